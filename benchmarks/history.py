"""What a history costs: the demo's network, 784-800-800-10, against one training run of the same steps.

    python benchmarks/history.py                    # 3,000 steps: half an hour, and 4 GB of disk
    python benchmarks/history.py --steps 300

One process trains without recording, another one records the same run; then the history of one number, and of sixteen
at once, each in a process of its own, so that the most memory that a process had is that of the question. Prints the
time of each question as a multiple of the time that the unrecorded training took, the most memory, and how well the sum
meets the network's answer. Run it on an otherwise idle machine; on a busy one, the ratio of CPU times is the better
guide.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
from in_turns import most_memory
from recording import Run

import spotlights as sl


def train(steps: int) -> tuple[float, float]:
    run = Run()
    run.steps(10)
    busy = time.process_time()
    return run.steps(steps), time.process_time() - busy


def record(steps: int, folder: Path) -> None:
    run = Run()
    with sl.record(run.model, run.optimizer, folder / "run.memory") as recorder:
        run.steps(steps, recorder)
    torch.save(run.model.state_dict(), folder / "model.pt")


def own_memory() -> float:
    """Megabytes that this process has now, without pages of mapped files, which the system can drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return float("nan")


def ask(numbers: int, folder: Path) -> tuple[float, float, str, str]:
    run = Run()
    run.model.load_state_dict(torch.load(folder / "model.pt"))
    memory = sl.open(folder / "run.memory")
    start, busy = time.perf_counter(), time.process_time()
    own = [0.0]
    history = memory.attend(run.model, run.images[:numbers]).history(
        target=7, progress=lambda share: own.append(own_memory())
    )
    took, busy = time.perf_counter() - start, time.process_time() - busy
    rounding = float((history.rest["rounding"] / history.answer).abs().max())
    said = (
        f"error {float(history.error.max()):.0e}, rounding {rounding:.0e}, "
        f"midpoints missed {float(history.residual.max()):.2%}, κ up to {float(history.kappa.max()):.0f}"
    )
    return took, busy, f"{most_memory():,.0f} MB, without pages of mapped files {max(own):,.0f} MB", said


def elsewhere(function, *args):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def measure(numbers: int, steps: int, turns: int, folder: Path) -> None:
    """Training and question in turns, so that whatever else the machine does hits both."""
    ratios, busy_ratios, memory, said = [], [], "", ""
    for _ in range(turns):
        training, busy_training = elsewhere(train, steps)
        took, busy, memory, said = elsewhere(ask, numbers, folder)
        ratios.append(took / training)
        busy_ratios.append(busy / busy_training)
    print(
        f"{numbers:3} at once, {steps:,} steps: {statistics.median(ratios):.2f} of training "
        f"({min(ratios):.2f} to {max(ratios):.2f}), in CPU time {statistics.median(busy_ratios):.2f} "
        f"({min(busy_ratios):.2f} to {max(busy_ratios):.2f}); most memory {memory}; {said}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--numbers", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        elsewhere(record, options.steps, Path(name))
        for count in options.numbers:
            measure(count, options.steps, options.turns, Path(name))
