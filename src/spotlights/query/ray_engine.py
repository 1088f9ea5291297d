"""A Ray cluster as an engine: tasks scan shares of a memory's segments, and their reducers are merged.

A module of its own, as only who asks for it has Ray. A worker opens the store itself and sees the memory as the asking
process does; it keeps what it has opened for its next task. A worker that dies is replaced by Ray. Workers need the
same environment: this library, the credentials of a bucket, or the directory of the memory.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spotlights.errors import SettingError
from spotlights.interrupts import check, progress
from spotlights.memory.format.manifest import Manifest
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store import Store
from spotlights.query.engine import SMALL, Engine, Threads
from spotlights.query.plan import BlockValues, Measure, Plan, Sweep
from spotlights.query.reducers import Reducer

_TASKS_PER_CPU = 4
"""Smaller tasks end at about the same time."""
_SECONDS = 0.5
"""Between two looks at how far the tasks are."""
_FAN_IN = 8
"""So many results are merged by one task, or by the asking process."""


@dataclass(frozen=True)
class Ray(Engine):
    """Runs plans on a Ray cluster."""

    address: str | None = None
    """As `ray.init` takes it; None for the cluster that the environment names, or a new one on this machine."""
    keep: bool = False
    """Whether actors hold the cluster's CPUs until this process ends, each for the same shares in every question, so
    that what they have read stays with them."""

    def run(self, plans: Sequence[Plan], reader: MemoryReader) -> list[tuple[Reducer, ...]]:
        reader.need_files()
        if sum(reader.layers[plan.layer].slots for plan in plans) <= SMALL:
            return Threads().run(plans, reader)
        ray = _connected(self.address)
        segments = max(len(reader.layers[plan.layer].segments) for plan in plans)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        shares = max(1, min(max(segments, len(reader.layers), len(plans)), _TASKS_PER_CPU * cpus))
        asked, known = ray.put((uuid.uuid4().hex, tuple(plans))), ray.put((reader.store, tuple(reader.ranks)))
        if self.keep:
            actors = _actors(ray, self.address, cpus)
            merge = actors[0].merge.remote
            leaves = [actors[n % len(actors)].run.remote(asked, known, n, shares) for n in range(shares)]
        else:
            run, merge = (ray.remote(max_retries=3)(function) for function in (_run_share, _merged))
            leaves, merge = [run.remote(asked, known, n, shares) for n in range(shares)], merge.remote
        level = leaves
        while len(level) > _FAN_IN:  # in order, so that sums round in the same way every time
            level = [merge(*level[first : first + _FAN_IN]) for first in range(0, len(level), _FAN_IN)]
        waiting = leaves
        try:
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_SECONDS)
                check()
                progress(segments * (shares - len(waiting)) // shares, segments)
            return _merged(*ray.get(level))
        finally:  # Ctrl-C, a question that nobody waits for, or a task that failed
            for left in waiting:
                ray.cancel(left)


def _connected(address: str | None) -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise SettingError("This engine needs Ray: pip install 'spotlights[ray]'.") from None
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    return ray


def _actors(ray: Any, address: str | None, count: int) -> list[Any]:
    """Those of this process; made anew after `ray.shutdown()`."""
    key = address, ray.get_runtime_context().get_job_id()
    if key not in _kept:
        cls = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=3, scheduling_strategy="SPREAD")(_Actor)
        _kept[key] = [cls.remote() for _ in range(count)]
    return _kept[key]


_kept: dict[tuple[str | None, str], list[Any]] = {}


class _Actor:
    """The tasks, in a process that stays."""

    def run(self, *args: Any) -> list[tuple[Reducer, ...]]:
        return _run_share(*args)

    def merge(self, *results: list[tuple[Reducer, ...]]) -> list[tuple[Reducer, ...]]:
        return _merged(*results)


def _merged(*results: list[tuple[Reducer, ...]]) -> list[tuple[Reducer, ...]]:
    """The reducers of several shares as one; those of the first stay as they are, as Ray may lend them."""
    merged = [tuple(reducer.fresh() for reducer in reducers) for reducers in results[0]]
    for result in results:
        for reducers, others in zip(merged, result, strict=True):
            for reducer, other in zip(reducers, others, strict=True):
                reducer.merge(other)
    return merged


def _run_share(
    asked: tuple[str, tuple[Plan, ...]], known: tuple[Store, tuple[Manifest, ...]], number: int, shares: int
) -> list[tuple[Reducer, ...]]:
    """In a worker: the plans for one share, in one thread, as Ray gives a task one CPU."""
    store, ranks = known
    opened = _opened.get(str(store))
    if opened is None or opened.ranks != list(ranks):
        opened = _opened[str(store)] = MemoryReader(store, ranks)
    question, plans = asked
    if question not in _bound:
        _bound.clear()
        _bound[question] = [
            plan if plan.measure is None else replace(plan, measure=_Once(plan.measure)) for plan in plans
        ]
    return Threads(threads=1, share=(number, shares)).run(_bound[question], opened)


class _Once(Measure):
    """Another measure, bound once for all shares of a question: what it prepares may take as long as a share."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._values: BlockValues | Sweep | None = None

    @property
    def width(self) -> int:
        return self._measure.width

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues | Sweep:
        if self._values is None:
            self._values = self._measure.bind(reader, layer)
        return self._values


_opened: dict[str, MemoryReader] = {}
"""By address: what this worker has opened."""
_bound: dict[str, list[Plan]] = {}
"""The plans of the last question, with measures bound to the memory."""
