"""What attributing an answer of a network trained with Adam costs, beside its training.

    python benchmarks/adam.py

Trains the paper's MNIST network with Adam, once plainly and once recorded, then asks for the contributions of all
slots to the answer: to one logit of one test image, and of 64, through the last layer and through every layer.
Prints each time as a multiple of the plain training's, the largest memory of the process, and how well the memory
meets the weights.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.query import Contributions
from spotlights_paper.datasets import load

BATCH = 128


def train(images: Tensor, labels: Tensor, steps: int, path: Path | None) -> tuple[nn.Module, float]:
    """An ordinary loop; returns the network and the seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    recorder = None if path is None else sl.record(model, optimizer, path).__enter__()
    start = time.perf_counter()
    for _ in range(steps):
        ids = torch.randint(len(images), (BATCH,), generator=generator)
        if recorder is not None:
            recorder.batch(example=ids, label=labels[ids])
        loss = F.cross_entropy(model(images[ids]), labels[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if recorder is not None:
        recorder.__exit__(None, None, None)
    return model, time.perf_counter() - start


def memory_use() -> float:
    """The largest this process has been, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(steps: int) -> None:
    mnist = load("mnist")
    split = mnist.train
    images, labels = split.images.flatten(1).float() / 255, split.labels.long()
    test = mnist.test.images[:64].flatten(1).float() / 255
    _, plainly = train(images, labels, steps, None)
    print(f"training: {plainly:.1f} s for {steps} steps ({1e3 * plainly / steps:.1f} ms a step), {memory_use():.2f} GB")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "run.memory"
        model, recorded = train(images, labels, steps, path)
        memory = sl.open(path)
        size = sum(file.stat().st_size for file in path.rglob("*")) / 1e9
        print(f"recorded: {recorded / plainly:.2f} times as long, {size:.1f} GB on disk, {memory_use():.2f} GB")

        def report(what: str, ask: Callable[[], object]) -> None:
            start = time.perf_counter()
            ask()
            seconds = time.perf_counter() - start
            print(f"{what}: {seconds:.1f} s, {seconds / plainly:.2f} times training, {memory_use():.2f} GB", flush=True)

        for count in (1, 64):
            spot = memory.attend(model, test[:count])
            target = model(test[:count]).argmax(dim=1)
            asked = [attention.contributions(target) for attention in spot.values()]
            report(f"{count} answers, last layer", partial(asked[-1].top, 10))
            report(f"{count} answers, all layers", partial(list, map(Contributions.top, asked)))
        report("verify", lambda: print(memory.verify(model, files=False)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    measure(parser.parse_args().steps)
