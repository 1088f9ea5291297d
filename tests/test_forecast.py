"""Forecasts: the number after retraining without a group, in its own unit, with an interval."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from test_joint import EXAMPLES, Run, first, in_order, squared

GONE = [1, 4, 9, 16]


@pytest.fixture
def regression(tmp_path: Path) -> Run:
    return Run(tmp_path / "a.memory", squared)


@pytest.fixture
def classes(tmp_path: Path) -> Run:
    return Run(tmp_path / "a.memory", F.cross_entropy)


def dense(run: Run, queries: Tensor) -> tuple[Tensor, Tensor]:
    """The change without each example, and the variance over initial weights, from dense matrices."""
    A, wrong = torch.zeros(EXAMPLES, run.visits[0][1].numel()).double(), torch.zeros(EXAMPLES).double()
    counts = torch.zeros(EXAMPLES).double()
    for example, gradient, error in run.visits:
        A[example] += gradient / error[0]
        wrong[example] += error[0]
        counts[example] += 1
    A, wrong = A / counts[:, None], wrong / counts
    sizes = [4 * 5 + 5, 5 + 1]
    a, f = A.split(sizes, dim=1), run.gradients(first, queries).split(sizes, dim=1)
    scales = [part.square().sum(dim=1).mean() for part in a]
    gram = sum(part @ part.T / scale for part, scale in zip(a, scales, strict=True))
    products = sum(part @ own.T / scale for part, own, scale in zip(a, f, scales, strict=True))
    solved = torch.linalg.solve(gram + gram.diagonal().mean() * torch.eye(EXAMPLES).double(), products)
    spread = [run.memory.view.reader.initial[f"{layer}/weight"].double().var(correction=0) for layer in ("0", "2")]
    rest = [(own - solved.T @ part).square().sum(dim=1) for own, part in zip(f, a, strict=True)]
    return (wrong[:, None] / 2 * solved).T, sum(s * r for s, r in zip(spread, rest, strict=True))


def test_a_forecast_under_a_squared_loss_needs_one_run(regression: Run):
    queries = regression.inputs[:3] + 0.1
    found = regression.memory.attend(regression.model, queries).forecast(first, without={"example": GONE})
    changes, variance = dense(regression, queries)
    change = changes[:, GONE].sum(dim=1)
    now = regression.model(queries)[:, 0].detach()
    torch.testing.assert_close(found.before, now)
    torch.testing.assert_close(found.after, now + change, rtol=1e-9, atol=1e-12)
    half = 1.96 * (variance / 4 * (1 + 1 / (1 - len(GONE) / EXAMPLES)) + change.square()).sqrt()
    torch.testing.assert_close(found.high - found.after, half, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found.after - found.low, half, rtol=1e-8, atol=1e-12)
    assert found.examples == len(GONE)
    assert "interval of 95 %" in str(found)


def test_another_curvature_gives_another_size(regression: Run):
    spot = regression.memory.attend(regression.model, regression.inputs[:2])
    mean, half = (spot.forecast(first, without={"label": 1}, curvature=c) for c in (2.0, 1.0))
    torch.testing.assert_close(2 * (mean.after - mean.before), half.after - half.before)


def test_for_classes_there_is_no_forecast_before_a_calibration(classes: Run):
    spot = classes.memory.attend(classes.model, classes.inputs[:2])
    with pytest.raises(sl.UnsupportedError, match=r"memory\.calibrate"):
        spot.forecast(1, without={"label": 2})


class Shifted(nn.Module):
    """Answers as a network does, and something more."""

    def __init__(self, model: nn.Module, more: Tensor) -> None:
        super().__init__()
        self.model, self.more = model, more

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs) + self.more[:, None]


def test_a_calibration_finds_the_size_and_the_noise(classes: Run):
    inputs = classes.inputs[:5]
    spot = classes.memory.attend(classes.model, inputs)
    values = in_order(spot.influence(1).totals("example"))
    noise = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1]).double()

    def retrain(examples: list[int]) -> nn.Module:
        gone = sorted(set(range(EXAMPLES)) - set(examples))
        return Shifted(classes.model, -3 * values[:, gone].sum(dim=1) if gone else noise)

    made = classes.memory.calibrate(retrain, classes.model, inputs, target=1)
    assert made.scale == pytest.approx(3.0)
    assert made.noise == pytest.approx(0.1)
    assert made.error == 0.0
    again = sl.open(classes.memory.path)
    found = again.attend(classes.model, inputs).forecast(1, without={"label": 2})
    expected = classes.model(inputs)[:, 1].detach() - 3 * values[:, 2::3].sum(dim=1)
    torch.testing.assert_close(found.after, expected)
    torch.testing.assert_close(found.high - found.low, torch.full_like(expected, 2 * 1.96 * 0.1))
    assert "8 halves" in found.note


def test_what_to_leave_out_must_be_some_examples(regression: Run):
    spot = regression.memory.attend(regression.model, regression.inputs[:2])
    with pytest.raises(sl.SettingError, match="not steps"):
        spot.forecast(first, without={"step": 3})
    with pytest.raises(sl.SettingError, match="24 of 24 examples"):
        spot.forecast(first, without={"label": [0, 1, 2]})
    with pytest.raises(sl.SettingError, match="at least 2 halves"):
        regression.memory.calibrate(
            lambda ids: regression.model, regression.model, regression.inputs[:2], target=first, halves=1
        )
