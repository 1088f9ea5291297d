"""What is measured: one number for each query and slot of a layer, and how questions about it are answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping, column_values
from spotlights.attention.questions import AskTop, AskTotals, Question
from spotlights.attention.reducers import ScoresReducer
from spotlights.attention.results import Top, Totals
from spotlights.attention.scan import Job, Values, scan
from spotlights.attention.unrolled import Unrolled, unroll
from spotlights.errors import SettingError, TooLargeError
from spotlights.memory.reader import LayerReader, MemoryReader
from spotlights.memory.selection import Selection

MAX_SCORES_BYTES = 1 << 30
_QUERIES_AT_ONCE = 1024
_TABLE_BYTES = 256 << 20


@dataclass(frozen=True)
class View:
    """Some slots of a memory, as of some step."""

    reader: MemoryReader
    selection: Selection
    until: int

    def unrolled(self, layer: str) -> Unrolled:
        return unroll(self.reader, layer, self.until)

    def strings(self, column: str) -> list[str]:
        return self.reader.manifest.columns[column].strings


class Measure(ABC):
    """One number for each query and slot of a layer; subclasses say which."""

    what: str

    def __init__(
        self, view: View, layer: LayerReader, queries: Float[Tensor, "queries in_features"]
    ) -> None:
        self.view = view
        self.layer = layer
        self.queries = queries
        self._groupings: dict[tuple[str, int | None], Grouping] = {}

    @property
    def note(self) -> str | None:
        """What a reader of the numbers must know."""
        storage = self.layer.storage
        if storage.name in ("float16", "int8"):
            return f"keys and errors were stored as {storage.name}: values are approximate"
        return None

    @abstractmethod
    def values(self, chosen: slice) -> Values:
        """How to compute the values of a block, for some of the queries."""

    def grouping(self, column: str, bins: int | None = None) -> Grouping:
        if (column, bins) not in self._groupings:
            self.layer.column_kind(column)  # an unknown column gets its error here
            self._groupings[column, bins] = Grouping(
                self.layer, column, self.view.strings(column), bins
            )
        return self._groupings[column, bins]

    def columns_at(
        self, slots: Int64[Tensor, "queries groups k"]
    ) -> dict[str, list[list[list[Any]]]]:
        """Every column's values for some slots, in the order a table shows them."""
        known = self.view.reader.manifest.columns
        names = [n for n in ("step", "example", "position") if n in known]
        names += [name for name in known if name not in names]
        result = {}
        for name in names:
            found = self.layer.column_at(name, slots.clamp_min(0)).reshape(-1)
            flat = column_values(found, known[name].kind, known[name].strings)
            if any(value is not None for value in flat):
                result[name] = _nested(flat, slots.shape)
        return result

    def query_batches(self) -> Iterator[slice]:
        size = _QUERIES_AT_ONCE
        if self.layer.entry.indexed:
            size = max(1, min(size, _TABLE_BYTES // (4 * max(self.layer.distinct_keys, 1))))
        for start in range(0, len(self.queries), size):
            yield slice(start, min(start + size, len(self.queries)))

    # -- asking ------------------------------------------------------------------------------

    def ask(self, *questions: Question) -> list[Any]:
        """Answers several questions in one scan."""
        return ask([self], questions)[0]

    def top(self, k: int = 10, *, by: str | None = None, per: str | None = None) -> Top:
        """The k slots with the largest values.

        Args:
            k: how many, for each query (and group).
            by: "example" (or another column): add up the slots with the same value first.
            per: a column: the k largest for each of its values.
        """
        return self._top(k, by=by, per=per, largest=True)

    def _top(self, k: int, *, by: str | None, per: str | None, largest: bool) -> Top:
        if by is None:
            return self.ask(AskTop(k, per, largest))[0]
        if per is not None:
            raise SettingError("Give by= or per=, not both: by= adds up slots, per= divides them.")
        return _top_of(self, self.totals(by), k, largest)

    def totals(self, column: str, *, absolute: bool = False, bins: int | None = None) -> Totals:
        """Values summed over the slots of each value of a column.

        Args:
            column: "label", "step", or any other column.
            absolute: sum magnitudes instead.
            bins: that many ranges of a numerical column instead of its single values.
        """
        return self.ask(AskTotals(column, absolute, bins))[0]

    def _all(self, what: str) -> tuple[Float[Tensor, "queries slots"], Int64[Tensor, "slots"]]:
        size = len(self.queries) * self.layer.slots * self.layer.storage.compute_dtype.itemsize
        if size > MAX_SCORES_BYTES:
            raise TooLargeError(
                f"{what} of {len(self.queries):,} queries with {self.layer.slots:,} slots would take "
                f"{size / 2**30:.1f} GB. Use top() or totals(), which need no such table, or fewer queries, or a "
                "smaller view (where(…))."
            )
        reducer = ScoresReducer()
        everything = slice(0, len(self.queries))
        scan(
            [
                Job(
                    self.layer,
                    self.view.selection,
                    len(self.queries),
                    self.values(everything),
                    [reducer],
                )
            ]
        )
        return reducer.result(len(self.queries))


def ask(measures: Sequence[Measure], questions: Sequence[Question]) -> list[list[Any]]:
    """Answers the questions about several layers, each batch of queries in one scan over all of them."""
    batches = [list(measure.query_batches()) for measure in measures]
    held: list[list[list[Any]]] = [[[] for _ in questions] for _ in measures]
    for index in range(max(map(len, batches), default=0)):
        jobs = []
        for measure, mine, parts in zip(measures, batches, held, strict=True):
            if index >= len(mine):
                continue
            chosen = mine[index]
            count = chosen.stop - chosen.start
            reducers = [question.reducer(measure, count) for question in questions]
            jobs.append(
                Job(measure.layer, measure.view.selection, count, measure.values(chosen), reducers)
            )
            for part, reducer in zip(parts, reducers, strict=True):
                part.append((reducer, count))
        scan(jobs)
    return [
        [question.answer(measure, part) for question, part in zip(questions, parts, strict=True)]
        for measure, parts in zip(measures, held, strict=True)
    ]


def _top_of(measure: Measure, totals: Totals, k: int, largest: bool) -> Top:
    """The groups with the largest totals, each shown with one of its slots."""
    k = min(k, len(totals.groups))
    values, where = totals.values.topk(k, dim=1, largest=largest)
    representative = measure.layer.first_slots(totals.column)
    slots = representative[where][:, None]
    columns = measure.columns_at(slots)
    columns.pop("step", None)
    counts = totals.counts[where]
    flat = [totals.groups[index] for index in where.reshape(-1).tolist()]
    visits = _nested(counts.reshape(-1).tolist(), slots.shape)
    columns = {totals.column: _nested(flat, slots.shape), "visits": visits} | {
        name: held for name, held in columns.items() if name != totals.column
    }
    return Top(
        totals.layer,
        totals.what,
        values[:, None],
        slots,
        columns,
        None,
        [None],
        totals.column,
        totals.note,
    )


def _nested(flat: list[Any], shape: torch.Size) -> list[list[list[Any]]]:
    _, groups, k = shape
    rows = (
        [flat[start : start + k] for start in range(0, len(flat), k)]
        if k
        else [[]] * (len(flat) or groups)
    )
    return [rows[start : start + groups] for start in range(0, len(rows), groups)]
