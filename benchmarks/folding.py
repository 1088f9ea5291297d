"""What folding costs, and what a passage costs to find.

    python benchmarks/folding.py training      # a language model with and without folding, in turns
    python benchmarks/folding.py query         # one query over the 2.09 million positions of WikiText-2

`training`: two identical networks of the experiments' laptop presets train in turns on their texts, some steps each
and each in a process of its own, one of them with `fold="example"`, so that whatever else the machine does hits both.
A folded turn ends when all of its keys have been added up; snapshots are timed apart, and said as a share of the
minute or more that lies between two of them. `query`: a folded memory of 2.09 million positions × 400 numbers (random
ones), the top 20 of one query under each kernel, in turns with `sum` over the same mapped keys by the same number of
threads. Prints medians of ratios. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Generator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from in_turns import beside_reading, beside_unrecorded, in_processes, most_memory, read_once, seconds
from torch import nn

import spotlights as sl
from spotlights.memory import folded_writer
from spotlights_paper import datasets
from spotlights_paper.experiments.language.lstm import (
    LanguageModel,
    LanguageSettings,
    State,
    keep_freed_memory,
    optimizers,
    windows,
)
from spotlights_paper.experiments.registry import preset_named

POSITIONS, FEATURES = 2_088_628, 400
"""WikiText-2's training text in words, and `[x; h]` of an LSTM with 200 units."""


EXPERIMENTS: dict[str, tuple[LanguageSettings, str, int | None]] = {
    "aesop-char": (preset_named("aesop-char", "laptop"), "aesop", None),
    "wikitext2-word": (preset_named("wikitext2-word", "laptop"), "wikitext-2", 90_000),
}
"""Settings, the text, and how much of it: of WikiText-2 so many words that the turns are about 5 epochs, as in the
preset. The first one, in which the system has to find memory for the sums, costs most."""


class Run:
    """The language model of an experiment in training, its state carried from window to window."""

    def __init__(self, name: str) -> None:
        keep_freed_memory()
        torch.manual_seed(0)
        settings, text, tokens = EXPERIMENTS[name]
        data = datasets.load_text(text)
        self.model = LanguageModel(len(data.vocabulary), settings)
        self.optimizers = optimizers(self.model, settings)
        self.clip = settings.clip
        self.windows = windows(data.train.numbers[:tokens], batch=settings.batch, unroll=settings.unroll)
        self.state: State | None = None

    def steps(self, count: int, recorder: sl.Recorder | None = None) -> float:
        start = time.perf_counter()
        for window in islice(self.windows, count):
            if recorder is not None:
                recorder.batch(example=window.positions)
            loss, state = self.model.loss(window.tokens, window.targets, None if window.first else self.state)
            self.state = state[0].detach(), state[1].detach()
            for each in self.optimizers:
                each.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([p for g in self.optimizers[0].param_groups for p in g["params"]], self.clip)
            for each in self.optimizers:
                each.step()
        if recorder is not None:
            _added_up(recorder)
        return time.perf_counter() - start


def _added_up(recorder: sl.Recorder) -> None:
    """Waits until the background thread has nothing left to add, without a snapshot."""
    writer = recorder._writer
    assert writer is not None
    writer._hand_over()
    writer._queue.join()


def plain(turns: int, *, name: str, steps: int) -> Generator[float, None, float]:
    run = Run(name)
    for _ in range(turns):
        yield run.steps(steps)
    return most_memory()


def folded(
    turns: int, *, name: str, steps: int, layers: list[str], folder: str
) -> Generator[float, None, tuple[float, float, int]]:
    """Also the memory of the process, the seconds of a snapshot, and its bytes."""
    run = Run(name)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path = Path(inside) / "run.memory"
        with sl.record(run.model, run.optimizers[0], path, layers=layers, fold="example") as recorder:
            for _ in range(turns):
                yield run.steps(steps, recorder)
            taken = seconds(recorder.flush)
        return most_memory(), taken, sl.open(path).info.as_dict()["bytes"]


def training(name: str, turns: int, steps: int, layers: list[str], folder: str) -> None:
    arms = {
        "plain": partial(plain, name=name, steps=steps),
        "folded": partial(folded, name=name, steps=steps, layers=layers, folder=folder),
    }
    took, returned = in_processes(arms, turns)
    pairs = list(zip(took["plain"], took["folded"], strict=True))
    most, taken, size = returned["folded"]
    together = sum(took["folded"]) / sum(took["plain"])
    between = max(folded_writer.SNAPSHOT_SECONDS, taken / folded_writer.SNAPSHOT_SHARE)
    print(
        f"{name}: folded / plain training: {beside_unrecorded(pairs, steps)}, all together {together:.3f}; a "
        f"snapshot of {size / 1e6:.0f} MB takes {taken:.2f} s, {100 * taken / between:.1f} % of the time between two; "
        f"extra memory {most - returned['plain']:.0f} MB",
        flush=True,
    )


def write_positions(path: Path, positions: int) -> nn.Module:
    """A folded memory of that many positions, one visit each: only its size matters here."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sl.record(model, optimizer, path, fold="example") as recorder:
        for first in range(0, positions, 1 << 16):
            ids = torch.arange(first, min(first + (1 << 16), positions))
            recorder.batch(example=ids)
            optimizer.zero_grad()
            model(torch.randn(len(ids), FEATURES)).sum().backward()
            optimizer.step()
    return model


def query(positions: int, turns: int, folder: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path = Path(inside) / "run.memory"
        model = write_positions(path, positions)
        memory, inputs = sl.open(path), torch.randn(1, FEATURES)
        read = read_once(path)
        for kernel in ("dot", "cosine"):

            def ask(kernel: str = kernel) -> object:
                return str(next(iter(memory.attend(model, inputs, kernel=kernel).values())).top(20))

            read()
            ask()
            pairs = [(seconds(read), seconds(ask)) for _ in range(turns)]
            print(f"{kernel}: one query over {len(memory):,} positions x {FEATURES}, top 20: {beside_reading(pairs)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["training", "query"])
    parser.add_argument("--setting", nargs="*", default=list(EXPERIMENTS))
    parser.add_argument("--layers", nargs="*", default=["rnn*"])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--positions", type=int, default=POSITIONS)
    parser.add_argument("--dir", default=".", help="a directory on the disk to be measured")
    options = parser.parse_args()
    if options.what == "query":
        query(options.positions, options.turns, options.dir)
    for each in options.setting if options.what == "training" else ():
        training(each, options.turns, options.steps, options.layers, options.dir)
