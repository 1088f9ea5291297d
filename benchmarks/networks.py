"""What recording costs for real networks: those of mnist-cnn and aesop-gpt, recorded and unrecorded, side by side.

    python benchmarks/networks.py
    python benchmarks/networks.py --dtype recipe --steps 250        # recipes, with a checkpoint in each turn

Two identical networks train in turns, each in a process of its own, as in benchmarks/recording.py; every layer is
recorded with its errors. Prints the median over the turns of recorded time / unrecorded time, and the size of the
memory for each training image or token, beside that of everything in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from in_turns import beside_unrecorded, in_processes
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights_paper import datasets
from spotlights_paper.experiments import mnist
from spotlights_paper.experiments.images import prepare
from spotlights_paper.experiments.language.gpt import GPT, adamw, shuffled_windows
from spotlights_paper.experiments.registry import preset_named
from spotlights_paper.experiments.training import without_replacement

Step = tuple[dict[str, Any], Callable[[nn.Module], Tensor]]
"""Who is in a batch, and its loss."""


class Run:
    """One network in training."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[Step], clip: float) -> None:
        self.model, self.optimizer, self._steps, self._clip = model, optimizer, steps, clip

    def steps(self, count: int, recorder: sl.Recorder | None = None) -> float:
        start = time.perf_counter()
        for columns, loss_of in islice(self._steps, count):
            if recorder is not None:
                recorder.batch(**columns)
            loss = loss_of(self.model)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
            self.optimizer.step()
        if recorder is not None:
            recorder.flush()
        return time.perf_counter() - start


def cnn() -> tuple[Run, int, str]:
    settings = preset_named("mnist-cnn", "laptop")
    torch.manual_seed(0)
    model = mnist.ConvolutionalNetwork(settings)

    def steps() -> Iterator[Step]:
        for batch in without_replacement([prepare("mnist", 20_000, 1).train], settings, 0):
            columns = {"example": batch.ids, "label": batch.labels, "source": batch.columns["source"]}
            yield columns, lambda net, b=batch: F.cross_entropy(net(b.inputs), b.labels)

    return Run(model, torch.optim.Adam(model.parameters(), lr=settings.lr), steps(), 1.0), settings.batch, "image"


def gpt() -> tuple[Run, int, str]:
    settings, data = preset_named("aesop-gpt", "laptop"), datasets.load_text("aesop")
    torch.manual_seed(0)
    model = GPT(len(data.vocabulary), settings)

    def steps() -> Iterator[Step]:
        for window in shuffled_windows(data.train.numbers, batch=settings.batch, length=settings.context, seed=0):
            yield (
                {"example": window.positions},
                lambda net, w=window: F.cross_entropy(net(w.tokens).flatten(0, 1), w.targets.flatten()),
            )

    return Run(model, adamw(model, settings), steps(), settings.clip), settings.batch * settings.context, "token"


RECIPE: dict[str, Any] = {"keep": "recipe", "checkpoint_every": 250}
NETWORKS: dict[str, Callable[[], tuple[Run, int, str]]] = {"mnist-cnn": cnn, "aesop-gpt": gpt}


def unrecorded(turns: int, *, network: str, steps: int) -> Generator[float, None, None]:
    run, _, _ = NETWORKS[network]()
    for _ in range(turns):
        yield run.steps(steps)


def recorded(turns: int, *, network: str, steps: int, dtype: str) -> Generator[float, None, str]:
    run, visits, unit = NETWORKS[network]()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "run.memory"
        options: dict[str, Any] = RECIPE if dtype == "recipe" else {"dtype": dtype}
        with sl.record(run.model, run.optimizer, path, **options) as recorder:
            for _ in range(turns):
                yield run.steps(steps, recorder)
        memory = sl.open(path)
        size = memory.info.as_dict()["bytes"] / (visits * memory.steps)
        if dtype == "recipe":
            return f"{size:,.0f} bytes for each {unit}"
        numbers = sum(layer.slots * (layer.in_features + layer.out_features) for layer in memory.layers.values())
        everything = 4 * numbers / (visits * memory.steps)
    return f"{size / 1e3:.1f} kB for each {unit}, everything in float32: {everything / 1e3:.1f} kB"


def measure(network: str, *, dtype: str, turns: int, steps: int) -> None:
    arms = {
        "unrecorded": partial(unrecorded, network=network, steps=steps),
        "recorded": partial(recorded, network=network, steps=steps, dtype=dtype),
    }
    took, returned = in_processes(arms, turns)
    pairs = list(zip(took["unrecorded"], took["recorded"], strict=True))
    print(
        f"{network:9} {dtype:8} recorded / unrecorded: {beside_unrecorded(pairs, steps)}; {returned['recorded']}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", nargs="*", default=["float16"])
    parser.add_argument("--network", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    for each in options.network:
        for name in options.dtype:
            measure(each, dtype=name, turns=options.turns, steps=options.steps)
