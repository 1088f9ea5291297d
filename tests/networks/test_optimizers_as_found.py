"""Optimizers as users have them: wrapped, derived, in lists, unusual; and what changes in the middle of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import (
    IDS,
    LABELS,
    OF_THE_CHANGE,
    B,
    D,
    X,
    adam,
    assert_adds_up_exactly,
    assert_verified,
    column,
    mlp,
    ordinary,
    run,
    sgd,
    turn,
    words,
)
from torch import Tensor, nn

import spotlights as sl


def together(model: nn.Module, optimizers: Any, recorder: Any, number: int) -> None:
    """A step of several optimizers after one backward pass."""
    recorder.batch(example=IDS)
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.cross_entropy(model(X[IDS]), LABELS[IDS]).backward()
    for optimizer in optimizers:
        optimizer.step()


# -- changes in mid-run ------------------------------------------------------------------------------------------------


def changed_at_two(change: Callable[[nn.Module, Any], object]) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        if number == 2:
            change(model, optimizer)
        ordinary(model, optimizer, recorder, number)

    return step


def replace_head(model: nn.Module, optimizer: Any) -> None:
    assert isinstance(model, nn.Sequential)
    old = model[2]
    model[2] = nn.Linear(6, 3)
    kept = [p for p in optimizer.param_groups[0]["params"] if all(p is not q for q in old.parameters())]
    optimizer.param_groups[0]["params"] = [*kept, *model[2].parameters()]


def unfreeze_body(model: nn.Module, optimizer: Any) -> None:
    assert isinstance(model, nn.Sequential)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})


def load_optimizer(model: nn.Module, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["momentum_buffer"] *= -3
    optimizer.load_state_dict(state)


def load_weights(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


MID_RUN: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module, Any], None], str]] = {
    "a layer and its optimizer entry replaced": (sgd(momentum=0.9), replace_head, "2"),
    "a parameter group added": (
        lambda model: torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),  # type: ignore[index]
        unfreeze_body,
        "0",
    ),
    "the optimizer's state loaded": (sgd(momentum=0.9), load_optimizer, "0"),
    "weights loaded": (sgd(momentum=0.9), load_weights, "0"),
}


@pytest.mark.parametrize("case", MID_RUN)
def test_a_change_in_mid_run_is_exact_from_then_on_or_logged_with_step_and_reason(case, tmp_path):
    make, change, layer = MID_RUN[case]
    done = run(mlp(), make, tmp_path / "m", changed_at_two(change), steps=5)
    check = done.memory.verify(done.model)[layer]
    if check.change_error > OF_THE_CHANGE:
        assert not check.ok
        assert "step 2" in done.heard, f"nobody was told while it trained: {done.heard.warnings}"
        assert check.reasons, "verify says NO without a reason"
        assert check.reasons[0] in words(done.memory.verify(done.model))


def test_a_layer_that_joins_the_optimizer_is_not_said_to_be_changed_from_outside(tmp_path):
    make, change, layer = MID_RUN["a parameter group added"]
    done = run(mlp(), make, tmp_path / "m", changed_at_two(change), steps=5)
    moved = done.memory.verify(done.model)[layer].moved
    assert moved == {"the optimizer trains parameters that it did not hold when recording began": [2, 3, 4]}


def test_a_new_optimizer_in_the_place_of_the_old_one_is_told_at_its_first_step(tmp_path):
    held: list[Any] = []

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        if number == 2:
            held.append(torch.optim.Adam(model.parameters()))
        ordinary(model, held[0] if held else optimizer, recorder, number)

    done = run(mlp(), sgd(), tmp_path / "m", step, steps=4, compare=False)
    (told,) = done.heard.warnings
    assert (
        "After step 2, layers of the model (0, 2) are trained by an optimizer that was not given to sl.record" in told
    )
    assert "(Adam)" in told
    assert done.memory.steps == 2
    assert not done.memory.verify(done.model).ok


def test_what_an_optimizer_trains_that_is_not_recorded_has_its_reason(tmp_path):
    other: list[Any] = []

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        other[:] = other or [torch.optim.SGD(model[0].parameters(), lr=0.1)]  # type: ignore[index]
        ordinary(model, optimizer, recorder, number)
        other[0].step()
        other[0].zero_grad()

    done = run(mlp(), lambda model: torch.optim.SGD(model[2].parameters(), lr=0.1), tmp_path / "m", step)  # type: ignore[index]
    assert "trained by an optimizer that was not given" in done.heard
    checks = done.memory.verify(done.model)
    assert checks["2"].ok
    assert checks["0"].moved == {"trained by an optimizer that is not recorded": [1, 2, 3]}


@pytest.mark.parametrize("through_data", [False, True])
def test_what_is_added_and_taken_away_again_did_not_change_the_weights(through_data, tmp_path):
    """As sharpness-aware minimisation does: the weights come back but for their rounding."""

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        F.cross_entropy(model(X[IDS]), LABELS[IDS]).backward()
        moves = [0.3 * p.grad / p.grad.norm() for p in model.parameters() if p.grad is not None]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    (parameter.data if through_data else parameter).add_(move, alpha=sign)
            if sign == 1:
                optimizer.zero_grad()
                F.cross_entropy(model(X[IDS]), LABELS[IDS]).backward()
        optimizer.step()
        optimizer.zero_grad()

    done = run(mlp(), sgd(), tmp_path / "m", step)
    assert_verified(done)
    assert not done.heard.warnings
    assert not any(check.moved for check in done.memory.verify(done.model).values())


# -- optimizers as found -----------------------------------------------------------------------------------------------


class Wrapped:
    """As accelerate wraps one: not a `torch.optim.Optimizer`, and the real one is `.optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


class MyAdamW(torch.optim.AdamW):
    """Changes nothing about the step."""


class Halved(torch.optim.SGD):
    """Overrides the step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5).sign_()
        super().step(closure)


class ScheduleFree(torch.optim.Optimizer):
    """Trains at a point between an average and the last iterate: not one of torch's, and nobody knows its rule."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                last = state.setdefault("z", parameter.clone())
                average = state.setdefault("x", parameter.clone())
                state["k"] = state.get("k", 0) + 1
                last.sub_(group["lr"] * parameter.grad)
                average.lerp_(last, 1 / state["k"])
                parameter.copy_(0.1 * last + 0.9 * average)


def test_a_wrapped_optimizer_is_unwrapped(tmp_path):
    done = run(mlp(), lambda model: Wrapped(adam()(model)), tmp_path / "m", ordinary, compare=True)
    assert_verified(done)
    assert done.memory.info.as_dict()["exact"]


def test_a_subclass_that_keeps_the_step_keeps_its_parent_s_rule(tmp_path):
    done = run(mlp(), lambda model: MyAdamW(model.parameters(), lr=0.01), tmp_path / "m", ordinary)
    assert_verified(done)
    assert done.memory.info.as_dict()["exact"]


def test_a_list_of_optimizers_records_the_layers_of_all(tmp_path):
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        assert isinstance(model, nn.Sequential)
        first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return [first, torch.optim.AdamW(model[2].parameters(), lr=0.01)]

    done = run(mlp(), make, tmp_path / "m", together, compare=True)
    assert_verified(done)
    assert done.memory.layers["0"].slots == done.memory.layers["2"].slots == 16
    assert done.memory.info.as_dict()["recorded parameters"] == done.memory.info.as_dict()["trained parameters"]


@pytest.mark.parametrize("given", [None, "adam", []])
def test_what_is_no_optimizer_is_refused_in_a_sentence(given, tmp_path):
    with pytest.raises(sl.SettingError, match="optimizer"):
        sl.record(mlp(), given, tmp_path / "m")


def lbfgs_turn(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[IDS]), LABELS[IDS])
        loss.backward()
        return loss

    optimizer.step(closure)


UNUSUAL: dict[str, tuple[Callable[[nn.Module], Any], Callable[..., None]]] = {
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), lbfgs_turn),
    "Adafactor": (lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01), ordinary),
    "ASGD": (lambda model: torch.optim.ASGD(model.parameters(), lr=0.01), ordinary),
    "Rprop": (lambda model: torch.optim.Rprop(model.parameters(), lr=0.01), ordinary),
    "schedule-free": (lambda model: ScheduleFree(model.parameters()), ordinary),
    "a step of its own": (lambda model: Halved(model.parameters(), lr=0.1), ordinary),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_optimizer_has_a_rule_or_recording_says_at_its_start_what_will_not_work(name, tmp_path):
    make, step = UNUSUAL[name]
    done = run(mlp(), make, tmp_path / "m", step, compare=True)
    assert done.memory.steps == 4
    assert done.memory.status == "closed"
    if not done.memory.info.as_dict()["exact"]:
        about = [text for text in done.heard.warnings if "contributions" in text and "scores" in text]
        assert about, f"silent at the start: {done.heard.warnings}"
        if "verify works" in about[0] or "verify replays" in about[0]:
            assert_verified(done)
        return
    assert_verified(done)


def test_lbfgs_is_not_said_to_change_weights_outside_the_optimizer(tmp_path):
    done = run(mlp(), UNUSUAL["LBFGS"][0], tmp_path / "m", lbfgs_turn)
    assert "outside the optimizer" not in done.heard
    with pytest.raises(sl.UnsupportedError, match="several gradients in one step"):
        done.memory.verify(done.model)


def test_two_optimizers_may_share_a_layer(tmp_path):
    """As with Muon: one has the matrices, the other has the biases. What both do between two passes is one step."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        biases = [p for p in model.parameters() if p.ndim == 1]
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(biases, lr=0.01)]

    done = run(mlp(), make, tmp_path / "m", together, compare=True)
    assert done.memory.steps == 4
    assert_verified(done)
    assert_adds_up_exactly(done.memory.attend(done.model, X[:3])["2"].contributions(1), done.model(X[:3])[:, 1])


class Recommending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(40, D, sparse=True), nn.Linear(D, 3)

    def forward(self, items: Tensor) -> Tensor:
        return self.head(self.items(items))


@pytest.mark.parametrize("sparse_first", [True, False])
def test_one_of_two_optimizers_may_be_sparse(sparse_first, tmp_path):
    """SparseAdam leaves tokens alone that a step does not use; Adam beside it does not."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        assert isinstance(model, Recommending)
        sparse = torch.optim.SparseAdam(model.items.parameters(), lr=0.01)
        dense = torch.optim.Adam(model.head.parameters(), lr=0.01)
        return [sparse, dense] if sparse_first else [dense, sparse]

    def step(model: nn.Module, optimizers: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(IDS + 5 * number), LABELS[IDS]).backward()
        for optimizer in optimizers:
            optimizer.step()

    assert_verified(run(Recommending(), make, tmp_path / "m", step, compare=True))


def test_optimizers_that_take_turns_take_steps_of_their_own(tmp_path):
    """As in a GAN: a backward pass before each optimizer's step."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        assert isinstance(model, nn.Sequential)
        return [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)]

    def step(model: nn.Module, optimizers: Any, recorder: Any, number: int) -> None:
        for ids, optimizer in zip((IDS, IDS + 1), optimizers, strict=True):
            recorder.batch(example=ids)
            turn(optimizer, F.cross_entropy(model(X[ids]), LABELS[ids]))

    done = run(mlp(), make, tmp_path / "m", step, compare=True)
    assert done.memory.steps == 8
    assert column(done.memory, "0") == IDS.tolist() * 4
    assert column(done.memory, "2") == (IDS + 1).tolist() * 4
    assert_verified(done)


def test_one_parameter_cannot_have_two_optimizers(tmp_path):
    model = mlp()
    with pytest.raises(sl.SettingError, match="the same parameter"):
        sl.record(model, [sgd()(model), sgd()(model)], tmp_path / "m")


def test_what_is_loaded_before_the_first_step_is_what_the_memory_starts_from(tmp_path):
    trained = mlp()
    earlier = sgd(momentum=0.9)(trained)
    turn(earlier, F.cross_entropy(trained(X), LABELS))

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        if number == 0:
            model.load_state_dict(trained.state_dict())
            optimizer.load_state_dict(copy.deepcopy(earlier.state_dict()))
        ordinary(model, optimizer, recorder, number)

    done = run(mlp(), sgd(momentum=0.9), tmp_path / "m", step, compare=True)
    assert_verified(done)
    assert "step 0" not in done.heard


def test_a_layer_that_leaves_the_optimizer_is_frozen_from_there_on(tmp_path):
    def freeze(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]

    done = run(mlp(), sgd(momentum=0.9), tmp_path / "m", changed_at_two(freeze), steps=5)
    assert_verified(done)
    assert done.memory.layers["0"].slots == 2 * B
    assert done.memory.layers["2"].slots == 5 * B
