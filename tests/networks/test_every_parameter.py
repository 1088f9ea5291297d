"""Every trained parameter is recorded, or named with the reason why not; coverage counts what has slots."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import (
    Run,
    adam,
    assert_adds_up_exactly,
    assert_all_recorded,
    assert_verified,
    column,
    listening,
    run,
    sgd,
    turn,
    words,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import spotlights as sl

B, L, D, CLASSES = 4, 5, 8, 3
X = torch.randn(12, L, D, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % CLASSES
IDS = torch.tensor([3, 1, 4, 7])


def tokens(vocabulary: int, *, rows: int = 12) -> Tensor:
    """Texts that use tokens from all over the vocabulary, and 0 as padding."""
    texts = torch.randint(1, vocabulary, (rows, L), generator=torch.Generator().manual_seed(3))
    texts[:, -1], texts[:, 0] = 0, vocabulary - 1
    return texts


def classify(inputs: Tensor) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        turn(optimizer, F.cross_entropy(model(inputs[IDS]), LABELS[IDS]))

    return step


def next_token(texts: Tensor) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        logits = model(texts[IDS, :-1])
        turn(optimizer, F.cross_entropy(logits.flatten(0, 1), texts[IDS, 1:].flatten()))

    return step


def slot_bytes(path: Path) -> int:
    """What keys, errors and the step log take; initial and final weights are not counted."""
    return sum(file.stat().st_size for file in (path / "segments").rglob("*") if file.is_file())


# -- embeddings --------------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """The mean of the tokens' vectors, and a linear layer."""

    def __init__(self, vocabulary: int, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, texts: Tensor) -> Tensor:
        return self.head(self.embedding(texts).mean(dim=1))


class Bag(nn.Module):
    def __init__(self, vocabulary: int, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(vocabulary, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, texts: Tensor) -> Tensor:
        return self.head(self.embedding(texts))


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    """For the embedding; the linear layer stays as it is."""
    model.head.requires_grad_(False)  # type: ignore[union-attr]
    return torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01)  # type: ignore[union-attr]


EMBEDDINGS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], int]] = {
    "5,000 tokens": (lambda: Mean(5_000), sgd(momentum=0.9), 5_000),
    "5,000 tokens, AdamW": (lambda: Mean(5_000), adam(), 5_000),
    "50,000 tokens": (lambda: Mean(50_000), sgd(), 50_000),
    "padding_idx": (lambda: Mean(40, padding_idx=0), sgd(momentum=0.9), 40),
    "padding_idx, AdamW": (lambda: Mean(5_000, padding_idx=0), adam(), 5_000),
    "sparse, SGD": (lambda: Mean(5_000, sparse=True), sgd(), 5_000),
    "sparse, SparseAdam": (lambda: Mean(5_000, sparse=True), sparse_adam, 5_000),
    "bag of 30,000": (lambda: Bag(30_000), sgd(), 30_000),
    "bag of 30,000, padding_idx, sum": (
        lambda: Bag(30_000, padding_idx=0, mode="sum"),
        adam(weight_decay=0.0),  # decay of 30,000 tokens that no text has would be most of the change: rounding
        30_000,
    ),
    "bag of 30,000, sparse": (lambda: Bag(30_000, sparse=True), sgd(), 30_000),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings_of_any_size_are_exact(case, tmp_path):
    make, optimizer, vocabulary = EMBEDDINGS[case]
    texts = tokens(vocabulary)
    done = run(make(), optimizer, tmp_path / "m", classify(texts), compare=True)
    assert not done.heard.warnings, done.heard.warnings
    assert_all_recorded(done)
    memory = done.memory
    torch.testing.assert_close(memory.primal(done.model)(texts), done.model(texts), rtol=1e-5, atol=1e-5)
    assert memory.layers["embedding"].slots, "the embedding has slots"
    assert set(column(memory, "embedding")) <= {*IDS.tolist(), None}


@pytest.mark.parametrize("case", ["5,000 tokens", "padding_idx", "bag of 30,000"])
def test_an_embedding_answers_for_its_own_output(case, tmp_path):
    make, optimizer, vocabulary = EMBEDDINGS[case]
    texts = tokens(vocabulary)
    done = run(make(), optimizer, tmp_path / "m", classify(texts))
    spot = done.memory.attend(done.model, texts[3:4])
    top = spot["embedding"].contributions(target=0).top(2, by="example")
    assert 3 in [row["example"] for row in top.rows(0)], "the same text was trained on"


def test_an_embedding_costs_the_same_whatever_its_vocabulary(tmp_path):
    sizes = {}
    for vocabulary in (1_000, 100_000):
        path = tmp_path / str(vocabulary)
        run(Mean(vocabulary), sgd(), path, classify(tokens(vocabulary)))
        assert "embedding" in sl.open(path).layers
        sizes[vocabulary] = slot_bytes(path)
    assert sizes[100_000] <= 1.2 * sizes[1_000], sizes


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=lambda option: next(iter(option))
)
def test_what_changes_weights_or_gradients_on_its_own_is_exact_or_refused_with_its_reason(option, tmp_path):
    done = run(Mean(40, **option), sgd(), tmp_path / "m", classify(tokens(40)), compare=True)
    (name,) = option
    if "embedding" in done.memory.layers:
        return assert_all_recorded(done)
    assert "embedding.weight" in done.heard
    assert name in done.heard
    assert name in words(done.memory.info)
    return None


class Tied(nn.Module):
    def __init__(self, vocabulary: int, width: int = 8) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.o.weight = self.e.weight

    def forward(self, texts: Tensor) -> Tensor:
        return self.o(torch.tanh(self.e(texts)))


@pytest.mark.parametrize("vocabulary", [4_096, 4_097, 50_257])
@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adam()], ids=["SGD", "AdamW"])
def test_tied_weights_are_exact_whatever_the_number_of_tokens(vocabulary, optimizer, tmp_path):
    texts = tokens(vocabulary)
    model = Tied(vocabulary)
    with torch.no_grad():
        model.e.weight.mul_(0.1)
    done = run(model, optimizer, tmp_path / "m", next_token(texts), steps=3)
    assert_all_recorded(done)
    spot = done.memory.attend(done.model, texts[:1, :1])
    token = int(texts[0, 0])  # its row was learned by both uses of the weight
    wanted = done.model(texts[:1, :1])[:, -1, token]
    assert_adds_up_exactly(spot["o"].contributions(target=lambda output: output[:, -1, token]), wanted)
    made = done.memory.primal(done.model)(texts[:2])
    torch.testing.assert_close(made, done.model(texts[:2]), rtol=1e-5, atol=1e-5)


def test_bytes_per_token_are_those_of_the_arithmetic(tmp_path):
    """In the output layer an error of 50,257 numbers and a key of 8; in the embedding an error of 8 and a number."""
    done = run(Tied(50_257), sgd(), tmp_path / "m", next_token(tokens(50_257)), steps=2)
    of_a_token = 4 * (50_257 + 8) + 4 * 8 + 8
    assert slot_bytes(done.path) / (2 * B * (L - 1)) < 1.02 * of_a_token


def test_bytes_per_token_of_an_output_layer_are_announced(tmp_path):
    done = run(Tied(50_257), sgd(), tmp_path / "m", next_token(tokens(50_257)), steps=2)
    given = re.search(r"([\d.,]+) (B|kB|MB|bytes) per (example|token)", str(done.heard))
    assert given, f"at the first step nothing was said about bytes: {done.heard}"
    scale = {"B": 1, "bytes": 1, "kB": 1e3, "MB": 1e6}[given[2]]
    announced = float(given[1].replace(",", "")) * scale * (1 if given[3] == "example" else L - 1)
    assert announced == pytest.approx(slot_bytes(done.path) / (2 * B), rel=0.25)


# -- stacked experts ---------------------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Three experts in one 3-D parameter; each subclass uses it in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, D) / 3)
        self.head = nn.Linear(8, CLASSES)

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mixed(x.mean(dim=1))))


class ByBmm(Stacked):
    def mixed(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(3, -1, -1), self.experts.transpose(1, 2)).sum(dim=0)


class ByEinsum(Stacked):
    def mixed(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->bo", x, self.experts)


class ByIndex(Stacked):
    """As transformers loops over experts: F.linear with a slice, for the rows of each."""

    def mixed(self, x: Tensor) -> Tensor:
        y = x.new_zeros(len(x), 8)
        for expert in range(3):
            rows = (torch.arange(len(x)) % 3 == expert).nonzero()[:, 0]
            y = y.index_add(0, rows, F.linear(x[rows], self.experts[expert]))
        return y


class ByMatmul(Stacked):
    """`x @ W` with a stack of matrices."""

    def mixed(self, x: Tensor) -> Tensor:
        return (x @ self.experts.transpose(1, 2)).sum(dim=0)


class ByGroupedMm(Stacked):
    def mixed(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.experts.transpose(1, 2), offs=torch.tensor([1, 3, 4], dtype=torch.int32))


STACKED = [ByBmm, ByEinsum, ByIndex, ByMatmul]
if hasattr(F, "grouped_mm"):
    STACKED.append(ByGroupedMm)


@pytest.mark.parametrize("make", STACKED)
@pytest.mark.parametrize("optimizer", [sgd(), adam()], ids=["SGD", "AdamW"])
def test_stacked_experts_are_exact(make, optimizer, tmp_path):
    done = run(make(), optimizer, tmp_path / "m", classify(X), compare=True)
    assert_all_recorded(done)


# -- norms by what they compute ----------------------------------------------------------------------------------------


class OwnRms(nn.Module):
    """Llama's, T5's and many others'."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(D)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(kind)


class GemmaRms(OwnRms):
    """Multiplies by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class FunctionalLayerNorm(nn.Module):
    """nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (D,), self.weight, self.bias, 1e-5)


class FunctionalRmsNorm(OwnRms):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), self.weight, 1e-6)


class SubclassedLayerNorm(nn.LayerNorm):
    """ConvNeXt's: over channels, by a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        moved = F.layer_norm(input.float(), self.normalized_shape, self.weight, self.bias, self.eps)
        return moved.type_as(input)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class OfChannels(nn.LayerNorm):
    """Over the second dimension."""

    def forward(self, input: Tensor) -> Tensor:
        last = input.movedim(1, -1)
        return F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps).movedim(-1, 1)


class GatedRms(OwnRms):
    """Has a second argument, which it calls itself with."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * gate.sigmoid()
        return super().forward(x)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x, gate=2 * x)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "RMSNorm by hand": OwnRms,
    "Gemma's RMSNorm": GemmaRms,
    "F.layer_norm": FunctionalLayerNorm,
    "F.rms_norm": FunctionalRmsNorm,
    "a subclass of LayerNorm": lambda: SubclassedLayerNorm(D),
    "a layer scale": LayerScale,
    "of channels": lambda: OfChannels(L),
    "with a gate": GatedRms,
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_exact_whoever_wrote_it(name, tmp_path):
    """And its slots belong to examples, if its output is its parameters times something."""
    model = nn.Sequential(nn.Linear(D, D), NORMS[name](), nn.Flatten(), nn.Linear(L * D, CLASSES))
    done = run(model, adam(), tmp_path / "m", classify(X), compare=True)
    assert_all_recorded(done)
    if name != "Gemma's RMSNorm":
        assert {*column(done.memory, "1")} == {*IDS.tolist()}
        assert done.memory.attend(done.model, X[:2])["1"].contributions(target=1).total().shape == (2,)


class Tricky(nn.Module):
    """Not its parameter times something, or only for some inputs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(D)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "bent":
            return x * self.weight.tanh()
        if self.how == "raises":
            assert x.shape == (len(IDS), L, D)
        return x * self.weight + (self.weight.sum() if self.how == "mixed" else 0.0)


@pytest.mark.parametrize("how", ["bent", "mixed", "raises"])
def test_a_vector_that_is_no_scale_is_recorded_by_its_gradient(how, tmp_path):
    model = nn.Sequential(nn.Linear(D, D), Tricky(how), nn.Flatten(), nn.Linear(L * D, CLASSES))
    done = run(model, adam(), tmp_path / "m", classify(X), compare=True)
    assert_all_recorded(done)
    assert done.memory.layers["1.weight"].kind == "parameter"


# -- weights that are computed -----------------------------------------------------------------------------------------


class LoraByHand(nn.Module):
    """W + B A, computed before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, CLASSES).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(2, D) / 2), nn.Parameter(torch.randn(CLASSES, 2) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.B @ self.A, self.base.bias)


class LoraInTurn(LoraByHand):
    """Row by row, as most write it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(D, CLASSES))


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, CLASSES)),
    "weight norm, the old way": old_weight_norm,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(D, CLASSES)),
    "LoRA, W + BA": LoraByHand,
    "LoRA, in turn": LoraInTurn,
    "weight norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), parametrizations.weight_norm(nn.Conv1d(1, CLASSES, D)), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_parameters_that_a_weight_is_computed_from_are_recorded_through_it(name, tmp_path):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    compare = "the old way" not in name  # which cannot be copied
    done = run(COMPUTED[name](), make, tmp_path / "m", classify(X.mean(dim=1)), compare=compare)
    info = done.memory.info.as_dict()
    assert info["recorded parameters"] == info["trained parameters"], info["not recorded"]
    assert_verified(done)


def test_a_parametrisation_that_is_not_known_is_recorded_or_named_with_its_reason(tmp_path):
    model = nn.Sequential(nn.Flatten(), parametrizations.orthogonal(nn.Linear(L * D, 40)), nn.Linear(40, CLASSES))
    done = run(model, sgd(), tmp_path / "m", classify(X), compare=True)
    info = done.memory.info.as_dict()
    if info["recorded parameters"] < info["trained parameters"]:
        assert re.search(r"1\.parametrizations\.weight.{0,160}because", words(done.memory.info)), words(
            done.memory.info
        )
    assert_verified(done)


# -- the last resort ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A scale, a gate, a token and a table of positions, none of which an adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, D)), nn.Parameter(torch.randn(1, L + 1, D) / 9)
        self.scale, self.gate = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(D))
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head((x + self.gate.sigmoid() * torch.tanh(self.scale * self.body(x))).mean(dim=1))


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adam()], ids=["SGD", "AdamW"])
def test_small_parameters_that_no_adapter_knows_have_one_slot_per_step_without_an_example(optimizer, tmp_path):
    done = run(Small(), optimizer, tmp_path / "m", classify(X), compare=True)
    assert_all_recorded(done)
    of_table = next(name for name in done.memory.layers if "positions" in name)
    assert done.memory.layers[of_table].slots == 4
    assert set(column(done.memory, of_table)) == {None}
    torch.testing.assert_close(done.memory.primal(done.model)(X), done.model(X), rtol=1e-5, atol=1e-5)


class Large(nn.Module):
    """A parameter that is large beside the rows, and is used in a way that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(400, 300) / 99), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(dim=1)) + self.table.cos().sum()


def test_a_large_parameter_that_nobody_knows_is_named_with_its_reason(tmp_path):
    done = run(Large(), sgd(1e-4), tmp_path / "m", classify(X), compare=True)
    assert "table" in done.memory.info.as_dict()["not recorded"]
    told = words(done.memory.info)
    assert re.search(r"table.{0,120}because", told), told
    assert re.search(r"table.{0,120}because", words(done.heard)), done.heard


def test_a_large_parameter_is_recorded_by_its_gradient_if_it_is_named(tmp_path):
    class Rotating(Large):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.mean(dim=1)) + self.table.cos()[:, :CLASSES].sum(dim=0)

    done = run(Rotating(), sgd(), tmp_path / "m", classify(X), compare=True, layers=["*.table", "head"])
    assert_all_recorded(done)
    assert done.memory.layers["rotating.table"].slots == done.memory.steps
    alone = run(Rotating(), sgd(), tmp_path / "alone", classify(X), layers="head")
    assert "rotating.table" not in alone.memory.layers


# -- coverage ----------------------------------------------------------------------------------------------------------


class SwinLike(nn.Module):
    """The module `qkv` is never called: its weight is used by F.linear, as in torchvision's Swin, or by `@`."""

    def __init__(self, *, functional: bool, also_called: bool = False) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(D, 3 * D), nn.Linear(D, CLASSES)
        self.functional, self.also_called = functional, also_called

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.qkv.weight, self.qkv.bias
        qkv = F.linear(x, weight, bias) if self.functional else x @ weight.T + bias
        qkv = qkv + torch.tanh(self.qkv(x)) if self.also_called else qkv
        q, k, v = qkv.chunk(3, dim=-1)
        return self.head(((q @ k.transpose(1, 2)).softmax(-1) @ v).mean(dim=1))


@pytest.mark.parametrize("also_called", [False, True])
def test_a_weight_that_another_module_uses_is_recorded(also_called, tmp_path):
    if "torch._dynamo" in sys.modules:  # by another test: compiled graphs would be compiled anew
        torch._dynamo.utils.counters.clear()
    model = SwinLike(functional=True, also_called=also_called)
    done = run(model, adam(), tmp_path / "m", classify(X), compare=True)
    assert_all_recorded(done)
    assert done.memory.layers["qkv"].slots == done.memory.steps * IDS.numel() * L * (1 + also_called)
    assert {*column(done.memory, "qkv")} <= {*IDS.tolist()}
    assert len(done.memory.attend(done.model, X[:1])["qkv"]) == L * (1 + also_called)
    assert F.linear is torch._C._nn.linear, "torch's own function is back after recording"


def test_a_layer_without_slots_does_not_count_as_recorded(tmp_path):
    model = SwinLike(functional=False)
    done = run(model, adam(1e-6), tmp_path / "m", classify(X), compare=True)
    info = done.memory.info.as_dict()
    assert info["recorded parameters"] == sum(p.numel() for p in model.head.parameters())
    assert "qkv.weight" in info["not recorded"]


def test_what_another_optimizer_trains_is_not_called_frozen(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(L * D, D), nn.Tanh(), nn.Linear(D, CLASSES))
    other = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        other.zero_grad()
        turn(optimizer, F.cross_entropy(model(X[IDS]), LABELS[IDS]))
        other.step()

    done = run(model, lambda model: torch.optim.Adam(model[3].parameters()), tmp_path / "m", step)  # type: ignore[index]
    told = words(done.memory.info)
    assert re.search(r"1\.weight.{0,80}another optimizer", told), told
    assert "recorded: 100 %" not in told


def test_one_table_says_of_each_parameter_what_becomes_of_it(tmp_path):
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(D, D).requires_grad_(False)
            self.body, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)
            self.table = Large().table

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(self.frozen(x.mean(dim=1))))) + self.table.cos().sum()

    done = run(Several(), sgd(1e-4), tmp_path / "m", classify(X))
    for told in (words(done.heard), words(done.memory.info)):
        assert re.search(r"frozen\.weight.{0,80}frozen", told), told
        assert re.search(r"table.{0,80}not recorded.{0,120}because", told), told
    assert re.search(r"head\.weight.{0,80}recorded", words(done.heard)), done.heard
    assert done.memory.info.as_dict()["parameters"]["head.weight"] == "recorded"


def test_bytes_per_example_are_announced_at_the_first_step(tmp_path):
    model = nn.Sequential(nn.Unflatten(2, (1, D)), nn.Flatten(1, 2), nn.Conv1d(L, 32, 3, padding=1), nn.Flatten())
    model.append(nn.Linear(32 * D, CLASSES))
    with listening() as heard:
        optimizer = sgd()(model)
        with sl.record(model, optimizer, tmp_path / "m") as recorder:
            classify(X)(model, optimizer, recorder, 0)
            told = re.search(r"([\d.,]+) (B|kB|MB|bytes) per example", words(heard.log))
    assert told, f"nothing was said at the first step: {heard}"
    assert_verified(Run(model, tmp_path / "m", heard))
