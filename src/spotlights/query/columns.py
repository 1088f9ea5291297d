"""Columns of slots: the groups that they divide slots into, lookups in them, and what the slots of a group share.

A lookup is a plan without a measure. What holds for the whole memory is kept with the layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.memory.blocks import Block, Everything, Selection
from spotlights.memory.format.columns import FIRST_STEP, LAST_STEP, MISSING_INT, MISSING_STRING, VISITS
from spotlights.memory.layer_reader import LayerReader
from spotlights.query.engine import View
from spotlights.query.reducers import Reducer, largest_first_in_order
from spotlights.results.answers import Label, Top, Totals

_SMALL_TABLE = 1 << 16
_PENDING = 1 << 20
"""Values of single blocks that may wait before they are joined."""


class Grouping:
    """Numbers the groups that a column divides a layer's slots into."""

    def __init__(self, column: str, kind: str, strings: list[str], values: np.ndarray, bins: int | None) -> None:
        """`values`: the distinct values of the column in this layer, sorted; `bins`: so many ranges of them instead."""
        self.column = column
        self.kind = kind
        self._strings = strings
        self._edges: Tensor | None = None
        self._outside = 0
        if bins is not None:
            values = self._bin(values, bins)
        self._values = torch.from_numpy(np.ascontiguousarray(values))
        self._places = self._lookup() if bins is None and self.kind != "float" and len(values) else None
        """The number of the group of each value from the first on, where values lie close enough for a table."""

    def _bin(self, values: np.ndarray, bins: int) -> np.ndarray:
        if self.kind == "string":
            raise SettingError(f'"{self.column}" holds strings; bins= needs a column of numbers.')
        if bins < 1:
            raise SettingError(f"bins={bins}: give at least one.")
        known = values[values != MISSING_INT] if self.kind == "int" else values[~np.isnan(values)]
        self._outside = len(values) - len(known)  # at most one: slots without a value are in no range
        edges = np.empty(1)
        if len(known):
            last = known[-1] + 1 if self.kind == "int" else np.nextafter(known[-1], np.inf)
            edges = np.linspace(known[0], last, bins + 1)
        self._edges = torch.from_numpy(edges)
        return edges[:-1]

    def _lookup(self) -> Int64[Tensor, "spread"] | None:
        spread = int(self._values[-1]) - int(self._values[0]) + 1
        if spread > 4 * len(self._values) + _SMALL_TABLE:
            return None
        places = torch.zeros(spread, dtype=torch.int64)
        places[self._values - self._values[0]] = torch.arange(len(self._values))
        return places

    def __len__(self) -> int:
        return len(self._values) + self._outside

    def codes(self, block: Block) -> Int64[Tensor, "rows"]:
        """The number of each slot's group."""
        if self not in block.known:
            block.known[self] = self._codes(block.column(self.column))
        return block.known[self]

    def _codes(self, column: Shaped[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
        if self._edges is not None:
            bins = torch.bucketize(column.double(), self._edges, right=True) - 1
            bins.clamp_(0, max(len(self._values) - 1, 0))
            return bins.masked_fill_(_is_missing(column), len(self._values))
        if self._places is not None:
            place = column - self._values[0]
            return place if len(self._places) == len(self._values) else self._places[place]
        if self.kind == "float":  # among NaN, which stands for a missing value, only numpy finds its way
            return torch.from_numpy(np.searchsorted(self._values.numpy(), column.numpy()))
        return torch.searchsorted(self._values, column)

    def counts(self, block: Block) -> Int64[Tensor, "groups"]:
        """How many slots of the block each group has; in a folded memory, how many visits were added up in them."""
        return _counts(self.codes(block), len(self), block)

    def members(self, block: Block) -> list[Int64[Tensor, "rows"]]:
        """For each group its rows of the block, in order."""
        codes = self.codes(block)
        small = codes.numpy().astype(np.uint16 if len(self) < 1 << 16 else np.int64)
        order = torch.from_numpy(small.argsort(kind="stable"))  # a radix sort, for numbers that small
        return list(order.split(torch.bincount(codes, minlength=len(self)).tolist()))

    @cached_property
    def labels(self) -> list[Label]:
        """What each group is called: a value, the lower edge of a bin, or None where it was not given."""
        if self._edges is not None:
            return [*self._edges[:-1].tolist(), *[None] * self._outside]
        return column_values(self._values, self.kind, self._strings)


class Cells:
    """Numbers the combinations of several columns' values that a layer's slots have."""

    def __init__(self, groupings: Sequence[Grouping], present: Int64[Tensor, "cells"] | None = None) -> None:
        """`present`: the combinations that there are, sorted; None to number all that could be."""
        self._groupings = tuple(groupings)
        self._present = present

    def __len__(self) -> int:
        return math.prod(map(len, self._groupings)) if self._present is None else len(self._present)

    def codes(self, block: Block) -> Int64[Tensor, "rows"]:
        codes = torch.zeros(len(block), dtype=torch.int64)
        for grouping in self._groupings:
            codes = codes * len(grouping) + grouping.codes(block)
        return codes if self._present is None else torch.searchsorted(self._present, codes)

    def counts(self, block: Block) -> Int64[Tensor, "cells"]:
        """As those of a grouping."""
        return _counts(self.codes(block), len(self), block)

    @property
    def values(self) -> list[tuple[Label, ...]]:
        """For each cell the value of each column."""
        sizes = tuple(len(grouping) for grouping in self._groupings)
        if not sizes:
            return [()] * len(self)
        present = torch.arange(len(self)) if self._present is None else self._present
        places = np.unravel_index(present.numpy(), sizes)
        labels = [grouping.labels for grouping in self._groupings]
        return list(zip(*([names[i] for i in place] for names, place in zip(labels, places, strict=True)), strict=True))


def _counts(codes: Int64[Tensor, "rows"], groups: int, block: Block) -> Int64[Tensor, "groups"]:
    visits = block.column(VISITS).double() if block.layer.folded else None
    return torch.bincount(codes, visits, minlength=groups).long()


def _is_missing(column: Shaped[Tensor, "rows"]) -> Bool[Tensor, "rows"]:
    return column.isnan() if column.is_floating_point() else column == MISSING_INT


def column_values(values: Tensor, kind: str, strings: list[str]) -> list[Label]:
    """A column's numbers as a user knows them."""
    if kind == "string":
        return [None if code == MISSING_STRING else strings[code] for code in values.tolist()]
    if kind == "float":
        return [None if value != value else value for value in values.tolist()]
    return [None if value == MISSING_INT else value for value in values.tolist()]


# -- lookups --------------------------------------------------------------------------------------


@dataclass(eq=False)
class DistinctReducer(Reducer):
    """The values that a column takes (or the cells that there are), sorted, each with the first slot that has it."""

    adds = ("values", "first")
    of: str | Cells

    def start(self) -> None:
        self.values: list[np.ndarray] = []
        self.first: list[np.ndarray] = []

    def update(self, block: Block, values: Any) -> None:
        taken = block.column(self.of) if isinstance(self.of, str) else self.of.codes(block)
        distinct, where = np.unique(taken.numpy(), return_index=True)
        self.values.append(distinct)
        self.first.append(block.slots.numpy()[where])
        if sum(map(len, self.values)) > _PENDING + len(self.values[0]):
            joined, first = self.result()
            self.values, self.first = [joined], [first]

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The values and the number of each one's first slot."""
        if not self.values:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = np.concatenate(self.first)
        order = first.argsort(kind="stable")
        values, where = np.unique(np.concatenate(self.values)[order], return_index=True)
        return values, first[order][where]


@dataclass(eq=False)
class GroupRowsReducer(Reducer):
    """The slots of some groups, with their group and their values of some columns."""

    adds = ("rows",)
    grouping: Grouping
    wanted: Bool[Tensor, "groups"]
    columns: Sequence[str]

    def start(self) -> None:
        self.rows: list[list[Tensor]] = []

    def update(self, block: Block, values: Any) -> None:
        codes = self.grouping.codes(block)
        rows = self.wanted[codes].nonzero().flatten()
        if len(rows):
            self.rows.append([block.slots[rows], codes[rows], *(block.column(name)[rows] for name in self.columns)])

    def result(self) -> tuple[Int64[Tensor, "rows"], Int64[Tensor, "rows"], dict[str, Tensor]]:
        """Slots in ascending order, the group of each, and the columns."""
        if not self.rows:
            nothing = torch.empty(0, dtype=torch.int64)
            return nothing, nothing, {}
        slots, *others = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
        order = slots.argsort()
        codes, *columns = (values[order] for values in others)
        return slots[order], codes, dict(zip(self.columns, columns, strict=True))


def distinct(view: View, layer: LayerReader, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The values that a column takes anywhere in a layer, sorted, and the first slot of each."""

    def find() -> tuple[np.ndarray, np.ndarray]:
        layer.column_kind(column)  # an unknown column gets its error here
        return view.reduce(layer.name, DistinctReducer(column), selection=Everything()).result()

    return layer.once(("distinct", column), find)


def grouping(view: View, layer: LayerReader, column: str, bins: int | None = None) -> Grouping:
    """The groups that a column divides a layer's slots into."""

    def find() -> Grouping:
        values, _ = distinct(view, layer, column)
        entry = view.reader.manifest.columns[column]
        return Grouping(column, entry.kind, entry.strings, values, bins)

    return layer.once(("grouping", column, bins), find)


def cells(view: View, layer: LayerReader, columns: Sequence[str], selection: Selection | None = None) -> Cells:
    """The combinations of columns' values that a layer's slots have: all slots, or those of a selection."""
    possible = Cells([grouping(view, layer, column) for column in columns])
    present, _ = view.reduce(layer.name, DistinctReducer(possible), selection=selection or Everything()).result()
    return Cells([grouping(view, layer, column) for column in columns], torch.from_numpy(present))


def few_groups(view: View, limit: int) -> dict[str, list[Label]]:
    """The columns that divide the slots into at most `limit` groups, with their values; labels come first.

    Of columns that divide the slots into the same groups under other names, only the first counts.
    """
    layers = list(view.reader.layers.values())
    if not layers or not layers[-1].slots:
        return {}
    layer, entries = layers[-1], view.reader.manifest.columns
    others = ("step", "example", "position", VISITS, FIRST_STEP, LAST_STEP)
    names = [name for name in entries if name not in others and entries[name].kind != "float"]
    groups: dict[str, list[Label]] = {}
    for name in sorted(names, key=("label", "source").__contains__, reverse=True):
        labels = grouping(view, layer, name).labels
        if not 0 < len(labels) <= limit or labels == [None]:
            continue
        if not any(len(cells(view, layer, [name, other])) == len(labels) == len(groups[other]) for other in groups):
            groups[name] = sorted(labels, key=str) if entries[name].kind == "string" else labels
    return groups


class Visits:
    """The view's slots in some groups: the visits of some examples."""

    def __init__(
        self, view: View, layer: LayerReader, groups: Grouping, wanted: Int64[Tensor, "..."], columns: Sequence[str]
    ) -> None:
        """`wanted`: numbers of groups. `columns`: what to read of their slots."""
        mask = torch.zeros(len(groups), dtype=torch.bool)
        mask[wanted] = True
        self._entries = view.reader.manifest.columns
        self.slots, codes, self._columns = view.reduce(layer.name, GroupRowsReducer(groups, mask, columns)).result()
        known, first, self._group = np.unique(codes.numpy(), return_index=True, return_inverse=True)
        self._first = torch.from_numpy(first)
        self.present = torch.from_numpy(np.isin(wanted.numpy(), known))
        """Which of the groups have slots in the view; the others are left out."""
        self._where = torch.from_numpy(np.searchsorted(known, wanted[self.present].numpy()))

    @property
    def first_slots(self) -> Int64[Tensor, "..."]:
        """The first slot of each group."""
        return self.slots[self._first][self._where]

    def agreed(self, name: str) -> list[Label]:
        """A column's value for each group, flat; None where its slots differ."""
        entry, values = self._entries[name], self._columns[name].numpy()
        first = values[self._first.numpy()]
        differs = (values != first[self._group]) & ~((values != values) & (first != first)[self._group])
        agree = np.ones(len(first), dtype=bool)
        agree[self._group[differs]] = False
        labels = column_values(torch.from_numpy(first), entry.kind, entry.strings)
        return [labels[i] if agree[i] else None for i in self._where.reshape(-1).tolist()]

    def values(self, name: str) -> list[Label]:
        """A column's value for each slot."""
        entry = self._entries[name]
        return column_values(self._columns[name], entry.kind, entry.strings)


def top_groups(parts: Sequence[tuple[View, LayerReader]], totals: Totals, k: int, *, largest: bool) -> Top:
    """The groups with the largest totals, and what their slots have in common; the first seen wins a tie.

    Layers may know different groups. The first layer of whose slots the view has some says what they have in common.
    """
    seen = totals.counts.nonzero().flatten()  # a group without slots in the view has no total
    first = _first_slots(*parts[0], totals)[seen].numpy()
    seen = seen[torch.from_numpy(first.argsort(kind="stable"))]  # numpy sorts without other threads
    sums = totals.values[:, seen] if largest else -totals.values[:, seen]
    kept = largest_first_in_order(sums, min(k, len(seen)))
    values, order = sums.gather(1, kept).sort(dim=1, descending=True, stable=True)
    where = seen[kept.gather(1, order)]
    flat = where.reshape(-1)
    slots = torch.zeros_like(flat)
    names = [
        name for name in table_order(parts[0][0].reader.manifest.columns) if name not in (totals.column, "step", VISITS)
    ]
    shared: dict[str, list[Label]] = {name: [None] * len(flat) for name in names}
    left = torch.arange(len(flat))
    for view, layer in parts:
        groups = grouping(view, layer, totals.column)
        numbers = flat[left]
        if groups.labels != totals.groups:
            known = {label: number for number, label in enumerate(groups.labels)}
            numbers = torch.tensor([known.get(totals.groups[i], -1) for i in numbers.tolist()], dtype=torch.int64)
        rows, numbers, left = left[numbers >= 0], numbers[numbers >= 0], left[numbers < 0]
        if not len(rows):
            continue
        visits = Visits(view, layer, groups, numbers, names)
        left, rows = torch.cat([left, rows[~visits.present]]), rows[visits.present]
        if len(rows):
            slots[rows] = visits.first_slots
            for name in names:
                for row, value in zip(rows.tolist(), visits.agreed(name), strict=True):
                    shared[name][row] = value
    shape = torch.Size((len(where), 1, where.shape[1]))
    columns: dict[str, Any] = {
        totals.column: nested([totals.groups[index] for index in flat.tolist()], shape),
        VISITS: nested(totals.counts[flat].tolist(), shape),
        **{n: nested(column, shape) for n, column in shared.items() if any(value is not None for value in column)},
    }
    unknown = any(None in group for query in columns[totals.column] for group in query)
    nameless = f"–: slots whose {totals.column} is not known" if unknown else None
    return Top(
        totals.layer,
        totals.what,
        (values if largest else -values)[:, None],
        slots.reshape(shape),
        columns,
        None,
        [None],
        totals.column,
        "; ".join(filter(None, (totals.note, nameless))) or None,
        largest,
        None if totals.standard_errors is None else totals.standard_errors.gather(1, where)[:, None],
    )


def _first_slots(view: View, layer: LayerReader, totals: Totals) -> Int64[Tensor, "groups"]:
    """The first slot of each group in a layer; groups that the layer does not know come last."""
    labels, first = grouping(view, layer, totals.column).labels, distinct(view, layer, totals.column)[1]
    if labels == totals.groups:
        return torch.from_numpy(first)
    slots = dict(zip(labels, first.tolist(), strict=True))
    return torch.tensor([slots.get(group, layer.slots) for group in totals.groups], dtype=torch.int64)


def join_tops(tops: Sequence[Top], k: int, by: str) -> Top:
    """The k largest (or smallest) of several rankings; those by position are named as what they are."""
    first = tops[0]
    values = torch.cat([top.values for top in tops], dim=2)
    order = values.argsort(dim=2, descending=first.largest, stable=True)[:, :, :k]

    def column(top: Top, name: str) -> list[list[list[Label]]]:
        if name == by and top.by == "position":
            held = top.columns["position"]
            return [[[f"position {at}, all examples" for at in group] for group in query] for query in held]
        return top.columns.get(name) or nested([None] * top.slots.numel(), top.slots.shape)

    columns: dict[str, Any] = {}
    for name in dict.fromkeys([by, *(name for top in tops for name in top.columns)]):
        held = [column(top, name) for top in tops]
        columns[name] = [
            [[[*(value for ranking in held for value in ranking[q][0])][place] for place in order[q, 0].tolist()]]
            for q in range(len(values))
        ]
    errors = [top.standard_errors for top in tops if top.standard_errors is not None]
    return replace(
        first,
        values=values.gather(2, order),
        slots=torch.cat([top.slots for top in tops], dim=2).gather(2, order),
        columns=columns,
        by=by,
        standard_errors=torch.cat(errors, dim=2).gather(2, order) if len(errors) == len(tops) else None,
    )


class SlotColumns(Mapping[str, list[list[list[Any]]]]):
    """The columns of some slots, by query, group and rank; each is read when it is first asked for."""

    def __init__(self, view: View, layer: LayerReader, slots: Int64[Tensor, "queries groups k"]) -> None:
        self._entries = view.reader.manifest.columns
        self._layer, self._slots = layer, slots
        self._read: dict[str, list[list[list[Any]]]] = {}

    @cached_property
    def _names(self) -> list[str]:
        """In the order of a table; without columns that these slots do not have."""
        names = table_order(self._entries)
        return [n for n in names if any(v is not None for q in self._column(n) for g in q for v in g)]

    def _column(self, name: str) -> list[list[list[Any]]]:
        if name not in self._read:
            entry = self._entries[name]
            values = self._layer.column_at(name, self._slots.clamp_min(0)).reshape(-1)
            self._read[name] = nested(column_values(values, entry.kind, entry.strings), self._slots.shape)
        return self._read[name]

    def __getitem__(self, name: str) -> list[list[list[Any]]]:
        if name not in self._entries:
            raise KeyError(name)
        return self._column(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def table_order(columns: Mapping[str, Any]) -> list[str]:
    """The names of columns in the order of a table."""
    first = [name for name in ("step", "example", "position") if name in columns]
    return first + [name for name in columns if name not in first]


def nested(flat: list[Any], shape: torch.Size) -> list[list[list[Label]]]:
    """A flat list as lists by query, group and rank."""
    _, groups, k = shape
    rows = [flat[start : start + k] for start in range(0, len(flat), k)] if k else [[]] * (len(flat) or groups)
    return [rows[start : start + groups] for start in range(0, len(rows), groups)]
