"""The equations: attention, the sweep over the steps of an optimizer, and the probe of a gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spotlights as sl
from spotlights.dual_form import (
    Adjoint,
    DiscreteGradient,
    LinearStep,
    OuterSum,
    PathAdjoint,
    act,
    gradient_factor,
    unexplained_share,
)

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


numbers = st.sampled_from([-0.5, 0.0, 0.3, 1.0])


@some
@given(
    steps=st.lists(st.builds(LinearStep, *[numbers] * 8, st.sampled_from([-1.0, 1.0])), max_size=6),
    matrices=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_sweep_down_is_the_way_up(steps: list[LinearStep], matrices: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    weights, moment, *others = torch.randn(2 + 2 * len(steps), 3, 4, generator=generator, dtype=torch.float64)
    gradients, P = others[::2], others[1::2] if matrices else [1.0] * len(steps)
    start, held = weights, moment
    for step, p, raw in zip(steps, P, gradients, strict=True):
        g = step.gradient(raw, weights)
        moved = step.next_weights("entries", p, weights, moment, g)
        weights, moment = moved, step.next_moment("entries", p, moment, g)
    adjoint, made = Adjoint(), torch.zeros_like(start)
    for step, p, raw in reversed(list(zip(steps, P, gradients, strict=True))):
        made = made + act("entries", adjoint.back(step, p), raw)
    made = made + adjoint.to_weights * start + adjoint.to_moment * held
    torch.testing.assert_close(made, weights, rtol=1e-9, atol=1e-9)
    assert matrices or isinstance(adjoint.to_weights, float), "SGD's factors stay numbers"


momentum = st.builds(
    lambda w_pg, ratio, m_g: LinearStep(w_pg, w_m=w_pg * ratio / m_g, m_m=ratio, m_g=m_g),
    *(st.sampled_from(some_of) for some_of in ([-0.3, 0.2], [0.0, 0.9], [0.1, 1.0])),
)
no_moment = st.sampled_from([LinearStep(-0.5), LinearStep(0.3)])


@some
@given(
    steps=st.lists(st.one_of(st.builds(LinearStep, *[numbers] * 6), momentum, no_moment), min_size=1, max_size=5),
    matrices=st.booleans(),
    kinds=st.lists(st.sampled_from(["matrix", "rows", "none"]), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_the_sweep_down_a_path_is_the_gradient_of_its_changes(
    steps: list[LinearStep], matrices: bool, kinds: list[str], seed: int
):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    midpoints = {
        "matrix": lambda: drawn(3, 4),
        "rows": lambda: OuterSum(drawn(2, 3), drawn(2, 4)),
        "none": lambda: None,
    }
    path = [DiscreteGradient(midpoints[kind](), drawn(3, 4), 0.7) for kind in kinds[: len(steps)]]
    P = [drawn(3, 4) if matrices else 1.0 for _ in steps]
    gradients, start = [drawn(3, 4).requires_grad_() for _ in steps], drawn(3, 4).requires_grad_()
    weights, moment, changes = torch.zeros(3, 4, dtype=torch.float64), start, torch.zeros(())
    for step, p, g, along in zip(steps, P, gradients, path, strict=True):
        moved = step.next_weights("entries", p, weights, moment, g)
        changes = changes + (along.full() * (moved - weights)).sum()
        weights, moment = moved, step.next_moment("entries", p, moment, g)
    *expected, of_start = torch.autograd.grad(changes, [*gradients, start], allow_unused=True, materialize_grads=True)
    adjoint = PathAdjoint()
    for step, p, along, wanted in reversed(list(zip(steps, P, path, expected, strict=True))):
        torch.testing.assert_close(adjoint.back(step, "entries", p, along).value, wanted, rtol=1e-9, atol=1e-9)
    found = torch.zeros(3, 4) if adjoint.to_moment is None else adjoint.to_moment.value
    torch.testing.assert_close(found, of_start, rtol=1e-9, atol=1e-9, check_dtype=False)


def test_no_steps_leave_the_initial_weights():
    assert (Adjoint().to_weights, Adjoint().to_moment) == (1.0, 0.0)


# -- the probe --------------------------------------------------------------------------------


@some
@given(factor=st.floats(-100, 100).filter(lambda f: abs(f) > 1e-3), seed=st.integers(0, 99))
def test_the_probe_finds_the_factor_between_backward_and_step(factor: float, seed: int):
    product = np.random.default_rng(seed).standard_normal(9)
    found = gradient_factor(factor * product, product, rounding=2.0**-53)
    assert found == pytest.approx(factor, rel=1e-12)
    assert unexplained_share(factor * product, found * product) < 1e-12


def test_the_probe_calls_an_untouched_gradient_untouched():
    product = np.random.default_rng(0).standard_normal(9).astype(np.float32)
    assert gradient_factor(product * np.float32(1 + 1e-7), product, rounding=2.0**-24) == 1.0
    assert gradient_factor(product * np.float32(1 + 1e-4), product, rounding=2.0**-24) != 1.0
    assert gradient_factor(product * np.float32(1 + 1e-4), product, rounding=2.0**-11) == 1.0


def test_the_unexplained_share_is_that_of_what_the_slots_do_not_explain():
    explained, other, nothing = np.array([3.0, 0.0]), np.array([0.0, 4.0]), np.zeros(2)
    exact = 2.0**-53
    assert gradient_factor(explained + other, explained, exact) == pytest.approx(1.0)
    assert unexplained_share(explained + other, explained) == pytest.approx(4 / 5)
    assert unexplained_share(other, nothing) == 1.0
    assert unexplained_share(nothing, nothing) == 0.0
    assert gradient_factor(nothing, explained, exact) == 0.0
    assert gradient_factor(other, nothing, exact) == 1.0, "γ cannot be told"


def test_the_probe_compares_many_steps_at_once():
    gradients, explained = np.random.default_rng(0).standard_normal((2, 5, 9))
    each = [gradient_factor(g, e, 0.0) for g, e in zip(gradients, explained, strict=True)]
    np.testing.assert_array_equal(gradient_factor(gradients, explained, 0.0), each)
