"""The scan: blocks of slots, spread over threads, each with reducers of its own that are merged at the end.

Memory use depends on the size of a block, not on the number of slots. Each thread multiplies with one
thread: that is what keeps up with the memory of the machine.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.attention.reducers import Reducer
from spotlights.memory.blocks import Block, StepBlocks, in_blocks
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.selection import Selection

BLOCK_VALUES = 1 << 22
"""Values (queries x slots) computed at once by one thread."""
MIN_ROWS, MAX_ROWS = 4096, 32768
_SMALL = 8192

Values = Callable[[Block], Float[Tensor, "queries rows"]]


class SweptValues(ABC):
    """Values that can only be computed step by step, from the last one down."""

    @abstractmethod
    def blocks(self, selection: Selection) -> Iterator[tuple[Block, Float[Tensor, "queries rows"]]]:
        """The selected slots with their values, in descending order of steps; blocks may be empty."""


@dataclass(frozen=True)
class WholeSteps(SweptValues):
    """Any values, in blocks that hold all selected slots of their steps: the step is what was drawn then."""

    layer: LayerReader
    values: Values
    steps: int
    """How many steps to look back on."""

    def blocks(self, selection: Selection) -> Iterator[tuple[Block, Float[Tensor, "queries rows"]]]:
        by_step = StepBlocks(self.layer, selection)
        stretch = max(1, MIN_ROWS * self.steps // max(self.layer.slots, 1))
        for first in reversed(range(0, self.steps, stretch)):
            block = by_step.block(first, min(first + stretch, self.steps))
            if len(block):
                yield block, self.values(block)


@dataclass(frozen=True)
class Job:
    """One layer's slots, what to compute for each, and who wants to know."""

    layer: LayerReader
    selection: Selection
    queries: int
    values: Values | SweptValues
    reducers: Sequence[Reducer]


def scan(jobs: Sequence[Job], *, threads: int | None = None, rows: int | None = None) -> None:
    """Feeds every selected slot to the reducers of its job."""
    for job in jobs:
        if isinstance(job.values, SweptValues):
            _sweep(job, job.values)
    jobs = [job for job in jobs if not isinstance(job.values, SweptValues)]
    count = torch.get_num_threads() if threads is None else threads
    if sum(job.layer.slots for job in jobs) <= _SMALL:
        count = 1
    source = _Blocks(jobs, rows)
    if count == 1:
        for job, block in source:
            _feed(job.reducers, block, job.values)
        return
    kept = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(_work, jobs, source) for _ in range(count)]
            for future in futures:
                for job, mine in zip(jobs, future.result(), strict=True):
                    for reducer, other in zip(job.reducers, mine, strict=True):
                        reducer.merge(other)
    finally:
        torch.set_num_threads(kept)  # the threads below changed what their BLAS shares with this one


class _Blocks:
    """All blocks of all jobs, in order, handed to whichever thread asks next."""

    def __init__(self, jobs: Sequence[Job], rows: int | None) -> None:
        self._lock = threading.Lock()
        self._blocks = (
            (job, block)
            for job in jobs
            for block in in_blocks(job.layer, job.selection, rows or _block_rows(job.queries))
        )

    def __iter__(self) -> Iterator[tuple[Job, Block]]:
        while True:
            with self._lock:
                item = next(self._blocks, None)
            if item is None:
                return
            yield item


def _block_rows(queries: int) -> int:
    return max(MIN_ROWS, min(MAX_ROWS, BLOCK_VALUES // max(queries, 1)))


def _work(jobs: Sequence[Job], source: _Blocks) -> list[list[Reducer]]:
    torch.set_num_threads(1)
    mine = {id(job): [reducer.fresh() for reducer in job.reducers] for job in jobs}
    with torch.inference_mode():
        for job, block in source:
            _feed(mine[id(job)], block, job.values)
    return [mine[id(job)] for job in jobs]


def _feed(reducers: Sequence[Reducer], block: Block, values: Values | SweptValues) -> None:
    assert not isinstance(values, SweptValues)
    computed = values(block)
    for reducer in reducers:
        reducer.update(block, computed)


def _sweep(job: Job, values: SweptValues) -> None:
    """Reducers take slots in ascending order only: each block gets its own, which are merged."""
    with torch.no_grad():
        for block, computed in values.blocks(job.selection):
            for reducer in job.reducers if len(block) else ():
                other = reducer.fresh()
                other.update(block, computed)
                reducer.merge(other)
