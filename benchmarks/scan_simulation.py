"""What memories of 10⁹ and 10¹¹ slots cost on paper: bytes, uploads, reads and tasks, and a simulated scan.

    python benchmarks/scan_simulation.py             # the tables of docs/scale.md, from the numbers below
    python benchmarks/scan_simulation.py --measure   # what this machine says of those that are measured

A worker takes the next task when it is done with one; a task reads its segments while it computes; some workers, and
some tasks, are slow; answers are merged in a tree. The same seeds give the same tables.
"""

import argparse
import dataclasses
import heapq
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

# Measured, the last three by benchmarks/scale.py.
ENTRY, HEADER_PER_LAYER, READING, READING_PER_LAYER = 235, 1700, 25e-6, 1e-6
"""Of a segment: bytes in the manifest, of its own header; seconds to parse the entry and prepare for reading."""
CORE, TASK, MERGING = 2.7e9, 0.02, 0.7e9
"""Bytes of keys that a core scans in a second; seconds a task takes besides; bytes of answers merged in a second."""
# Assumed, as of a cluster beside its bucket.
NETWORK, LATENCY, IN_FLIGHT, RANGE = 200e6, 0.03, 8, 8 << 20
"""Bytes in a second for each worker; seconds until a request is answered; requests at a time; bytes in one."""
SLOW_WORKERS, SLOW, SPREAD = 0.02, 4.0, 0.25
"""The share of workers that is slow, and how much slower; the spread of the speeds of all others, and of tasks."""


class Run(NamedTuple):
    name: str
    layers: int
    slot: float  # bytes in all layers
    asked: float  # bytes of a slot that the question reads
    batch: int  # slots of a step
    log: float  # bytes of a step in one layer's log


RUNS = (
    Run("MNIST-size, float16: scores in one layer", 3, 6600, 1600, 64, 600),
    Run("LoRA of a 7B, float16, a slot for each token: contributions in one layer", 128, 1.06e6, 8270, 4096, 350),
    Run("7B projected to 16 × 16, a slot for each example: all layers", 224, 1.24e5, 1.15e5, 64, 350),
)
"""The third does not exist yet; its bytes follow from 256 numbers of 2 bytes for each layer, and columns."""


def opening(run: Run, segments: int) -> float:
    """Seconds to fetch the manifest and to read it."""
    return LATENCY + segments * (ENTRY / NETWORK + READING + run.layers * READING_PER_LAYER)


def tasks_of(segments: int, workers: int, each: int | None = None) -> int:
    """As query/ray_engine.py divides a question; or so many for `each` worker."""
    most = max(4 * workers, min(16 * workers, segments // 16)) if each is None else each * workers
    return min(segments, most)


def scan(run: Run, slots: float, segments: int, workers: int, each: int | None = None) -> float:
    """Seconds for workers that have opened the memory: the median of some draws."""
    tasks = tasks_of(segments, workers, each)
    numbers, headers = slots * run.asked / tasks, segments / tasks * run.layers * HEADER_PER_LAYER
    requests = segments / tasks * (1 + math.ceil(slots * run.asked / segments / RANGE))
    seconds = TASK + max((numbers + headers) / NETWORK, requests * LATENCY / IN_FLIGHT, numbers / CORE)
    ends = []
    for seed in range(5):
        chance = random.Random(seed)
        slow = [chance.random() < SLOW_WORKERS for _ in range(min(workers, tasks))]
        speeds = [SLOW if each else chance.lognormvariate(0, SPREAD) for each in slow]
        free = [(0.0, worker) for worker in range(len(speeds))]
        for _ in range(tasks):
            now, worker = free[0]
            now += seconds * speeds[worker] * chance.lognormvariate(0, SPREAD)
            heapq.heapreplace(free, (now, worker))
        ends.append(max(free)[0])
    return statistics.median(ends)


def merging(tasks: int, answer: float) -> float:
    """Eight at a time; the merges of a level run side by side."""
    return math.ceil(math.log(tasks, 8)) * (TASK + 8 * answer / MERGING)


def tables() -> None:
    titles = "slots, bytes, segment, uploads, manifest, all manifests, opening, log, tasks, reads, 10 CPUs, 100, 1000"
    for run in RUNS:
        print(f"\n{run.name}\n\n| {titles.replace(', ', ' | ')} |\n|{' --- |' * (titles.count(',') + 1)}")
        for slots in (1e9, 1e11):
            for size, named in ((64 << 20, "64 MB"), (1 << 30, "1 GB")):
                segments = math.ceil(slots * run.slot / size)
                manifest, reads = segments * ENTRY, segments * (1 + math.ceil(size * run.asked / run.slot / RANGE))
                cells = [f"{slots:.0e}", human(slots * run.slot), named, f"2 × {human(segments, '')}", human(manifest)]
                cells += [human(manifest * segments / 2), duration(opening(run, segments))]
                cells += [human(slots / run.batch * run.log), human(tasks_of(segments, 100), ""), human(reads, "")]
                print("|", " | ".join(cells + [duration(scan(run, slots, segments, n)) for n in (10, 100, 1000)]), "|")
    mnist, segments = RUNS[0], math.ceil(1e11 * RUNS[0].slot / (1 << 30))
    print("\n1e11 MNIST-size slots, 1,000 CPUs, tasks for each CPU: time, beside that of equal workers")
    for each in (1, 4, 16, 64):
        alike = 1e11 * mnist.asked / NETWORK / 1000 + each * TASK
        print(f"{each}: {scan(mnist, 1e11, segments, 1000, each) / alike:.2f}", end="  ")
    print("\n\nMerging the answers of 16,000 tasks")
    for what, size in (("top 10 of 100 inputs", 16e3), ("a total for each of 60,000 examples", 1e6), ("of 1e8", 1.6e9)):
        print(f"{what}: {duration(merging(16_000, size))}", end="  ")
    print()


def human(number: float, unit: str = "B") -> str:
    power = int(math.log10(max(number, 1)) // 3)
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z'][power]}{unit}".strip()


def duration(seconds: float) -> str:
    size, unit = next(((s, u) for s, u in ((86400, "days"), (3600, "h"), (60, "min")) if seconds >= 2 * s), (1, "s"))
    return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"


def measure() -> None:
    """Of a small recording: bytes of a slot, a step's log and a header; then a manifest of many segments."""
    import torch
    from torch import nn

    import spotlights as sl
    from spotlights.memory.format.manifest import manifest_content, parse_manifest
    from spotlights.memory.reader import MemoryReader
    from spotlights.memory.store import store_at

    mlp = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    adapter = nn.Sequential(nn.Linear(4096, 16, bias=False), nn.Linear(16, 4096, bias=False))
    for name, model, shape in (("MNIST-size", mlp, (64, 784)), ("adapter of a 7B", adapter, (4, 512, 4096))):
        with tempfile.TemporaryDirectory() as folder:
            optimizer, path = torch.optim.SGD(model.parameters(), lr=1e-3), Path(folder) / "run.memory"
            with sl.record(model, optimizer, path, dtype="float16") as recorder:
                for step in range(8 if len(shape) > 2 else 200):
                    recorder.batch(example=range(step * shape[0], (step + 1) * shape[0]))
                    optimizer.zero_grad()
                    model(torch.randn(shape)).square().mean().backward()
                    optimizer.step()
            reader = sl.open(path).view.reader
            sizes = [(n, p.dtype.itemsize * math.prod(p.shape)) for s in reader.segments for n, p in s.layout.items()]
            log, state = (sum(size for n, size in sizes if n.startswith(kind)) for kind in ("/log", "/state"))
            every, layers = sum(size for _, size in sizes), len(reader.layers)
            header = (reader.nbytes - every) / len(reader.segments) / layers
            slot = (every - log - state) / max(layer.slots for layer in reader.layers.values())
            print(
                f"{name}: {slot:,.0f} bytes a slot, {log / reader.steps / layers:.0f} bytes of log a step and layer, "
            )
            print(
                f"{header:,.0f} bytes of header a layer, {len(reader.manifest.segments[0].line)} bytes in the manifest"
            )
            if name == "MNIST-size":
                one = reader.manifest.segments[0]
                ends = [dataclasses.replace(one, first_step=step, end_step=step + 1) for step in range(50_000)]
                content = manifest_content(dataclasses.replace(reader.manifest, segments=ends))
                start = time.process_time()
                MemoryReader(store_at(path), [parse_manifest(content, "many")]).layer("0").slots  # noqa: B018 (counts them)
                took = time.process_time() - start
                print(f"a manifest of 50,000 segments: {len(content) / 1e6:.1f} MB, {took:.1f} s to read")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--measure", action="store_true")
    measure() if arguments.parse_args().measure else tables()
