"""What a recipe keeps of a step in place of its slots, as tensors of a segment.

A step has the batches that were announced for it, the random state before each (if numbers were drawn), the numbers
among the optimizer's options, and some entries of the gradients that the optimizer saw. Batches differ in size, so
their values lie one behind the other: `/log//recipe/ends` says where those of each step end, and `/log//recipe/layout`
how they are divided into batches and columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int8, Shaped
from torch import Tensor

from spotlights.memory.format.names import LOG

RECIPE = "/recipe/"
"""No layer can have this prefix: names of layers are never empty."""
HEADER, MODEL, OPTIMIZER = f"{RECIPE}header", f"{RECIPE}model/", f"{RECIPE}optimizer/"
"""Of a checkpoint, before the first step of a segment: plain data as JSON; parameters and buffers; state."""
_INTS, _FLOATS, _RANDOM, _LAYOUTS = (f"{RECIPE}{name}" for name in ("ints", "floats", "random", "layouts"))
_ENDS, _LAYOUT, _OPTIONS, _GRADIENTS = (f"{LOG}{RECIPE}{name}" for name in ("ends", "layout", "options", "gradients"))

Columns = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(eq=False, slots=True)
class AnnouncedBatch:
    """What `recorder.batch` said of one batch, as numbers."""

    columns: Columns
    by_row: dict[str, Columns] = field(default_factory=dict)
    """Columns for the layers that match a pattern: one value for each row."""
    random: Int8[np.ndarray, "bytes"] | None = None
    """The state of torch's random numbers at that time; None if none were drawn until the next batch, or the step."""


@dataclass(slots=True)
class StepRecipe:
    """One optimizer step: what its slots follow from, given the weights and the optimizer's state."""

    batches: list[AnnouncedBatch]
    """Each has had a backward pass since the gradients were last empty."""
    options: Float[np.ndarray, "options"]
    gradients: Float[np.ndarray, "entries"]
    """Of each trained parameter in turn, as the optimizer saw them; NaN where there was no gradient."""

    @property
    def nbytes(self) -> int:
        values = sum(array.nbytes for batch in self.batches for _, array in _values(batch))
        random = sum(batch.random.nbytes for batch in self.batches if batch.random is not None)
        return values + random + self.options.nbytes + self.gradients.nbytes


def _values(batch: AnnouncedBatch) -> list[tuple[list[str], Shaped[np.ndarray, "..."]]]:
    """All values of a batch, each with its pattern of layers ("" for all) and its column."""
    given = {"": batch.columns, **batch.by_row}
    return [([layers, name], values) for layers, columns in given.items() for name, values in columns.items()]


def recipe_tensors(steps: Sequence[StepRecipe]) -> dict[str, list[np.ndarray]]:
    """Some steps as tensors of a segment; nothing if there are none."""
    if not steps:
        return {}
    flat: dict[str, list[np.ndarray]] = {"i": [], "f": [], "random": []}
    counts = dict.fromkeys(flat, 0)
    layouts: dict[str, int] = {}
    ends, layout = [], []
    for step in steps:
        batches = []
        for batch in step.batches:
            described = []
            for name, values in _values(batch):
                kind = values.dtype.kind
                described.append([*name, kind, values.shape])
                flat[kind].append(values.reshape(-1))
                counts[kind] += values.size
            if batch.random is not None:
                flat["random"].append(batch.random)
                counts["random"] += batch.random.size
            batches.append([described, 0 if batch.random is None else batch.random.size])
        ends.append(list(counts.values()))
        layout.append(layouts.setdefault(json.dumps(batches), len(layouts)))
    return {
        _INTS: [np.concatenate([np.empty(0, np.int64), *flat["i"]])],
        _FLOATS: [np.concatenate([np.empty(0), *flat["f"]])],
        _RANDOM: [np.concatenate([np.empty(0, np.int8), *flat["random"]])],
        _LAYOUTS: [bytes_of([json.loads(text) for text in layouts])],
        _ENDS: [np.array(ends)],
        _LAYOUT: [np.array(layout)],
        _OPTIONS: [np.stack([step.options for step in steps])],
        _GRADIENTS: [np.stack([step.gradients for step in steps])],
    }


def read_step(tensor: Callable[[str], Tensor], number: int) -> StepRecipe:
    """The n-th step of a segment, given a function that returns the segment's tensors."""
    ends = tensor(_ENDS)
    first = [0, 0, 0] if number == 0 else ends[number - 1].tolist()
    starts: dict[str, int] = dict(zip(("i", "f", "random"), first, strict=True))
    flat = {"i": tensor(_INTS).numpy(), "f": tensor(_FLOATS).numpy(), "random": tensor(_RANDOM).numpy()}

    def take(kind: str, count: int) -> np.ndarray:
        start = starts[kind]
        starts[kind] += count
        return flat[kind][start : start + count].copy()

    batches = []
    for described, random in plain_data(tensor(_LAYOUTS))[int(tensor(_LAYOUT)[number])]:
        given: dict[str, dict[str, np.ndarray]] = {"": {}}
        for layers, name, kind, shape in described:
            given.setdefault(layers, {})[name] = take(kind, math.prod(shape)).reshape(shape)
        columns = given.pop("")
        batches.append(AnnouncedBatch(columns, dict(given), take("random", random) if random else None))
    return StepRecipe(batches, tensor(_OPTIONS)[number].numpy(), tensor(_GRADIENTS)[number].numpy())


def bytes_of(data: Any) -> Int8[np.ndarray, "bytes"]:
    """Plain data as the bytes of its JSON."""
    return np.frombuffer(json.dumps(data).encode(), dtype=np.int8)


def plain_data(stored: Int8[Tensor, "bytes"]) -> Any:
    return json.loads(stored.numpy().tobytes())


def storable(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """A copy in a type that segments have: integers as int64, bfloat16 as float32; a single number as one row."""
    tensor = tensor.detach()
    kinds = {torch.bfloat16: torch.float32, torch.float64: torch.float64, torch.float32: torch.float32}
    kinds[torch.float16] = torch.float16
    kind = kinds.get(tensor.dtype, torch.int64)
    copied = tensor.to("cpu", kind, memory_format=torch.contiguous_format, copy=True)
    return copied.reshape(copied.shape or (1,))
