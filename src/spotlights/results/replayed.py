"""Influence by exact replay: what each example's weight does to an answer, through a whole recorded training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.results.answers import Label, QueryAnswer
from spotlights.results.tables import FEW

TRUSTED = 2.0
"""Up to this growth the derivative was measured to be a good forecast of leaving out a tenth (docs/truth.md)."""


@dataclass(frozen=True, repr=False)
class ReplayedInfluence(QueryAnswer):
    """The derivative of some numbers with respect to each example's weight, in the numbers' own unit.

    Positive: without the example the number would be smaller.
    """

    examples: list[Label]
    values: Float[Tensor, "inputs examples"]
    growth: Float[Tensor, "inputs"]
    """How many times as large the adjoint of the weights has become on its way back to the first step."""
    what: str = "influence"

    @property
    def trusted(self) -> bool:
        """Whether the adjoint has grown no more than where the derivative was measured to be a good forecast."""
        return bool(self.growth.median() <= TRUSTED)

    @property
    def note(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How far to trust the numbers."""
        grown = f"the adjoint has grown {float(self.growth.median()):.3g} times"
        if self.trusted:
            return f"exact to first order, for this trajectory; {grown}"
        return f"not to be trusted: {grown}, so small changes early in training do not stay small"

    def without(self, examples: Sequence[Label]) -> Float[Tensor, "inputs"]:
        """How much each number would change without some examples."""
        places = {example: place for place, example in enumerate(self.examples)}
        unknown = [example for example in examples if example not in places]
        if unknown:
            raise SettingError(f"No example {unknown[0]!r} in this training; it had {len(places):,} examples.")
        return -self.values[:, [places[example] for example in examples]].sum(dim=1)

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One input's examples, the largest influence first."""
        order = self.values[query].argsort(descending=True, stable=True).tolist()
        for rank, place in enumerate(order, start=1):
            yield {"rank": rank, "influence": float(self.values[query, place]), "example": self.examples[place]}

    @property
    def _title(self) -> str:
        return "influence by exact replay"

    def _few(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        return rows[:FEW], self.note

    def numpy(self) -> np.ndarray:
        """Of shape (inputs, examples), in the order of `examples`."""
        return self.values.numpy()

    @staticmethod
    def of(
        by_number: dict[int, Float[Tensor, "inputs"]], growth: Tensor, names: Sequence[str] | None
    ) -> ReplayedInfluence:
        """From a value for each example's number."""
        numbers = sorted(by_number)
        examples: list[Label] = [number if names is None else names[number] for number in numbers]
        return ReplayedInfluence(examples, torch.stack([by_number[number] for number in numbers], dim=1), growth)
