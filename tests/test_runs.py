"""Influence from several runs: the mean, and its standard error."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl

INPUTS, LABELS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def run(path: Path, seed: int, examples: torch.Tensor) -> tuple[sl.Memory, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, path) as recorder:
        for batch in examples.repeat(3).split(4):
            recorder.batch(example=batch, label=LABELS[batch])
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[batch]), LABELS[batch]).backward()
            optimizer.step()
    return sl.open(path), model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[sl.Memory, nn.Module]]:
    folder = tmp_path_factory.mktemp("runs")
    orders = [torch.arange(12), torch.arange(12).flip(0), torch.arange(8)]  # the last one lacks four examples
    return [run(folder / f"{seed}.memory", seed, order) for seed, order in enumerate(orders)]


def test_several_runs_give_the_mean_and_its_standard_error(runs: list[tuple[sl.Memory, nn.Module]]):
    memories, models = zip(*runs, strict=True)
    mean = sl.influence(memories, models, INPUTS[:2], target=1).totals("example")
    own = [memory.attend(model, INPUTS[:2]).influence(1).totals("example") for memory, model in runs]
    for place, example in enumerate(mean.groups):
        each = torch.stack([t.values[:, t.groups.index(example)] for t in own if example in t.groups])
        assert len(each) == (3 if example < 8 else 2)
        torch.testing.assert_close(mean.values[:, place], each.mean(dim=0))
        torch.testing.assert_close(mean.standard_errors[:, place], each.std(dim=0) / len(each) ** 0.5)
    assert "±" in str(mean)
    assert "3 runs" in str(mean.note)


def test_several_runs_rank_by_the_mean(runs: list[tuple[sl.Memory, nn.Module]]):
    memories, models = zip(*runs, strict=True)
    influence = sl.influence(memories, models, INPUTS[:2], target=1, rule="joint")
    mean = influence.totals("example")
    assert len(influence) == 2
    assert influence.top(3).columns["example"][0][0][0] == mean.largest()[0]
    assert float(influence.bottom(1).values[1, 0, 0]) == float(mean.values[1].min())
    by_label = influence.totals("label")
    for place, label in enumerate(by_label.groups):
        of_label = [index for index, example in enumerate(mean.groups) if example % 3 == label]
        assert len(of_label) == 4
        each = [float(run.totals("label").values[0, run.totals("label").groups.index(label)]) for run in influence.runs]
        assert float(by_label.values[0, place]) == pytest.approx(sum(each) / 3)


def test_one_model_is_needed_for_each_memory(runs: list[tuple[sl.Memory, nn.Module]]):
    memories, models = zip(*runs, strict=True)
    with pytest.raises(sl.SettingError, match="3 memories and 2 models"):
        sl.influence(memories, models[:2], INPUTS[:2], target=1)
    with pytest.raises(sl.SettingError, match="at least two runs"):
        sl.influence(memories[:1], models[:1], INPUTS[:2], target=1)
