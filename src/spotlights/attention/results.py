"""Answers: small objects that print as tables, plot, and convert to pandas and numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.tables import Printable, build
from spotlights.errors import SettingError

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_SHOWN_ROWS = 10

Label = int | float | str | None


@dataclass(frozen=True, repr=False)
class Top(Printable):
    """The slots (or examples) with the largest (or smallest) values, for each query and group."""

    layer: str
    what: str
    """"score", "contribution" or "influence"."""
    values: Float[Tensor, "queries groups k"]
    slots: Int64[Tensor, "queries groups k"]
    """Numbers of the slots, -1 where a group has fewer than k. With by="example", one slot of the example."""
    columns: Mapping[str, list[list[list[Label]]]]
    """For each column its values, by query, group and rank."""
    per: str | None
    groups: list[Label]
    by: str | None = None
    note: str | None = None
    largest: bool = True
    """False if these are the smallest values."""
    standard_errors: Float[Tensor, "queries groups k"] | None = None
    """Of values that are estimated from a sample of the slots."""

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One query's answer, row by row."""
        for group in range(len(self.groups)):
            for rank in range(self.values.shape[2]):
                if self.slots[query, group, rank] < 0:
                    continue
                row: dict[str, Any] = {"rank": rank + 1}
                if self.by is None:
                    row["slot"] = int(self.slots[query, group, rank])
                row[self.what] = float(self.values[query, group, rank])
                if self.standard_errors is not None:
                    row["±"] = float(self.standard_errors[query, group, rank])
                row |= {name: held[query][group][rank] for name, held in self.columns.items()}
                yield row

    def table(self) -> Any:
        return self.table_of(0)

    def table_of(self, query: int) -> Any:
        """One query's answer as a table; with groups, the first few of each."""
        shown = 3 if len(self.groups) > 1 else _SHOWN_ROWS
        rows = [row for row in self.rows(query) if row["rank"] <= shown]
        names = list(rows[0]) if rows else ["rank", self.what]
        what = "examples" if self.by else "slots"
        title = f"{'top' if self.largest else 'bottom'} {what} by {self.what} in {self.layer}"
        if len(self) > 1:
            title += f" (query {query} of {len(self)})"
        return build(title, names, ([row[name] for name in names] for row in rows), self.note)

    def numpy(self) -> np.ndarray:
        """The values, of shape (queries, k), or (queries, groups, k) with `per`."""
        values = self.values.numpy()
        return values if self.per is not None else values[:, 0]

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each query and slot."""
        return frame({"query": q, **row} for q in range(len(self)) for row in self.rows(q))

    def plot(self, query: int = 0, **options: Any) -> Figure:
        """The values in descending order, by group (the paper's figures 4 and 6)."""
        from spotlights import figures

        return figures.plot_top(self, query, **options)


@dataclass(frozen=True, repr=False)
class Totals(Printable):
    """Values summed over the slots of each group, for each query."""

    layer: str
    what: str
    column: str
    values: Float[Tensor, "queries groups"]
    counts: Int64[Tensor, "groups"]
    groups: list[Label]
    absolute: bool = False
    binned: bool = False
    note: str | None = None
    standard_errors: Float[Tensor, "queries groups"] | None = None
    """Of totals that are estimated from a sample of the slots."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def name(self) -> str:
        return f"total |{self.what}|" if self.absolute else f"total {self.what}"

    def largest(self) -> list[Label]:
        """The group with the largest total, for each query."""
        return [self.groups[index] for index in self.values.argmax(dim=1).tolist()]

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One query's answer, row by row."""
        for group, label in enumerate(self.groups):
            row: dict[str, Any] = {self.column: label, self.name: float(self.values[query, group])}
            if self.standard_errors is not None:
                row["±"] = float(self.standard_errors[query, group])
            yield {**row, "slots": int(self.counts[group])}

    def table(self) -> Any:
        return self.table_of(0)

    def table_of(self, query: int) -> Any:
        """One query's answer as a table."""
        rows = list(self.rows(query))
        note = self.note
        if len(rows) > 2 * _SHOWN_ROWS:
            rows = sorted(rows, key=lambda row: -abs(row[self.name]))[:_SHOWN_ROWS]
            note = f"{len(self.groups):,} groups; the {_SHOWN_ROWS} largest. {note or ''}".strip()
        title = f"{self.name} by {self.column} in {self.layer}"
        if len(self) > 1:
            title += f" (query {query} of {len(self)})"
        names = list(rows[0]) if rows else [self.column, self.name, "slots"]
        return build(title, names, ([row[name] for name in names] for row in rows), note)

    def numpy(self) -> np.ndarray:
        """The totals, of shape (queries, groups)."""
        return self.values.numpy()

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each query and group."""
        return frame({"query": q, **row} for q in range(len(self)) for row in self.rows(q))

    def plot(self, query: int = 0, **options: Any) -> Figure:
        """The totals as bars, or as a line over ranges (the paper's figures 5 and 7)."""
        from spotlights import figures

        return figures.plot_totals(self, query, **options)


def frame(rows: Iterator[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a data frame, or a sentence that says what to install."""
    try:
        import pandas
    except ImportError:
        raise SettingError("to_pandas() needs pandas: pip install 'spotlights[tables]'.") from None
    return pandas.DataFrame(list(rows))
