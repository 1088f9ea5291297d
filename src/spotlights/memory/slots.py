"""Slots on their way to the disk: what one training step leaves behind, and the names it gets in a file.

A segment holds, for each layer, `LAYER/keys`, `LAYER/errors` (and their scales), `LAYER/index` where keys
are kept once, `LAYER/column/NAME`, the step log under `/log/`, and now and then the state of the optimizer under
`/state/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from spotlights.memory.gradient_block import GradientBlock, explain
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.sampling import Draw
from spotlights.memory.storage import BufferPool

KEYS, KEY_SCALE, ERRORS, ERROR_SCALE, INDEX = "keys", "key_scale", "errors", "error_scale", "index"
NORMS = "norms"
"""Of a folded memory: the length of each sum, part by part. Finding it costs as much as a score."""
LOG = "/log/"
"""No layer can have this prefix: names of layers are never empty."""
STEPS = f"{LOG}step"
SAMPLE_SIZE = 64


def layer_tensor(layer: str, what: str) -> str:
    return f"{layer}/{what}"


def column_tensor(layer: str, column: str) -> str:
    return f"{layer}/column/{column}"


def probe_tensor(layer: str) -> str:
    """Per step: the unexplained share, and 1 if the weights were changed outside the optimizer."""
    return f"{LOG}{layer}/probe"


def factor_tensor(layer: str, parameter: str) -> str:
    """Per step: γ."""
    return f"{LOG}{layer}/{parameter}/factor"


def explained_tensor(layer: str, parameter: str) -> str:
    """Of a run in several processes, per step: what this one's slots sum up to, on a block of the gradient."""
    return f"{LOG}{layer}/{parameter}/explained"


def gradient_tensor(layer: str, parameter: str) -> str:
    """The same block of the gradient itself, kept by the first process; NaN where there is no gradient."""
    return f"{LOG}{layer}/{parameter}/gradient"


def rule_tensor(layer: str, parameter: str) -> str:
    """Per step: the fields of the update rule."""
    return f"{LOG}{layer}/{parameter}/rule"


def sample_tensor(layer: str, parameter: str) -> str:
    """Per step: some entries of the parameter after the step (see `sample_slice`)."""
    return f"{LOG}{layer}/{parameter}/sample"


STATE = "/state/"


def state_tensor(layer: str, parameter: str, state: str) -> str:
    """What the optimizer held of a parameter before the segment's first step; or the parameter itself."""
    return f"{STATE}{layer}/{parameter}/{state}"


def sample_slice(numel: int) -> slice:
    """Which entries of a parameter, flattened, the step log keeps: spread over its rows and its columns."""
    count = min(SAMPLE_SIZE, numel)
    stride = numel // max(count, 1)
    stride -= stride % 2 == 0  # odd, or it would meet few columns of the usual sizes
    return slice(max(stride, 1) // 2, count * max(stride, 1), max(stride, 1))


def plain(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """A parameter as it is kept: bfloat16, which numpy does not know, as float32, which holds it exactly."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@dataclass(slots=True)  # not frozen: that costs several times as much, at every step
class Rows:
    """The slots of one call of one layer, encoded for storage."""

    keys: Shaped[Tensor, "rows in_features"]
    key_scale: Float[Tensor, "rows"] | None
    errors: Shaped[Tensor, "rows out_features"] | None
    error_scale: Float[Tensor, "rows"] | None
    columns: Mapping[str, Shaped[np.ndarray, "rows"]]
    may_repeat: bool = False
    """The keys are data, not the output of another trained layer: the next epoch brings them again."""
    computed: torch.dtype | None = None
    """What the layer computed in, where that is coarser than its parameters' type (autocast)."""

    def __len__(self) -> int:
        return len(self.keys)

    def some(self, chosen: Int64[Tensor, "chosen"]) -> Rows:
        """Some of the slots."""
        keys, key_scale, errors, error_scale = (
            None if tensor is None else tensor[chosen]
            for tensor in (self.keys, self.key_scale, self.errors, self.error_scale)
        )
        assert keys is not None
        columns = {name: column[chosen.numpy()] for name, column in self.columns.items()}
        return replace(self, keys=keys, key_scale=key_scale, errors=errors, error_scale=error_scale, columns=columns)

    def give_back(self, pool: BufferPool) -> None:
        """Nobody needs these any more."""
        pool.give(self.keys)
        if self.errors is not None:
            pool.give(self.errors)

    @property
    def nbytes(self) -> int:
        columns = 8 * len(self) * len(self.columns)
        return self.keys.nbytes + (0 if self.errors is None else self.errors.nbytes) + columns


@dataclass(slots=True)
class LayerStep:
    """What one optimizer step left behind in one layer."""

    rows: list[Rows]
    gradients: dict[str, GradientBlock]
    """By parameter; none where there is nothing to compare: no errors are kept, or there was no gradient."""
    moved: bool
    rule: dict[str, list[float]] = field(default_factory=dict)
    """Fields of the update rule, for weight and bias."""
    samples: dict[str, Shaped[np.ndarray, "sample"]] = field(default_factory=dict)
    """Entries of the parameters after the step (see `sample_slice`)."""
    explained: dict[str, Float[np.ndarray, "1 ..."]] | None = None
    """Where only some slots are kept: what all of them sum up to in the blocks of `gradients`."""

    def thinned(self, draw: Draw, entry: LayerEntry) -> LayerStep:
        """The same step with some of its slots; what the gradients are compared with is the sum of all."""
        kept = (rows.some(draw.rows(len(rows))) for rows in self.rows)
        explained = explain([self], entry)
        return replace(self, rows=[rows for rows in kept if len(rows)], explained=explained)


@dataclass(slots=True)
class StepRecord:
    """What one optimizer step left behind."""

    step: int
    layers: dict[str, LayerStep]
    state: dict[str, Tensor] = field(default_factory=dict)
    """What the optimizer held before the step (see `state_tensor`); of some steps only."""

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for layer in self.layers.values() for rows in layer.rows)
