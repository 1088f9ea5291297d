"""What recording costs: the paper's MNIST network, recorded and unrecorded, side by side.

    python benchmarks/recording.py

Two identical networks train in turns, some steps each, one of them recorded, so that whatever else the
machine does hits both. A recorded turn ends when all of it is on disk. The wait for its last segment comes
once a turn; turns are long enough that it weighs no more than at a checkpoint of a real run. Prints the
median over the turns of recorded time / unrecorded time, and the largest extra memory of the recorded
process. Run it on an otherwise idle machine: a second busy process moves the ratio by more than recording.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl

BATCH = 128


class Run:
    """One network in training on data of MNIST's size."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.images, self.labels = images, labels
        self.model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-3, momentum=0.9)
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, count: int, recorder: sl.Recorder | None = None) -> float:
        start = time.perf_counter()
        for _ in range(count):
            ids = torch.randint(len(self.images), (BATCH,), generator=self.generator)
            images, labels = self.images[ids], self.labels[ids]
            if recorder is not None:
                recorder.batch(example=ids, label=labels, source="mnist")
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        if recorder is not None:
            recorder.flush()
        return time.perf_counter() - start


def measure(dtype: str, turns: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(40_053, 784, generator=generator)
    labels = torch.randint(10, (40_053,), generator=generator)
    plain, recorded = Run(images, labels), Run(images, labels)
    plain.steps(steps)
    recorded.steps(steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        sl.record(recorded.model, recorded.optimizer, Path(folder) / "run.memory", dtype=dtype) as r,
    ):
        recorded.steps(steps, r)
        pairs = [(plain.steps(steps), recorded.steps(steps, r)) for _ in range(turns)]
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ratios = sorted(b / a for a, b in pairs)
    step = statistics.median(a for a, _ in pairs) / steps
    print(
        f"{dtype:8} recorded / unrecorded: median {statistics.median(ratios):.3f} "
        f"(quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f}, {turns} turns of "
        f"{steps} steps, {1e3 * step:.1f} ms a step unrecorded); extra memory {extra:.0f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", nargs="*", default=["float32", "float16", "int8"])
    options = parser.parse_args()
    for name in options.dtype:
        measure(name, options.turns, options.steps)
