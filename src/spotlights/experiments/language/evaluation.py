"""How good are the passages, honestly? And what did training add?

For random positions of the test text: how much of the text before it does a found passage share, and does the vote of
the tokens that follow the passages hit the next token?
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.experiments.language.neighbours import Asked, attended, by_chance, choose, longest_suffixes, untrained
from spotlights.experiments.language.network import LanguageModel
from spotlights.experiments.language.settings import LanguageSettings
from spotlights.experiments.language.training import TrainedLanguage
from spotlights.experiments.progress import stage

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


@dataclass(frozen=True)
class Estimate:
    """A mean over positions, and its standard error."""

    mean: float
    error: float

    @staticmethod
    def of(values: Float[np.ndarray, "asked"]) -> Estimate:
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        return Estimate(float(values.mean()), float(error))


@dataclass(frozen=True)
class Judged:
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
    judged: list[Judged]

    def of(self, how: str, kernel: str | None = None) -> Judged:
        return next(each for each in self.judged if (each.how, each.kernel) == (how, kernel))

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
    ours, judged = [], []
    for kernel in settings.kernels:
        found = attended(trained.memory, trained.model, contexts, kernel=kernel, k=NEIGHBOURS)
        ours.append(judge(found, asked, train, end=end))
        judged.append(_compared("trained", kernel, ours[-1], ours[-1]))
    with untrained(data, settings, seed=seed) as (model, memory):
        for kernel, best in zip(settings.kernels, ours, strict=True):
            found = attended(memory, model, contexts, kernel=kernel, k=NEIGHBOURS)
            judged.append(_compared("untrained", kernel, judge(found, asked, train, end=end), best))
    with stage("longest common suffixes"):
        others = {
            "longest common suffix": longest_suffixes(contexts, train, k=NEIGHBOURS, seed=seed),
            "random": by_chance(len(contexts), train, k=NEIGHBOURS, seed=seed),
        }
    judged += [_compared(how, None, judge(found, asked, train, end=end), ours[0]) for how, found in others.items()]
    right = Estimate.of((asked.said == asked.after).double().numpy())
    return Evaluation(len(contexts), NEIGHBOURS, contexts.shape[1], data.vocabulary.unit, right, judged)


def judge(positions: Int64[Tensor, "asked k"], asked: Asked, train: Int64[Tensor, "tokens"], *, end: int) -> Judgement:
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


def _compared(how: str, kernel: str | None, values: Judgement, ours: Judgement) -> Judged:
    return Judged(
        how,
        kernel,
        {name: Estimate.of(values[name]) for name in MEASURES},
        {name: Estimate.of(ours[name] - values[name]) for name in MEASURES},
    )
