"""A Ray cluster as an engine: tasks scan shares of a memory's segments, and their reducers are merged.

A module of its own, as only who asks for it has Ray. A worker opens the store itself and sees the memory as the asking
process does; it keeps what it has opened for its next task. A worker that dies is replaced by Ray. Workers need the
same environment: this library, the credentials of a bucket, or the directory of the memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spotlights.errors import SettingError
from spotlights.memory.format.manifest import Manifest
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store import Store
from spotlights.query.engine import SMALL, Engine, Threads
from spotlights.query.plan import Plan
from spotlights.query.reducers import Reducer

_TASKS_PER_CPU = 4
"""Smaller tasks end at about the same time."""


@dataclass(frozen=True)
class Ray(Engine):
    """Runs plans on a Ray cluster."""

    address: str | None = None
    """As `ray.init` takes it; None for the cluster that the environment names, or a new one on this machine."""

    def run(self, plans: Sequence[Plan], reader: MemoryReader) -> list[tuple[Reducer, ...]]:
        reader.need_files()
        if sum(reader.layers[plan.layer].slots for plan in plans) <= SMALL:
            return Threads().run(plans, reader)
        ray = _connected(self.address)
        segments = max(len(reader.layers[plan.layer].segments) for plan in plans)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        shares = max(1, min(max(segments, len(reader.layers)), _TASKS_PER_CPU * cpus))
        task = ray.remote(max_retries=3)(_run_share)
        asked, known = ray.put(tuple(plans)), ray.put((reader.store, tuple(reader.ranks)))
        waiting = [task.remote(asked, known, number, shares) for number in range(shares)]
        merged = [tuple(reducer.fresh() for reducer in plan.reducers) for plan in plans]
        try:
            while waiting:
                (done,), waiting = ray.wait(waiting, num_returns=1)
                for reducers, others in zip(merged, ray.get(done), strict=True):
                    for reducer, other in zip(reducers, others, strict=True):
                        reducer.merge(other)
        finally:  # Ctrl-C, or a task that failed
            for task_left in waiting:
                ray.cancel(task_left)
        return merged


def _connected(address: str | None) -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise SettingError("This engine needs Ray: pip install 'spotlights[ray]'.") from None
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    return ray


def _run_share(
    plans: tuple[Plan, ...], known: tuple[Store, tuple[Manifest, ...]], number: int, shares: int
) -> list[tuple[Reducer, ...]]:
    """In a worker: the plans for one share, in one thread, as Ray gives a task one CPU."""
    store, ranks = known
    opened = _opened.get(str(store))
    if opened is None or opened.ranks != list(ranks):
        opened = _opened[str(store)] = MemoryReader(store, ranks)
    return Threads(threads=1, share=(number, shares)).run(plans, opened)


_opened: dict[str, MemoryReader] = {}
"""By address: what this worker has opened."""
