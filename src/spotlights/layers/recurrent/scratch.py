"""Memory that is reused from step to step.

The backward pass through a recurrent layer needs several times the memory of its outputs. The system's allocator would
return blocks of that size to the system and request them again at every step, and the system would clear every page.
"""

from __future__ import annotations

import math
import threading

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spotlights.torch_internals import storage_references

_SMALL = 16 << 10
"""Smaller tensors, in numbers, come from the allocator's own lists."""
_MAX_EXCESS = 2
"""A block may be this many times as large as what is asked for."""


class Scratch:
    """Hands out blocks of memory. A block is handed out again once all tensors in it are gone."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._blocks: list[tuple[Shaped[Tensor, "numbers"], int | None]] = []
        """With the number of references to the memory when nobody uses it: no view, no saved tensor of a graph."""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How much memory is kept."""
        return sum(memory.nbytes for memory, _ in self._blocks)

    def empty(self, *shape: int, like: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """A tensor of that shape, of the type and on the device of `like`, with arbitrary numbers in it."""
        numbers = math.prod(shape)
        if numbers < _SMALL or not like.is_cpu:
            return like.new_empty(shape)
        with self._lock:
            fitting = [
                memory
                for memory, when_free in self._blocks
                if memory.dtype == like.dtype
                and numbers <= len(memory) <= _MAX_EXCESS * numbers
                and when_free is not None
                and storage_references(memory) == when_free
            ]
            memory = min(fitting, key=len) if fitting else self._add(numbers, like.dtype)
            return memory[:numbers].view(shape)

    def _add(self, numbers: int, dtype: torch.dtype) -> Shaped[Tensor, "numbers"]:
        memory = torch.empty(numbers, dtype=dtype)
        when_free = storage_references(memory)
        if when_free is None or self.nbytes + memory.nbytes > self._max_bytes:
            self._blocks.clear()  # lengths that occur once; tensors that are still used keep their memory
        self._blocks.append((memory, when_free))
        return memory

    def remove(self) -> None:
        """Frees all memory at the end of a recording, like the handle of a hook."""
        self._blocks.clear()


scratch = Scratch()
"""Shared by all recurrent layers."""
