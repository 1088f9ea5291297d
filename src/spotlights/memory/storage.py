"""How numbers are kept: float64 and float32 as they are, float16 and int8 with one scale per row.

Errors are often smaller than float16 can hold (a mean loss over a batch divides them by its size), so
float16 rows are scaled too, by a power of two, which costs no precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spotlights.errors import SettingError


class BufferPool:
    """Room for rows, used again and again: asking the system for fresh memory costs more than a copy.

    The training thread takes, the writer's thread gives back; a deque's ends are safe for both.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._free: dict[tuple[int, torch.dtype], deque[Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        free = self._free.get((math.prod(shape), dtype))
        if not free:
            return torch.empty(*shape, dtype=dtype)
        tensor = free.pop()
        self._bytes -= tensor.nbytes
        return tensor.view(*shape)

    def give(self, tensor: Shaped[Tensor, "..."]) -> None:
        if self._bytes + tensor.nbytes <= self._max_bytes:
            self._bytes += tensor.nbytes
            self._free.setdefault((tensor.numel(), tensor.dtype), deque()).append(tensor)


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
        self, rows: Float[Tensor, "rows features"], pool: BufferPool
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        """The stored numbers, in memory taken from the pool, and the scale of each row."""


class _Plain(Storage):
    scaled = False

    def encode(
        self, rows: Float[Tensor, "rows features"], pool: BufferPool
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        return pool.take(rows.shape, self.dtype).copy_(rows), None


class Float64(_Plain):
    name, dtype, compute_dtype, rounding = "float64", torch.float64, torch.float64, 2.0**-53


class Float32(_Plain):
    name, dtype, rounding = "float32", torch.float32, 2.0**-24


class _Scaled(Storage):
    scaled = True

    @abstractmethod
    def _scale(self, largest: Float[Tensor, "rows"]) -> Float[Tensor, "rows"]:
        """What to divide a row by, given its largest magnitude."""

    def encode(
        self, rows: Float[Tensor, "rows features"], pool: BufferPool
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)).float()
        scale = self._scale(largest)
        scale.masked_fill_(~((largest > 0) & largest.isfinite()), 1.0)
        stored = pool.take(rows.shape, self.dtype)
        return self._divide(rows, scale[:, None], stored), scale.cpu()

    def _divide(self, rows: Tensor, scale: Tensor, stored: Tensor) -> Tensor:
        if rows.device.type == "cpu" and rows.dtype == torch.float32:
            return torch.div(rows, scale, out=stored)
        return stored.copy_(rows / scale)


class Float16(_Scaled):
    name, dtype, rounding = "float16", torch.float16, 2.0**-11

    def _scale(self, largest: Float[Tensor, "rows"]) -> Float[Tensor, "rows"]:
        return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


class Int8(_Scaled):
    name, dtype, rounding = "int8", torch.int8, 0.5 / 127

    def _scale(self, largest: Float[Tensor, "rows"]) -> Float[Tensor, "rows"]:
        return largest / 127

    def _divide(self, rows: Tensor, scale: Tensor, stored: Tensor) -> Tensor:
        return stored.copy_((rows / scale).round_())


STORAGES: dict[str, Storage] = {s.name: s for s in (Float64(), Float32(), Float16(), Int8())}


def storage_named(name: str) -> Storage:
    """The storage type of that name, or an error that lists them."""
    if name not in STORAGES:
        raise SettingError(f"Unknown storage dtype {name!r}. There are: {', '.join(STORAGES)}.")
    return STORAGES[name]
