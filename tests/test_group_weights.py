"""Group weights are the weights of views: any mask built from them equals the library's own."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
import training
from explorers import exact_run

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


def masks_of(columns: list[str]) -> Any:
    memory, model = exact_run()
    masks = memory.masks(model, columns)
    masks.build()
    assert masks.ready
    return masks


def masked(memory: sl.Memory, selections: list[dict[str, Any]]) -> sl.Memory:
    """The view that leaves the same slots out."""
    for conditions in selections:
        memory = memory.without(**conditions)
    return memory


def some(values):
    return st.lists(st.sampled_from(values), unique=True, max_size=len(values)).map(lambda found: tuple(sorted(found)))


def stretches(steps: int):
    """Some stretches that do not touch."""
    cuts = st.lists(st.integers(0, steps), unique=True, max_size=4).map(sorted)
    return cuts.map(lambda found: tuple(zip(found[::2], found[1::2], strict=False)))


@cache
def with_groups() -> Any:
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
    values = {"label": list(labels), "source": list(sources), "example": list(examples)}
    left_out: list[dict[str, Any]] = [{column: found} for column, found in values.items() if found]
    left_out += [{"step": range(first, end)} for first, end in steps]
    mask = sl.Mask.of(left_out, layers)
    expected = masked(memory, left_out).primal(model, layers=layers)
    with torch.no_grad():
        torch.testing.assert_close(with_groups().network(mask)(inputs), expected(inputs), rtol=EXACT, atol=EXACT)


def test_stretches_between_the_edges_and_several_conditions_at_once_are_exact_too(monkeypatch: pytest.MonkeyPatch):
    memory, model = exact_run()
    monkeypatch.setattr("spotlights.query.masks.MAX_EDGES", 3)
    masks = masks_of(["label", "source"])
    assert masks.edges == (0, 7, 13, 20)
    inputs, _ = training.examples()
    for steps in ((0, 7), (3, 7), (5, 11), (7, 20), (19, 20)):
        for left_out in ([{"label": [1]}, {"step": range(*steps)}], [{"label": 1, "step": range(*steps)}]):
            with torch.no_grad():
                torch.testing.assert_close(
                    masks.network(sl.Mask.of(left_out))(inputs),
                    masked(memory, left_out).primal(model)(inputs),
                    rtol=EXACT,
                    atol=EXACT,
                )


def test_overlapping_stretches_are_left_out_once():
    memory, model = exact_run()
    inputs, _ = training.examples()
    left_out = [{"step": range(2, 9)}, {"step": range(5, 14)}, {"step": range(14, 16)}]
    found = with_groups().network(sl.Mask.of(left_out))(inputs)
    expected = memory.without(step=range(2, 16)).primal(model)
    with torch.no_grad():
        torch.testing.assert_close(found, expected(inputs), rtol=EXACT, atol=EXACT)


def test_a_masked_network_takes_the_arguments_of_the_model():
    inputs, _ = training.examples()
    network = with_groups().network(sl.Mask.of([{"label": 1}]))
    assert torch.equal(network((inputs,)), network(inputs))
    assert torch.equal(network({"input": inputs}), network(inputs))


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
            masks.network(sl.Mask.of([{"step": range(10)}]))(inputs),
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
    masks = memory.masks(network, ["label"])
    assert masks.edges, "there are group weights"
    masks.build()
    assert memory.verify(network, parameters=masks.whole()).ok
    for left_out in ({"label": [1]}, {"step": range(3)}, {"example": [2, 5]}):
        expected = memory.without(**left_out).primal(network)(inputs)
        with torch.no_grad():
            found = masks.network(sl.Mask.of([left_out]))(inputs)
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
