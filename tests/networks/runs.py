"""Small recorded runs for the tests of this folder: a loop, what was said during it, and the memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl

torch.set_num_threads(1)

B, D = 4, 5
X, LABELS = torch.randn(12, D, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
IDS = torch.tensor([3, 1, 4, 7])
OF_THE_CHANGE = 1e-4
"""How much of the change a float32 run may miss by rounding."""


@dataclass
class Heard:
    """Everything that was said while a block ran: warnings, and the log of "spotlights"."""

    warnings: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join((*self.warnings, *self.log))

    def __contains__(self, text: str) -> bool:
        return text in str(self)


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Hears warnings instead of raising them as errors, which the settings of the tests do."""
    heard, handler, logger = Heard(), logging.Handler(), logging.getLogger("spotlights")
    handler.emit = lambda record: heard.log.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield heard
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            heard.warnings += [str(w.message) for w in caught if issubclass(w.category, sl.SpotlightsWarning)]


@dataclass
class Run:
    """A finished run."""

    model: nn.Module
    path: Path
    heard: Heard
    plain: nn.Module | None = None
    """The same network, trained without recording."""

    @property
    def memory(self) -> sl.Memory:
        return sl.open(self.path)


def run(
    model: nn.Module,
    make: Callable[[nn.Module], Any],
    path: Path,
    step: Callable[..., Any],
    *,
    steps: int = 4,
    after: Callable[[nn.Module], object] = lambda model: None,
    compare: bool = False,
    **options: Any,
) -> Run:
    """Trains a network and records it; `step(model, optimizer, recorder, number)` is one pass of the user's loop.

    Args:
        model: the network.
        make: makes its optimizer.
        path: where the memory is written.
        step: one turn of the loop, with `optimizer.step()` in it. Without recording, the recorder is a dummy.
        steps: how many turns.
        after: what is done after the last turn, inside the `with` block.
        compare: also train a copy without recording, and assert that it has the same weights, bit for bit.
        options: those of `record`.
    """
    plain = copy.deepcopy(model) if compare else None
    optimizer = make(model)
    seed = torch.random.get_rng_state()
    with listening() as heard, sl.record(model, optimizer, path, **options) as recorder:
        for number in range(steps):
            step(model, optimizer, recorder, number)
        after(model)
    if plain is not None:
        torch.random.set_rng_state(seed)
        optimizer = make(plain)
        for number in range(steps):
            step(plain, optimizer, NotRecording(), number)
        same_weights(model, plain)
    return Run(model, path, heard, plain)


def same_weights(model: nn.Module, plain: nn.Module) -> None:
    """Asserts that a recorded network is bit for bit what it is without recording."""
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), f"{name} is not what it is without recording"


class NotRecording:
    """Stands in for a recorder in the run without one."""

    def batch(self, **columns: Any) -> None:
        pass

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        yield


def turn(optimizer: Any, loss: Tensor) -> None:
    """The three lines at the end of every loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sgd(lr: float = 0.1, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **options)


def adam(lr: float = 0.01, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, **options)


def words(thing: Any) -> str:
    """A printed table with its line breaks taken out."""
    return " ".join(str(thing).split())


def column(memory: sl.Memory, layer: str, name: str = "example") -> list[Any]:
    """The values of a column for all slots of a layer, in the order of recording."""
    return memory.column(name, range(memory.layers[layer].slots), layer=layer)


def assert_verified(run: Run) -> None:
    """Every layer meets the change that training made, to rounding."""
    verified = run.memory.verify(run.model)
    assert verified.ok, f"verify says no:\n{verified}\n{run.heard}"
    for name, check in verified.items():
        assert check.change_error <= OF_THE_CHANGE, f"{name}: {check.change_error:.1e} of the change is missing"


def assert_all_recorded(run: Run) -> None:
    """Every trained parameter belongs to a layer with slots, and all layers meet the change."""
    info = run.memory.info.as_dict()
    assert not info["not recorded"], f"not recorded: {info['not recorded']}"
    assert info["recorded parameters"] == info["trained parameters"]
    empty = [name for name, layer in run.memory.layers.items() if layer.trained and not layer.slots]
    assert not empty, f"no slots in {empty}, though they count as recorded"
    assert_verified(run)


def parts_of(parts: Any) -> Tensor:
    """initial + Σ contributions + what no example taught."""
    rounding = getattr(parts, "rounding", None)
    total = parts.initial + parts.total()
    return total if rounding is None else total + rounding


def assert_adds_up(parts: Any, wanted: Tensor, *, tolerance: float = 1e-4) -> None:
    """The parts make up the number, or the result does not claim it and says what is missing."""
    made, wanted = parts_of(parts), wanted.detach().double().reshape(-1)
    difference = float((made - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
    if difference > tolerance:
        assert not parts.exact, f"the sum misses by {difference:.1e}, and the result calls itself exact"
        assert _says_how_much(parts.note), f"the sum misses by {difference:.1e}, and the note is: {parts.note}"


def assert_adds_up_exactly(parts: Any, wanted: Tensor, *, tolerance: float = 1e-5) -> None:
    made, wanted = parts_of(parts), wanted.detach().double().reshape(-1)
    torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)
    assert parts.exact, f"the sum is exact, and the result says: {parts.note}"


def _says_how_much(note: str | None) -> bool:
    """Whether a note speaks of what is missing, beyond "first order"."""
    return note is not None and any(
        word in note for word in ("missing", "unexplained", "not recorded", "differ", "approximate")
    )


def assert_honest(run: Run) -> None:
    """`verify` is exact, or verdict and info say why not: there is no third outcome."""
    memory = run.memory
    verified = memory.verify(run.model)
    # Each step rounds the weights themselves; of a small change, that is more than 1e-4.
    rounded = torch.finfo(next(run.model.parameters()).dtype).eps * memory.steps**0.5
    wrong = {
        name: check
        for name, check in verified.items()
        if not (check.change_error <= max(OF_THE_CHANGE, check.tolerance) or check.relative_error <= rounded)
    }
    said = {name: "; ".join(check.reasons) for name, check in wrong.items()}
    claims = [name for name, check in wrong.items() if check.ok and "round" not in said[name]]
    assert not claims, f"verify says yes, and more than {OF_THE_CHANGE} of the change is missing:\n{verified}"
    silent = [n for n, c in wrong.items() if not (c.unexplained_steps or c.moved_steps or said[n])]
    assert not silent, f"verify says NO without a reason for {silent}:\n{verified}"
    if any(not check.ok for check in wrong.values()):
        assert not memory.info.as_dict()["exact"], "info says that contributions are exact, and verify that not"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3))


def ordinary(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    turn(optimizer, F.cross_entropy(model(X[IDS]), LABELS[IDS]))
