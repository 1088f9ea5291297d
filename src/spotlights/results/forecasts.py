"""Forecasts: numbers of interest after retraining without a group, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from spotlights.results.tables import FEW, Printable, RowAnswer, build, build_rows


@dataclass(frozen=True, repr=False)
class Forecast(RowAnswer):
    """What some numbers will be after retraining without a group, each with an interval of 95 %."""

    before: Float[Tensor, "inputs"]
    """What the network says now."""
    after: Float[Tensor, "inputs"]
    """The forecast."""
    low: Float[Tensor, "inputs"]
    high: Float[Tensor, "inputs"]
    examples: int
    """How many are left out."""
    without: Mapping[str, Any]
    note: str
    """Where the size and the interval come from."""

    def __len__(self) -> int:
        return len(self.after)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each input."""
        columns = (self.before, self.after, self.low, self.high)
        for number, (before, after, low, high) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            yield {"input": number, "now": before, "forecast": after, "from": low, "to": high}

    def table(self) -> Any:
        left_out = ", ".join(f"{column}={value}" for column, value in self.without.items())
        rows = list(self.rows())[:FEW]
        title = f"retrained without {left_out} ({self.examples:,} examples)"
        return build_rows(title, rows, "forecast", f"an estimate with an interval of 95 %; {self.note}")


@dataclass(frozen=True, repr=False)
class Calibration(Printable):
    """What a few retrainings said about the size of influence; kept with the memory."""

    scale: float
    """The change of the number for an influence of 1."""
    noise: float
    """The standard deviation between this network's answer and that of another one trained on all examples."""
    error: float
    """The standard deviation of a forecast's error beyond the noise, for a forecast change of 1."""
    halves: int
    seeds: int
    inputs: int
    steps: int
    """Of the memory."""

    def table(self) -> Any:
        rows = [[self.scale, self.noise, self.error]]
        note = f"from {self.halves} halves and {self.seeds} other seeds, on {self.inputs} inputs"
        return build("calibration", ["change for an influence of 1", "noise of seeds", "error beyond it"], rows, note)
