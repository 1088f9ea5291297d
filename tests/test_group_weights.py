"""Group weights are the weights of views: any mask built from them equals the library's own."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
import training
from explorers import exact_run
from spotlights.web.masks import Mask, Masks

EXACT = 1e-10
SOURCES, LABELS = ["even", "odd"], [0, 1, 2]


class Reader(nn.Module):
    """Says a class after reading a sequence."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, sequences: Tensor) -> Tensor:
        states, _ = self.parts["recurrent"](sequences.transpose(0, 1))
        return self.parts["head"](states[-1])


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


@pytest.mark.parametrize(
    "recurrent", [nn.LSTM(3, 4), nn.GRU(3, 4), nn.LSTM(3, 4, bias=False)], ids=["two", "gru", "none"]
)
def test_layers_with_two_biases_or_none_have_group_weights_too(recurrent: nn.Module, tmp_path):
    model = training.fill(nn.ModuleDict({"recurrent": recurrent, "head": nn.Linear(4, 2)}).double())
    network = Reader(model)
    biases = [parameter for name, parameter in network.named_parameters() if "bias_hh" in name]
    others = [parameter for name, parameter in network.named_parameters() if "bias_hh" not in name]
    groups = [{"params": others}, {"params": biases, "lr": 0.01}] if biases else others
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # the two biases do not learn alike
    inputs = torch.randn(8, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(8) % 2
    with sl.record(network, optimizer, tmp_path / "run.memory", dtype="float64") as recorder:
        for step in range(6):
            ids = torch.randint(8, (3,), generator=torch.Generator().manual_seed(step))
            recorder.batch(example=ids, label=labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(network(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    memory = sl.open(tmp_path / "run.memory")
    masks = Masks(memory, network, ["label"], cells=2)
    assert masks.groups is not None
    masks.build(lambda: torch.no_grad())
    assert memory.verify(network, parameters=masks.whole()).ok
    for mask in (Mask((("label", (1,)),)), Mask(steps=((0, 3),)), Mask(examples=(2, 5))):
        expected = mask.view(memory).primal(network)(inputs)
        with torch.no_grad():
            torch.testing.assert_close(masks.network(mask)(inputs), expected, rtol=EXACT, atol=EXACT)
