"""The image experiments: the paper's data, runs that can be repeated, a command for each."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import spotlights as sl
from real_data import need
from spotlights.cli import app
from spotlights_paper.datasets import load
from spotlights_paper.experiments import mnist
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.experiments.images import prepare, training_positions
from spotlights_paper.experiments.registry import EXPERIMENTS, experiment_named, from_plain, preset_named, to_plain
from spotlights_paper.experiments.running import PLAN, load_results, load_run, repeat, run_experiment, run_plan
from spotlights_paper.experiments.training import without_replacement

pytestmark = pytest.mark.usefixtures("load_once")

SMALL = {"train_images": 200, "test_images": 60, "hidden": (12, 8), "timeline_images": 20, "lost_images": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mnist")
    return run_experiment("mnist-single", preset="quick", steps=12, out=tmp_path_factory.mktemp("runs") / "a")


# -- data -------------------------------------------------------------------------------------


def test_the_paper_trains_on_40053_images() -> None:
    positions = training_positions(60_000)
    assert len(positions) == 40_053
    assert len(positions.unique()) == 40_053
    held_out = np.random.RandomState(0x1234).permutation(60_000)[-10_000:]
    assert not np.isin(positions.numpy(), held_out).any()


def test_inputs_are_normalised_by_the_training_images() -> None:
    need("mnist")
    prepared = prepare("mnist", 500, 100)
    assert len(prepared.train) == 500
    assert len(prepared.test) == 100
    assert abs(float(prepared.train.inputs.mean())) < 1e-5
    assert abs(float(prepared.train.inputs.std()) - 1) < 1e-5
    original, at = load("mnist").train, prepared.train.ids  # which are positions in MNIST
    assert torch.equal(original.images[at], prepared.train.pixels)
    assert torch.equal(original.labels[at], prepared.train.labels)


def test_every_example_comes_once_before_any_comes_twice() -> None:
    need("mnist", "fashion-mnist")
    data = [prepare(source, 100, 10).train for source in ("mnist", "fashion-mnist")]
    settings = replace(preset_named("mnist-joint", "quick"), batch=32)
    batches = list(islice(without_replacement(data, settings, 0), 13))
    ids = torch.cat([batch.ids for batch in batches]).tolist()
    assert sorted(ids[:200]) == sorted(torch.cat([each.ids for each in data]).tolist())
    assert len(set(ids[200:400])) == 200
    first = batches[0]
    for place, source in enumerate(first.columns["source"]):
        expected = "mnist" if first.ids[place] < 1_000_000 else "fashion-mnist"
        assert source == expected
        assert first.columns["category"][place].startswith(source)


def test_the_task_changes_at_the_switch(tmp_path: Path) -> None:
    need("mnist", "fashion-mnist")
    settings = replace(preset_named("mnist-continual", "quick"), steps=9, switch=4, batch=16, **SMALL)
    trained = experiment_named("mnist-continual").run(settings, seed=1, path=tmp_path / "m")
    assert len(trained.memory.where(source="mnist")) == 4 * 16
    assert len(trained.memory.where(source="mnist", step=range(4))) == 4 * 16
    assert len(trained.memory.where(source="fashion-mnist", step=range(4, 9))) == 5 * 16


# -- presets ----------------------------------------------------------------------------------


def test_presets_are_the_papers_variants() -> None:
    single, continual = (experiment_named(name).presets for name in ("mnist-single", "mnist-continual"))
    assert (single["paper"].steps, single["table1"].steps) == (3000, 5000)
    assert (single["paper"].momentum, single["paper"].clip) == (0.9, 1.0)
    assert (single["text"].momentum, single["text"].clip) == (0.0, None)
    assert preset_named("mnist-joint", "paper").steps == 5000
    assert (continual["paper"].steps, continual["paper"].switch) == (6000, 3000)
    assert (continual["long"].steps, continual["long"].switch) == (10_000, 3000)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_what_the_registry_promises(name: str) -> None:
    experiment = experiment_named(name)
    assert "quick" in experiment.presets
    first = next(iter(experiment.presets))  # what runs if nothing is said: never for hours
    assert first == ("laptop" if "laptop" in experiment.presets else "paper")
    assert callable(experiment.run)
    assert callable(experiment.analyse)
    for preset in experiment.presets.values():
        assert from_plain(experiment.settings, to_plain(preset)) == preset


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(sl.UnknownNameError, match="mnist-single, mnist-joint, mnist-continual"):
        experiment_named("mnist")
    with pytest.raises(sl.UnknownNameError, match="paper, table1, text, quick"):
        preset_named("mnist-single", "long")


# -- runs -------------------------------------------------------------------------------------


def test_a_run_says_what_it_takes_to_repeat_it(folder: Path) -> None:
    run = load_run(folder)
    assert run.settings["steps"] == 12
    assert run.train_images == {"mnist": 600}
    assert run.exact
    assert {"spotlights", "torch", "numpy", "python"} <= set(run.versions)
    again = repeat(folder / "run.json", keep=False)
    assert again != folder
    assert not (again / "run.memory").exists()
    assert load_run(again).accuracy == run.accuracy
    first, second = (load_file(each / "model.safetensors") for each in (folder, again))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_the_accuracy_is_that_of_the_network_and_of_its_memory(folder: Path) -> None:
    memory = sl.open(folder / "run.memory")
    test = prepare("mnist", 600, 200).test
    weights = load_file(folder / "model.safetensors")
    hidden = test.inputs
    for layer in range(3):
        hidden = hidden @ weights[f"layers.{layer}.weight"].T + weights[f"layers.{layer}.bias"]
        found = memory.parameters(f"layers.{layer}")
        assert torch.allclose(found["weight"].float(), weights[f"layers.{layer}.weight"], atol=1e-5)
        hidden = hidden.relu() if layer < 2 else hidden
    right = (hidden.argmax(dim=1) == test.labels).double().mean()
    assert load_run(folder).accuracy["mnist"] == pytest.approx(float(right))


def test_results_survive_the_way_to_disk_and_back(folder: Path) -> None:
    results = load_results(folder)
    plain = to_plain(results)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    again = from_plain(ImageResults, plain)
    assert again.votes == results.votes
    for one, other in zip(again.cases, results.cases, strict=True):
        assert np.array_equal(one.pixels, other.pixels)
        assert one.pixels.dtype == np.uint8
        np.testing.assert_array_equal(one.layers[0].top, other.layers[0].top)


def test_a_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(sl.MemoryExistsError, match="--out"):
        run_experiment("mnist-single", preset="quick", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_too_few_steps_for_the_second_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sl.SettingError, match="changes the task at step 80"):
        run_experiment("mnist-continual", preset="quick", steps=80, out=tmp_path / "r")


def test_what_was_trained_is_kept_if_its_analyses_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mnist")

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no picture today")

    failing = replace(mnist.EXPERIMENTS["mnist-single"], analyse=fail)
    monkeypatch.setitem(mnist.EXPERIMENTS, "mnist-single", failing)
    with pytest.raises(RuntimeError, match="no picture"):
        run_experiment("mnist-single", preset="quick", steps=3, out=tmp_path / "r")
    memory, weights = sl.open(tmp_path / "r" / "run.memory"), load_file(tmp_path / "r" / "model.safetensors")
    torch.testing.assert_close(memory.weights("layers.0").float(), weights["layers.0.weight"], rtol=1e-4, atol=1e-6)


def test_a_folder_without_a_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(sl.MemoryFormatError, match="spotlights run mnist-single"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(sl.MemoryFormatError, match="not what `spotlights run` writes"):
        load_run(tmp_path)


# -- everything at once -----------------------------------------------------------------------


def test_the_plan_has_the_first_seed_of_everything_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        "spotlights_paper.experiments.running.run_experiment", lambda name, **options: called.append(options)
    )
    monkeypatch.setattr("spotlights_paper.experiments.running.LARGEST_GB", 0)
    folders = run_plan(seeds=5, out=tmp_path, keep=False)
    assert [each["seed"] for each in called[: len(PLAN)]] == [0] * len(PLAN)
    assert sum(each["preset"] == "table1" for each in called) == 5
    assert sum(each["preset"] == "long" for each in called) == 1
    assert len(set(folders)) == len(folders) == len(called)


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def pretend(name: str, **options: object) -> Path:
        called.append((name, options["keep"]))
        return tmp_path

    monkeypatch.setattr("spotlights_paper.experiments.running.run_experiment", pretend)
    folders = run_plan(seeds=2, out=tmp_path, keep=True, quick=True)
    assert len(folders) == len(called) == 6
    assert [keep for _, keep in called] == [True] * 3 + [False] * 3
    assert [folder.name for folder in folders[:2]] == ["mnist-single-quick-0", "mnist-single-quick-1"]


# -- the command ------------------------------------------------------------------------------


def test_the_command_runs_and_says_what_it_found(tmp_path: Path) -> None:
    need("mnist")
    arguments = [
        "run",
        "mnist-single",
        "--preset",
        "quick",
        "--steps",
        "5",
        "--out",
        str(tmp_path / "r"),
        "--json",
    ]
    done = CliRunner().invoke(app, [*arguments, "--discard-memory"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["settings"]["steps"] == 5
    assert not (tmp_path / "r" / "run.memory").exists()


@pytest.mark.parametrize("arguments", [["run"], ["run", "mnist-single", "--from", "x"], ["run", "mnist"]])
def test_the_command_explains_what_it_needs(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
