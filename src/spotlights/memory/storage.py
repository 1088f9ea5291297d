"""How numbers are kept: float64 and float32 as they are, float16 and int8 with one scale per row.

Errors are often smaller than float16 can hold (a mean loss over a batch divides them by its size), so
float16 rows are scaled too, by a power of two, which costs no precision. All rows of a call share it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spotlights.errors import SettingError

_PAGE = 4096
DIRECT_BYTES = 64 << 10
"""What is smaller is copied together before it is written, and may lie anywhere."""
_JOINED, _JOINED_BYTES = 64, 16 << 20
"""So many blocks, and so much, lie one behind the other at most."""
_SMALLEST = 0.25
"""Rows whose largest stored number is below this would lose digits of the small ones: float16 ends at 2⁻²⁴."""


class BufferPool:
    """Room for rows, used again and again: asking the system for fresh memory costs more than a copy.

    What is large starts at a page, so that it can be written to disk from where it is. Blocks that are taken for one
    use lie one behind the other, as far as they can, so that the rows of many steps are one piece (`joined`): what is
    given back first is taken first. The training thread takes, the writer's thread gives back; a deque's ends are safe
    for both.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._free: dict[tuple[object, ...], deque[Tensor]] = {}
        self._use: dict[int, tuple[object, ...]] = {}
        """What each block was made for, by its address."""
        self._made: dict[tuple[object, ...], int] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, use: object = None) -> Shaped[Tensor, "..."]:
        """
        Args:
            shape: of the room.
            dtype: of the numbers in it.
            use: what it is for; whoever takes for the same use again gets room behind the last one.
        """
        free = self._free.get((shape, dtype, use))
        if not free:
            return self._make(shape, dtype, use)
        tensor = free.popleft()
        nbytes = tensor.nbytes
        self._bytes -= nbytes
        return tensor

    def _make(self, shape: torch.Size, dtype: torch.dtype, use: object) -> Shaped[Tensor, "..."]:
        key, nbytes = (shape, dtype, use), shape.numel() * dtype.itemsize
        # As many again as there are: a shape that comes but once gets a single one.
        made = self._made.get(key, 0)
        together = nbytes > 0 and (nbytes % _PAGE == 0 or nbytes < DIRECT_BYTES)
        count = max(1, min(made, _JOINED, _JOINED_BYTES // nbytes)) if together else 1
        self._made[key] = made + count
        room = torch.empty(count * nbytes + _PAGE, dtype=torch.uint8)
        start = -room.data_ptr() % _PAGE
        blocks = [room[start + i * nbytes : start + (i + 1) * nbytes].view(dtype).view(shape) for i in range(count)]
        first, *others = blocks
        self._use |= {block.data_ptr(): key for block in blocks}
        for block in others:
            self.give(block)
        return first

    def give(self, tensor: Shaped[Tensor, "..."]) -> None:
        use, nbytes = self._use[tensor.data_ptr()], tensor.nbytes
        if self._bytes + nbytes <= self._max_bytes:
            self._bytes += nbytes
            self._free.setdefault(use, deque()).append(tensor)
        else:
            del self._use[tensor.data_ptr()]


def follows(before: Shaped[Tensor, "..."], after: Shaped[Tensor, "..."]) -> bool:
    """Whether a block of rows lies right behind another one of its shape, in the same piece of room."""
    return (
        after.data_ptr() == before.data_ptr() + before.nbytes
        and before.shape == after.shape
        # Two pieces may lie side by side by chance.
        and after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    )


def joined(blocks: Iterable[Shaped[Tensor, "_ *row"]]) -> list[Shaped[Tensor, "_ *row"]]:
    """The same rows in fewer blocks: those that lie one behind the other are one."""
    runs: list[list[Tensor]] = []
    for block in blocks:
        if runs and follows(runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return [_as_one(run) for run in runs]


def _as_one(run: list[Tensor]) -> Tensor:
    first = run[0]
    return first if len(run) == 1 else first.as_strided((len(run) * len(first), *first.shape[1:]), first.stride())


class Storage(ABC):
    """One way of keeping rows of numbers."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]
    scaled: ClassVar[bool]
    compute_dtype: ClassVar[torch.dtype] = torch.float32
    """What stored rows are turned into before anything is computed with them."""
    rounding: ClassVar[float]
    """The relative error of one stored number."""

    @abstractmethod
    def encode(
        self, rows: Float[Tensor, "*lead features"], pool: BufferPool, use: object = None, *, like: float | None = None
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        """The stored numbers, in memory taken from the pool for that use, and the scale of each row.

        Rows come in whatever shape and order of memory; they are copied once.

        `like` is a scale used before. Rows that come again are then stored the same as before, whatever other rows they
        come with, so that they are recognised by their bytes; and a scale that still fits need not be looked for.
        """


class _Plain(Storage):
    scaled = False

    def encode(
        self, rows: Float[Tensor, "*lead features"], pool: BufferPool, use: object = None, *, like: float | None = None
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        stored = pool.take(_flat_shape(rows), self.dtype, use)
        _like(stored, rows).copy_(rows)
        return stored, None


class Float64(_Plain):
    name, dtype, compute_dtype, rounding = "float64", torch.float64, torch.float64, 2.0**-53


class Float32(_Plain):
    name, dtype, rounding = "float32", torch.float32, 2.0**-24


class Float16(Storage):
    name, dtype, scaled, rounding = "float16", torch.float16, True, 2.0**-11

    def encode(
        self, rows: Float[Tensor, "*lead features"], pool: BufferPool, use: object = None, *, like: float | None = None
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        if rows.dtype != torch.float32 or not rows.is_cpu:
            rows = rows.to("cpu", torch.float32)
        stored = pool.take(_flat_shape(rows), self.dtype, use)
        if like is not None and rows.numel():
            # Looking at what came out costs half of looking at what goes in, and nothing before it.
            largest = _largest(self._fill(stored, rows, like, pool))
            if _SMALLEST <= largest < math.inf:
                return stored, _same_scale(len(stored), like)
        largest = _largest(rows) if rows.numel() else 0.0
        scale = like if like is not None and largest == 0.0 else 1.0
        if 0 < largest < math.inf and not _SMALLEST <= largest <= 2.0**15:
            # To 2⁶ … 2⁷, so that it fits for long; 2⁻¹²⁶: the smallest scale whose inverse is no infinity.
            scale = math.ldexp(1.0, max(math.frexp(largest)[1] - 7, -126))
        return self._fill(stored, rows, scale, pool), _same_scale(len(stored), scale)

    def _fill(
        self,
        stored: Shaped[Tensor, "rows features"],
        rows: Float[Tensor, "*lead features"],
        scale: float,
        pool: BufferPool,
    ) -> Shaped[Tensor, "rows features"]:
        if scale == 1.0:
            _like(stored, rows).copy_(rows)
            return stored
        scaled = pool.take(stored.shape, rows.dtype)
        torch.mul(rows, 1 / scale, out=_like(scaled, rows))
        stored.copy_(scaled)
        pool.give(scaled)
        return stored


def _flat_shape(rows: Shaped[Tensor, "*lead features"]) -> torch.Size:
    return rows.shape if rows.dim() == 2 else torch.Size((math.prod(rows.shape[:-1]), rows.shape[-1]))


def _like(stored: Shaped[Tensor, "rows features"], rows: Shaped[Tensor, "*lead features"]) -> Shaped[Tensor, "..."]:
    """The same memory, in the shape in which the rows come."""
    return stored if rows.dim() == 2 else stored.view(rows.shape)


def _largest(rows: Float[Tensor, "*lead features"]) -> float:
    low, high = torch.aminmax(rows)
    return max(-float(low), float(high))


@lru_cache(maxsize=256)
def _same_scale(rows: int, scale: float) -> Float[Tensor, "rows"]:
    """Nobody changes it: one tensor serves all calls."""
    return torch.full((rows,), scale, dtype=torch.float32)


class Int8(Storage):
    name, dtype, scaled, rounding = "int8", torch.int8, True, 0.5 / 127

    def encode(
        self, rows: Float[Tensor, "*lead features"], pool: BufferPool, use: object = None, *, like: float | None = None
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        rows = rows.reshape(_flat_shape(rows))
        largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)).float().cpu().numpy()
        # numpy: for one number per row, most of the time of a torch operation is its call.
        scale = largest / np.float32(127)
        scale[~((scale > 0) & np.isfinite(scale))] = 1.0
        kept = torch.from_numpy(scale)
        divided = (rows / kept.to(rows.device)[:, None]).round_()
        return pool.take(rows.shape, self.dtype, use).copy_(divided), kept


STORAGES: dict[str, Storage] = {s.name: s for s in (Float64(), Float32(), Float16(), Int8())}


def storage_named(name: str) -> Storage:
    """The storage type of that name, or an error that lists them."""
    if name not in STORAGES:
        raise SettingError(f"Unknown storage dtype {name!r}. There are: {', '.join(STORAGES)}.")
    return STORAGES[name]
