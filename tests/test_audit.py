"""`spotlights audit` and `spotlights retrain-check`."""

import json
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
from spotlights_paper.experiments.images import prepare
from spotlights_paper.experiments.running import run_experiment
from spotlights_paper.experiments.training import mlp


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


def test_retraining_without_examples_that_were_never_seen_changes_nothing(run: Path):
    seen = set(
        sl.open(run / "run.memory").attend(_model(run), torch.zeros(1, 784))["layers.2"].totals("example").groups
    )
    unseen = [example for example in prepare("mnist", 600, 10).train.ids.tolist() if example not in seen]
    with pytest.raises(sl.SettingError, match="No training"):
        retrain_check.retrain_check(run, example=[10**9])
    check = retrain_check.retrain_check(run, example=unseen)
    assert check.examples == len(unseen)
    for line in check.lines:
        assert line.retrained == pytest.approx(line.before, abs=1e-5)
        assert line.masked == pytest.approx(line.before, abs=1e-3)
        assert line.estimate == 0.0


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


@pytest.mark.parametrize(("group", "sentence"), [("colour=3", "No column"), ("step=3", "Cannot retrain without")])
def test_what_cannot_be_left_out_is_a_sentence(run: Path, group: str, sentence: str):
    result = spotlights("retrain-check", run, "--without", group)
    assert result.exit_code == 2
    assert sentence in result.stderr


def _model(run: Path) -> nn.Module:
    model = mlp((784, 32, 24, 10))
    model.load_state_dict(load_file(run / "model.safetensors"))
    return model


def test_a_group_is_written_as_columns_and_values():
    assert retrain_check.parse_group(["label=3", "source=mnist", "example=17,42"]) == {
        "label": 3,
        "source": "mnist",
        "example": [17, 42],
    }
    with pytest.raises(sl.SettingError, match="write column=value"):
        retrain_check.parse_group(["label"])
