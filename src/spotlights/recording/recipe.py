"""With `keep="recipe"`, a recording keeps batches, entries of the gradients, options and checkpoints, but no slots.

No module has a hook. A hook on each trained parameter notices when a backward pass begins, and whether the gradients
were empty before it. A step consists of the batches whose backward passes have run since then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.format.names import probed_entries
from spotlights.memory.format.recipe import (
    HEADER,
    MODEL,
    OPTIMIZER,
    AnnouncedBatch,
    Columns,
    StepRecipe,
    bytes_of,
    storable,
)
from spotlights.optimizers.replayed import option_numbers
from spotlights.recording.layer import any_nonzero
from spotlights.recording.optimizers import Optimizers
from spotlights.torch_internals import Untraced, version

_FEWEST_STEPS, _SHARE_OF_TIME, _BYTES_PER_SECOND = 100, 0.05, 400e6
"""`checkpoint_every="auto"`: at least so many steps apart, and so far that copying and writing take this share."""
_CHECKPOINTS_OF_CHANGES = 100
"""A loop that changes weights by itself at every step gets only so many checkpoints for it."""
_SMALL = 100_000
"""A batch norm changes its running statistics without a new version, so buffers up to this size are always copied."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a network."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Those that the optimizer holds, by name, in the order of its groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = [p for p in held if id(p) not in names]
    if unknown:
        raise SettingError(
            f"The optimizer trains {len(unknown)} parameters that are not the model's. A recipe keeps the model's "
            "alone: give sl.record the module that has them all."
        )
    return {names[id(p)]: p for p in held}


def gradient_entries(parameters: dict[str, nn.Parameter]) -> list[np.ndarray | None]:
    """Some entries of each gradient, by which a recomputed one can be compared; None without a dense gradient."""
    return [None if p.grad is None or p.grad.is_sparse else _entries(p.grad) for p in parameters.values()]


def _entries(gradient: Tensor) -> np.ndarray:
    flat = gradient.detach().reshape(-1)[probed_entries(gradient.numel())]
    return (flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat).cpu().numpy()


@dataclass(eq=False, slots=True)
class _Batch:
    announced: AnnouncedBatch
    buffers: dict[str, Tensor]
    """Before its forward pass."""


class RecipeNotes:
    """Notes what a run's slots follow from."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, every: int | None) -> None:
        """
        Args:
            model: the network.
            optimizers: one of them.
            every: steps between two checkpoints; None to choose.
        """
        if len(optimizers.all) > 1:
            raise SettingError('keep="recipe" works with one optimizer. Record without it, or train with one.')
        self._model, self._optimizer = model, optimizers.all[0]
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise SettingError('keep="recipe": LBFGS computes several gradients in one step, which a recipe cannot.')
        self._parameters = trained_parameters(model, self._optimizer)
        dtypes = {p.dtype for p in self._parameters.values()}
        self._dtype = np.float64 if torch.float64 in dtypes else np.float32
        self._every = every
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}
        """Each with its version and its last copy."""
        self._current: _Batch | None = None
        self._used: list[_Batch] = []
        self._buffers_before: dict[str, Tensor] = {}
        self._last_checkpoint: int | None = None
        self._structure: list[Any] = []
        self._changes = 0
        self._last_step, self._step_seconds, self._checkpoint_seconds = 0.0, 0.0, 0.0

    def register(self, guard: Callable[..., Callable[..., Any]], recorded: Callable[[], bool]) -> list[Any]:
        """Registers the hooks; returns their handles. `recorded`: whether passes count at the moment."""

        def begin(gradient: Tensor) -> None:
            batch = self._current
            if batch is None or (self._used and self._used[-1] is batch) or not recorded():
                return
            if all(p.grad is None or not any_nonzero(p.grad) for p in self._parameters.values()):
                self._used.clear()
            self._used.append(batch)

        hook = Untraced(guard(begin))
        return [p.register_hook(hook) for p in self._parameters.values() if p.requires_grad]

    def announce(self, columns: Columns) -> None:
        announced = AnnouncedBatch(columns, {}, torch.get_rng_state().numpy().view(np.int8))
        self._current = _Batch(announced, self._copied_buffers())

    def _copied_buffers(self) -> dict[str, Tensor]:
        """The buffers as a forward pass finds them, copied if they have changed since the last call.

        A checkpoint comes later, when the pass has changed them.
        """
        known, self._buffers = self._buffers, {}
        for name, buffer in self._model.named_buffers():
            of, at, copied = known.get(name, (None, -1, buffer))
            if of is not buffer or at != version(buffer) or buffer.numel() <= _SMALL:
                copied = storable(buffer)
            self._buffers[name] = buffer, version(buffer), copied
        return {name: copied for name, (_, _, copied) in self._buffers.items()}

    def describe_rows(self, layers: str, columns: Columns) -> None:
        if self._current is not None:
            by_row = self._current.announced.by_row
            by_row[layers] = {**by_row.get(layers, {}), **columns}

    def step(self, number: int) -> StepRecipe:
        """What the optimizer's next step follows from."""
        now = time.perf_counter()
        if self._last_step:  # the quickest of late: a pause for an evaluation is no step
            took = now - self._last_step
            self._step_seconds = min(1.02 * self._step_seconds, took) if self._step_seconds else took
        self._last_step = now
        entries = gradient_entries(self._parameters)
        sizes = [min(64, p.numel()) for p in self._parameters.values()]
        if any(entry is not None for entry in entries) and not (
            self._used and all("example" in batch.announced.columns for batch in self._used)
        ):
            raise UnsupportedError(
                f"a recipe needs recorder.batch(example=ids) before each forward pass, and step {number} has a "
                "gradient without one"
            )
        self._buffers_before = self._used[0].buffers if self._used else self._copied_buffers()
        batches, self._used, self._current = [batch.announced for batch in self._used], [], None
        later = [*(batch.random for batch in batches[1:]), torch.get_rng_state().numpy().view(np.int8)]
        for batch, after in zip(batches, later, strict=True):
            if batch.random is not None and np.array_equal(batch.random, after):
                batch.random = None
        known = [np.full(n, np.nan) if e is None else e for e, n in zip(entries, sizes, strict=True)]
        numbers = [n for group in self._optimizer.param_groups for n in option_numbers(group).values()]
        gradients = np.concatenate(known).astype(self._dtype)
        return StepRecipe(batches, np.array(numbers), gradients)

    def due(self, step: int, *, changed: bool) -> bool:
        """Whether a checkpoint is due before a step; `changed`: weights or state do not follow from the last step."""
        structure = [[list(group), *map(id, group["params"])] for group in self._optimizer.param_groups]
        changed_structure, self._structure = structure != self._structure, structure
        if self._last_checkpoint is None or changed_structure:
            return True
        if changed and self._changes < _CHECKPOINTS_OF_CHANGES:
            self._changes += 1
            return True
        every = self._every
        if every is None:
            every = max(_FEWEST_STEPS, self._checkpoint_seconds / (_SHARE_OF_TIME * max(self._step_seconds, 1e-6)))
        return step - self._last_checkpoint >= every

    def checkpoint(self, step: int) -> dict[str, Tensor]:
        """Everything that the next steps start from, copied."""
        start = time.perf_counter()
        self._last_checkpoint = step
        self._parameters = trained_parameters(self._model, self._optimizer)
        tensors = {MODEL + name: storable(tensor) for name, tensor in self._model.named_parameters()}
        tensors |= {MODEL + name: tensor for name, tensor in self._buffers_before.items()}
        names, numbers = {id(p): name for name, p in self._parameters.items()}, {}
        for parameter, state in self._optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{OPTIMIZER}{name}/{key}"] = storable(value)
                elif value is None or isinstance(value, bool | int | float):
                    numbers.setdefault(name, {})[key] = value
                else:
                    kind = type(value).__name__
                    raise UnsupportedError(f"a recipe cannot keep the optimizer's state {key!r}, which is a {kind}")
        header = {
            "optimizer": type(self._optimizer).__name__,
            "groups": [self._plain(group, names) for group in self._optimizer.param_groups],
            "state": numbers,
            "training": [name for name, module in self._model.named_modules() if module.training],
            "gradients": [name for name, p in self._model.named_parameters() if p.requires_grad],
            "threads": torch.get_num_threads(),
        }
        tensors[HEADER] = torch.from_numpy(bytes_of(header).copy())
        written = sum(tensor.nbytes for tensor in tensors.values()) / _BYTES_PER_SECOND
        self._checkpoint_seconds = time.perf_counter() - start + written
        return tensors

    @staticmethod
    def _plain(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
        """A group's options and the names of its parameters."""
        plain: dict[str, Any] = {"params": [names[id(p)] for p in group["params"]]}
        for name, value in group.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            items = list(number) if isinstance(number, tuple | list) else [number]
            if name != "params" and all(item is None or isinstance(item, bool | int | float | str) for item in items):
                plain[name] = items if isinstance(number, tuple | list) else number
        return plain
