"""Influence by exact replay: the derivative of an answer with respect to each example's weight, through training."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl

EXAMPLES, STEPS = 12, 9
INPUTS = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(EXAMPLES) % 3
QUERIES = INPUTS[:3] + 0.1
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def losses(model: nn.Module, ids: Any) -> Tensor:
    return F.cross_entropy(model(INPUTS[ids]), LABELS[ids], reduction="none")


def first(output: Tensor) -> Tensor:
    return output[:, 0]


def train(
    kind: str, weights: Tensor | None = None, path: Path | None = None, *, names: bool = False, parts: int = 1
) -> nn.Module:
    """The same training with a weight for each example, recorded or not; in `parts`, gradients are added up."""
    model, (make, options) = network(), OPTIMIZERS[kind]
    weights = torch.ones(EXAMPLES).double() if weights is None else weights
    optimizer = make(model.parameters(), **options)
    batches = [torch.arange(EXAMPLES).roll(5 * step)[:4] for step in range(STEPS)]

    def step(batch: Tensor, recorder: sl.Recorder | None = None) -> None:
        optimizer.zero_grad()
        for part in batch.chunk(parts):
            if recorder is not None:
                recorder.batch(example=[f"e{i}" for i in part.tolist()] if names else part)
            ((losses(model, part) * weights[part]).mean() / parts).backward()
        optimizer.step()

    if path is None:
        for batch in batches:
            step(batch)
        return model
    with sl.record(model, optimizer, path, keep="recipe", checkpoint_every=4) as recorder:
        for batch in batches:
            step(batch, recorder)
    return model


def opened(path: Path, loss: Any = losses) -> sl.Memory:
    return sl.open(path, model=network(), recompute=loss)


@pytest.mark.parametrize(("kind", "parts"), [*((kind, 1) for kind in OPTIMIZERS), ("momentum", 2)])
def test_replay_is_the_derivative_with_respect_to_each_weight(tmp_path: Path, kind: str, parts: int):
    train(kind, path=tmp_path / "a.memory", parts=parts)
    found = opened(tmp_path / "a.memory").replay(QUERIES, first)
    assert found.examples == list(range(EXAMPLES))
    small = 1e-5
    for example in range(EXAMPLES):
        both = []
        for sign in (1, -1):
            weights = torch.ones(EXAMPLES).double()
            weights[example] += sign * small
            both.append(train(kind, weights, parts=parts)(QUERIES)[:, 0].detach())
        torch.testing.assert_close(found.values[:, example], (both[0] - both[1]) / (2 * small), rtol=2e-5, atol=1e-7)
    assert found.growth.shape == (3,)
    assert "adjoint" in str(found)


def test_examples_by_name_and_what_leaving_some_out_does(tmp_path: Path):
    train("SGD", path=tmp_path / "a.memory", names=True)
    memory = opened(tmp_path / "a.memory", lambda model, ids: losses(model, [int(name[1:]) for name in ids]))
    found = memory.replay(QUERIES, first)
    places = [found.examples.index(name) for name in ("e3", "e5")]
    torch.testing.assert_close(found.without(["e3", "e5"]), -found.values[:, places].sum(dim=1))
    assert next(found.rows())["example"] == found.examples[int(found.values[0].argmax())]
    with pytest.raises(sl.SettingError, match="No example 'e99'"):
        found.without(["e99"])


def test_replay_says_what_it_needs(tmp_path: Path):
    train("SGD", path=tmp_path / "a.memory")
    mean = opened(tmp_path / "a.memory", lambda model, ids: losses(model, ids).mean())
    with pytest.raises(sl.SettingError, match='reduction="none"'):
        mean.replay(QUERIES, first)
    full = opened(tmp_path / "a.memory").materialise(tmp_path / "full.memory")
    with pytest.raises(sl.UnsupportedError, match="keep='recipe'"):
        full.replay(QUERIES, first)


def test_the_model_given_is_left_alone(tmp_path: Path):
    train("Adam", path=tmp_path / "a.memory")
    model = network()
    before = copy.deepcopy(model.state_dict())
    sl.open(tmp_path / "a.memory", model=model, recompute=losses).replay(QUERIES, first)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_trainings_without_a_tenth_tell_whether_to_trust(tmp_path: Path):
    train("AdamW", path=tmp_path / "a.memory")
    found = opened(tmp_path / "a.memory").replay(QUERIES, first)
    before, missed, changed = train("AdamW")(QUERIES)[:, 0].detach(), 0.0, 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        weights = torch.ones(EXAMPLES).double()
        left_out = int(torch.randperm(EXAMPLES, generator=generator)[0])
        weights[left_out] = 0.0
        change = train("AdamW", weights)(QUERIES)[:, 0].detach() - before
        missed += float((found.without([left_out]) - change).square().sum())
        changed += float(change.square().sum())
    assert found.explained == pytest.approx(1 - missed / changed, rel=1e-9)
    assert found.trusted
    assert "exact to first order" in str(found)
    other = dataclasses.replace(found, explained=-0.3)
    assert not other.trusted
    assert "not to be trusted: of what two trainings without a random tenth changed, it foretells 0%" in str(other)
