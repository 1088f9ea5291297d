"""What recording costs: the paper's MNIST network, recorded and unrecorded, side by side.

    python benchmarks/recording.py
    python benchmarks/recording.py --dtype --recipe 1000        # a recipe: step time, size, and a question's time

Three identical networks train in turns, some steps each and each in a process of its own, so that whatever else the
machine does hits all of them: one unrecorded, one recorded, and one whose rows are merely copied and written to a file,
which is what any recorder of these bytes pays at least. A recorded turn ends when all of it is on disk. The wait for
its last segment comes once a turn; turns are long enough that it weighs no more than at a checkpoint of a real run.
Prints the median over the turns of recorded time / unrecorded time, the same for the bare copy, and by how much the
most memory that the recorded process had exceeds that of the unrecorded one. Run it on an otherwise idle machine: a
second busy process moves the ratio by more than recording. Where a process finds its memory moves it by five points, so
each network is started several times.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_turns import beside_unrecorded, in_processes, most_memory
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.memory.buffers import BufferPool

BATCH = 128
SEGMENT_BYTES = 64 << 20
WRITE_BLOCKS = 20


class BareCopy:
    """Copies every layer's errors, and the keys that an epoch does not bring again, and writes them; nothing else."""

    def __init__(self, run: Run, path: Path, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        self._pool = BufferPool(4 * SEGMENT_BYTES)
        self._seen: list[torch.Tensor] = []
        self._blocks: list[torch.Tensor] = []
        self._queue: queue.Queue[list[torch.Tensor]] = queue.Queue(2)
        for module in run.model:
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._forward)
        run.optimizer.register_step_post_hook(self._after_step)
        threading.Thread(target=self._write, daemon=True).start()

    def batch(self, **columns: Any) -> None:
        pass

    def _forward(self, module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if args[0].requires_grad:
            self._seen.append(args[0].detach())
        output.register_hook(self._seen.append)

    def _after_step(self, *unused: Any) -> None:
        for rows in self._seen:
            self._blocks.append(self._pool.take(rows.shape, self._dtype).copy_(rows))
        self._seen.clear()
        if sum(block.nbytes for block in self._blocks) >= SEGMENT_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        self._queue.put(self._blocks)
        self._blocks = []

    def _write(self) -> None:
        while True:
            blocks = self._queue.get()
            whole = [memoryview(b.numpy().reshape(-1).view("u1")) for b in blocks if b.nbytes % 4096 == 0]
            for start in range(0, len(whole), WRITE_BLOCKS):
                os.writev(self._file, whole[start : start + WRITE_BLOCKS])
            for block in blocks:
                self._pool.give(block)
            self._queue.task_done()

    def flush(self) -> None:
        self._hand_over()
        self._queue.join()
        os.fsync(self._file)


class Run:
    """One network in training on data of MNIST's size."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.images, self.labels = torch.randn(40_053, 784), torch.randint(10, (40_053,))
        self.model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-3, momentum=0.9)
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, count: int, recorder: sl.Recorder | BareCopy | None = None) -> float:
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


def unrecorded(turns: int, *, steps: int) -> Generator[float, None, float]:
    run = Run()
    for _ in range(turns):
        yield run.steps(steps)
    return most_memory()


def recorded(turns: int, *, steps: int, **options: Any) -> Generator[float, None, float]:
    run = Run()
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        sl.record(run.model, run.optimizer, Path(folder) / "run.memory", **options) as recorder,
    ):
        for _ in range(turns):
            yield run.steps(steps, recorder)
    return most_memory()


def copied(turns: int, *, steps: int, dtype: str) -> Generator[float, None, None]:
    run = Run()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        copy = BareCopy(run, Path(folder) / "rows", dtype)
        for _ in range(turns):
            yield run.steps(steps, copy)


def measure(dtype: str, turns: int, steps: int, processes: int) -> None:
    arms = {"unrecorded": partial(unrecorded, steps=steps), "recorded": partial(recorded, steps=steps, dtype=dtype)}
    if dtype != "int8":
        arms["copied"] = partial(copied, steps=steps, dtype=dtype)
    took, most = in_processes(arms, turns, processes)
    pairs = list(zip(took["unrecorded"], took["recorded"], strict=True))
    floor = [copy / plain for plain, copy in zip(took["unrecorded"], took.get("copied", ()), strict=False)]
    print(
        f"{dtype:8} recorded / unrecorded: {beside_unrecorded(pairs, steps)}"
        + (f"; copying and writing alone: median {statistics.median(floor):.3f}" if floor else "")
        + f"; extra memory {most['recorded'] - most['unrecorded']:.0f} MB",
        flush=True,
    )


def measure_recipe(turns: int, steps: int, processes: int, run_steps: int) -> None:
    """A recipe with a checkpoint every 250 steps: its step time; then one run's size and its questions' times."""
    options = {"keep": "recipe", "checkpoint_every": 250}
    arms = {"unrecorded": partial(unrecorded, steps=steps), "recipe": partial(recorded, steps=steps, **options)}
    took, most = in_processes(arms, turns, processes)
    pairs = list(zip(took["unrecorded"], took["recipe"], strict=True))
    extra = most["recipe"] - most["unrecorded"]
    print(f"recipe / unrecorded: {beside_unrecorded(pairs, steps)}; extra memory {extra:.0f} MB", flush=True)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        bytes_of, seconds = {}, {}
        for name, keep in (("full", {}), ("recipe", options)):
            run, path = Run(), Path(folder) / f"{name}.memory"
            with sl.record(run.model, run.optimizer, path, **keep) as recorder:
                run.steps(run_steps, recorder)
            bytes_of[name] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        run = Run()
        training = run.steps(run_steps)

        def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(run.images[ids]), run.labels[ids])

        recipe, cache = Path(folder) / "recipe.memory", Path(folder) / "cache"
        options_of_opening: dict[str, Any] = {"model": run.model, "recompute": loss, "cache": cache}
        for name in ("first", "second"):
            memory = sl.open(recipe, **options_of_opening, cache_bytes=64 << 30)
            start = time.perf_counter()
            recomputed = memory.attend(run.model, run.images[:1])["4"].contributions(target=7).top(10)
            seconds[name] = time.perf_counter() - start
            assert memory.recomputed == 0.0, recomputed
        full = sl.open(Path(folder) / "full.memory").attend(run.model, run.images[:1])["4"].contributions(target=7)
        same = torch.equal(full.top(10).values, recomputed.values)
        small, large = (bytes_of[name] / 1e6 for name in ("recipe", "full"))
        print(
            f"{run_steps:,} steps: {small:.0f} MB, the full memory {large:.0f} MB: 1/{large / small:.0f}; first "
            f"question {seconds['first'] / training:.2f} of a training run ({training:.1f} s), second "
            f"{seconds['second'] / training:.3f}; top 10 as of the full memory, bit for bit: {same}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--dtype", nargs="*", default=["float32", "float16", "int8"])
    parser.add_argument("--recipe", type=int, default=0, help="also a recipe, of a run of so many steps")
    options = parser.parse_args()
    for name in options.dtype:
        measure(name, options.turns, options.steps, options.processes)
    if options.recipe:
        measure_recipe(options.turns, options.steps, options.processes, options.recipe)
