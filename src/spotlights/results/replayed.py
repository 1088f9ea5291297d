"""Influence by exact replay: what each example's weight does to an answer, through a whole recorded training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.results.answers import Label
from spotlights.results.tables import FEW, Printable, build_rows, frame

if TYPE_CHECKING:
    import pandas

TRUSTED = 0.4
"""The derivative is trusted if it foretells this share of what two trainings without a random tenth changed."""


@dataclass(frozen=True, repr=False)
class ReplayedInfluence(Printable):
    """The derivative of some numbers with respect to each example's weight, in the numbers' own unit.

    Positive: without the example the number would be smaller.
    """

    examples: list[Label]
    values: Float[Tensor, "inputs examples"]
    growth: Float[Tensor, "inputs"]
    """How many times as large the adjoint of the weights has become on its way back to the first step."""
    explained: float
    """The share of the squared changes of two trainings without a random tenth that the derivative foretells: 1 is all
    of them; below 0 a forecast of no change would have been nearer."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def trusted(self) -> bool:
        """Whether leaving out examples really does what the derivative says, as far as two trainings tell."""
        return self.explained >= TRUSTED

    @property
    def note(self) -> str:
        """How far to trust the numbers."""
        checked = f"of what two trainings without a random tenth changed, it foretells {max(self.explained, 0.0):.0%}"
        grown = f"the adjoint has grown {float(self.growth.median()):.3g} times"
        trusted = "exact to first order, for this trajectory" if self.trusted else "not to be trusted"
        return f"{trusted}: {checked}; {grown}"

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

    def table(self) -> Any:
        which = f" (query 0 of {len(self)})" if len(self) > 1 else ""
        return build_rows(f"influence by exact replay{which}", list(self.rows())[:FEW], "influence", self.note)

    def numpy(self) -> np.ndarray:
        """Of shape (inputs, examples), in the order of `examples`."""
        return self.values.numpy()

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each input and example."""
        return frame({"query": q, **row} for q in range(len(self)) for row in self.rows(q))

    @staticmethod
    def of(
        found: dict[int, Float[Tensor, "inputs"]], growth: Tensor, explained: float, names: Sequence[str] | None
    ) -> ReplayedInfluence:
        """From a value for each example's number."""
        numbers = sorted(found)
        examples: list[Label] = [number if names is None else names[number] for number in numbers]
        return ReplayedInfluence(examples, torch.stack([found[number] for number in numbers], dim=1), growth, explained)
