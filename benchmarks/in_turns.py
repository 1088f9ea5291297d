"""Two things measured in turns, so that whatever slows the machine down slows both: what the other benchmarks share."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from spotlights.memory.layer_reader import Part
from spotlights.memory.reader import MemoryReader

Pairs = Sequence[tuple[float, float]]
"""Of each turn, the seconds that the one took and the other."""


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
    parts = [part for layer in MemoryReader(path).layers.values() for part in layer.parts]

    def total(part: Part) -> float:
        torch.set_num_threads(1)
        return float(part.held("keys").sum())

    def run() -> None:
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            sum(pool.map(total, parts))
        torch.set_num_threads(threads)

    return run
