"""What every update rule keeps: its coefficients are what the optimizer did, as of any step."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spotlights.optimizers import RULES, UpdateRule, exact_optimizers, rule_for, rule_named

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


class UpdateRuleContract(ABC):
    """`initial·W_0 + Σ states·S + Σ_s per_step[s]·G_s` is the parameter, as of any step."""

    rule: UpdateRule

    @abstractmethod
    def optimizers(self) -> list[Make]:
        """Optimizers of this family, with their options."""

    def steps(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> tuple:
        """Takes steps with random gradients; returns the log, the gradients, and the parameter after each."""
        log, gradients, after = [], [], [parameter.detach().clone()]
        for step in range(count):
            optimizer.param_groups[0]["lr"] *= 0.9
            gradient = torch.randn_like(parameter)
            here = step % 4 != 2
            parameter.grad = gradient.clone() if here else None
            log.append(self.rule.log(optimizer.param_groups[0], optimizer.state.get(parameter, {}), here))
            optimizer.step()
            gradients.append(gradient)
            after.append(parameter.detach().clone())
        return torch.tensor(log, dtype=torch.float64).reshape(count, len(self.rule.fields)), gradients, after

    def made(self, log: Tensor, gradients: list, start: Tensor, states: dict[str, Tensor]) -> Tensor:
        coefficients = self.rule.coefficients(log)
        assert coefficients.per_step.shape == (len(log),)
        made = coefficients.initial * start
        for coefficient, gradient in zip(coefficients.per_step, gradients, strict=False):
            made = made + coefficient * gradient
        for name, state in states.items():
            made = made + coefficients.states[name] * state
        return made

    def test_it_is_registered_and_found(self):
        assert self.rule in RULES
        assert rule_named(self.rule.name) is self.rule
        assert self.rule.name.upper() in exact_optimizers()
        for make in self.optimizers():
            assert rule_for(make([nn.Parameter(torch.zeros(2))])) is self.rule

    def test_weights_as_of_every_step_are_what_the_optimizer_made(self):
        for make in self.optimizers():
            torch.manual_seed(0)
            parameter = nn.Parameter(torch.randn(6, dtype=torch.float64))
            log, gradients, after = self.steps(parameter, make([parameter]), 9)
            for until in range(10):
                made = self.made(log[:until], gradients, after[0], {})
                torch.testing.assert_close(made, after[until], **EXACT, msg=f"as of step {until}: {make}")

    def test_state_that_existed_before_recording_is_part_of_the_sum(self):
        for make in self.optimizers():
            torch.manual_seed(1)
            parameter = nn.Parameter(torch.randn(6, dtype=torch.float64))
            optimizer = make([parameter])
            self.steps(parameter, optimizer, 3)
            held = optimizer.state.get(parameter, {})
            states = {name: held[name].clone() for name in self.rule.states if held.get(name) is not None}
            log, gradients, after = self.steps(parameter, optimizer, 5)
            for until in range(6):
                made = self.made(log[:until], gradients, after[0], states)
                torch.testing.assert_close(made, after[until], **EXACT, msg=f"as of step {until}: {make}")

    def test_no_steps_leave_the_initial_weights(self):
        coefficients = self.rule.coefficients(torch.zeros(0, len(self.rule.fields), dtype=torch.float64))
        assert coefficients.initial == 1.0
        assert all(factor == 0.0 for factor in coefficients.states.values())

    def test_it_logs_one_number_for_each_field(self):
        for make in self.optimizers():
            optimizer = make([nn.Parameter(torch.zeros(2))])
            assert len(self.rule.log(optimizer.param_groups[0], {}, True)) == len(self.rule.fields)


SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.4},
    {"momentum": 0.9, "nesterov": True},
    {"maximize": True, "weight_decay": 0.1, "momentum": 0.5},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "maximize": True},
]


class TestSgd(UpdateRuleContract):
    rule = rule_named("sgd")

    def optimizers(self) -> list[Make]:
        return [lambda p, o=options: torch.optim.SGD(p, lr=0.2, **o) for options in SGD_OPTIONS]

    @settings(max_examples=20, deadline=None)
    @given(
        options=st.sampled_from(SGD_OPTIONS),
        rates=st.lists(st.floats(0, 1), min_size=1, max_size=6),
        momenta=st.lists(st.sampled_from([0.3, 0.9]), min_size=6, max_size=6),
    )
    def test_options_may_change_while_training_goes_on(self, options: dict, rates: list, momenta: list):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=0.1, **options)
        log, gradients = [], []
        for step, rate in enumerate(rates):
            group = optimizer.param_groups[0]
            group["lr"] = rate
            group["weight_decay"] = 0.1 * (step % 2)
            if options.get("momentum"):
                group["momentum"] = momenta[step]
            parameter.grad = torch.full_like(parameter, 1.0 + step)
            log.append(self.rule.log(group, optimizer.state.get(parameter, {}), True))
            gradients.append(parameter.grad.clone())
            optimizer.step()
        log = torch.tensor(log, dtype=torch.float64)
        made = self.made(log, gradients, torch.ones(3, dtype=torch.float64), {})
        torch.testing.assert_close(made, parameter.detach(), **EXACT)


def test_optimizers_without_a_rule_have_none():
    class Own(torch.optim.SGD):
        """May do anything in its step."""

    parameter = [nn.Parameter(torch.zeros(2))]
    assert rule_for(torch.optim.Adagrad(parameter)) is None
    assert rule_for(Own(parameter, lr=0.1)) is None, "a subclass may do something else than its name says"
    assert rule_named(None) is None
    assert rule_named("sdg") is None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_keeps_the_contract(rule: UpdateRule):
    tested = {contract.rule.name for contract in UpdateRuleContract.__subclasses__()}
    assert rule.name in tested, "write a contract test for the new rule: one small class here"
