"""Tiny networks and loops for the tests of recording: each run is determined by its step numbers alone."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl

torch.set_num_threads(1)  # matrices this small only wait for a second thread

FEATURES, CLASSES, EXAMPLES = 5, 3, 24
EXACT = 1e-10


def network(*sizes: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers "0", "2", … (with dropout "0", "3", …) with tanh between; always the same weights."""
    sizes = sizes or (FEATURES, 6, CLASSES)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
        layers += [nn.Dropout(dropout)] if dropout else []
    model = nn.Sequential(*layers[: -2 if dropout else -1]).to(dtype)
    return fill(model)


def fill(model: nn.Module) -> Any:
    """Sets every parameter to numbers that depend on its shape and place alone, leaving torch's seed be."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def examples(dtype: torch.dtype = torch.float64, count: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(CLASSES, (count,), generator=generator)


def chosen(step: int, size: int = 4) -> Tensor:
    """The numbers of the examples in the batch of this step."""
    return torch.randint(EXAMPLES, (size,), generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range | int,
    recorder: sl.Recorder | None = None,
    *,
    size: int = 4,
    before_step: Callable[[int], object] = lambda step: None,
    after_step: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """An ordinary loop; returns the losses."""
    inputs, labels = examples(next(model.parameters()).dtype)
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        ids = chosen(step, size)
        if recorder is not None:
            recorder.batch(example=ids, label=labels[ids])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[ids]), labels[ids])
        loss.backward()
        before_step(step)
        optimizer.step()
        after_step(step)
        losses.append(loss.item())
    return losses


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two networks' parameters."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def assert_exact(path: Path | str, model: nn.Module, inputs: Tensor | None = None) -> sl.Memory:
    """The memory *is* the network: weights and outputs meet to 1e-10."""
    memory = sl.open(path)
    verified = memory.verify(model)
    assert verified.ok, f"the memory does not add up to the trained weights:\n{verified}"
    for name, check in verified.items():
        assert check.relative_error <= EXACT, f"layer {name} is off by {check.relative_error:.1e}"
        assert not check.unexplained_steps, f"layer {name}: γ or slots are wrong at {check.unexplained_steps}"
        assert not check.moved_steps, f"layer {name}: own steps taken for outside changes {check.moved_steps}"
    inputs = examples()[0][:4] if inputs is None else inputs
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(memory.dual(model)(inputs), model(inputs), rtol=EXACT, atol=EXACT)
    return memory


def fit(model: nn.Module, path: Path, inputs: Tensor) -> sl.Memory:
    """Trains towards zero on the same inputs, recorded in float64, and checks that the memory is exact."""
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    with sl.record(model, optimizer, path, dtype="float64"):
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return assert_exact(path, model, inputs)


def processes() -> multiprocessing.context.ForkServerContext:
    """Starts processes that have torch already: some milliseconds each, not seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "spotlights.api", "spotlights.recording", "pytest"])
    return context


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function in a process of its own, without run-time type checks; returns what it returns."""
    with ProcessPoolExecutor(1, mp_context=processes()) as pool:
        return pool.submit(function, *args).result(timeout=120)


def kill_at_call(call: int) -> None:
    """This process will be killed at the n-th call by which a file system is changed."""
    _at_each_call(lambda number: number == call and os.kill(os.getpid(), signal.SIGKILL))


def count_calls() -> Iterator[int]:
    """Counts those calls from now on; `next` says how many there were."""
    latest = [0]
    _at_each_call(lambda number: latest.__setitem__(0, number))
    return (latest[0] for _ in itertools.count())


def _at_each_call(do: Callable[[int], object]) -> None:
    calls = itertools.count(1)

    def counted(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            do(next(calls))
            return original(*args, **kwargs)

        return wrapped

    for name in ("writev", "write", "fsync", "replace", "ftruncate", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def slots(memory: sl.Memory, model: nn.Module, layer: str, inputs: Tensor) -> list[dict[str, Any]]:
    """Every slot of a layer in the order of recording, as dicts of its columns."""
    attention = memory.attend(model, inputs)[layer]
    rows = attention.top(max(1, memory.layers[layer].slots)).rows(0)
    return sorted(rows, key=lambda row: row["slot"])


def column(memory: sl.Memory, model: nn.Module, layer: str, inputs: Tensor, name: str) -> list[Any]:
    return [row.get(name) for row in slots(memory, model, layer, inputs)]


def one_number(output: Tensor) -> Tensor:
    """A number of interest in which every output has a part."""
    flat = output.flatten(1)
    return flat @ torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
