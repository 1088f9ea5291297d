"""How good are the passages that a memory finds, and what did training add?

For random positions of the test text: how much of the text before the position does a passage share, and does the vote
of the tokens that follow the passages predict the next token? Compared with the same network before it was trained,
with the longest common suffix, which needs no network, and with chance.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import spotlights as sl
from spotlights.errors import SettingError
from spotlights_paper.datasets import TextDataset
from spotlights_paper.experiments.language.lstm import (
    LAYER,
    LanguageModel,
    LanguageSettings,
    State,
    recorded,
    steps_per_epoch,
    windows,
)
from spotlights_paper.experiments.language.trained import TrainedLanguage, Window
from spotlights_paper.experiments.paper import Estimate
from spotlights_paper.experiments.progress import stage, track
from spotlights_paper.experiments.training import fit

NEIGHBOURS = 20
"""Passages that vote."""
SAME_END = {"character": 3, "word": 1}
"""Tokens that a passage must share: the last three characters, or the last word."""
MEASURES = {
    "suffix": "common suffix",
    "same_end": "same end",
    "next_true": "vote is the next token",
    "next_said": "vote is what the network says",
}

Judgement = dict[str, Float[np.ndarray, "asked"]]
"""Each measure, position by position."""
_AT_ONCE = 250
"""Queries in one scan."""


@dataclass(frozen=True)
class JudgedMethod:
    """One way to find passages, over all positions."""

    how: str
    kernel: str | None
    measures: dict[str, Estimate]
    """By the names in `MEASURES`."""
    gain: dict[str, Estimate]
    """What the trained network's passages have more, paired by position: with the same kernel, or the first one."""


@dataclass(frozen=True)
class Evaluation:
    """All ways of finding passages, over the same positions."""

    asked: int
    neighbours: int
    context: int
    unit: str
    right: Estimate
    """How often the network itself is right about the next token."""
    judged: list[JudgedMethod]

    def of(self, how: str, kernel: str | None = None) -> JudgedMethod:
        return next(judged for judged in self.judged if (judged.how, judged.kernel) == (how, kernel))

    @property
    def kernels(self) -> list[str]:
        """Those that the trained network's passages were found with."""
        return [judged.kernel for judged in self.judged if judged.how == "trained" and judged.kernel is not None]

    def verdict(self, kernel: str) -> str:
        """In words: what training added to the passages of a kernel."""
        gain = self.of("untrained", kernel).gain
        more = [MEASURES[name] for name in MEASURES if gain[name].mean > 2 * gain[name].error]
        less = [MEASURES[name] for name in MEASURES if gain[name].mean < -2 * gain[name].error]
        same = [MEASURES[name] for name in MEASURES if MEASURES[name] not in more + less]
        parts = [("more of", more), ("less of", less), ("not measurably another", same)]
        return f"Training added, by kernel {kernel}: " + "; ".join(f"{s} {', '.join(n)}" for s, n in parts if n) + "."


def evaluate(trained: TrainedLanguage, settings: LanguageSettings) -> Evaluation:
    """Judges the passages of a run, for each kernel of its settings."""
    if not settings.kernels:
        raise SettingError('kernels=(): give at least one, such as "cosine".')
    data, train, seed = trained.data, trained.data.train.numbers, trained.seed
    assert isinstance(trained.model, LanguageModel), "a GPT's passages are not judged"
    context = min(settings.context, len(data.test) // 2)
    asked = choose(trained.model, data.test.numbers, asked=settings.asked, context=context, seed=seed)
    contexts, end = asked.contexts, SAME_END[data.vocabulary.unit]

    def judged_by(memory: sl.Memory, model: LanguageModel) -> dict[str, Judgement]:
        positions = {k: attended(memory, model, contexts, kernel=k, k=NEIGHBOURS) for k in settings.kernels}
        return {kernel: judge(best, asked, train, end=end) for kernel, best in positions.items()}

    ours = judged_by(trained.memory, trained.model)
    with untrained(data, settings, seed=seed) as (model, memory):
        before = judged_by(memory, model)
    judged = [_compared("trained", kernel, ours[kernel], ours[kernel]) for kernel in ours]
    judged += [_compared("untrained", kernel, before[kernel], ours[kernel]) for kernel in ours]
    with stage("longest common suffixes"):
        others = {
            "longest common suffix": longest_suffixes(contexts, train, k=NEIGHBOURS, seed=seed),
            "random": by_chance(len(contexts), train, k=NEIGHBOURS, seed=seed),
        }
    first = ours[settings.kernels[0]]
    judged += [_compared(how, None, judge(best, asked, train, end=end), first) for how, best in others.items()]
    right = Estimate.of((asked.said == asked.after).double().numpy())
    return Evaluation(len(contexts), NEIGHBOURS, contexts.shape[1], data.vocabulary.unit, right, judged)


def judge(
    positions: Int64[Tensor, "asked k"], asked: AskedPositions, train: Int64[Tensor, "tokens"], *, end: int
) -> Judgement:
    """Each measure for each position: means over its passages, and whether their vote hits."""
    shared = common_suffix(positions, asked.contexts, train).double()
    winners = vote(train[positions + 1])
    return {
        "suffix": shared.mean(dim=1).numpy(),
        "same_end": (shared >= end).double().mean(dim=1).numpy(),
        "next_true": (winners == asked.after).double().numpy(),
        "next_said": (winners == asked.said).double().numpy(),
    }


def common_suffix(
    positions: Int64[Tensor, "asked k"], contexts: Int64[Tensor, "asked context"], train: Int64[Tensor, "tokens"]
) -> Int64[Tensor, "asked k"]:
    """How many tokens, counted back from a position, are those of the context."""
    shared = torch.zeros_like(positions)
    agree = torch.ones_like(positions, dtype=torch.bool)
    for back in range(contexts.shape[1]):
        agree &= (positions >= back) & (train[(positions - back).clamp_min(0)] == contexts[:, -1 - back, None])
        if not agree.any():
            break
        shared += agree
    return shared


def vote(tokens: Int64[Tensor, "asked k"]) -> Int64[Tensor, "asked"]:
    """The most frequent token of each row; of equally frequent ones the first."""
    return torch.tensor([Counter(row).most_common(1)[0][0] for row in tokens.tolist()], dtype=torch.int64)


def _compared(how: str, kernel: str | None, values: Judgement, ours: Judgement) -> JudgedMethod:
    return JudgedMethod(
        how,
        kernel,
        {name: Estimate.of(values[name]) for name in MEASURES},
        {name: Estimate.of(ours[name] - values[name]) for name in MEASURES},
    )


# -- ways to find passages --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AskedPositions:
    """Positions of the test text, and what is before and after them."""

    contexts: Int64[Tensor, "asked context"]
    """The tokens up to the position; the last one is asked about."""
    after: Int64[Tensor, "asked"]
    """The token that follows."""
    said: Int64[Tensor, "asked"]
    """The token that the trained network expects most."""


@torch.no_grad()
def choose(
    model: LanguageModel, test: Int64[Tensor, "tokens"], *, asked: int, context: int, seed: int
) -> AskedPositions:
    """Random positions of the test text, all different, each with as much text before it."""
    possible = len(test) - context
    if possible < 1:
        raise SettingError(f"The test text has {len(test)} tokens: too few for contexts of {context} and a next one.")
    generator = np.random.default_rng(seed)
    starts = torch.from_numpy(np.sort(generator.choice(possible, size=min(asked, possible), replace=False)))
    contexts = test[starts[:, None] + torch.arange(context)]
    said = torch.cat([model(some, last=True)[:, 0].argmax(dim=1) for some in contexts.split(_AT_ONCE)])
    return AskedPositions(contexts, test[starts + context], said)


def attended(
    memory: sl.Memory, model: LanguageModel, contexts: Int64[Tensor, "asked context"], *, kernel: str, k: int
) -> Int64[Tensor, "asked k"]:
    """The k positions of the training text with the largest scores, best first."""
    positions = []
    length = contexts.shape[1]
    for some in track(contexts.split(_AT_ONCE), -(-len(contexts) // _AT_ONCE), f"passages by kernel {kernel}"):
        spot = memory.attend(model, {"tokens": some, "last": True}, kernel=kernel)[LAYER]
        last = spot.at(range(length - 1, len(some) * length, length))
        # In a folded memory each slot is an example already.
        top = last.top(k) if memory.folded else last.top(k, by="example")
        positions.append(torch.tensor(top.columns["example"])[:, 0])
    return torch.cat(positions)


@contextmanager
def untrained(data: TextDataset, settings: LanguageSettings, *, seed: int) -> Iterator[tuple[LanguageModel, sl.Memory]]:
    """The network as it was before training, and the memory of its one look at the training text."""
    torch.manual_seed(seed)
    model = LanguageModel(len(data.vocabulary), settings)
    model.dropout.eval()  # nothing is recorded of a network in eval mode, but it need not drop what it sees
    model.requires_grad_(False).rnn.requires_grad_(True)  # what nobody steps with or empties would grow step by step
    optimizer = torch.optim.SGD(model.rnn.parameters(), lr=0.0)
    steps = steps_per_epoch(len(data.train), settings)
    settings = replace(settings, steps=steps, layers=("rnn*",), errors=False, fold=True)
    state: State | None = None

    def loss(window: Window) -> Float[Tensor, ""]:
        nonlocal state
        hidden, state = model.read(window.tokens, None if window.first else state)
        state = state[0].detach(), state[1].detach()
        return hidden.mean()  # any gradient: rows are recorded when one arrives

    with tempfile.TemporaryDirectory(prefix="spotlights-") as folder:
        recorder = recorded(model, optimizer, Path(folder) / "untrained.memory", settings)
        looked = windows(data.train.numbers, batch=settings.batch, unroll=settings.unroll)
        fit(recorder, [optimizer], settings, batches=looked, loss=loss)
        yield model, sl.open(Path(folder) / "untrained.memory")


def longest_suffixes(
    contexts: Int64[Tensor, "asked context"], train: Int64[Tensor, "tokens"], *, k: int, seed: int
) -> Int64[Tensor, "asked k"]:
    """The k positions whose text before them agrees longest with a context; chance decides between equals."""
    generator = np.random.default_rng(seed)
    text = train.numpy()[:-1]  # the last token has none after it
    everywhere = np.arange(len(text))
    positions = np.empty((len(contexts), k), np.int64)
    for row, context in enumerate(contexts.numpy()):
        alive = np.flatnonzero(text == context[-1])
        agreeing = [alive]  # by how many tokens they agree, at least
        for back in range(1, len(context)):
            alive = alive[alive >= back]
            alive = alive[text[alive - back] == context[-1 - back]]
            if not len(alive):
                break
            agreeing.append(alive)
        best: list[int] = []
        for some in [*reversed(agreeing), everywhere]:
            # k are enough, even if all that were drawn before are drawn again
            drawn = generator.choice(some, size=min(k, len(some)), replace=False).tolist()
            best += [position for position in drawn if position not in best][: k - len(best)]
            if len(best) == k:
                break
        positions[row] = best
    return torch.from_numpy(positions)


def by_chance(asked: int, train: Int64[Tensor, "tokens"], *, k: int, seed: int) -> Int64[Tensor, "asked k"]:
    """Any positions that have a next token."""
    return torch.from_numpy(np.random.default_rng(seed).integers(len(train) - 1, size=(asked, k)))
