"""Suspects: training examples that look mislabelled, as people and programs see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.results.answers import Label
from spotlights.results.table_files import write_csv
from spotlights.results.tables import RowAnswer, build_rows, first_rows, layer_named

NOTE = "a ranking, not a verdict: hard and rare examples rank high too; look at them"


@dataclass(frozen=True, repr=False)
class Suspects(RowAnswer):
    """Training examples, the most suspicious first."""

    layer: str
    """The layer whose errors were added up."""
    examples: list[Label]
    scores: Float[Tensor, "k"]
    """The sum over visits of the norm of the error."""
    visits: Int64[Tensor, "k"]
    answers: list[int | None]
    """The class that the network said instead, over all visits; None where errors are not those of classes."""
    agreement: list[float | None]
    """At which share of its visits the network's first answer was the label; None where errors do not tell."""
    rivals: list[list[Label]]
    """The nearest training examples of other classes, as the layer that answers sees them."""
    columns: Mapping[str, list[Label]]
    """The other columns of each example, such as its label."""
    note: str = NOTE
    """What a reader of the ranking must know."""

    def __len__(self) -> int:
        return len(self.examples)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each example."""
        for index, example in enumerate(self.examples):
            yield {
                "rank": index + 1,
                "example": example,
                **{name: held[index] for name, held in self.columns.items()},
                "network says": self.answers[index],
                "agreement": self.agreement[index],
                "nearest that disagree": " ".join(map(str, self.rivals[index])),
                "suspicion": float(self.scores[index]),
                "visits": int(self.visits[index]),
            }

    def table(self) -> Any:
        rows = first_rows(list(self.rows()))
        some = f" (the first {len(rows)} of {len(self):,})" if len(rows) < len(self) else ""
        return build_rows(f"suspects by the errors of {layer_named(self.layer)}{some}", rows, "suspicion", self.note)

    def to_csv(self, path: str | Path) -> Path:
        """Writes one line for each example."""
        return write_csv(self.rows(), path)
