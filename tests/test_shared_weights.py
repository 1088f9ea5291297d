"""Weights that are used in more than one way, or by no module of their own, are exact all the same."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from layer_kinds import Conv1D
from spotlights.layers import ADAPTERS
from training import fill, one_number, state

EXACT = {"rtol": 1e-9, "atol": 1e-9}
TOKENS, WIDTH, LENGTH, STEPS = 7, 4, 4, 5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1),
}


class Tied(nn.Module):
    """A language model whose embedding and output layer share their weight; `how` it uses it for the output."""

    def __init__(self, how: str = "module") -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        if how == "module":
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.head(hidden) if "head" in self._modules else F.linear(hidden, self.embedding.weight)


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(TOKENS, shape, generator=torch.Generator().manual_seed(5))


def recorded(model: nn.Module, inputs: Any, optimizer: str, **options: Any) -> tuple[sl.Memory, list[Any]]:
    """Some steps, each on two of the inputs."""
    path, after = Path(tempfile.mkdtemp()) / "run.memory", [state(model)]
    trainer = OPTIMIZERS[optimizer](model.parameters())
    generator = torch.Generator().manual_seed(3)
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    with sl.record(model, trainer, path, **{"dtype": "float64", "segment_bytes": 3000, **options}) as recorder:
        for _ in range(STEPS):
            ids = torch.randint(len(several[0]), (2,), generator=generator)
            recorder.batch(example=ids, label=ids % 2)
            trainer.zero_grad()
            output = model(*(each[ids] for each in several))
            wanted = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            (output - wanted).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            trainer.step()
            after.append(state(model))
    return sl.open(path), after


def assert_whole(memory: sl.Memory, model: nn.Module, inputs: Any, after: list[Any]) -> None:
    """The memory is the network: its weights as of any step, its output, masked or not."""
    model.eval()
    verified = memory.verify(model)
    for layer, check in verified.items():
        assert check.relative_error <= 1e-9, f"{layer}: {verified}"
        assert not check.unexplained_steps, f"{layer}: {verified}"
        assert not check.moved_steps, f"{layer}: {verified}"
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    torch.testing.assert_close(memory.dual(model)(*several), model(*several).detach(), **EXACT)
    for name, value in memory.as_of(2).primal(model).state_dict().items():
        torch.testing.assert_close(value, after[2][name], **EXACT)
    masked = memory.without(label=0)
    torch.testing.assert_close(masked.dual(model)(*several), masked.primal(model)(*several), **EXACT)


def assert_adds_up(memory: sl.Memory, model: nn.Module, inputs: Any, layer: str) -> None:
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    contributions = memory.attend(model, inputs)[layer].contributions(target=one_number)
    assert contributions.exact
    every = torch.from_numpy(contributions.numpy()).sum(dim=1)
    made = (contributions.initial + every).reshape(len(several[0]), -1).sum(dim=1)
    torch.testing.assert_close(made, one_number(model(*several)).detach(), **EXACT)


@pytest.fixture
def known() -> Iterator[Callable[..., None]]:
    kept = list(ADAPTERS)
    yield sl.register_layer
    ADAPTERS[:] = kept


# -- an embedding and an output layer ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["module", "function"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_weight_that_embedding_and_output_layer_share_is_one_memory_of_two_kinds_of_slots(known, how, optimizer):
    if how == "function":
        known(sl.FunctionalLinear(Tied, {"embedding.weight": None}))
    head = "head" if how == "module" else "tied.embedding.weight"
    model, tokens = fill(Tied(how)).double(), some_tokens(3, LENGTH)
    memory, after = recorded(model, tokens, optimizer)
    assert sorted(memory.layers) == sorted([head, "hidden"])
    assert memory.info.as_dict()["not recorded"] == []
    assert memory.layers[head].slots == 2 * STEPS * 2 * LENGTH
    assert_whole(memory, model, tokens, after)
    assert_adds_up(memory, model, tokens, head)
    rows = list(memory.attend(model, tokens)[head].top(memory.layers[head].slots).rows(0))
    path = "head" if how == "module" else "tied"
    assert {row["module"] for row in rows} == {path, "embedding"}
    assert sum(row["module"] == "embedding" for row in rows) == len(rows) // 2
    assert all(row["label"] == row["example"] % 2 for row in rows)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_slots_of_both_kinds_keep_their_digits_in_float16(size):
    """Keys of the one are errors of the other: each kind has the scale of its own numbers."""
    model = fill(Tied().float())
    with torch.no_grad():
        model.hidden.weight *= size
    memory, _ = recorded(model, some_tokens(6, LENGTH), "sgd", dtype="float16")
    verified = memory.verify(model)
    assert verified.ok, str(verified)
    for layer, check in verified.items():
        assert check.relative_error <= 2.0**-11, f"{layer}: {verified}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_embedding_s_own_output_is_made_of_the_slots_of_both(optimizer):
    model, tokens = fill(Tied()).double(), some_tokens(3, LENGTH)
    memory, _ = recorded(model, tokens, optimizer)
    spot = memory.attend(model.eval(), tokens)["embedding"]
    contributions = spot.contributions(target=lambda output: output.sum(dim=(1, 2)), rows=True)
    every = torch.from_numpy(contributions.numpy()).sum(dim=1)
    embedded = model.embedding(tokens).detach().reshape(-1, WIDTH)
    leaf = model.embedding(tokens).detach().requires_grad_()
    F.linear(torch.tanh(model.hidden(leaf)), model.embedding.weight).sum().backward()
    torch.testing.assert_close(
        contributions.initial + every, (embedded * leaf.grad.reshape(-1, WIDTH)).sum(dim=1), **EXACT
    )
    same = spot.scores()[0] == 1.0  # a slot of the embedding scores 1 for the same token
    found = [row for row in spot.top(len(memory), by=None).rows(0) if row["module"] == "embedding"]
    assert sum(row["score"] == 1.0 for row in found) <= int(same.sum())
    for refused in (
        lambda: spot.influence(target=one_number),
        lambda: memory.attend(model, tokens, kernel="cosine")["embedding"].scores(),
    ):
        with pytest.raises(sl.UnsupportedError):
            refused()


def test_a_bias_beside_a_shared_weight_has_a_slot_per_step_of_no_example():
    model = fill(Tied()).double()
    model.head = nn.Linear(WIDTH, TOKENS).double()
    model.head.weight = model.embedding.weight
    memory, _ = recorded(fill(model), some_tokens(3, LENGTH), "sgd")
    assert memory.layers["head.bias"].slots == memory.steps
    assert max(check.relative_error for check in memory.verify(model).values()) <= 1e-9
    assert not memory.attend(model, some_tokens(3, LENGTH))["head"].contributions(target=one_number).exact


def test_the_dual_network_has_the_bias_beside_a_transposed_weight():
    encoder, decoder = nn.Linear(5, 3), Conv1D(5, 3)
    decoder.weight = encoder.weight
    model = fill(nn.Sequential(encoder, nn.Tanh(), decoder)).double()
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    memory, after = recorded(model, inputs, "sgd")
    assert model[2].bias.any()
    assert_whole(memory, model, inputs, after)


# -- weights that are used by F.linear -----------------------------------------------------------


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(6, WIDTH))
        self.shift = nn.Parameter(torch.zeros(6))
        self.down = nn.Parameter(torch.zeros(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.up, self.shift)), self.down)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_module_that_uses_f_linear_on_its_own_parameters_is_exact(known, optimizer):
    known(sl.FunctionalLinear(Own, {"up": "shift", "down": None}))
    model = fill(nn.Sequential(Own())).double()
    inputs = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    plain = F.linear
    memory, after = recorded(model, inputs, optimizer)
    assert list(memory.layers) == ["0.up", "0.down"]
    assert memory.info.as_dict()["not recorded"] == []
    assert_whole(memory, model, inputs, after)
    assert_adds_up(memory, model, inputs, "0.down")
    assert F.linear is plain, "the function is what it was"


def test_without_the_adapter_the_matrices_are_found_and_the_bias_has_no_slots_of_examples():
    model = fill(nn.Sequential(Own(), nn.Linear(3, 2))).double()
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    memory, _ = recorded(model, inputs, "sgd")
    kinds = {name: layer.kind for name, layer in memory.layers.items()}
    assert kinds == {"0.shift": "parameter", "0.up": "product", "0.down": "product", "1": "linear"}
    assert memory.verify(model).ok


# -- attention ------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention as it is used: of a sequence over itself, or over another one."""

    def __init__(self, way: str, **options: Any) -> None:
        super().__init__()
        self.way = way
        self.attention = nn.MultiheadAttention(WIDTH, 2, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.attention.batch_first
        x, y = (x, y) if first else (x.transpose(0, 1), y.transpose(0, 1))
        key, value = {"self": (x, x), "cross": (y, y), "three": (y, y.tanh())}[self.way]
        made, _ = self.attention(x, key, value, need_weights=False)
        return made if first else made.transpose(0, 1)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_projections_of_attention_are_exact(data: st.DataObject):
    way = data.draw(st.sampled_from(["self", "cross", "three"]), label="way")
    options: dict[str, Any] = {
        "bias": data.draw(st.booleans(), label="bias"),
        "batch_first": data.draw(st.booleans(), label="batch_first"),
    }
    apart = way != "self" and data.draw(st.booleans(), label="apart")
    if apart:
        options |= {"kdim": 3, "vdim": 3}
    model = fill(Attends(way, **options)).double()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    x = torch.randn(3, 2, WIDTH, generator=generator, dtype=torch.float64)
    # As many positions as sequences: what is which must not be guessed.
    y = torch.randn(3, 2, 3 if apart else WIDTH, generator=generator, dtype=torch.float64)
    memory, after = recorded(model, (x, y), data.draw(st.sampled_from([*OPTIMIZERS]), label="optimizer"))
    projections = {"attention.q_proj", "attention.k_proj", "attention.v_proj"} if apart else {"attention.in_proj"}
    assert set(memory.layers) == projections | {"attention.out_proj"}
    assert memory.info.as_dict()["not recorded"] == []
    assert_whole(memory, model, (x, y), after)
    assert_adds_up(memory, model, (x, y), "attention.out_proj")
    rows = memory.attend(model, (x, y))["attention.out_proj"].top(memory.layers["attention.out_proj"].slots).rows(0)
    rows = sorted(rows, key=lambda row: row["slot"])
    assert [row["position"] for row in rows] == [0, 1] * (len(rows) // 2)
    assert all(rows[at]["example"] == rows[at + 1]["example"] for at in range(0, len(rows), 2))


def test_a_transformer_layer_is_recorded_as_a_whole_and_asked_about_past_its_fused_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=6, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 3))
    model = fill(model).double().train()
    inputs = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    memory, after = recorded(model, inputs, "adam")
    assert memory.info.as_dict()["not recorded"] == []
    assert len(memory.layers) == 2 * 6 + 1
    assert_whole(memory, model, inputs, after)
    assert_adds_up(memory, model, inputs, "1")
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # torch would take its fused path here
    assert set(memory.attend(model, inputs)) == set(memory.layers)
    assert torch.backends.mha.get_fastpath_enabled()
