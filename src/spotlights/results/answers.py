"""Answers for each query: small objects that print as tables, plot, and convert to pandas and numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.results.tables import FEW, Printable, build_rows, first_rows, frame, layer_named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from spotlights.figures import TopPanel, TotalsPanel

Label = int | float | str | None


LARGE_KAPPA = 100.0
"""From here on a sum says how much of it cancels."""


def kappa(magnitudes: Float[Tensor, "queries"], sums: Float[Tensor, "queries"]) -> Float[Tensor, "queries"]:
    """`κ = Σ|value| / |Σ value|`: 1 where nothing cancels."""
    return (magnitudes.double() / sums.double().abs()).nan_to_num(1.0, posinf=float("inf"))


class QueryAnswer(Printable):
    """Rows for each query; printed are those of the first."""

    layer: str
    what: str
    values: Tensor
    note: str | None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def _title(self) -> str:
        raise NotImplementedError

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One query's answer, row by row."""
        raise NotImplementedError

    def table(self) -> Any:
        """The first query's answer as a table; of many rows, the first or the largest few."""
        rows, note = self._few(list(self.rows()))
        which = f" (query 0 of {len(self)})" if len(self) > 1 else ""
        return build_rows(self._title + which, rows, self.what, note)

    def _few(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        return rows, self.note

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each query and row."""
        return frame({"query": q, **row} for q in range(len(self)) for row in self.rows(q))


def check_query(query: int, count: int, what: str = "queries") -> None:
    """Refuses a query, or another number of interest, that does not exist."""
    if not -count <= query < count:
        raise SettingError(f"query={query}: there are {count} {what}, 0 to {count - 1}.")


@dataclass(frozen=True, repr=False)
class Top(QueryAnswer):
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

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One query's answer, row by row."""
        values, slots = self.values[query].tolist(), self.slots[query].tolist()
        errors = None if self.standard_errors is None else self.standard_errors[query].tolist()
        for group in range(len(self.groups)):
            for rank, slot in enumerate(slots[group]):
                if slot < 0:
                    continue
                row: dict[str, Any] = {"rank": rank + 1} if self.by is not None else {"rank": rank + 1, "slot": slot}
                row[self.what] = values[group][rank]
                if errors is not None:
                    row["±"] = errors[group][rank]
                for name, held in self.columns.items():
                    row[name] = held[query][group][rank]
                yield row

    @property
    def _title(self) -> str:
        return f"{'top' if self.largest else 'bottom'} {self._what} by {self.what} in {layer_named(self.layer)}"

    @property
    def _what(self) -> str:
        return "examples" if self.by else "slots"

    def _few(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        few = [row for row in rows if row["rank"] <= 3] if len(self.groups) > 1 else first_rows(rows)
        return few, self.note

    def numpy(self) -> np.ndarray:
        """The values, of shape (queries, k), or (queries, groups, k) with `per`."""
        values = self.values.numpy()
        return values if self.per is not None else values[:, 0]

    def panel(self, query: int = 0) -> TopPanel:
        """One query's values as the functions of `spotlights.figures` take them."""
        from spotlights.figures import TopPanel

        check_query(query, len(self))
        values = self.values[query].where(self.slots[query] >= 0, float("nan")).numpy()
        of_each = f" of each {self.per}" if self.per else ""
        title = f"{self.what}s of the top {values.shape[1]} {self._what}{of_each} in {layer_named(self.layer)}"
        return TopPanel(values, self.groups, self.what, self.per, title, self.note)

    def plot(self, query: int = 0, **options: Any) -> Figure:
        """The values in descending order, by group (the paper's figures 4 and 6)."""
        from spotlights import figures

        return figures.plot_top(self.panel(query), **options)


@dataclass(frozen=True, repr=False)
class Totals(QueryAnswer):
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

    @property
    def kappa(self) -> Float[Tensor, "queries"]:
        """`κ = Σ|total| / |Σ total|` over the groups: how much of the groups' totals cancels."""
        return kappa(self.values.abs().sum(dim=1), self.values.sum(dim=1))

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

    @property
    def _title(self) -> str:
        return f"{self.name} by {self.column} in {layer_named(self.layer)}"

    def _few(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        if len(rows) <= 2 * FEW:
            return rows, self.note
        note = f"{len(rows):,} groups; the {FEW} largest. {self.note or ''}".strip()
        return sorted(rows, key=lambda row: -abs(row[self.name]))[:FEW], note

    def numpy(self) -> np.ndarray:
        """The totals, of shape (queries, groups)."""
        return self.values.numpy()

    def panel(self, query: int = 0) -> TotalsPanel:
        """One query's totals as the functions of `spotlights.figures` take them."""
        from spotlights.figures import TotalsPanel

        check_query(query, len(self))
        return TotalsPanel(
            self.values[query].numpy(),
            self.groups,
            self.name,
            self.column,
            self._title,
            binned=self.binned,
            signed=self.what == "contribution" and not self.absolute,
            errors=None if self.standard_errors is None else self.standard_errors[query].numpy(),
            note=self.note,
        )

    def plot(self, query: int = 0, **options: Any) -> Figure:
        """The totals as bars, or as a line over ranges (the paper's figures 5 and 7)."""
        from spotlights import figures

        return figures.plot_totals(self.panel(query), **options)


@dataclass(frozen=True)
class ExampleVisits:
    """When training visited an example, and what is known of it; made by `Memory.visits`."""

    example: int
    columns: dict[str, Label]
    """The other columns of its first slot, such as its label."""
    steps: list[int]
    """The steps of its visits; empty for a folded memory, which does not know them."""
