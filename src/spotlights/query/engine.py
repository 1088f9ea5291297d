"""Engines run plans, and nobody else passes over slots. `View` is what questions run them on.

The threads engine spreads blocks of slots over threads, each with reducers of its own that are merged at the end.
Memory use depends on the size of a block, not on the number of slots. Each thread multiplies with one BLAS thread,
which keeps up with the machine's memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from spotlights.interrupts import CHECK
from spotlights.memory.blocks import Block, Everything, Selection, StepBlocks, as_of, in_blocks
from spotlights.memory.layer_reader import LayerReader, SegmentSlots
from spotlights.memory.reader import MemoryReader
from spotlights.query.coefficients import Unrolled, unroll
from spotlights.query.plan import BlockValues, LayerValue, Measure, Plan, Sweep
from spotlights.query.reducers import CountReducer, LastReducer, Reducer

BLOCK_VALUES = 1 << 22
"""Values (queries x slots) computed at once by one thread."""
MIN_ROWS, MAX_ROWS = 4096, 32768
SMALL = 8192
"""So few slots are not worth a second thread."""

R = TypeVar("R", bound=Reducer)
T = TypeVar("T")
Turn = Callable[[], AbstractContextManager[object]]
"""What background work holds during each stretch of a pass, so that others may ask in between."""
Progress = Callable[[float], object]
"""Is told the share that is done."""


class Engine(ABC):
    """Runs plans on an opened memory."""

    @abstractmethod
    def run(self, plans: Sequence[Plan], reader: MemoryReader) -> list[tuple[Reducer, ...]]:
        """The filled reducers of each plan. The plans themselves stay as they are."""

    def each(self, task: Callable[[T], object], items: Iterable[T]) -> Iterator[object]:
        """A task for each item, of which none needs another one's result; yields whenever one has come to its end.

        Tasks train networks: torch's random numbers and thread count are those of the process, and each operation is
        spread over the cores already. So one process runs them one after the other.
        """
        return map(task, items)

    @property
    def of_the_whole(self) -> Engine:
        """An engine for what a question must know of the whole memory, whoever answers the question itself."""
        return self


@dataclass(frozen=True, eq=False)
class _Job:
    """A plan bound to the opened memory."""

    layer: LayerReader
    segments: Sequence[SegmentSlots]
    selection: Selection
    values: BlockValues
    rows: int
    reducers: tuple[Reducer, ...]


@dataclass(frozen=True)
class Threads(Engine):
    """Runs plans on this machine."""

    threads: int | None = None
    """None for as many as torch uses; 1 leaves the other cores alone."""
    rows: int | None = None
    """Slots in a block; None for what suits the measure."""
    share: tuple[int, int] = (0, 1)
    """(n, of): only the n-th of so many shares of the memory: some segments; what needs all steps of a layer together,
    or in their order, is divided by layers, and by plans of one layer."""

    def run(self, plans: Sequence[Plan], reader: MemoryReader) -> list[tuple[Reducer, ...]]:
        threads = torch.get_num_threads()
        count = self.threads or threads
        try:
            if count == 1:
                torch.set_num_threads(1)
            with torch.no_grad():
                filled = [tuple(reducer.fresh() for reducer in plan.reducers) for plan in plans]
                number, shares = self.share
                names, asked, jobs = list(reader.layers), Counter[str](), []
                for plan, reducers in zip(plans, filled, strict=True):
                    mine = (names.index(plan.layer) + asked[plan.layer]) % shares == number
                    asked[plan.layer] += 1
                    values = _nothing if plan.measure is None else plan.measure.bind(reader, plan.layer)
                    if any(reducer.whole_steps for reducer in reducers) and not isinstance(values, Sweep):
                        values = _by_steps(reader, plan.layer, values)
                    if not isinstance(values, Sweep):
                        jobs.append(self._job(plan, reader, values, reducers))
                    elif mine:
                        for block, of_block in _checked(values.blocks(plan.selection)):
                            _feed(reducers, block, of_block)
                _run_blockwise(jobs, count)
        finally:
            torch.set_num_threads(threads)  # pool threads change the number that their BLAS shares with this thread
        return filled

    def _job(self, plan: Plan, reader: MemoryReader, values: BlockValues, reducers: tuple[Reducer, ...]) -> _Job:
        width = 1 if plan.measure is None else max(plan.measure.width, 1)
        rows = self.rows or max(MIN_ROWS, min(MAX_ROWS, BLOCK_VALUES // width))
        layer, (number, shares) = reader.layers[plan.layer], self.share
        count = len(layer.segments)
        segments = layer.segments[count * number // shares : count * (number + 1) // shares]
        return _Job(layer, segments, plan.selection, values, rows, reducers)


def _nothing(block: Block) -> None:
    """The values where nothing is measured."""


def _run_blockwise(jobs: Sequence[_Job], threads: int) -> None:
    blocks_of_jobs = ((job, in_blocks(job.layer, job.selection, job.rows, job.segments)) for job in jobs)
    blocks = _checked((job, block) for job, of_job in blocks_of_jobs for block in of_job)
    if threads == 1 or sum(job.layer.slots for job in jobs) <= SMALL:
        for job, block in blocks:
            _feed(job.reducers, block, job.values(block))
        return
    lock = threading.Lock()

    def work() -> dict[_Job, list[Reducer]]:
        torch.set_num_threads(1)
        own = {job: [reducer.fresh() for reducer in job.reducers] for job in jobs}
        with torch.inference_mode():
            while True:
                with lock:  # blocks go to whichever thread asks next
                    job, block = next(blocks, (None, None))
                if job is None or block is None:
                    return own
                _feed(own[job], block, job.values(block))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            for job, own in future.result().items():
                for reducer, other in zip(job.reducers, own, strict=True):
                    reducer.merge(other)


def _checked(blocks: Iterable[T]) -> Iterator[T]:
    """The blocks, with the check of the thread that asks before each, whichever thread takes them."""
    stop = CHECK.get()

    def one_by_one() -> Iterator[T]:
        for block in blocks:
            if stop is not None:
                stop()
            yield block

    return one_by_one()


def _feed(reducers: Sequence[Reducer], block: Block, values: Any) -> None:
    for reducer in reducers:
        reducer.update(block, values)


def _by_steps(reader: MemoryReader, layer: str, values: BlockValues) -> Sweep:
    """The values of blocks that hold all selected slots of their steps."""
    recorded, steps = reader.layers[layer], reader.steps
    stretch = max(1, MIN_ROWS * steps // max(recorded.slots, 1))

    def blocks(selection: Selection) -> Iterator[tuple[Block, Any]]:
        by_step = StepBlocks(recorded, selection)
        for first in reversed(range(0, steps, stretch)):
            block = by_step.block(first, min(first + stretch, steps))
            if len(block):
                yield block, values(block)

    return Sweep(blocks)


@dataclass(frozen=True)
class View:
    """Some slots of a memory, as of some step, and the engine that answers questions about them."""

    reader: MemoryReader
    selection: Selection
    until: int
    engine: Engine = Threads()

    def run(self, *plans: Plan) -> list[tuple[Reducer, ...]]:
        """The filled reducers of each plan."""
        return self.engine.run(plans, self.reader)

    def reduce(
        self, layer: str, reducer: R, measure: Measure | None = None, *, selection: Selection | None = None
    ) -> R:
        """One question about one layer's slots: those of the view, or of another selection."""
        plan = Plan(layer, self.selection if selection is None else selection, (reducer,), measure)
        ((filled,),) = self.run(plan)
        assert isinstance(filled, type(reducer))
        return filled

    def values(self, *asked: tuple[str, LayerValue]) -> list[Any]:
        """Values of whole layers, given by their names; an engine divides them."""
        filled = self.run(*(Plan(layer, Everything(), (LastReducer(),), value) for layer, value in asked))
        return [last.value for (last,) in filled if isinstance(last, LastReducer)]

    def unrolled(self, layer: str) -> Unrolled:
        """What multiplies δ⊗k of each of a layer's slots in its weights, as of the view's step."""
        return self.reader.layers[layer].last("unrolled", self.until, lambda: unroll(self.reader, layer, self.until))

    @property
    def all_slots(self) -> Selection:
        """Every slot of the memory as of the view's step, whatever the view selects."""
        return as_of(self.reader, Everything(), self.until)

    @property
    def is_whole(self) -> bool:
        """Whether the view has every slot as of its step."""
        return self.selection == self.all_slots

    def where(self, selection: Selection) -> View:
        """Those of the view's slots that are selected."""
        return replace(self, selection=self.selection & selection)

    def count(self, layer: str) -> int:
        """The number of the view's slots in a layer."""
        if isinstance(self.selection, Everything):
            self.reader.need_slots()
            return self.reader.layer(layer).slots
        return int(self.reduce(layer, CountReducer()).counts)

    @property
    def slots(self) -> int:
        """The number of slots, in the layer that has most of them."""
        return max((self.count(name) for name in self.reader.layers), default=0)
