"""Memory that is used again, for what is large and gone by the end of a training step.

The way back through a recurrent layer needs several times the memory of its outputs. By default the system's allocator
gives blocks of that size back and asks for them again at every step, and the system has to find and empty page after
page: measured, a third of the time of a training step.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

_SMALL = 16 << 10
"""Numbers. What has fewer comes from the allocator's own lists."""
_ROOMIER = 2
"""A block may have so many times as many numbers as are asked for."""


@dataclass(frozen=True)
class _Block:
    """Some memory, and how often it is referred to while nobody uses it."""

    room: Shaped[Tensor, "numbers"]
    alone: int

    @classmethod
    def of(cls, numbers: int, dtype: torch.dtype) -> _Block:
        room = torch.empty(numbers, dtype=dtype)
        return cls(room, _references(room))

    @property
    def is_free(self) -> bool:
        """Nobody has a view of it: no saved tensor of a graph, no row that waits to be stored."""
        return _references(self.room) == self.alone


class Scratch:
    """Hands out blocks; one whose tensors are all gone is handed out again."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def empty(self, *shape: int, like: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Room for that many numbers of the kind of `like`, with whatever is in it."""
        numbers = math.prod(shape)
        if numbers < _SMALL or not like.is_cpu:
            return like.new_empty(shape)
        with self._lock:
            fitting = [
                block
                for block in self._blocks
                if block.room.dtype == like.dtype and numbers <= len(block.room) <= _ROOMIER * numbers and block.is_free
            ]
            block = min(fitting, key=lambda block: len(block.room)) if fitting else self._make(numbers, like.dtype)
            return block.room[:numbers].view(shape)

    def _make(self, numbers: int, dtype: torch.dtype) -> _Block:
        block = _Block.of(numbers, dtype)
        held = sum(each.room.nbytes for each in self._blocks)
        if held + block.room.nbytes > self._max_bytes:  # lengths that come once: what is in use stays alive by itself
            self._blocks.clear()
        self._blocks.append(block)
        return block

    def remove(self) -> None:
        """Lets go of everything; like a hook's, at the end of a recording."""
        self._blocks.clear()


def _references(tensor: Shaped[Tensor, "..."]) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


scratch = Scratch()
"""Of all recurrent layers."""
