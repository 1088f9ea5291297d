"""Room for rows on their way to the disk: blocks of main memory that are used again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

PAGE = 4096
DIRECT_BYTES = 64 << 10
"""Smaller blocks are copied together before they are written, and may begin anywhere."""
_JOINED, _JOINED_BYTES = 64, 16 << 20
"""So many blocks, and so many bytes, are allocated in one piece at most."""

_T = TypeVar("_T")


class BufferPool:
    """Blocks for rows, used again and again: fresh memory from the system costs more than a copy.

    Large blocks start at a page, so that they can be written to disk from where they are. Blocks for one use lie one
    behind the other as far as possible, so that the rows of many steps are one piece (`joined`); the block that was
    given back first is taken first. The training thread takes, the writer's thread gives back; a deque's ends are safe
    for both.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._free: dict[tuple[object, ...], deque[Tensor]] = {}
        self._use: dict[int, tuple[object, ...]] = {}
        """What each block was allocated for, by its address."""
        self._allocated: dict[tuple[object, ...], int] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, use: object = None) -> Shaped[Tensor, "..."]:
        """A block, whose content is left over from earlier use; the next one for the same `use` lies behind this one,
        if possible."""
        free = self._free.get((shape, dtype, use))
        if not free:
            return self._allocate(shape, dtype, use)
        tensor = free.popleft()
        self._bytes -= tensor.nbytes
        return tensor

    def _allocate(self, shape: torch.Size, dtype: torch.dtype, use: object) -> Shaped[Tensor, "..."]:
        key, nbytes = (shape, dtype, use), shape.numel() * dtype.itemsize
        # Twice as many as before: a shape that comes only once gets a single block.
        before = self._allocated.get(key, 0)
        together = nbytes > 0 and (nbytes % PAGE == 0 or nbytes < DIRECT_BYTES)
        count = max(1, min(before, _JOINED, _JOINED_BYTES // nbytes)) if together else 1
        self._allocated[key] = before + count
        room = torch.empty(count * nbytes + PAGE, dtype=torch.uint8)
        start = -room.data_ptr() % PAGE
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
    """Whether a block of rows lies right behind another one of its shape, in the same allocation."""
    return (
        after.data_ptr() == before.data_ptr() + before.nbytes
        and before.shape == after.shape
        # Two allocations may lie side by side by chance.
        and after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    )


def joined(blocks: Iterable[Shaped[Tensor, "_ *row"]]) -> list[Shaped[Tensor, "_ *row"]]:
    """The same rows in fewer blocks: those that lie one behind the other are one."""
    joinable = runs(blocks, lambda run, block: follows(run[-1], block))
    return [run[0].as_strided((len(run) * len(run[0]), *run[0].shape[1:]), run[0].stride()) for run in joinable]


def runs(items: Iterable[_T], goes_on: Callable[[list[_T], _T], bool]) -> Iterator[list[_T]]:
    """The items in runs: an item that goes on with a run is part of it."""
    run: list[_T] = []
    for item in items:
        if run and not goes_on(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
