"""Ways to find, for positions of the test text, positions of the training text that are like them.

The memory's way, and what it must be compared with: the same network before it was trained, the longest common suffix,
which needs no network at all, and chance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

import spotlights as sl
from spotlights.attention.passages import top_positions
from spotlights.datasets import TextDataset
from spotlights.errors import SettingError
from spotlights.experiments.language.network import LAYER, LanguageModel, State
from spotlights.experiments.language.settings import LanguageSettings
from spotlights.experiments.language.training import recorded, steps_per_epoch, windows
from spotlights.experiments.progress import track

_AT_ONCE = 250
"""Queries in one scan."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Positions of the test text, and what is before and after them."""

    contexts: Int64[Tensor, "asked context"]
    """The tokens up to the position; the last one is asked about."""
    after: Int64[Tensor, "asked"]
    """The token that follows."""
    said: Int64[Tensor, "asked"]
    """The token that the trained network expects most."""


@torch.no_grad()
def choose(model: LanguageModel, test: Int64[Tensor, "tokens"], *, asked: int, context: int, seed: int) -> Asked:
    """Random positions of the test text, all different, each with as much text before it."""
    possible = len(test) - context
    if possible < 1:
        raise SettingError(f"The test text has {len(test)} tokens: too few for contexts of {context} and a next one.")
    generator = np.random.default_rng(seed)
    starts = torch.from_numpy(np.sort(generator.choice(possible, size=min(asked, possible), replace=False)))
    contexts = test[starts[:, None] + torch.arange(context)]
    said = torch.cat([model(some, last=True)[:, 0].argmax(dim=1) for some in contexts.split(_AT_ONCE)])
    return Asked(contexts, test[starts + context], said)


def attended(
    memory: sl.Memory, model: LanguageModel, contexts: Int64[Tensor, "asked context"], *, kernel: str, k: int
) -> Int64[Tensor, "asked k"]:
    """The k positions of the training text with the largest scores, best first."""
    found = []
    length = contexts.shape[1]
    for some in track(contexts.split(_AT_ONCE), -(-len(contexts) // _AT_ONCE), f"passages by kernel {kernel}"):
        spot = memory.attend(model, {"tokens": some, "last": True}, kernel=kernel)[LAYER]
        last = spot.at(range(length - 1, len(some) * length, length))
        found.append(torch.tensor(top_positions(last, k).columns["example"])[:, 0])
    return torch.cat(found)


@contextmanager
def untrained(data: TextDataset, settings: LanguageSettings, *, seed: int) -> Iterator[tuple[LanguageModel, sl.Memory]]:
    """The network as it was before training, and the memory of its one look at the training text."""
    torch.manual_seed(seed)
    model = LanguageModel(len(data.vocabulary), settings)
    model.dropout.eval()  # nothing is recorded of a network in eval mode, but it need not drop what it sees
    model.requires_grad_(False).rnn.requires_grad_(True)  # what nobody steps with or empties would grow step by step
    optimizer = torch.optim.SGD(model.rnn.parameters(), lr=0.0)
    settings = replace(settings, layers=("rnn*",), errors=False, fold=True, fold_from=0)
    state: State | None = None
    with tempfile.TemporaryDirectory(prefix="spotlights-") as folder:
        with recorded(model, optimizer, Path(folder) / "untrained.memory", settings) as recorder:
            steps = steps_per_epoch(len(data.train), settings)
            looked = windows(data.train.numbers, batch=settings.batch, unroll=settings.unroll)
            for window, _ in zip(looked, track(range(steps), steps, "the untrained network"), strict=False):
                recorder.batch(example=window.positions)
                hidden, state = model.read(window.tokens, None if window.first else state)
                state = state[0].detach(), state[1].detach()
                optimizer.zero_grad()
                hidden.mean().backward()  # any gradient: rows are recorded when one arrives
                optimizer.step()
        yield model, sl.open(Path(folder) / "untrained.memory")


def longest_suffixes(
    contexts: Int64[Tensor, "asked context"], train: Int64[Tensor, "tokens"], *, k: int, seed: int
) -> Int64[Tensor, "asked k"]:
    """The k positions whose text before them agrees longest with a context; chance decides between equals."""
    generator = np.random.default_rng(seed)
    text = train.numpy()[:-1]  # the last token has none after it
    everywhere, order = np.arange(len(text)), np.argsort(text, kind="stable")
    edges = np.searchsorted(text, np.arange(text.max() + 2), sorter=order)
    found = np.empty((len(contexts), k), np.int64)
    for row, context in enumerate(contexts.numpy()):
        token = context[-1]
        alive = order[edges[token] : edges[token + 1]] if token <= text.max() else order[:0]
        agreeing = [alive]  # by how many tokens they agree, at least
        for back in range(1, len(context)):
            alive = alive[alive >= back]
            alive = alive[text[alive - back] == context[-1 - back]]
            if not len(alive):
                break
            agreeing.append(alive)
        chosen: list[int] = []
        for some in [*reversed(agreeing), everywhere]:
            # k of them are enough, also if all that were chosen before are drawn again
            drawn = generator.choice(some, size=min(k, len(some)), replace=False).tolist()
            chosen += [position for position in drawn if position not in chosen][: k - len(chosen)]
            if len(chosen) == k:
                break
        found[row] = chosen
    return torch.from_numpy(found)


def by_chance(asked: int, train: Int64[Tensor, "tokens"], *, k: int, seed: int) -> Int64[Tensor, "asked k"]:
    """Any positions that have a next token."""
    return torch.from_numpy(np.random.default_rng(seed).integers(len(train) - 1, size=(asked, k)))
