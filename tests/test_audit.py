"""`spotlights audit` and `spotlights retrain-check`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
from real_data import need
from spotlights.cli import app
from spotlights_paper import datasets
from spotlights_paper.experiments import retrain_check
from spotlights_paper.experiments.registry import experiment_named
from spotlights_paper.experiments.running import run_experiment
from spotlights_paper.subjects import subject_of


def spotlights(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Digits with ten wrong labels."""
    digits = datasets.load("digits").train
    images, labels, ids = digits.images[:200].flatten(1) / 255, digits.labels[:200].clone(), digits.ids[:200]
    wrong = torch.arange(0, 200, 20)
    labels[wrong] = (labels[wrong] + 3) % 10
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = tmp_path_factory.mktemp("audit") / "digits.memory"
    with sl.record(model, optimizer, path) as recorder:
        for _ in range(10):
            for batch in torch.randperm(200).split(20):
                recorder.batch(example=ids[batch], label=labels[batch])
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
    return path, ids[wrong].tolist()


def test_an_audit_of_examples_that_show_themselves_as_html_or_figures_has_a_page(
    memory: tuple[Path, list[int]], tmp_path: Path
):
    for look, shown in (("Own()", "which the explorer shows"), ("figure()", "data:image/png;base64,")):
        (tmp_path / "looks.py").write_text(
            "import spotlights as sl\nfrom matplotlib.figure import Figure as figure\n"
            "class Own:\n    def _repr_html_(self): return '<script>alert(1)</script>'\n"
            f"subject = sl.Subject({str(memory[0])!r}, show=lambda e: {look})\n"
        )
        result = spotlights(
            "audit", memory[0], "-k", 2, "--subject", f"{tmp_path / 'looks.py'}:subject", "--out", tmp_path
        )
        assert result.exit_code == 0, result.output
        page = (tmp_path / "audit.html").read_text(encoding="utf-8")
        assert shown in page
        assert "<script" not in page


def test_a_place_that_cannot_be_written_is_named_without_a_traceback(memory: tuple[Path, list[int]], tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = spotlights("audit", memory[0], "--out", tmp_path / "file" / "audit")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert str(tmp_path / "file") in result.stderr.replace("\n", "")


def test_audit_writes_csv_and_a_page_with_pictures(memory: tuple[Path, list[int]], tmp_path: Path):
    path, wrong = memory
    (tmp_path / "pictures.py").write_text(
        "import spotlights as sl\nfrom spotlights_paper import datasets\n"
        "digits = datasets.load('digits').train\n"
        f"subject = sl.Subject({str(path)!r}, show=lambda e: digits.images[(digits.ids == e).nonzero()[0, 0]])\n"
    )
    named = f"{tmp_path / 'pictures.py'}:subject"
    result = spotlights("audit", path, "-k", 12, "--subject", named, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    ranked = [row["example"] for row in found["suspects"]]
    assert len(set(ranked) & set(wrong)) >= 7
    page = Path(found["page"]).read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert (tmp_path / "audit.csv").read_text().count("\n") == 13


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 128 on 600 images: many are never seen."""
    need("mnist")
    return run_experiment("mnist-single", preset="quick", steps=2, out=tmp_path_factory.mktemp("runs") / "a")


def test_the_run_s_own_training_leaves_the_recorded_network(run: Path):
    again = subject_of(run).retrain([])
    for name, value in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_a_run_in_reversed_order_is_trained_again_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need("mnist", "fashion-mnist")
    presets = experiment_named("mnist-continual").presets
    monkeypatch.setitem(presets, "backwards", replace(presets["quick"], steps=6, switch=3, reversed_order=True))
    run = run_experiment("mnist-continual", preset="backwards", out=tmp_path / "run")
    again = subject_of(run).retrain([])
    for name, value in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_retrain_check_puts_estimate_mask_and_truth_side_by_side(run: Path):
    result = spotlights("retrain-check", run, "--without", "label=3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    threes = next(line for line in found["lines"] if line["tests"] == "mnist 3")
    assert threes["retrained"] < threes["before"]
    assert threes["masked"] < threes["before"]
    assert threes["estimate"] > 0
    assert found["influence_agreement"] > 0.3
    table = spotlights("retrain-check", run, "--without", "label=3").stdout
    assert "Rank correlation with the true loss" in " ".join(table.split())


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ("colour=3", "No column"),
        ("step=3", "Cannot retrain without"),
        ("example=99999", "No training example"),
        ("label", "write column=value"),
        ("label=0; label=1", "one selection"),
    ],
)
def test_what_cannot_be_left_out_is_a_sentence(run: Path, group: str, sentence: str):
    result = spotlights("retrain-check", run, "--without", group)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_any_subject_that_can_train_again_can_be_checked(memory: tuple[Path, list[int]]):
    """The estimate is better than nothing, and the examples of the group are the ones that are left out."""
    path, _ = memory
    digits = datasets.load("digits").train
    images, labels, ids = digits.images[:200].flatten(1) / 255, digits.labels[:200], digits.ids[:200]
    left_out = []

    def retrain(examples):
        left_out.extend(examples)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stays = ~torch.isin(ids, torch.tensor(examples))
        for _ in range(100):
            optimizer.zero_grad()
            F.cross_entropy(model(images[stays]), labels[stays]).backward()
            optimizer.step()
        return model

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    given = {"model": lambda memory: memory.primal(model), "inputs": images, "labels": labels}
    check = retrain_check.retrain_check(sl.Subject(path, **given, retrain=retrain), "label=3")
    assert left_out
    assert all(sl.open(path).visits(example).columns["label"] == 3 for example in left_out)
    threes = next(line for line in check.lines if line.tests == "3")
    assert threes.retrained < threes.before
    assert threes.estimate > 0
    with pytest.raises(sl.SettingError, match="how to train again"):
        retrain_check.retrain_check(sl.Subject(path, **given), "label=3")


def test_decisions_of_an_audit_are_read_back_and_retrained_with(memory: tuple[Path, list[int]], tmp_path: Path):
    path, _ = memory
    digits = datasets.load("digits").train
    images, labels, ids = digits.images[:200].flatten(1) / 255, digits.labels[:200], digits.ids[:200]
    one, two, three = sl.open(path).distinct("example")[:3]
    rows = [
        {"example": one, "decision": "drop", "given": 1, "label": None},
        {"example": two, "decision": "relabel", "given": 1, "label": 7},
        {"example": three, "decision": "keep", "given": 1, "label": None},
    ]
    (tmp_path / "decisions.json").write_text(json.dumps({"memory": "x", "decisions": rows}))
    (tmp_path / "decisions.csv").write_text(
        f"example,decision,given,label\n{one},drop,1,\n{two},relabel,1,7\n{three},keep,1,\n"
    )
    read = [sl.Decisions.read(tmp_path / name) for name in ("decisions.json", "decisions.csv")]
    assert read[0] == read[1]
    assert (read[0].dropped, read[0].relabelled) == ([one], {two: 7})
    asked = []
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def retrain(examples, relabelled):
        asked.append((examples, relabelled))
        return sl.open(path).primal(model)

    def without(examples):
        asked.append(sorted(examples))
        return sl.open(path).primal(model)

    given = {"model": lambda memory: memory.primal(model), "inputs": images, "labels": labels, "ids": ids}
    retrain_check.retrain_check(sl.Subject(path, **given, retrain=retrain), read[0])
    retrain_check.retrain_check(sl.Subject(path, **given, retrain=without), read[0])
    assert asked == [([one], {two: 7}), sorted([one, two])]
    (tmp_path / "other.json").write_text('{"decisions": [{"example": 1, "decision": "burn"}]}')
    with pytest.raises(sl.SettingError, match="as the explorer's audit exports them"):
        sl.Decisions.read(tmp_path / "other.json")
    assert sl.Subject(path, decisions=tmp_path / "decisions.csv").decisions == read[0]
