"""What is measured: one number for each query and slot of a layer, and how questions are answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping, column_values
from spotlights.attention.questions import AskTop, AskTotals, Question
from spotlights.attention.reducers import ScoresReducer, largest_first_in_order
from spotlights.attention.results import Top, Totals
from spotlights.attention.scan import Job, SweptValues, Values, WholeSteps, scan
from spotlights.attention.unrolled import Unrolled, unroll
from spotlights.attention.visits import Visits
from spotlights.errors import SettingError, TooLargeError
from spotlights.memory.columns import VISITS
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.memory.sampling import Sample
from spotlights.memory.selection import Everything, Selection

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

    @property
    def slots(self) -> int:
        """How many there are, in the layer that has most of them."""
        every = isinstance(self.selection, Everything)
        layers = self.reader.layers.values()
        return max((layer.slots if every else layer.count(self.selection) for layer in layers), default=0)

    def strings(self, column: str) -> list[str]:
        return self.reader.manifest.columns[column].strings


class Measure(ABC):
    """One number for each query and slot of a layer; subclasses say which."""

    what: str

    def __init__(self, view: View, layer: LayerReader, queries: Float[Tensor, "queries in_features"]) -> None:
        self.view = view
        self.layer = layer
        self.queries = queries
        self._groupings: dict[tuple[str, int | None], Grouping] = {}

    @property
    def sample(self) -> Sample | None:
        """Which share of the slots there is; None if it is all."""
        return self.view.reader.manifest.sample

    @property
    def note(self) -> str | None:
        """What a reader of the numbers must know."""
        notes = []
        fold, storage = self.view.reader.manifest.fold, self.layer.storage
        if fold is not None:
            notes.append(f"folded: a slot is an example, its {self.what} the sum over its visits in {fold.span}")
        if self.sample is not None:
            notes.append(f"a sample: {self.sample} were kept; totals are estimates, ± their standard error")
        if storage.name in ("float16", "int8"):
            notes.append(f"keys and errors were stored as {storage.name}: values are approximate")
        return "; ".join(notes) or None

    @abstractmethod
    def values(self, chosen: slice) -> Values | SweptValues:
        """How to compute the values of a block, for some of the queries."""

    def grouping(self, column: str, bins: int | None = None) -> Grouping:
        if (column, bins) not in self._groupings:
            self.layer.column_kind(column)  # an unknown column gets its error here
            self._groupings[column, bins] = Grouping(self.layer, column, self.view.strings(column), bins)
        return self._groupings[column, bins]

    @property
    def column_names(self) -> list[str]:
        """In the order that a table shows them."""
        known = self.view.reader.manifest.columns
        first = [name for name in ("step", "example", "position") if name in known]
        return first + [name for name in known if name not in first]

    def columns_at(self, slots: Int64[Tensor, "queries groups k"]) -> SlotColumns:
        """Every column's values for some slots."""
        return SlotColumns(self, slots)

    def query_batches(self) -> Iterator[slice]:
        size = _QUERIES_AT_ONCE
        if self.layer.entry.indexed:
            size = max(1, min(size, _TABLE_BYTES // (4 * max(self.layer.distinct_keys, 1))))
        for start in range(0, max(len(self.queries), 1), size):
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
        if k < 1:
            raise SettingError(f"top({k}): ask for at least one {by}.")
        return top_of(self, self.totals(by), k, largest)

    def totals(self, column: str, *, absolute: bool = False, bins: int | None = None) -> Totals:
        """Values summed over the slots of each value of a column.

        Args:
            column: "label", "step", or any other column.
            absolute: sum magnitudes instead.
            bins: that many ranges of a numerical column instead of its single values.
        """
        return self.ask(AskTotals(column, absolute, bins))[0]

    def _all(self, what: str) -> tuple[Float[Tensor, "queries slots"], Int64[Tensor, "slots"]]:
        per_slot = len(self.queries) * self.layer.storage.compute_dtype.itemsize
        slots = self.layer.slots
        if slots * per_slot > MAX_SCORES_BYTES:
            slots = self.layer.count(self.view.selection)
        size = slots * per_slot
        if size > MAX_SCORES_BYTES:
            raise TooLargeError(
                f"{what} of {len(self.queries):,} queries with {slots:,} slots would take "
                f"{size / 2**30:.1f} GB. Use top() or totals(), which need no such table, "
                "or fewer queries, or a smaller view (where(…))."
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
            values = measure.values(chosen)
            if measure.sample is not None and not isinstance(values, SweptValues):
                values = WholeSteps(measure.layer, values, measure.view.until)
            jobs.append(Job(measure.layer, measure.view.selection, count, values, reducers))
            for part, reducer in zip(parts, reducers, strict=True):
                part.append((reducer, count))
        scan(jobs)
    return [
        [question.answer(measure, part) for question, part in zip(questions, parts, strict=True)]
        for measure, parts in zip(measures, held, strict=True)
    ]


def top_of(measure: Measure, totals: Totals, k: int, largest: bool) -> Top:
    """The groups with the largest totals, and what their slots have in common; the first seen wins a tie."""
    representative = measure.layer.first_slots(totals.column)
    seen = totals.counts.nonzero().flatten()  # a group without slots in the view has no total
    seen = seen[torch.from_numpy(representative[seen].numpy().argsort())]  # without calling other threads
    sums = totals.values[:, seen] if largest else -totals.values[:, seen]
    kept = largest_first_in_order(sums, min(k, len(seen)))
    values, order = sums.gather(1, kept).sort(dim=1, descending=True, stable=True)
    values = values if largest else -values
    where = seen[kept.gather(1, order)]
    seen_in_view = Visits(measure.layer, measure.view, measure.grouping(totals.column), where)
    slots = seen_in_view.first_slots[:, None]
    counts = totals.counts[where]
    flat = [totals.groups[index] for index in where.reshape(-1).tolist()]
    visits = nested(counts.reshape(-1).tolist(), slots.shape)
    columns = {totals.column: nested(flat, slots.shape), VISITS: visits}
    for name in measure.column_names:
        agreed = seen_in_view.agreed(name) if name not in (totals.column, "step", VISITS) else []
        if any(value is not None for value in agreed):
            columns[name] = nested(agreed, slots.shape)
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
        largest,
        None if totals.standard_errors is None else totals.standard_errors.gather(1, where)[:, None],
    )


class SlotColumns(Mapping[str, list[list[list[Any]]]]):
    """The columns of some slots, by query, group and rank; each is read when it is first asked for."""

    def __init__(self, measure: Measure, slots: Int64[Tensor, "queries groups k"]) -> None:
        self._measure = measure
        self._slots = slots
        self._read: dict[str, list[list[list[Any]]]] = {}

    @cached_property
    def _names(self) -> list[str]:
        """In the order that a table shows them; without those that these slots do not have."""
        names = self._measure.column_names
        return [n for n in names if any(v is not None for q in self._column(n) for g in q for v in g)]

    def _column(self, name: str) -> list[list[list[Any]]]:
        if name not in self._read:
            measure = self._measure
            entry = measure.view.reader.manifest.columns[name]
            found = measure.layer.column_at(name, self._slots.clamp_min(0)).reshape(-1)
            self._read[name] = nested(column_values(found, entry.kind, entry.strings), self._slots.shape)
        return self._read[name]

    def __getitem__(self, name: str) -> list[list[list[Any]]]:
        if name not in self._measure.view.reader.manifest.columns:
            raise KeyError(name)
        return self._column(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def nested(flat: list[Any], shape: torch.Size) -> list[list[list[Any]]]:
    _, groups, k = shape
    rows = [flat[start : start + k] for start in range(0, len(flat), k)] if k else [[]] * (len(flat) or groups)
    return [rows[start : start + groups] for start in range(0, len(rows), groups)]
