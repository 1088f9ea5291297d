"""What has been measured: one number for each query and slot, and the questions that can be asked about them.

Several questions can share one pass over the slots (`ask`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import SettingError, TooLargeError, UnsupportedError
from spotlights.memory.blocks import OneOf
from spotlights.memory.format.columns import MISSING_INT
from spotlights.memory.format.sampling import Sample
from spotlights.memory.layer_reader import LayerReader
from spotlights.query.columns import Grouping, SlotColumns, grouping, join_tops, top_groups
from spotlights.query.engine import View
from spotlights.query.measures import Absolute, Known
from spotlights.query.plan import Measure, Plan
from spotlights.query.reducers import (
    AllValuesReducer,
    Reducer,
    SampledTotalsReducer,
    TopReducer,
    TotalsReducer,
)
from spotlights.results.answers import LARGE_KAPPA, Label, Top, Totals
from spotlights.sparse_rows import Numbers

if TYPE_CHECKING:
    from spotlights.api import Memory

MAX_VALUES_BYTES = 1 << 30
QUERIES_AT_ONCE = 1024
_TABLE_BYTES = 256 << 20


class Measured(ABC):
    """Values of training slots for some queries: scores, contributions or influence."""

    what: str
    """"score", "contribution" or "influence"."""
    signed: bool = False
    """Whether values speak for or against a number of interest."""

    @property
    @abstractmethod
    def layer(self) -> str:
        """The name of the layer, or "all layers"."""

    @property
    @abstractmethod
    def note(self) -> str | None:
        """What a reader of the numbers must know."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of queries."""

    @abstractmethod
    def ask(self, *questions: Question) -> list[Any]:
        """Answers several questions in one pass."""

    @abstractmethod
    def _layers(self) -> Sequence[LayerMeasured]:
        """The layers whose values are added up."""

    def totals(self, column: str, *, absolute: bool = False, bins: int | None = None) -> Totals:
        """Values summed over the slots of each value of a column.

        Args:
            column: "label", "step", or any other column.
            absolute: sum magnitudes instead.
            bins: that many ranges of a numerical column instead of its single values.
        """
        return self.ask(AskTotals(column, absolute, bins))[0]

    def top(self, k: int = 10, *, by: str | None = None, per: str | None = None) -> Top:
        """The k slots with the largest values.

        Args:
            k: how many, for each query (and group).
            by: "example" (or another column): add up the slots with the same value first.
            per: a column: the k largest for each of its values.
        """
        return self._top(k, by, per, largest=True)

    def bottom(self, k: int = 10, *, by: str | None = None, per: str | None = None) -> Top:
        """The k slots with the smallest values: those that speak most against the number; arguments as in `top`."""
        return self._top(k, by, per, largest=False)

    def _top(self, k: int, by: str | None, per: str | None, *, largest: bool) -> Top:
        if by is None:
            return self.ask(AskTop(k, per, largest))[0]
        if per is not None:
            raise SettingError("Give by= or per=, not both: by= adds up slots, per= divides them.")
        if k < 1:
            raise SettingError(f"top({k}): ask for at least one {by}.")
        totals = self.totals(by)
        shared = self._without_example() if by == "example" and None in totals.groups else None
        if shared is None:
            return self.rank(totals, k, largest=largest)
        # Slots of no example are those of all examples at once: each position by itself.
        none = totals.groups.index(None)
        own = [place for place in range(len(totals.groups)) if place != none]
        counts = totals.counts.clone()
        counts[none] = 0
        tops = [self.rank(replace(totals, counts=counts), k, largest=largest)] if own else []
        return join_tops([*tops, shared.rank(shared.totals("position"), k, largest=largest)], k, "example")

    def rank(self, totals: Totals, k: int = 10, *, largest: bool = True) -> Top:
        """The k groups with the largest (or smallest) of some totals of these values; `top(by=…)` adds up itself."""
        return top_groups([(part.view, part.recorded) for part in self._layers()], totals, k, largest=largest)

    def _without_example(self) -> Measured | None:
        """The values of the slots that belong to no example, if they have positions."""
        return None

    def total(self) -> Float[Tensor, "queries"]:
        """The sum over all slots of the view.

        Of a sampled memory the sum is an estimate; `totals("step", bins=1)` has its standard error too.
        """
        return self.totals("step", bins=1).values.sum(dim=1)


M = TypeVar("M", bound="LayerMeasured")


class LayerMeasured(Measured):
    """One layer's values; subclasses say which."""

    def __init__(self, view: View, recorded: LayerReader, queries: Numbers) -> None:
        self.view = view
        self.recorded = recorded
        """The layer in the memory."""
        self.queries = queries
        self._magnitudes = False
        self._kept: Float[Tensor, "queries slots"] | None = None
        """The values of all slots, once they have been computed and kept."""

    @abstractmethod
    def measure(self, some: slice) -> Measure:
        """What a slot's values are, for some of the queries."""

    def _with(self: M, **changed: Any) -> M:
        """A copy with some attributes changed."""
        other = copy.copy(self)
        vars(other).update(changed)
        return other

    @property
    def layer(self) -> str:
        return self.recorded.name

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def sample(self) -> Sample | None:
        """Which share of the slots the memory has; None if it has all."""
        return self.view.reader.manifest.sample

    @property
    def note(self) -> str | None:
        notes = []
        fold, storage = self.view.reader.manifest.fold, self.recorded.storage
        if fold is not None:
            what = self.what.strip("|")
            notes.append(f"folded: a slot is an example, its {what} the sum over its visits in {fold.span}")
        if self.sample is not None:
            notes.append(f"a sample: {self.sample} were kept; totals are estimates, ± their standard error")
        if storage.lossy:
            notes.append(f"keys and errors were stored as {storage.name}: values are approximate")
        notes.append(self.view.reader.manifest.slots_note)
        return "; ".join(filter(None, notes)) or None

    # -- asking ------------------------------------------------------------------------------

    def ask(self, *questions: Question) -> list[Any]:
        """Answers several questions in one pass."""
        return ask([self], questions)[0]

    def numpy(self) -> Any:
        """The value of every slot, of shape (queries, slots)."""
        return self._values_and_slots()[0].numpy()

    def keep(self: M) -> M:
        """The same values, computed once: further questions need no pass over keys and errors.

        What is kept has its size (`nbytes`), and can be asked about other slots: `within(memory.where(…))`.
        """
        values, slots = self._values_and_slots()
        if len(slots) < self.recorded.slots:  # looked up by the number of the slot
            values = values.new_zeros(len(values), self.recorded.slots).index_copy_(1, slots, values)
        return self._with(_kept=values)

    @property
    def nbytes(self) -> int:
        """What kept values take in main memory."""
        return 0 if self._kept is None else self._kept.nbytes

    def within(self: M, memory: Memory) -> M:
        """The same kept values, for the slots of another view of the memory."""
        return self.seen_from(memory.view)

    def seen_from(self: M, view: View) -> M:
        """The same values, for the slots of another view."""
        return self._with(view=view)

    def absolute(self: M) -> M:
        """The magnitudes of the values."""
        return self._with(what=f"|{self.what}|", signed=False, _magnitudes=True)

    def values(self, some: slice) -> Measure:
        """What is asked about: the measure, what was kept of it, or its magnitude."""
        measure = self.measure(some) if self._kept is None else Known(self._kept[some])
        return Absolute(measure) if self._magnitudes else measure

    def _values_and_slots(self) -> tuple[Float[Tensor, "queries slots"], Int64[Tensor, "slots"]]:
        """The value of every slot of the view, in the order of their numbers, and these."""
        per_slot = len(self) * self.recorded.storage.compute_dtype.itemsize
        slots = self.recorded.slots
        if slots * per_slot > MAX_VALUES_BYTES:
            slots = self.view.count(self.layer)
        if slots * per_slot > MAX_VALUES_BYTES:
            raise TooLargeError(
                f"A {self.what} for each of {len(self):,} queries and {slots:,} slots would take "
                f"{slots * per_slot / 2**30:.1f} GB. Use top() or totals(), which need no such table, "
                "or fewer queries, or a smaller view (where(…))."
            )
        reducer = AllValuesReducer(len(self))
        return self.view.reduce(self.layer, reducer, self.values(slice(0, len(self)))).result()

    def _layers(self) -> Sequence[LayerMeasured]:
        return [self]

    def _without_example(self) -> Measured | None:
        if "position" not in self.view.reader.manifest.columns or self.view.reader.manifest.fold is not None:
            return None
        shared = self._with(view=self.view.where(OneOf("example", (MISSING_INT,), "none")))
        return shared if None not in shared.totals("position").groups else None

    # -- what questions need -----------------------------------------------------------------

    def grouping(self, column: str, bins: int | None = None) -> Grouping:
        return grouping(self.view, self.recorded, column, bins)

    def query_batches(self) -> Iterator[slice]:
        size = QUERIES_AT_ONCE
        if self.recorded.entry.indexed:
            size = max(1, min(size, _TABLE_BYTES // (4 * max(self.recorded.distinct_keys, 1))))
        for start in range(0, max(len(self), 1), size):
            yield slice(start, min(start + size, len(self)))


class OfExamples(Measured):
    """Values of examples and other groups, not of single slots."""

    def top(self, k: int = 10, *, by: str | None = "example", per: str | None = None) -> Top:
        """The k examples with the largest values: those that add most to the number."""
        return self._top(k, by, per, largest=True)

    def bottom(self, k: int = 10, *, by: str | None = "example", per: str | None = None) -> Top:
        """The k examples with the smallest values: those that take most away from the number."""
        return self._top(k, by, per, largest=False)


class OverLayers(OfExamples):
    """Values that are added up over layers, and over the visits of an example: of groups, not of single slots."""

    def __init__(self, parts: Sequence[LayerMeasured]) -> None:
        self._parts = parts
        self._totals: dict[tuple[str, int | None], Totals] = {}

    @abstractmethod
    def _of_layers(self, column: str, bins: int | None) -> list[Totals]:
        """The totals of each layer."""

    @property
    def layer(self) -> str:
        return self._parts[0].layer if len(self._parts) == 1 else "all layers"

    def ask(self, *questions: Question) -> list[Totals]:
        """Answers several questions about totals."""
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Totals:
        named = self.what.capitalize()
        if not isinstance(question, AskTotals):
            raise UnsupportedError(
                f'{named} is about whole examples and groups: ask for totals, or for top(k, by="example").'
            )
        if question.absolute:
            raise UnsupportedError(f"{named} is added up over visits and layers: it has no magnitude for each slot.")
        key = question.column, question.bins
        if key not in self._totals:
            of_layers = self._of_layers(*key)
            unknown = [totals.layer for totals in of_layers if totals.groups == [None] and len(of_layers) > 1]
            note = f"no {question.column} is known of the slots of {', '.join(unknown)}" if unknown else None
            note = "; ".join(filter(None, (self.note, note))) or None
            self._totals[key] = replace(add_up(of_layers), layer=self.layer, note=note)
        return self._totals[key]

    @property
    def nbytes(self) -> int:
        """What kept values take in main memory."""
        return sum(part.nbytes for part in self._parts)

    def numpy(self) -> Any:
        """Of shape (queries, examples), in the order of `totals("example").groups`."""
        return self.totals("example").numpy()

    def _layers(self) -> Sequence[LayerMeasured]:
        return self._parts


def add_up(of_layers: Sequence[Totals]) -> Totals:
    """The totals of several layers, which may know different groups, as one."""
    labels, places = all_groups([totals.groups for totals in of_layers])
    values = torch.zeros(len(of_layers[0]), len(labels), dtype=torch.float64)
    counts = torch.zeros(len(labels), dtype=torch.int64)
    # Errors of a sample may be correlated between layers: their sum is an upper bound.
    errors = None if any(totals.standard_errors is None for totals in of_layers) else torch.zeros_like(values)
    for totals, where in zip(of_layers, places, strict=True):
        values[:, where] += totals.values
        if errors is not None and totals.standard_errors is not None:
            errors[:, where] += totals.standard_errors
        counts[where] = torch.maximum(counts[where], totals.counts)
    return replace(of_layers[0], groups=labels, values=values, counts=counts, standard_errors=errors)


def all_groups(lists: Sequence[Sequence[Label]]) -> tuple[list[Label], list[Int64[Tensor, "_"]]]:
    """The labels of several lists, each once; and for each list the places of its own."""
    known: dict[Label, int] = {}
    places = [torch.tensor([known.setdefault(label, len(known)) for label in own]).long() for own in lists]
    return list(known), places


# -- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskTop:
    """Which slots have the largest (or smallest) values?"""

    k: int
    per: str | None = None
    """A column: the k largest for each of its values."""
    largest: bool = True

    def reducer(self, measured: LayerMeasured, queries: int) -> Reducer:
        if self.k < 1:
            raise SettingError(f"top({self.k}): ask for at least one slot.")
        groups = None if self.per is None else measured.grouping(self.per)
        return TopReducer(queries, self.k, groups, self.largest)

    def answer(self, measured: LayerMeasured, parts: list[Any]) -> Top:
        values, slots = (torch.cat(tensors) for tensors in zip(*(part.result() for part in parts), strict=True))
        groups: list[Label] = [None] if self.per is None else measured.grouping(self.per).labels
        return Top(
            measured.layer,
            measured.what,
            values,
            slots,
            SlotColumns(measured.view, measured.recorded, slots),
            self.per,
            groups,
            note=measured.note,
            largest=self.largest,
        )


@dataclass(frozen=True)
class AskTotals:
    """How large is the sum over each group of slots?"""

    column: str
    absolute: bool = False
    bins: int | None = None

    def reducer(self, measured: LayerMeasured, queries: int) -> Reducer:
        self.check(measured)
        groups = measured.grouping(self.column, self.bins)
        kind = TotalsReducer if measured.sample is None else SampledTotalsReducer
        return kind(queries, groups, self.absolute)

    def answer(self, measured: LayerMeasured, parts: list[Any]) -> Totals:
        sums, counts = torch.cat([part.sums for part in parts]), parts[0].counts
        if measured.sample is None:
            return self.totals(measured, sums, counts)
        squares, of_steps = (torch.cat([getattr(part, n) for part in parts]) for n in ("squares", "step_squares"))
        estimate = self.totals(measured, measured.sample.total(sums), counts)
        return replace(estimate, standard_errors=measured.sample.standard_error(squares, of_steps))

    def check(self, measured: LayerMeasured) -> None:
        """Refuses what a folded memory cannot answer."""
        if self.absolute:
            measured.view.reader.need_visits(
                "the size of each visit's score, which a sum of |score| adds up", "Ask for plain totals"
            )

    def totals(self, measured: LayerMeasured, sums: Tensor, counts: Tensor) -> Totals:
        """The result, from sums that were computed in any way."""
        totals = Totals(
            measured.layer,
            measured.what,
            self.column,
            sums,
            counts,
            measured.grouping(self.column, self.bins).labels,
            absolute=self.absolute,
            binned=self.bins is not None,
            note=measured.note,
        )
        cancels = totals.values.abs().sum(dim=1) > LARGE_KAPPA * totals.values.sum(dim=1).abs()
        if measured.what != "contribution" or not cancels.any():
            return totals
        large = f"κ = {float(totals.kappa.max()):.2g}"
        note = f"{large}: the sum is a small difference of large totals; a mask of one side predicts nothing"
        return replace(totals, note=f"{totals.note}; {note}" if totals.note else note)


Question = AskTop | AskTotals
"""Each has a reducer for some queries of a layer, and makes the answer of the filled reducers of all of them."""


def ask(measured: Sequence[LayerMeasured], questions: Sequence[Question]) -> list[list[Any]]:
    """Answers the questions about several layers; each batch of queries takes one pass over all of them."""
    batches = [list(layer_values.query_batches()) for layer_values in measured]
    filled: list[list[list[Any]]] = [[[] for _ in questions] for _ in measured]
    for index in range(max(map(len, batches), default=0)):
        asked = [number for number, own in enumerate(batches) if index < len(own)]
        plans = []
        for number in asked:
            layer_values, some = measured[number], batches[number][index]
            reducers = tuple(question.reducer(layer_values, some.stop - some.start) for question in questions)
            plans.append(Plan(layer_values.layer, layer_values.view.selection, reducers, layer_values.values(some)))
        for number, reducers in zip(asked, measured[0].view.run(*plans), strict=True):
            for parts, reducer in zip(filled[number], reducers, strict=True):
                parts.append(reducer)
    return [
        [question.answer(layer_values, parts) for question, parts in zip(questions, of_layer, strict=True)]
        for layer_values, of_layer in zip(measured, filled, strict=True)
    ]
