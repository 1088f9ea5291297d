"""Claims about the demo, on scikit-learn's digits."""

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

import spotlights as sl
from demos import run, settings, small_demo
from spotlights_paper import datasets
from spotlights_paper.experiments import demo
from spotlights_paper.experiments.training import mlp

pytestmark = pytest.mark.usefixtures("quick_figures")


def test_its_memory_equals_its_network():
    outcome = small_demo().outcome
    assert outcome.exact
    assert outcome.stored_as == "float16"
    assert max(outcome.relative_errors.values()) < 1e-3


def test_its_network_has_learned():
    assert small_demo().outcome.accuracy > 0.5


def test_it_explains_two_right_answers_and_a_wrong_one():
    answers = small_demo().outcome.answers
    assert [(a.truth, a.said) for a in answers[:2]] == [(6, 6), (3, 3)]
    assert answers[2].truth != answers[2].said


def test_it_leaves_a_figure_for_each_answer_beside_the_memory():
    outcome = small_demo().outcome
    for answer in outcome.answers:
        assert answer.figure.parent == outcome.memory.parent
        assert answer.figure.read_bytes().startswith(b"\x89PNG")


def test_its_tables_show_examples_totals_and_contributions():
    printed = small_demo().printed
    for words in (
        "top examples by score",
        "total contribution by label",
        "top examples by contribution",
        "bottom examples by contribution",
        "initial weights",
        "approximate",
    ):
        assert words in printed


def test_what_it_prints_last_are_lines_that_run(capsys: pytest.CaptureFixture[str]):
    lines = [line.strip() for line in small_demo().printed.splitlines() if line.startswith("    ")]
    start = lines.index("from spotlights_paper.experiments import demo")
    exec("\n".join(lines[start : start + 3]), {})
    assert "top examples by score in layers.2" in capsys.readouterr().out


def test_a_reopened_network_answers_as_the_trained_one():
    found = small_demo()
    said = found.network(found.images.test.inputs).argmax(dim=1)
    accuracy = (said == found.images.test.labels).double().mean()
    assert accuracy == pytest.approx(found.outcome.accuracy)


def test_every_epoch_has_each_example_once(tmp_path: Path):
    train = small_demo().images.train
    count = len(train)
    batches = list(islice(demo.batches(train, settings(tmp_path, batch=400)), 8))
    assert [len(batch.ids) for batch in batches] == [400, 400, 400, 300] * 2
    first, second = (torch.cat([batch.ids for batch in some]) for some in (batches[:4], batches[4:]))
    assert len(first.unique()) == count
    assert first.sort().values.equal(second.sort().values)
    assert not first.equal(second)


def test_it_says_first_what_it_will_take():
    printed = small_demo().printed
    said = printed.index("of disk in")
    assert said < printed.index("Trained and recorded")
    assert "stored as float16: approximate" in printed


def test_the_disk_it_takes_is_the_disk_it_announced():
    found = small_demo()
    expected = demo.expected_bytes((64, 20, 15, 10), 1500, found.settings)
    assert expected < found.memory.info.as_dict()["bytes"] < expected + 1_000_000  # columns, log and weights


def test_at_full_size_it_needs_less_than_1_5_gb():
    assert demo.expected_bytes((784, 800, 800, 10), 60_000, demo.DemoSettings()) < 1.45e9  # columns and log come on top


def test_a_full_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(sl.SettingError, match="GB left"):
        run(settings(tmp_path / "out"))
    assert not (tmp_path / "out" / demo.MEMORY).exists()


def test_nothing_that_was_rounded_is_called_exact():
    assert "exact" not in small_demo().printed.replace("│ exact", "").replace("layer      exact", "")


def test_the_next_demo_replaces_the_last(tmp_path: Path):
    run(settings(tmp_path / "out", steps=3, explained=()))
    outcome, _ = run(settings(tmp_path / "out", steps=5, explained=()))
    assert sl.open(outcome.memory).steps == 5


def test_what_is_not_a_demo_is_never_overwritten(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(sl.MemoryExistsError, match="something other than a demo"):
        run(settings(tmp_path))
    (tmp_path / demo.MARK).write_text(json.dumps({"experiment": "mnist-single"}))
    with pytest.raises(sl.MemoryExistsError):
        run(settings(tmp_path))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_without_mnist_it_takes_the_digits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load = datasets.load

    def unreachable(name: str) -> datasets.Dataset:
        if name == "mnist":
            raise datasets.DatasetError("No source has mnist.")
        return load(name)

    monkeypatch.setattr(datasets, "load", unreachable)
    outcome, printed = run(settings(tmp_path / "out", data="mnist", steps=3, explained=()))
    assert outcome.data == "digits"
    assert "No source has mnist." in printed
    assert "8 × 8 digits instead of mnist" in printed


def test_a_folder_without_a_demo_cannot_be_reopened(tmp_path: Path):
    with pytest.raises(sl.MemoryFormatError, match="There is no demo in"):
        demo.reopen(tmp_path)


def test_the_network_has_the_sizes_it_was_given():
    network = mlp((784, 800, 800, 10))
    assert [tuple(p.shape) for p in network.parameters()] == [
        (800, 784),
        (800,),
        (800, 800),
        (800,),
        (10, 800),
        (10,),
    ]
    assert network(torch.zeros(2, 28, 28)).shape == (2, 10)
    with pytest.raises(sl.SettingError, match="at least the inputs and the classes"):
        mlp((784,))
