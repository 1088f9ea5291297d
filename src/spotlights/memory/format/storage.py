"""Storage types: float64 and float32 rows as they are, float16 and int8 rows with one scale per row.

Errors are often smaller than float16 can hold (a mean loss over a batch divides errors by the batch size), so float16
rows are scaled too, by a power of two, which costs no precision. All rows of one call share that scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.memory.buffers import BufferPool

_SMALLEST = 0.25
"""Rows whose largest stored number is below this would lose digits of small numbers: float16 ends at 2⁻²⁴."""

_Rows = Float[Tensor, "*lead features"]
_Stored = Shaped[Tensor, "rows features"]
_Scales = Float[Tensor, "rows"] | None


@dataclass(frozen=True)
class Storage:
    """A type in which rows of numbers are stored."""

    name: str
    dtype: torch.dtype
    rounding: float
    """The relative error of one stored number."""
    fill: Callable[[_Stored, _Rows, BufferPool, float | None], _Scales]
    """Converts rows into the memory for the stored numbers; returns their scales. See `encode`."""
    lossy: bool = False
    """Whether stored numbers are approximate, so that answers say so."""
    foldable: bool = True
    """Whether running sums can be stored."""
    compute_dtype: torch.dtype = torch.float32
    """What stored rows are converted to before anything is computed with them."""

    def encode(
        self, rows: _Rows, pool: BufferPool, use: object = None, *, like: float | None = None
    ) -> tuple[_Stored, _Scales]:
        """The stored numbers, and the scale of each row if the type has scales.

        Args:
            rows: in any shape and memory order. They are copied once.
            pool: where the memory for the stored numbers comes from.
            use: passed to `BufferPool.take`.
            like: a scale used before, which is kept if it still fits. The same rows are then stored as the same bytes,
                whatever other rows they come with, so that repeated keys are recognised.
        """
        shape = rows.shape if rows.dim() == 2 else torch.Size((math.prod(rows.shape[:-1]), rows.shape[-1]))
        stored = pool.take(shape, self.dtype, use)
        return stored, self.fill(stored, rows, pool, like)


def _copy(stored: _Stored, rows: _Rows, pool: BufferPool, like: float | None) -> _Scales:
    _shaped_like(rows, stored).copy_(rows)


def _fill_float16(stored: _Stored, rows: _Rows, pool: BufferPool, like: float | None) -> _Scales:
    if rows.dtype != torch.float32 or not rows.is_cpu:
        rows = rows.to("cpu", torch.float32)
    if like is not None and rows.numel():
        _divide(stored, rows, like, pool)
        # Looking at the stored numbers costs half of looking at the rows.
        if _SMALLEST <= _largest(stored) < math.inf:
            return _same_scale(len(stored), like)
    largest = _largest(rows) if rows.numel() else 0.0
    scale = like if like is not None and largest == 0.0 else 1.0
    if 0 < largest < math.inf and not _SMALLEST <= largest <= 2.0**15:
        # To 2⁶ … 2⁷, so that the scale fits for long; 2⁻¹²⁶ is the smallest scale with a finite inverse.
        scale = math.ldexp(1.0, max(math.frexp(largest)[1] - 7, -126))
    _divide(stored, rows, scale, pool)
    return _same_scale(len(stored), scale)


def _fill_int8(stored: _Stored, rows: _Rows, pool: BufferPool, like: float | None) -> _Scales:
    rows = rows.reshape(stored.shape)
    largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)).float().cpu().numpy()
    # numpy: for one number per row, most of the time of a torch operation is its call.
    scale = largest / np.float32(127)
    scale[~((scale > 0) & np.isfinite(scale))] = 1.0
    scales = torch.from_numpy(scale)
    stored.copy_((rows / scales.to(rows.device)[:, None]).round_())
    return scales


def _divide(stored: _Stored, rows: _Rows, scale: float, pool: BufferPool) -> None:
    if scale == 1.0:
        _shaped_like(rows, stored).copy_(rows)
        return
    scaled = pool.take(stored.shape, rows.dtype)
    torch.mul(rows, 1 / scale, out=_shaped_like(rows, scaled))
    stored.copy_(scaled)
    pool.give(scaled)


def _shaped_like(rows: Shaped[Tensor, "*lead features"], stored: _Stored) -> Shaped[Tensor, "..."]:
    """The memory of the stored rows, in the shape in which the rows come."""
    return stored if rows.dim() == 2 else stored.view(rows.shape)


def _largest(rows: _Rows) -> float:
    low, high = torch.aminmax(rows)
    return max(-float(low), float(high))


@lru_cache(maxsize=256)
def _same_scale(rows: int, scale: float) -> Float[Tensor, "rows"]:
    """One tensor serves all calls: nobody changes it."""
    return torch.full((rows,), scale, dtype=torch.float32)


STORAGES = {
    "float64": Storage("float64", torch.float64, 2.0**-53, _copy, compute_dtype=torch.float64),
    "float32": Storage("float32", torch.float32, 2.0**-24, _copy),
    "float16": Storage("float16", torch.float16, 2.0**-11, _fill_float16, lossy=True),
    "int8": Storage("int8", torch.int8, 0.5 / 127, _fill_int8, lossy=True, foldable=False),
}


def storage_named(name: str) -> Storage:
    """The storage type of that name, or an error that lists them."""
    if name not in STORAGES:
        raise SettingError(f"Unknown storage dtype {name!r}. There are: {', '.join(STORAGES)}.")
    return STORAGES[name]
