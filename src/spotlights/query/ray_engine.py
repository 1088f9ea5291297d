"""A Ray cluster as an engine: tasks scan shares of a memory's segments, and their reducers are merged.

A module of its own, as only who asks for it has Ray. A worker opens the store itself and sees the memory as the asking
process does; it keeps what it has opened for its next task. A worker that dies is replaced by Ray. Workers need the
same environment: this library, the credentials of a bucket, or the directory of the memory.
"""

from __future__ import annotations

import copy
import importlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.interrupts import check, progress
from spotlights.memory.reader import MemoryReader
from spotlights.query.engine import SMALL, Engine, Threads
from spotlights.query.plan import BlockValues, Measure, Plan, Sweep
from spotlights.query.reducers import Reducer

T = TypeVar("T")
_TASKS_PER_CPU, _MOST_TASKS_PER_CPU, _SEGMENTS_PER_TASK = 4, 16, 16
"""Smaller tasks end at about the same time, and a slow worker takes fewer of them: in a large memory, up to so many
tasks of at least so many segments. benchmarks/scan_simulation.py says how much that saves."""
_LARGE_ANSWER = 8 << 20
"""Bytes: such an answer takes a task about as long to hand over as a tenth of a second of scanning."""
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
        if reader.local or sum(reader.layers[plan.layer].slots for plan in plans) <= SMALL:
            return Threads().run(plans, reader)
        ray = _connected(self.address)
        segments = max(len(reader.layers[plan.layer].segments) for plan in plans)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        few = _TASKS_PER_CPU // 2 if _size_of_answer(plans) > _LARGE_ANSWER else _TASKS_PER_CPU
        tasks = max(few * cpus, min(_MOST_TASKS_PER_CPU * cpus, segments // _SEGMENTS_PER_TASK))
        shares = max(1, min(max(segments, len(reader.layers), len(plans)), tasks))
        bare = [replace(plan, reducers=tuple(map(_question, plan.reducers))) for plan in plans]
        asked, known = ray.put((uuid.uuid4().hex, bare)), _known(ray, reader)
        if self.keep:
            actors = _actors(ray, self.address, cpus)
            merge = actors[0].merge.remote
            leaves = [actors[n % len(actors)].run.remote(asked, known, n, shares) for n in range(shares)]
        else:
            # Unless told to spread tasks, Ray keeps those that are longer than half a second on the asking node.
            run = ray.remote(max_retries=3, scheduling_strategy="SPREAD")(_run_share)
            merge = ray.remote(max_retries=3)(_merged).remote
            leaves = [run.remote(asked, known, n, shares) for n in range(shares)]
        level = leaves
        while len(level) > _FAN_IN:  # in order, so that sums round in the same way every time
            level = [merge(asked, *level[first : first + _FAN_IN]) for first in range(0, len(level), _FAN_IN)]
        waiting = leaves
        try:
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_SECONDS)
                check()
                progress(segments * (shares - len(waiting)) // shares, segments)
            return _all_of(bare, ray.get(level))
        finally:  # Ctrl-C, a question that nobody waits for, or a task that failed
            for left in waiting:
                ray.cancel(left)

    def each(self, task: Callable[[T], object], items: Iterable[T]) -> Iterator[object]:
        """Side by side, in processes of the cluster."""
        ray = _connected(self.address)
        run, sent = ray.remote(_call), ray.put(task)
        waiting = [run.remote(sent, item) for item in items]
        try:
            while waiting:
                ended, waiting = ray.wait(waiting, timeout=_SECONDS)
                check()
                yield from ray.get(ended)
        finally:
            for left in waiting:
                ray.cancel(left)


def _call(task: Callable[[T], object], item: T) -> object:
    return task(item)


def _connected(address: str | None) -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise SettingError("This engine needs Ray: pip install 'spotlights[ray]'.") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        except (OSError, RuntimeError, ValueError) as error:
            place = address or "the address that the environment names"
            raise SettingError(f"No Ray cluster answers at {place}: {error}") from None
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

    def run(self, *args: Any) -> list[Answers]:
        return _run_share(*args)

    def merge(self, *args: Any) -> list[Answers]:
        return _merged(*args)


Known = tuple[str, str, list[Any]]
"""A memory's address, a name for what the asking process has opened, and where that is found: in a list, so that only
workers which have not opened the memory yet fetch its manifests. Those of a large memory take seconds to read."""


def _known(ray: Any, reader: MemoryReader) -> Known:
    key = ray.get_runtime_context().get_job_id()
    if _sent.get(reader, ("", None))[0] != key:
        _sent[reader] = key, (str(reader.store), uuid.uuid4().hex, [ray.put((reader.store, reader.ranks))])
    return _sent[reader][1]


_sent: WeakKeyDictionary[MemoryReader, tuple[str, Any]] = WeakKeyDictionary()


# -- what travels: of a reducer, the question once, and of every share the answer alone -----------------------


def _size_of_answer(plans: Sequence[Plan]) -> int:
    held = (value for plan in plans for reducer in plan.reducers for value in vars(reducer).values())
    return sum(value.nbytes for value in held if isinstance(value, Tensor))


class _Array(NamedTuple):
    """A tensor as Ray moves it without copies."""

    numbers: np.ndarray


Answers = list[dict[str, Any]]
"""What the reducers of a plan have found."""


def _question(reducer: Reducer) -> Reducer:
    """A reducer's fields without what `start` made."""
    bare = copy.copy(reducer)
    for name in vars(bare).keys() - {field.name for field in fields(bare)}:  # type: ignore[arg-type]
        delattr(bare, name)
    return bare


def _answer(reducer: Reducer) -> dict[str, Any]:
    """The rest of a reducer."""
    answer = {name: value for name, value in vars(reducer).items() if name not in vars(_question(reducer))}
    plain = {n: v for n, v in answer.items() if isinstance(v, Tensor) and v.dtype != torch.bfloat16}
    return answer | {name: _Array(value.numpy()) for name, value in plain.items()}


def _filled(reducer: Reducer, answer: dict[str, Any]) -> Reducer:
    """A reducer again; it may be changed, while what Ray has brought may not."""
    filled = copy.copy(reducer)
    for name, value in answer.items():
        setattr(filled, name, torch.from_numpy(value.numbers.copy()) if isinstance(value, _Array) else value)
    return filled


def _all_of(plans: Sequence[Plan], shares: Sequence[list[Answers]]) -> list[tuple[Reducer, ...]]:
    """The reducers of several shares as one."""
    merged = [tuple(reducer.fresh() for reducer in plan.reducers) for plan in plans]
    for share in shares:
        for reducers, answers in zip(merged, share, strict=True):
            for reducer, answer in zip(reducers, answers, strict=True):
                reducer.merge(_filled(reducer, answer))
    return merged


def _answers(filled: Sequence[tuple[Reducer, ...]]) -> list[Answers]:
    return [list(map(_answer, reducers)) for reducers in filled]


def _merged(asked: tuple[str, list[Plan]], *shares: list[Answers]) -> list[Answers]:
    """In a worker: the answers of several shares as one."""
    return _answers(_all_of(asked[1], shares))


def _run_share(asked: tuple[str, list[Plan]], known: Known, number: int, shares: int) -> list[Answers]:
    """In a worker: the plans for one share, in one thread, as Ray gives a task one CPU."""
    question, plans = asked
    opened = _reader(known)
    if question not in _bound:
        _bound.clear()
        bound = (None if plan.measure is None else _Once(plan.measure) for plan in plans)
        _bound[question] = [replace(plan, measure=measure) for plan, measure in zip(plans, bound, strict=True)]
    return _answers(Threads(threads=1, share=(number, shares)).run(_bound[question], opened))


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


def _reader(known: Known) -> MemoryReader:
    """In a worker: the memory, as the asking process sees it."""
    address, name, (sent,) = known
    if address not in _opened or _opened[address][0] != name:
        (parts,) = importlib.import_module("ray").get([sent])
        _opened[address] = name, MemoryReader(*parts)
    return _opened[address][1]


_opened: dict[str, tuple[str, MemoryReader]] = {}
"""By address: what this worker has opened, and what the asking process calls it."""
_bound: dict[str, list[Plan]] = {}
"""The plans of the last question, with measures bound to the memory."""
