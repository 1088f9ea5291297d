"""Group weights are the weights of views: any mask built from them equals the library's own."""

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import training
from explorers import exact_run
from spotlights.web.masks import Mask, Masks

EXACT = 1e-10
SOURCES, LABELS = ["even", "odd"], [0, 1, 2]


def masks_of(columns: list[str]) -> Masks:
    memory, model = exact_run()
    masks = Masks(memory, model, columns, cells=6)
    masks.build(lambda: torch.no_grad())
    return masks


def some(values):
    return st.lists(st.sampled_from(values), unique=True, max_size=len(values)).map(lambda found: tuple(sorted(found)))


def stretches(steps: int):
    """Some stretches that do not touch."""
    cuts = st.lists(st.integers(0, steps), unique=True, max_size=4).map(sorted)
    return cuts.map(lambda found: tuple(zip(found[::2], found[1::2], strict=False)))


@cache
def with_groups() -> Masks:
    return masks_of(["label", "source"])


@given(
    labels=some(LABELS),
    sources=some(SOURCES),
    steps=stretches(20),
    examples=some(list(range(training.EXAMPLES))),
    layers=st.sampled_from([None, ("0",), ("2",)]),
)
@settings(max_examples=60, deadline=None)
def test_a_masked_network_from_group_weights_equals_the_view_s_own(labels, sources, steps, examples, layers):
    memory, model = exact_run()
    inputs, _ = training.examples()
    values = tuple((column, found) for column, found in (("label", labels), ("source", sources)) if found)
    mask = Mask(values, steps, examples, layers)
    expected = mask.view(memory).primal(model, layers=layers)
    with torch.no_grad():
        torch.testing.assert_close(with_groups().network(mask)(inputs), expected(inputs), rtol=EXACT, atol=EXACT)


def test_stretches_between_the_edges_are_exact_too():
    memory, model = exact_run()
    masks = Masks(memory, model, ["label", "source"], cells=6)
    assert masks.groups is not None
    masks.groups.edges = (0, 7, 20)
    masks.build(lambda: torch.no_grad())
    inputs, _ = training.examples()
    for steps in ((0, 7), (3, 7), (5, 11), (7, 20), (19, 20)):
        mask = Mask((("label", (1,)),), (steps,))
        with torch.no_grad():
            torch.testing.assert_close(
                masks.network(mask)(inputs), mask.view(memory).primal(model)(inputs), rtol=EXACT, atol=EXACT
            )


def test_all_groups_together_are_the_network():
    memory, model = exact_run()
    verified = memory.verify(model, parameters=with_groups().whole())
    assert verified.ok, verified
    assert all(check.relative_error < EXACT for check in verified.values())


def test_a_memory_without_groups_can_be_masked_by_steps():
    memory, model = exact_run()
    masks = masks_of([])
    inputs, _ = training.examples()
    with torch.no_grad():
        torch.testing.assert_close(
            masks.network(Mask(steps=((0, 10),)))(inputs),
            memory.without(step=range(10)).primal(model)(inputs),
            rtol=EXACT,
            atol=EXACT,
        )
