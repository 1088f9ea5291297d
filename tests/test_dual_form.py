"""The equations: attention, the sweep over the steps of SGD, and the probe of a gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import spotlights as sl
from spotlights.dual_form import SgdStep, probe_gradient, sgd_sweep

some = settings(max_examples=40, deadline=None)


# -- attention --------------------------------------------------------------------------------


@some
@given(slots=st.integers(0, 6), lead=st.lists(st.integers(0, 3), max_size=2), seed=st.integers(0, 99))
def test_dot_attention_is_the_sum_over_slots_of_score_times_value(slots: int, lead: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    keys, values, queries = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((slots, 4), (slots, 3), (*lead, 4))
    )
    found = sl.dot_attention(keys, values, queries)
    assert found.shape == (*lead, 3)
    expected = torch.zeros(*lead, 3, dtype=torch.float64)
    for key, value in zip(keys, values, strict=True):
        expected += (queries @ key)[..., None] * value
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- the sweep --------------------------------------------------------------------------------


@st.composite
def sgd_runs(draw: st.DrawFn) -> tuple[list[dict], list[bool]]:
    """Settings for each step of one optimizer, and at which steps there is a gradient."""
    nesterov = draw(st.booleans())
    momentum = draw(st.sampled_from([0.5, 0.9] if nesterov else [0.0, 0.5, 0.9]))
    fixed = {
        "momentum": momentum,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3, 1.0])),
        "nesterov": nesterov,
        "maximize": draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
    }
    rates = draw(st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.5]), max_size=8))
    active = draw(st.lists(st.booleans(), min_size=len(rates), max_size=len(rates)))
    return [{"lr": rate, **fixed} for rate in rates], active


@some
@given(run=sgd_runs(), seed=st.integers(0, 99), running=st.booleans())
def test_the_sweep_is_what_torch_does_with_every_option(run: tuple, seed: int, running: bool):
    options, active = run
    generator = torch.Generator().manual_seed(seed)
    start, buffer, *gradients = torch.randn(len(options) + 2, 5, generator=generator, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    has_buffer = running and bool(options) and options[0]["momentum"] != 0
    if has_buffer:
        optimizer.state[parameter]["momentum_buffer"] = buffer.clone()
    steps = []
    for setting, here, gradient in zip(options, active, gradients, strict=True):
        optimizer.param_groups[0].update(setting)
        parameter.grad = gradient.clone() if here else None
        starts = optimizer.state[parameter].get("momentum_buffer") is None
        steps.append(SgdStep(**setting, starts_buffer=starts, active=here))
        optimizer.step()
    sweep = sgd_sweep(steps)
    made = sweep.initial * start
    if has_buffer:
        made += sweep.buffer * buffer
    for coefficient, gradient in zip(sweep.per_step, gradients, strict=True):
        made += coefficient * gradient
    torch.testing.assert_close(made, parameter.detach(), rtol=1e-10, atol=1e-10)


def test_no_steps_leave_the_initial_weights():
    sweep = sgd_sweep([])
    assert (sweep.initial, sweep.buffer, len(sweep.per_step)) == (1.0, 0.0, 0)


# -- the probe --------------------------------------------------------------------------------


@some
@given(factor=st.floats(-100, 100).filter(lambda f: abs(f) > 1e-3), seed=st.integers(0, 99))
def test_the_probe_finds_the_factor_between_backward_and_step(factor: float, seed: int):
    product = np.random.default_rng(seed).standard_normal(9)
    probe = probe_gradient(factor * product, product, rounding=2.0**-53)
    assert probe.factor == pytest.approx(factor, rel=1e-12)
    assert probe.residual < 1e-12


def test_the_probe_calls_an_untouched_gradient_untouched():
    product = np.random.default_rng(0).standard_normal(9).astype(np.float32)
    assert probe_gradient(product * np.float32(1 + 1e-7), product, rounding=2.0**-24).factor == 1.0
    assert probe_gradient(product * np.float32(1 + 1e-4), product, rounding=2.0**-24).factor != 1.0
    assert probe_gradient(product * np.float32(1 + 1e-4), product, rounding=2.0**-11).factor == 1.0


def test_the_residual_is_the_share_that_the_slots_do_not_explain():
    explained, other, nothing = np.array([3.0, 0.0]), np.array([0.0, 4.0]), np.zeros(2)
    exact = 2.0**-53
    probe = probe_gradient(explained + other, explained, exact)
    assert probe.factor == pytest.approx(1.0)
    assert probe.residual == pytest.approx(4 / 5)
    assert probe_gradient(other, nothing, exact).residual == 1.0
    assert probe_gradient(nothing, nothing, exact).residual == 0.0
    assert probe_gradient(nothing, explained, exact).factor == 0.0
