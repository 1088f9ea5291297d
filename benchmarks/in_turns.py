"""Things measured in turns, so that whatever slows the machine down slows all of them: what the benchmarks share."""

import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from spotlights.memory.layer_reader import SegmentSlots
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store import store_at

Pairs = Sequence[tuple[float, float]]
"""Of each turn, the seconds that the one took and the other."""

Arm = Callable[[int], Generator[float, None, Any]]
"""One of the things that are measured: does so many turns, one whenever it is asked for the next, and yields their
seconds; returns what else it found."""


def in_processes(
    arms: Mapping[str, Arm], turns: int, processes: int = 1
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of every turn of every arm, and what each arm returned.

    Each arm has a process of its own, as it has in real life, and waits while another one has its turn. In one process
    they would share an allocator, which one arm leaves better prepared for the next one than that would by itself. The
    first turn of each, in which memory is found and code is loaded, does not count. With several `processes` each arm
    starts that many times, one after the other: some processes are luckier with their memory than others.
    """
    took: dict[str, list[float]] = {name: [] for name in arms}
    returned: dict[str, Any] = {}
    for _ in range(processes):
        seconds, returned = _once(arms, turns)
        for name in arms:
            took[name] += seconds[name]
    return took, returned


def _once(arms: Mapping[str, Arm], turns: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    started: dict[str, Any] = {}
    for name, arm in arms.items():
        connections[name], theirs = context.Pipe()
        started[name] = context.Process(target=_alone, args=(arm, turns + 1, theirs), daemon=True)
        started[name].start()
        theirs.close()

    def ask(name: str) -> Any:
        connections[name].send("next")
        try:
            answer = connections[name].recv()
        except EOFError:
            started[name].join()
            raise RuntimeError(f"{name!r} ended with exit code {started[name].exitcode}, without a turn") from None
        if isinstance(answer, _Failure):
            raise RuntimeError(f"{name!r} failed:\n{answer.traceback}")
        return answer

    rounds = [{name: ask(name) for name in arms} for _ in range(turns + 1)]
    returned = {name: ask(name) for name in arms}
    for process in started.values():
        process.join()
    return {name: [each[name] for each in rounds[1:]] for name in arms}, returned


def _alone(arm: Arm, turns: int, connection: Connection) -> None:
    measured = arm(turns)
    while connection.recv():
        try:
            connection.send(next(measured))
        except StopIteration as end:
            connection.send(end.value)
            return
        except Exception:
            connection.send(_Failure(traceback.format_exc()))
            raise


@dataclass(frozen=True)
class _Failure:
    traceback: str


def most_memory() -> float:
    """The most that this process has had at once, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def beside_unrecorded(pairs: Pairs, steps: int) -> str:
    """Of unrecorded and recorded training, each turn so many steps: the ratio's median and quartiles."""
    ratios = sorted(recorded / plain for plain, recorded in pairs)
    step = statistics.median(plain for plain, _ in pairs) / steps
    return (
        f"median {statistics.median(ratios):.3f} (quartiles {ratios[len(ratios) // 4]:.3f} to "
        f"{ratios[-len(ratios) // 4]:.3f}, {len(pairs)} turns of {steps} steps, {1e3 * step:.1f} ms a step unrecorded)"
    )


def beside_reading(pairs: Pairs) -> str:
    """Of reading all keys once and a question: medians, and that of the ratio."""
    return (
        f"{1e3 * statistics.median(asked for _, asked in pairs):.0f} ms; reading the keys once "
        f"{1e3 * statistics.median(read for read, _ in pairs):.0f} ms; median ratio "
        f"{statistics.median(asked / read for read, asked in pairs):.2f}"
    )


def read_once(path: Path) -> Callable[[], None]:
    """Sums every key of the memory, as the scan reads them: mapped, in one thread per core."""
    reader = MemoryReader(store_at(path))
    segments = [segment for layer in reader.layers.values() for segment in layer.segments]

    def total(segment: SegmentSlots) -> float:
        torch.set_num_threads(1)
        return float(segment.required("keys").sum())

    def run() -> None:
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            sum(pool.map(total, segments))
        torch.set_num_threads(threads)

    return run
