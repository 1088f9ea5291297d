"""What recording an LSTM costs: language models in training, recorded and unrecorded, side by side.

    python benchmarks/recurrent.py

Three identical networks train in turns, some steps each and each in a process of its own, so that whatever else the
machine does hits all of them. One is unrecorded, of the others the LSTM is recorded: with keys and errors; with keys
alone (`errors=False`). With `--network characters --arm recipe --steps 250` it is a recipe of all layers. All train to
the same bits. A recorded turn ends when all of it is on disk. `characters` is nearly all LSTM; `words` has a vocabulary
of 33,278 and the losses and embeddings that go with it. How much time the system takes to find memory differs from
process to process (words, unrecorded: 77 ms a step in one, 120 in the next), so each network is trained in several, one
after the other; with `--kept` all of them tell the allocator to keep what is freed, as the language experiments do.
Prints the median over the turns of recorded time / unrecorded time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_turns import beside_unrecorded, in_processes
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights_paper.experiments.language.lstm import keep_freed_memory


class Characters(nn.Module):
    """Embedding 256, LSTM 256, 80 characters; batches of 32 by 100."""

    vocabulary, batch, unroll = 80, 32, 100

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, 256)
        self.lstm = nn.LSTM(256, 256)
        self.head = nn.Linear(256, self.vocabulary)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(text))[0]).flatten(0, 1), following.flatten())


class Words(nn.Module):
    """Embedding 200 with dropout, LSTM 200, adaptive softmax over 33,278 words; batches of 32 by 35."""

    vocabulary, batch, unroll = 33_278, 32, 35

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, 200, sparse=True)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(200, 200)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(200, self.vocabulary, [1000, 6000])

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(text)))
        return self.head(states.flatten(0, 1), following.flatten()).loss


NETWORKS: dict[str, type[Characters | Words]] = {"characters": Characters, "words": Words}


class Run:
    """One network in training on random text, with words as rare as in real one."""

    def __init__(self, network: str, *, kept: bool) -> None:
        make = NETWORKS[network]
        if kept:
            keep_freed_memory()
        torch.manual_seed(0)
        self.model = make()
        dense = [p for name, p in self.model.named_parameters() if make is Characters or name != "embedding.weight"]
        self.dense = torch.optim.Adam(dense, lr=1e-3)
        self.sparse = torch.optim.SparseAdam([self.model.embedding.weight], lr=1e-3) if make is Words else None
        self.frequencies = 1 / torch.arange(1, make.vocabulary + 1)
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, count: int, recorder: sl.Recorder | None = None) -> float:
        model = self.model
        shape = model.unroll + 1, model.batch
        drawn = [
            torch.multinomial(self.frequencies, shape[0] * shape[1], replacement=True, generator=self.generator)
            for _ in range(count)
        ]
        start = time.perf_counter()
        for text in drawn:
            text = text.reshape(shape)
            if recorder is not None:
                recorder.batch(example=torch.arange(model.batch), token=text[:-1].T)
            for optimizer in (self.dense, self.sparse):
                if optimizer is not None:
                    optimizer.zero_grad()
            model(text[:-1], text[1:]).backward()
            nn.utils.clip_grad_norm_([p for group in self.dense.param_groups for p in group["params"]], 1.0)
            for optimizer in (self.dense, self.sparse):
                if optimizer is not None:
                    optimizer.step()
        if recorder is not None:
            recorder.flush()
        return time.perf_counter() - start


ARMS: dict[str, dict[str, Any]] = {
    "keys and errors": {},
    "keys alone": {"errors": False},
    "recipe": {"keep": "recipe", "checkpoint_every": 250},
}


def unrecorded(turns: int, *, network: str, kept: bool, steps: int) -> Generator[float, None, None]:
    run = Run(network, kept=kept)
    for _ in range(turns):
        yield run.steps(steps)


def recorded(turns: int, *, network: str, kept: bool, steps: int, dtype: str, arm: str) -> Generator[float, None, None]:
    run = Run(network, kept=kept)
    options = ARMS[arm] if arm == "recipe" else {"layers": "lstm.l0", "dtype": dtype, **ARMS[arm]}
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        sl.record(run.model, run.dense, Path(folder) / "run.memory", **options) as recorder,
    ):
        for _ in range(turns):
            yield run.steps(steps, recorder)


def measure(network: str, dtype: str, options: argparse.Namespace) -> None:
    training = {"network": network, "kept": options.kept, "steps": options.steps}
    arms = {arm: partial(recorded, **training, dtype=dtype, arm=arm) for arm in options.arm}
    took, _ = in_processes({"unrecorded": partial(unrecorded, **training), **arms}, options.turns, options.processes)
    for arm in arms:
        pairs = list(zip(took["unrecorded"], took[arm], strict=True))
        name = f"{network:10} {dtype:8} {arm:16}"
        print(f"{name} recorded / unrecorded: {beside_unrecorded(pairs, options.steps)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--dtype", nargs="*", default=["float32", "float16"])
    parser.add_argument("--network", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--arm", nargs="*", choices=ARMS, default=["keys and errors", "keys alone"])
    given = parser.parse_args()
    for text in given.network:
        for name in given.dtype:
            measure(text, name, given)
