"""A memory in a bucket beside the same one on disk: bytes read for a question, and its time, cold and warm.

    python benchmarks/buckets.py                     # starts an S3 server on this machine (moto)
    python benchmarks/buckets.py --steps 6000        # 384,000 slots
    python benchmarks/buckets.py --to s3://bucket/x  # a real bucket, by the environment's credentials

The network is the paper's for MNIST (784-800-800-10) on random images; questions are about its last layer, whose keys
have 800 numbers. "Needed" are the bytes of the tensors that a question uses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spotlights as sl
from spotlights.memory.store import bucket

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--to", help="where in a bucket; an S3 server on this machine by default")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = options.to
        if address is None:
            from buckets import new_bucket

            address = str(new_bucket("s3"))
        local, model = Path(folder) / "run.memory", record(Path(folder) / "run.memory", options.steps)
        start = time.perf_counter()
        sl.open(local).copy(address)
        size = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
        took = time.perf_counter() - start
        speed = f"{size / took / 1e6:.0f} MB/s"
        print(f"{len(sl.open(local)):,} slots, {size / 1e6:,.0f} MB; copied and opened in {took:.1f} s ({speed})")
        compare(local, address, model, Path(folder) / "cache")


def record(path: Path, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.rand(60_000, 784), torch.randint(10, (60_000,))
    with sl.record(model, optimizer, path, layers="4") as recorder:
        for _ in range(steps):
            ids = torch.randint(60_000, (64,))
            recorder.batch(example=ids, label=labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(images[ids]), labels[ids]).backward()
            optimizer.step()
    return model


def compare(local: Path, address: str, model: nn.Module, cache: Path) -> None:
    inputs = torch.rand(4, 784)
    questions: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
        "top of scores": (lambda a: a.top(10), ["4/keys"]),
        "totals by label": (lambda a: a.totals("label"), ["4/keys", "4/column/label"]),
        "top contributions": (
            lambda a: a.contributions(target=3).top(10, by="example"),
            ["4/keys", "4/errors", "4/column/step", "4/column/example"],
        ),
    }
    counted = Counted()
    titles = {"question": -18, "needed": 9, "read": 9, "ratio": 6, "cold": 8, "warm": 8, "on disk": 8, "warm/disk": 9}
    print(" ".join(f"{title:<{-width}}" if width < 0 else f"{title:>{width}}" for title, width in titles.items()))
    for number, (name, (question, tensors)) in enumerate(questions.items()):
        own = cache / str(number)

        def seconds(path: str | Path, own: Path = own, question: Any = question) -> float:
            memory = sl.open(path, cache=own)
            start = time.perf_counter()
            question(memory.attend(model, inputs)["4"])
            return time.perf_counter() - start

        on_disk = min(seconds(local) for _ in range(3))
        before = counted.bytes
        sl.open(address, cache=own)
        opening, before = counted.bytes - before, counted.bytes
        cold = seconds(address)
        read = counted.bytes - before - opening
        warm = min(seconds(address) for _ in range(3))
        layouts = [segment.layout for segment in sl.open(local).view.reader.segments]
        needed = sum(
            torch.Size(layout[tensor].shape).numel() * layout[tensor].dtype.itemsize
            for layout in layouts
            for tensor in tensors
        )
        ratio = f"{needed / 1e6:6,.1f} MB {read / 1e6:6,.1f} MB {read / needed:6.3f}"
        print(f"{name:18} {ratio} {cold:6.2f} s {warm:6.3f} s {on_disk:6.3f} s {warm / on_disk:9.2f}")


class Counted:
    """Stands before obstore and counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes = 0
        self._obstore, bucket.obstore = bucket.obstore, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._obstore, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._obstore.get(*args, **kwargs)
        start, end = answer.range
        self.bytes += end - start
        return answer


if __name__ == "__main__":
    main()
