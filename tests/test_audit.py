"""`spotlights audit` and `spotlights retrain-check`."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
from spotlights.cli import app
from spotlights.experiments import retrain_check


def spotlights(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Digits with ten wrong labels."""
    digits = sl.datasets.load("digits", "train")
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
    result = spotlights("audit", path, "-k", 20, "--data", "digits", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    ranked = [row["example"] for row in found["suspects"]]
    assert len(set(ranked) & set(wrong)) >= 8
    page = Path(found["page"]).read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert (tmp_path / "audit.csv").read_text().count("\n") == 21


def test_audit_shows_texts_by_line(memory: tuple[Path, list[int]], tmp_path: Path):
    path, _ = memory
    (tmp_path / "lines.txt").write_text("<b>zero</b>\none\n")
    result = spotlights("audit", path, "--texts", tmp_path / "lines.txt", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "suspects by the errors of 2" in result.stdout
    both = spotlights("audit", path, "--texts", tmp_path / "lines.txt", "--data", "digits", "--out", tmp_path / "out")
    assert both.exit_code == 2
    assert "not both" in both.stderr


def test_a_group_is_written_as_columns_and_values():
    assert retrain_check.parse_group(["label=3", "source=mnist", "example=17,42"]) == {
        "label": 3,
        "source": "mnist",
        "example": [17, 42],
    }
    with pytest.raises(sl.SettingError, match="COLUMN=VALUE"):
        retrain_check.parse_group(["label"])
