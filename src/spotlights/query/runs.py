"""Influence from several runs: the mean, and how far runs that differ in nothing but their seed disagree.

One run's estimate is about the network that its seed led to. What depends on the seed is noise for whoever retrains,
and the mean over runs has less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spotlights.errors import SettingError, UnsupportedError
from spotlights.query.forward import Target
from spotlights.query.influence import Influence
from spotlights.query.measured import LayerMeasured, OfExamples, Question, all_groups
from spotlights.results.answers import Top, Totals

if TYPE_CHECKING:
    from spotlights.api import Memory


def influence(
    memories: Sequence[Memory], models: Sequence[nn.Module], inputs: Any, *, target: Target, **options: Any
) -> RunsInfluence:
    """The mean influence over several runs of one training, with its standard error.

    Runs differ in their seed, and share the examples and their ids. A run need not have seen every example.

    Args:
        memories: one memory for each run.
        models: the trained network of each run, in the same order.
        inputs: a batch, or a tuple or dict of the model's arguments.
        target: the number of interest, as for `Spotlights.influence`.
        options: the other arguments of `Spotlights.influence`.
    """
    if len(memories) != len(models) or len(memories) < 2:
        raise SettingError(
            f"influence() got {len(memories)} memories and {len(models)} models. "
            "Give at least two runs, and one model for each memory."
        )
    pairs = zip(memories, models, strict=True)
    return RunsInfluence([memory.attend(model, inputs).influence(target, **options) for memory, model in pairs])


class RunsInfluence(OfExamples):
    """The mean of the influence that each of several runs gives; made by `influence`."""

    what = "influence"
    signed = True

    def __init__(self, runs: Sequence[Influence]) -> None:
        self.runs = list(runs)
        """Each run's own estimate."""

    def __len__(self) -> int:
        return len(self.runs[0])

    @property
    def layer(self) -> str:
        return self.runs[0].layer

    @property
    def note(self) -> str:
        runs = f"mean of {len(self.runs)} runs, ± its standard error"
        return "; ".join(filter(None, [runs, self.runs[0].note]))

    def ask(self, *questions: Question) -> list[Totals]:
        """Answers several questions about totals."""
        answers = [run.ask(*questions) for run in self.runs]
        return [replace(mean_of(of_runs), note=self.note) for of_runs in zip(*answers, strict=True)]

    def numpy(self) -> Any:
        """Of shape (queries, examples), in the order of `totals("example").groups`."""
        return self.totals("example").numpy()

    def rank(self, totals: Totals, k: int = 10, *, largest: bool = True) -> Top:
        """The k groups with the largest (or smallest) of some totals; what they have in common, the first run says."""
        return self.runs[0].rank(totals, k, largest=largest)

    def _layers(self) -> Sequence[LayerMeasured]:
        raise UnsupportedError("Each run has layers of its own: ask one of `.runs`.")

    def __repr__(self) -> str:
        return f"RunsInfluence({len(self)} inputs; {self.note})"


def mean_of(runs: Sequence[Totals]) -> Totals:
    """The mean of some totals, which may know different groups, with its standard error: NaN for what one run knows."""
    labels, places = all_groups([totals.groups for totals in runs])
    values = torch.full((len(runs), len(runs[0]), len(labels)), float("nan"), dtype=torch.float64)
    counts = torch.zeros(len(labels), dtype=torch.int64)
    for of_run, totals, where in zip(values, runs, places, strict=True):
        of_run[:, where] = totals.values
        counts[where] += totals.counts
    mean, known = values.nanmean(dim=0), (~values.isnan()).sum(dim=0)
    errors = (values - mean).square().nansum(dim=0) / (known - 1) / known
    return replace(runs[0], groups=labels, values=mean, counts=counts, standard_errors=errors.sqrt())
