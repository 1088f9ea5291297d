"""Folding: one running sum of keys for each example (and position) of a layer, instead of a row for each visit.

The sum of the scores of all visits is the score of the sum of their keys. Rows get their places in the order in which
they first come, so a batch that comes again as it came in the first epoch, a window of a text, is one slice, and
adding it is `sums[a:b] += keys`. numpy alone, for the writer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Int64, Shaped

from spotlights.memory.columns import FIRST_STEP, LAST_STEP, MAX_POSITIONS, VISITS, is_missing, missing

_PAGE_BITS = 8
_NOWHERE = -1
_IDENTITY = frozenset({"example", "position"})
_SHORT_RUN = 8
"""Below so many rows in a row, slices cost more than they save."""


class Places:
    """Which row of the sums each (example, position) has: a table in pages, for examples that are close together.

    4 bytes for each example if their numbers are dense, 1 KB for each if they lie far apart.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pages: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """The number of each page in the table: of examples alone, and of examples with positions."""
        self._table = np.empty((0, 1 << _PAGE_BITS), np.int32)

    def find(
        self, examples: Int64[np.ndarray, "rows"], positions: Int64[np.ndarray, "rows"] | None
    ) -> Int[np.ndarray, "rows"]:
        """The row of each; those not met before get the next ones, in order."""
        ids = examples if positions is None else examples * MAX_POSITIONS + positions
        pages, within = ids >> _PAGE_BITS, ids & ((1 << _PAGE_BITS) - 1)
        starts = np.flatnonzero(np.concatenate([[True], pages[1:] != pages[:-1]]))
        numbers = self._numbers(self._pages[positions is not None], pages[starts].tolist())
        page = np.repeat(numbers, np.diff(starts, append=len(ids)))
        found = self._table[page, within]
        new = np.flatnonzero(found == _NOWHERE)
        if len(new):
            _, first = np.unique(ids[new], return_index=True)  # one may come twice in a batch
            new = new[np.sort(first)]
            self._table[page[new], within[new]] = np.arange(self.count, self.count + len(new))
            self.count += len(new)
            found = self._table[page, within]
        return found

    def _numbers(self, known: dict[int, int], pages: list[int]) -> list[int]:
        held = sum(map(len, self._pages))
        for page in pages:
            if page not in known:
                known[page] = held
                held += 1
        if held > len(self._table):
            room = np.full((max(held, 2 * len(self._table)), self._table.shape[1]), _NOWHERE, np.int32)
            room[: len(self._table)] = self._table
            self._table = room
        return [known[page] for page in pages]


class FoldedLayer:
    """The running sums of one layer, and what is known of each slot."""

    def __init__(
        self, features: int, dtype: type[np.floating[Any]], kind_of: Callable[[str], str], *, chunk_bytes: int
    ) -> None:
        self._features = features
        self._dtype = np.dtype(dtype)
        self._kind_of = kind_of
        """The kind of a column."""
        self.chunk_rows = max(1, chunk_bytes // (features * self._dtype.itemsize))
        self._chunks: list[np.ndarray] = []
        self._places = Places()
        self._room = 0
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._places.count

    @property
    def nbytes(self) -> int:
        """What the sums take in main memory."""
        return len(self) * self._features * self._dtype.itemsize

    def add(
        self, keys: Float[np.ndarray, "rows features"], columns: Mapping[str, Shaped[np.ndarray, "rows"]], step: int
    ) -> None:
        """Takes the rows of one call at some step."""
        if not len(keys):
            return
        rows = self._find(columns)
        self._add_keys(rows, keys)
        visits, first, last = (self._column(name) for name in (VISITS, FIRST_STEP, LAST_STEP))
        fresh = visits[rows] <= 0  # a missing number is the smallest one
        if fresh.any():
            visits[rows[fresh]] = 0
            first[rows[fresh]] = step
            for name in columns.keys() & _IDENTITY:
                self._column(name)[rows[fresh]] = columns[name][fresh]
        last[rows] = step
        np.add.at(visits, rows, 1)
        for name in (columns.keys() | self._columns.keys()) - _IDENTITY - {VISITS, FIRST_STEP, LAST_STEP}:
            self._agree(name, rows, fresh, columns.get(name))

    def load(self, keys: Float[np.ndarray, "rows features"], columns: Mapping[str, Shaped[np.ndarray, "rows"]]) -> None:
        """Goes on from sums that were written, in the order in which they were."""
        start = len(self)
        at = columns.get("position")
        bare = np.ones(len(keys), bool) if at is None else is_missing("int", at)
        edges = np.flatnonzero(np.diff(bare)) + 1
        for first, end in pairwise([0, *edges.tolist(), len(keys)]):
            examples = columns["example"][first:end]
            self._find(
                {"example": examples} if at is None or bare[first] else {"example": examples, "position": at[first:end]}
            )
        self._add_keys(np.arange(start, len(self)), keys)
        for name, column in columns.items():
            self._column(name)[start : len(self)] = column

    def chunks(self) -> Iterator[tuple[Float[np.ndarray, "rows features"], dict[str, Shaped[np.ndarray, "rows"]]]]:
        """The sums and their columns, chunk by chunk. Columns on which no slot's visits agree are left out."""
        count = len(self)
        told = [name for name, held in self._columns.items() if not is_missing(self._kind_of(name), held[:count]).all()]
        for number, sums in enumerate(self._chunks):
            start, end = number * self.chunk_rows, min((number + 1) * self.chunk_rows, count)
            yield sums[: end - start], {name: self._columns[name][start:end] for name in told}

    def _find(self, columns: Mapping[str, np.ndarray]) -> Int[np.ndarray, "rows"]:
        rows = self._places.find(columns["example"], columns.get("position"))
        while len(self._chunks) * self.chunk_rows < len(self):
            # Zeros that nobody has touched take no memory yet.
            self._chunks.append(np.zeros((self.chunk_rows, self._features), self._dtype))
        if len(self) > self._room:
            self._room = max(len(self), 2 * self._room)
            for name, held in self._columns.items():
                self._columns[name] = np.concatenate([held, self._nothing(name, self._room - len(held))])
        return rows

    def _column(self, name: str) -> np.ndarray:
        if name not in self._columns:
            self._columns[name] = self._nothing(name, self._room)
        return self._columns[name]

    def _nothing(self, name: str, rows: int) -> np.ndarray:
        return missing(self._kind_of(name), rows).numpy()

    def _agree(
        self,
        name: str,
        rows: Int[np.ndarray, "rows"],
        fresh: Bool[np.ndarray, "rows"],
        given: Shaped[np.ndarray, "rows"] | None,
    ) -> None:
        """Keeps a column's value where it is the same at every visit of the slot."""
        held, nothing = self._column(name), self._nothing(name, 1)
        if given is None:
            held[rows] = nothing
            return
        held[rows[fresh]] = given[fresh]
        found = held[rows]
        differs = (found != given) & ~((found != found) & (given != given))  # NaN stays NaN
        if differs.any():
            held[rows[differs]] = nothing

    def _add_keys(self, rows: Int[np.ndarray, "rows"], keys: Float[np.ndarray, "rows features"]) -> None:
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        if len(breaks) * _SHORT_RUN < len(rows):
            for start, end in pairwise([0, *breaks.tolist(), len(rows)]):
                self._add_run(int(rows[start]), keys[start:end])
        else:
            self._add_scattered(rows, keys)

    def _add_run(self, row: int, keys: Float[np.ndarray, "rows features"]) -> None:
        while len(keys):
            number, first = divmod(row, self.chunk_rows)
            some = keys[: self.chunk_rows - first]
            self._chunks[number][first : first + len(some)] += some
            row, keys = row + len(some), keys[len(some) :]

    def _add_scattered(self, rows: Int[np.ndarray, "rows"], keys: Float[np.ndarray, "rows features"]) -> None:
        order = np.argsort(rows, kind="stable")
        rows, keys = rows[order], keys[order]
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        if len(starts) < len(rows):  # `sums[rows] += keys` would take one of several visits in a batch
            rows, keys = rows[starts], np.add.reduceat(keys, starts, axis=0)
        numbers = rows // self.chunk_rows
        edges = np.flatnonzero(np.diff(numbers)) + 1
        for start, end in pairwise([0, *edges.tolist(), len(rows)]):
            number = int(numbers[start])
            self._chunks[number][rows[start:end] - number * self.chunk_rows] += keys[start:end]
