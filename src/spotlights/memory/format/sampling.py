"""Sampling: a memory that keeps some of its slots, chosen at random, and what these tell of all of them.

Each step is kept with one probability, and each slot of a kept step with another, all independently of each other and
of what they hold. The sum over the slots that were kept, divided by the probability of being kept, is then right on
average whatever is added up (Horvitz and Thompson's estimate), and its standard error follows from the same slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """Which share of a run is kept."""

    rows: float = 1.0
    """The probability of a slot in a step that is kept."""
    steps: float = 1.0
    """The probability of a step."""

    @property
    def probability(self) -> float:
        """That a slot is kept at all."""
        return self.rows * self.steps

    def __str__(self) -> str:
        of_rows = "all slots" if self.rows == 1.0 else f"{100 * self.rows:g} % of the slots"
        return of_rows if self.steps == 1.0 else f"{of_rows} of {100 * self.steps:g} % of the steps"

    def total(self, kept: Float[Tensor, "queries groups"]) -> Float[Tensor, "queries groups"]:
        """The estimate of a sum over all slots, from the sum over those that were kept."""
        return kept / self.probability

    def standard_error(
        self, squares: Float[Tensor, "queries groups"], step_squares: Float[Tensor, "queries groups"]
    ) -> Float[Tensor, "queries groups"]:
        """How far that estimate is off, typically.

        Args:
            squares: the sum over the slots that were kept of their squares.
            step_squares: the sum over the steps that were kept of the square of each one's sum.
        """
        of_rows = squares * ((1 - self.rows) / (self.steps * self.rows**2))
        of_steps = step_squares * ((1 - self.steps) / self.probability**2)
        return (of_rows + of_steps).sqrt()


class Draw:
    """What is kept of one step. The numbers follow from seed, step and process: nobody else's are used up."""

    def __init__(self, sample: Sample, seed: int, step: int, rank: int) -> None:
        self._share = sample.rows
        # A step is kept by all processes of a run or by none.
        self.keeps_step = bool(np.random.default_rng([seed, step]).random() < sample.steps)
        self._generator = np.random.default_rng([seed, step, 1 + rank])

    def rows(self, count: int) -> Int64[Tensor, "kept"]:
        """Which of some further slots of the step are kept."""
        if not self.keeps_step:
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(np.flatnonzero(self._generator.random(count) < self._share))
