"""Optimizers without an exact rule: scores work all the same, and `verify` runs the optimizer again."""

from typing import Any

import pytest
import torch
from torch import nn

import spotlights as sl
from spotlights.optimizers import rule_for, rule_named
from training import examples, network, train
from update_rules import Circumstances, UpdateRuleContract

X, _ = examples()


class OwnSGD(torch.optim.SGD):
    """May do anything in its step: its rule is not known."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


def test_optimizers_without_a_rule_have_none():
    parameter = [nn.Parameter(torch.zeros(2))]
    assert rule_for(torch.optim.Rprop(parameter)) is None
    assert rule_for(OwnSGD(parameter, lr=0.1)) is None, "a subclass with a step of its own may do something else"
    assert rule_named(None) is None
    assert rule_named("sdg") is None


class Own(torch.optim.Optimizer):
    """Nobody has a rule for it: the step is as long as the gradient's norm says."""

    def __init__(self, params: Any, lr: float = 0.1, power: int = 1) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["power"], int)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    p.add_(p.grad * p.grad.norm() ** group["power"], alpha=-group["lr"] / self.state[p]["step"])


@pytest.mark.filterwarnings("ignore:.*has no exact rule")
class TestReplayed(UpdateRuleContract):
    """Without a rule, `verify` runs the optimizer's own class again; nothing else is promised."""

    rule = None

    @pytest.mark.parametrize("optimizer", [torch.optim.Rprop, torch.optim.ASGD, Own])
    def test_the_memory_is_the_network_in_parts_that_add_up(self, optimizer: Any):
        self.optimizer = optimizer
        around = Circumstances(clip=0.2, accumulate=2, schedule=True, no_gradient_at=frozenset({1, 4}))
        run = self.run({"lr": 0.05}, around)
        cls = {"optimizer": Own} if optimizer is Own else {}
        checked = run.memory.verify(run.model, **cls)
        assert checked.ok
        assert max(check.relative_error for check in checked.values()) < 1e-10
        assert optimizer.__name__ in str(checked)
        assert run.memory.as_of(3).verify(**cls).ok
        assert "scores only" in str(run.memory.info)

    test_the_dual_network_is_the_trained_one = None
    test_a_resumed_run_is_one_run = None
    test_it_is_registered_and_found = None

    def test_what_cannot_be_replayed_is_refused_in_a_sentence(self):
        self.optimizer = Own
        run = self.run({"lr": 0.05}, Circumstances())
        with pytest.raises(sl.UnsupportedError, match="give its class: memory"):
            run.memory.verify(run.model)
        with pytest.raises(sl.UnsupportedError, match="cannot be run again"):
            run.memory.verify(run.model, optimizer=torch.optim.LBFGS)
        with pytest.raises(sl.UnsupportedError, match="not a part of it"):
            run.memory.where(label=1).verify(run.model, optimizer=Own)
        with pytest.raises(sl.UnsupportedError, match="contributions, weights and masks need one of"):
            run.memory.weights("0")
        started = self.run({"lr": 0.05}, Circumstances(steps_before=2))
        with pytest.raises(sl.UnsupportedError, match="before recording began"):
            started.memory.verify(started.model, optimizer=Own)


@pytest.mark.filterwarnings("ignore:.*has no exact rule")
@pytest.mark.parametrize("kind", [OwnSGD, torch.optim.Rprop, torch.optim.ASGD])
def test_without_a_rule_attention_and_verify_work_and_contributions_refuse(tmp_path, kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.01)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 4, recorder)
    memory = sl.open(tmp_path / "m")
    attention = memory.attend(model, X[:2])["2"]
    assert attention.scores().shape == (2, 16)
    assert len(list(attention.top(3).rows())) == 3
    assert sum(row["slots"] for row in attention.totals("label").rows()) == 16
    refusal = f"{kind.__name__}.*SGD"
    with pytest.raises(sl.UnsupportedError, match=refusal):
        attention.contributions(target=0)
    with pytest.raises(sl.UnsupportedError, match=refusal):
        memory.weights("0")
    with pytest.raises(sl.UnsupportedError, match=refusal):
        memory.dual(model)
    assert memory.verify(model, optimizer=kind).ok, "its own class, run again, makes the same weights"
    assert "scores only" in str(memory.info)
