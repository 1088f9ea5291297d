"""Tiny trained networks, their memories, and the same slots in plain lists to compare answers with.

Each `Run` has seen everything that the recorder has seen, by hooks of its own: `run.slots[layer]` is the list
of slots in order, and `run.replay(layer, chosen)` hands the gradients of some of them to torch's own SGD.
Inputs are small whole numbers, so that scores of a first layer are exact and have ties.
"""

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl

ROOT = Path(tempfile.mkdtemp(prefix="spotlights-tests-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)

torch.set_num_threads(1)  # for networks this small a second thread only gets in the way

EVERYTHING = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}
SEGMENT_BYTES = 20_000
"""So small that a memory has several segments, and blocks cross their borders."""


@dataclass
class Slot:
    """One (input, error) pair, as a plain record."""

    step: int
    key: Tensor
    error: Tensor
    columns: dict[str, Any]


@dataclass
class Run:
    """A trained network, its memory, and everything needed to answer by brute force."""

    model: nn.Module
    memory: sl.Memory
    options: dict[str, Any]
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    checkpoints: list[dict[str, Tensor]] = field(default_factory=list)
    """The state before each step, and the last one after it."""
    lrs: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    """What clipping multiplied the gradient by."""
    queries: Tensor = field(default_factory=lambda: torch.empty(0))

    def keys(self, layer: str) -> Tensor:
        return torch.stack([slot.key for slot in self.slots[layer]])

    def column(self, layer: str, name: str) -> list[Any]:
        return [s.step if name == "step" else s.columns.get(name) for s in self.slots[layer]]

    def replay(
        self, layer: str, chosen: Callable[[Slot], bool] = lambda slot: True, until: int | None = None
    ) -> dict[str, Tensor]:
        """What torch's SGD makes of the initial weights and the gradients of the chosen slots alone."""
        module = self.model.get_submodule(layer)
        names = [name for name, _ in module.named_parameters()]
        start = self.checkpoints[0]
        held = {name: nn.Parameter(start[f"{layer}.{name}"].clone()) for name in names}
        optimizer = torch.optim.SGD(held.values(), **self.options)
        for step in range(len(self.lrs) if until is None else until):
            for name, parameter in held.items():
                parameter.grad = torch.zeros_like(parameter)
                for slot in self.slots[layer]:
                    if slot.step == step and chosen(slot):
                        one = torch.outer(slot.error, slot.key) if name == "weight" else slot.error
                        parameter.grad += self.factors[step] * one
            optimizer.param_groups[0]["lr"] = self.lrs[step]
            optimizer.step()
        return {name: parameter.detach() for name, parameter in held.items()}


class Witness:
    """Hooks that keep keys and errors in a list, as simply as possible."""

    def __init__(self, model: nn.Module) -> None:
        self.slots: dict[str, list[Slot]] = {}
        self.step = 0
        self.columns: dict[str, Any] = {}
        self.handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self.slots[name] = []
                self.handles.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            key = args[0].detach().clone()
            output.register_hook(lambda error: self._keep(name, key, error))

        return hook

    def _keep(self, name: str, keys: Tensor, errors: Tensor) -> None:
        lead = keys.shape[:-1]
        per_example = lead.numel() // lead[0]
        for row, (key, error) in enumerate(
            zip(keys.reshape(-1, keys.shape[-1]), errors.reshape(-1, errors.shape[-1]), strict=True)
        ):
            columns = {
                column: values[row // per_example] if isinstance(values, list) else values
                for column, values in self.columns.items()
            }
            if len(lead) > 1:
                columns["position"] = row % per_example
            self.slots[name].append(Slot(self.step, key, error.clone(), columns))


Batches = Iterable[tuple[Tensor, Tensor, dict[str, Any]]]


def train(
    model: nn.Module,
    batches: Batches,
    *,
    storage: str = "float64",
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    schedule: Callable[[int], float] = lambda step: 1.0,
    segment_bytes: int = SEGMENT_BYTES,
    **settings: Any,
) -> Run:
    """Trains with cross entropy and records, keeping a second copy of everything."""
    options = dict(EVERYTHING if options is None else options)
    path = Path(tempfile.mkdtemp(dir=ROOT)) / "run.memory"
    optimizer = torch.optim.SGD(model.parameters(), **options)
    witness = Witness(model)
    checkpoints, lrs, factors = [], [], []
    settings |= {"dtype": storage, "segment_bytes": segment_bytes}
    with sl.record(model, optimizer, path, **settings) as recorder:
        for step, (inputs, targets, columns) in enumerate(batches):
            checkpoints.append(copy.deepcopy(model.state_dict()))
            lrs.append(options["lr"] * schedule(step))
            optimizer.param_groups[0]["lr"] = lrs[-1]
            witness.step, witness.columns = step, columns
            if columns:
                recorder.batch(**columns)
            output = model(inputs)
            optimizer.zero_grad()
            F.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1)).backward()
            norm = float("inf")
            if clip is not None:
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
            factors.append(1.0 if clip is None else min(1.0, clip / (norm + 1e-6)))
            optimizer.step()
    checkpoints.append(copy.deepcopy(model.state_dict()))
    for handle in witness.handles:
        handle.remove()
    return Run(model, sl.open(path), options, witness.slots, checkpoints, lrs, factors)


def build_mlp(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7, bias=bias),
        nn.ReLU(),
        nn.Linear(7, 6, bias=bias),
        nn.ReLU(),
        nn.Linear(6, 4, bias=bias),
    )


LAYERS = ("0", "2", "4")
SOURCES = ("mnist", "fashion", "kanji")


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).double()


def batches(steps: int, dtype: torch.dtype, examples: int = 25, size: int = 6, lead: Sequence[int] = ()) -> Batches:
    """Batches with a column of each kind; some batches say little of their examples, some nothing."""
    inputs, labels = whole_numbers(examples, *lead, 5).to(dtype), torch.randint(0, 4, (examples, *lead))
    ratings = torch.rand(examples).double()
    for step in range(steps):
        chosen = torch.randint(0, examples, (size,))
        columns: dict[str, Any] = {}
        if step % 7 != 6:
            first = labels[chosen].reshape(size, -1)[:, 0]
            columns = {"example": (chosen * 10 + 3).tolist(), "label": first.tolist()}
        if step % 7 in (0, 1, 3, 4):
            columns["source"] = SOURCES[step % 3]
            columns["rating"] = ratings[chosen].tolist()
        yield inputs[chosen], labels[chosen], columns


@cache
def mlp(storage: str = "float64", dtype: torch.dtype = torch.float64, *, bias: bool = True) -> Run:
    """Three layers, every option of SGD, a schedule, clipping; a column of each kind with missing values."""
    torch.manual_seed(1)
    model = build_mlp(bias=bias).to(dtype)
    run = train(
        model,
        batches(30, dtype),
        storage=storage,
        clip=0.5,
        schedule=lambda step: 1.0 - step / 40,
    )
    run.queries = whole_numbers(3, 5).to(dtype)
    return run


@cache
def plain_layer() -> Run:
    """One linear layer without bias, trained by plain gradient descent: the paper's setting."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4, bias=False)).double()
    run = train(model, batches(20, torch.float64), options={"lr": 0.2})
    run.queries = whole_numbers(3, 5)
    return run


@cache
def sequence() -> Run:
    """Inputs of shape (batch, length, features): several slots for each example."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    run = train(model, batches(12, torch.float64, size=3, lead=(2,)))
    run.queries = whole_numbers(2, 2, 5)
    return run


class Twice(nn.Module):
    """Uses one layer twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@cache
def twice() -> Run:
    """A layer called several times per forward."""
    torch.manual_seed(4)
    run = train(Twice().double(), batches(10, torch.float64))
    run.queries = whole_numbers(3, 5)
    return run


def brute_totals(scores: Tensor, groups: Sequence[Any]) -> dict[Any, Tensor]:
    """Sums of columns of `scores` by group, in a plain loop."""
    found: dict[Any, Tensor] = {}
    for slot, group in enumerate(groups):
        found[group] = found.get(group, 0.0) + scores[:, slot].double()
    return found


def brute_top(values: Sequence[float], k: int, chosen: Iterable[int] | None = None) -> list[int]:
    """The slots with the k largest values, the lowest slot first among equals."""
    slots = range(len(values)) if chosen is None else chosen
    return sorted(slots, key=lambda slot: (-values[slot], slot))[:k]


def attend(run: Run, layer: str, **options) -> sl.Attention:
    return run.memory.attend(run.model, run.queries, **options)[layer]
