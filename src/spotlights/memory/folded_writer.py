"""The writer of folded memories: running sums in main memory, written as snapshots now and then.

Folding keeps one sum of keys for each example (and position) of a layer, instead of a row for each visit: the sum of
the scores of all visits is the score of the sum of their keys. Rows are placed in the order of their first visits, so a
batch that comes again as in the first epoch (a window of a text) is one slice, and adding it is `sums[a:b] += keys`.
numpy alone: the background thread must not start torch's threads.

The background thread adds up the keys of each step, and writes all sums when a snapshot is due: after a minute (less
often if writing takes more than a fiftieth of the time), when `flush` asks for one, and at the end. Then it commits a
manifest that lists the new files, and then it deletes the old files. The last snapshot that `flush` asked for before
the newest one is kept too: a run that is killed between `flush` and saving its checkpoint has the checkpoint before.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from spotlights.errors import TooLargeError
from spotlights.memory.buffers import BufferPool
from spotlights.memory.files import Committed
from spotlights.memory.format import names
from spotlights.memory.format.columns import (
    FIRST_STEP,
    LAST_STEP,
    MAX_POSITIONS,
    VISITS,
    ColumnTable,
    is_missing,
    missing,
)
from spotlights.memory.format.manifest import FoldEntry, LayerEntry, SegmentEntry
from spotlights.memory.slots import StepRecord
from spotlights.memory.writer import MemoryWriter

SNAPSHOT_SECONDS = 60.0
SNAPSHOT_SHARE = 1 / 50
"""Snapshots that nobody asked for take at most this share of the time."""
MEMORY_SHARE = 1 / 2
"""Sums may take this share of the machine's main memory; beyond that, recording stops and training goes on."""
_PAGE_BITS = 8
_NOWHERE = -1
_IDENTITY = frozenset({"example", "position"})
_SHORT_RUN = 8
"""Slices of fewer rows than this cost more than they save."""

_RowNumbers = Int[np.ndarray, "rows"]
_Keys = Float[np.ndarray, "rows features"]
_Columns = Mapping[str, Shaped[np.ndarray, "rows"]]


class FoldedWriter(MemoryWriter):
    """Adds steps to one folded memory."""

    waiting: ClassVar[int] = 32
    """How many portions may wait to be added up, each a sixteenth of a segment: two segments, as elsewhere."""

    def __init__(self, memory: Committed, columns: ColumnTable, *, pool: BufferPool, segment_bytes: int) -> None:
        portion = max(1, 2 * segment_bytes // self.waiting)
        super().__init__(memory, columns, pool=pool, segment_bytes=portion)
        for name in ("position", VISITS, FIRST_STEP, LAST_STEP):
            columns.declare(name, "int")
        self._sums = {
            name: FoldedLayer(entry, columns.kind, segment_bytes) for name, entry in self.manifest.layers.items()
        }
        self._last: StepRecord | None = None
        """The last step that was added up; None if a snapshot holds all steps."""
        self._next_snapshot = time.monotonic() + SNAPSHOT_SECONDS

    @classmethod
    def _as_of(cls, memory: Committed, steps: int) -> dict[str, object]:
        """What the manifest says differently as of the snapshot after `steps` steps; there must be one."""
        snapshot = next(kept for kept in memory.manifest.snapshots if kept.steps == steps)
        newest = dataclasses.replace(_fold(memory), steps=steps, asked=snapshot.asked, earlier=None)
        return {"segments": snapshot.segments, "fold": newest}

    def _load(self, segment: SegmentEntry, tensors: Mapping[str, Tensor]) -> None:
        for layer, sums in self._sums.items():
            if not segment.slots[layer]:
                continue
            keys = tensors[names.layer_tensor(layer, names.KEYS)].numpy()
            scale = tensors.get(names.layer_tensor(layer, names.KEY_SCALE))
            if scale is not None:
                keys = keys * scale.numpy()[:, None]
            prefix = names.column_tensor(layer, "")
            sums.load(keys, {n.removeprefix(prefix): t.numpy() for n, t in tensors.items() if n.startswith(prefix)})

    @property
    def starts_segment(self) -> bool:
        """Never: checkpoints of the optimizer's state are of no use without errors."""
        return False

    def flush(self) -> None:
        """Waits until a snapshot of all steps added so far is committed."""
        self._hand_over()
        self._queue.put(partial(self._snapshot, asked=True))
        self._queue.join()

    def close(self, final: Mapping[str, Tensor] | None, *, interrupted: bool = False) -> None:
        """Writes the last snapshot and, if nothing failed, the final weights."""
        self._hand_over()
        self._queue.put(partial(self._snapshot, asked=False, only=not interrupted))
        super().close(final)

    def _commit(self, steps: list[StepRecord]) -> None:
        for record in steps:
            for name, layer in record.layers.items():
                for rows in layer.rows:
                    assert isinstance(rows.keys, Tensor), "a folded memory has no tokens"
                    self._sums[name].add(rows.keys.numpy(), rows.columns, record.step)
                    rows.give_back(self._pool)
            taken, room = sum(sums.nbytes for sums in self._sums.values()), MEMORY_SHARE * main_memory()
            if taken > room:
                self._sums.clear()
                raise TooLargeError(
                    f"the running sums take {taken / 1e9:.1f} GB, and {room / 1e9:.1f} GB of main memory can be spared "
                    "for them; fold fewer layers (layers=…)"
                )
        self._last = steps[-1]
        if time.monotonic() >= self._next_snapshot:
            self._snapshot(asked=False)

    def _snapshot(self, *, asked: bool, only: bool = False) -> None:
        """Commits the sums as they are. `only`: no earlier snapshot is kept beside this one."""
        fold = _fold(self._memory)
        if self._last is None:
            asked = (asked or fold.asked) and fold.steps > 0
            self._memory.replace(fold=dataclasses.replace(fold, asked=asked, earlier=None if only else fold.earlier))
            self._memory.delete_unlisted()
            return
        start = time.monotonic()
        newest = self.manifest.snapshots[0]
        earlier = newest if newest.asked else fold.earlier
        fold = dataclasses.replace(fold, steps=self._last.step + 1, asked=asked, earlier=None if only else earlier)
        try:
            segments, given = self._write_sums(fold, self._last)
            columns = {name: entry for name, entry in self.columns.entries().items() if name in given}
            self._memory.replace(segments=segments, columns=columns, fold=fold)
        finally:
            self._memory.delete_unlisted()
        self._last = None
        now = time.monotonic()
        self._next_snapshot = now + max(SNAPSHOT_SECONDS, (now - start) / SNAPSHOT_SHARE)

    def _write_sums(self, fold: FoldEntry, last: StepRecord) -> tuple[list[SegmentEntry], set[str]]:
        """Writes all of the sums; returns the files, and which columns they have.

        The first file has no slots, but the probed entries by which a checkpoint of the network is recognised.
        """
        steps = range(min(fold.from_step, fold.steps), fold.steps)
        log = {names.STEPS: [np.array([last.step])]}
        for layer, step in last.layers.items():
            log |= {names.log_tensor(layer, p, names.PROBED): [entries[None]] for p, entries in step.probed.items()}
        segments = [self._memory.write_segment(log, steps, {})]
        given = {"example", VISITS, FIRST_STEP, LAST_STEP}
        for layer, sums in self._sums.items():
            entry = self.manifest.layers[layer]
            for keys, columns in sums.chunks():
                tensors = {names.column_tensor(layer, name): [column] for name, column in columns.items()}
                tensors[names.layer_tensor(layer, names.NORMS)] = [_norms(keys, entry.stretches.values())]
                if entry.storage == "float16":
                    keys, scale = _halved(keys)
                    tensors[names.layer_tensor(layer, names.KEY_SCALE)] = [scale]
                tensors[names.layer_tensor(layer, names.KEYS)] = [keys]
                segments.append(self._memory.write_segment(tensors, steps, {layer: len(keys)}))
                given |= set(columns)
        return segments, given


def main_memory() -> float:
    """The machine's main memory, in bytes."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # pragma: no cover - not on Windows
        return math.inf


def _fold(memory: Committed) -> FoldEntry:
    assert memory.manifest.fold is not None
    return memory.manifest.fold


def _norms(rows: _Keys, stretches: Iterable[slice]) -> Float[np.ndarray, "rows stretches"]:
    return np.sqrt(np.stack([np.einsum("ij,ij->i", some, some) for some in (rows[:, s] for s in stretches)], axis=1))


def _halved(rows: _Keys) -> tuple[np.ndarray, np.ndarray]:
    """As float16, each row divided by a power of two that brings its largest number near 1; and those powers."""
    largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    exponents: Any = np.frexp(largest)[1]
    scale = np.ldexp(np.float32(1), np.clip(exponents, -126, 127)).astype(np.float32)
    return (rows / scale[:, None]).astype(np.float16), scale


class Places:
    """Which row of the sums each (example, position) has: a table in pages.

    An example takes 4 bytes if the ids are dense, 1 KB if they lie far apart.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pages: dict[int, int] = {}
        """The number of each page in the table. Pages of examples alone are even, those with positions are odd."""
        self._table = np.empty((0, 1 << _PAGE_BITS), np.int32)

    def find(self, examples: Int64[np.ndarray, "rows"], positions: Int64[np.ndarray, "rows"] | None) -> _RowNumbers:
        """The row of each (example, position); new ones get the next rows, in order. A position may be missing."""
        ids, with_position = examples, np.zeros(1, bool)
        if positions is not None:
            with_position = ~is_missing("int", positions)
            ids = np.where(with_position, examples * MAX_POSITIONS + positions, examples)
        pages, within = (ids >> _PAGE_BITS) * 2 + with_position, ids & ((1 << _PAGE_BITS) - 1)
        starts = np.flatnonzero(np.concatenate([[True], pages[1:] != pages[:-1]]))
        numbers = [self._pages.setdefault(page, len(self._pages)) for page in pages[starts].tolist()]
        if len(self._pages) > len(self._table):
            larger = np.full((max(len(self._pages), 2 * len(self._table)), 1 << _PAGE_BITS), _NOWHERE, np.int32)
            larger[: len(self._table)] = self._table
            self._table = larger
        page = np.repeat(numbers, np.diff(starts, append=len(ids)))
        rows = self._table[page, within]
        new = np.flatnonzero(rows == _NOWHERE)
        if len(new):
            _, first = np.unique((page[new] << _PAGE_BITS) + within[new], return_index=True)  # one may come twice
            new = new[np.sort(first)]
            self._table[page[new], within[new]] = np.arange(self.count, self.count + len(new))
            self.count += len(new)
            rows = self._table[page, within]
        return rows


class FoldedLayer:
    """The running sums of one layer, and the columns of each slot."""

    def __init__(self, entry: LayerEntry, kind_of: Callable[[str], str], chunk_bytes: int) -> None:
        self._features = entry.in_features
        self._dtype = np.dtype(np.float64 if entry.storage == "float64" else np.float32)
        self._kind_of = kind_of
        """The kind of a column."""
        self._chunk_rows = max(1, chunk_bytes // (self._features * self._dtype.itemsize))
        self._chunks: list[np.ndarray] = []
        self._places = Places()
        self._room = 0
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._places.count

    @property
    def nbytes(self) -> int:
        """The size of the sums in main memory."""
        return len(self) * self._features * self._dtype.itemsize

    def add(self, keys: _Keys, columns: _Columns, step: int) -> None:
        """Adds the rows of one call at some step."""
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
            # A value stays if it is the same at every visit of the slot.
            column, given = self._column(name), columns[name] if name in columns else self._nothing(name, len(rows))
            column[rows[fresh]] = given[fresh]
            before = column[rows]
            differs = (before != given) & ~((before != before) & (given != given))  # NaN stays NaN
            if differs.any():
                column[rows[differs]] = self._nothing(name, 1)

    def load(self, keys: _Keys, columns: _Columns) -> None:
        """Continues from sums that were written; they must come in the order in which they were written."""
        rows = self._find(columns)
        self._add_keys(rows, keys)
        for name, column in columns.items():
            self._column(name)[rows] = column

    def chunks(self) -> Iterator[tuple[_Keys, _Columns]]:
        """The sums and their columns, chunk by chunk, without columns on which no slot's visits agree."""
        count = len(self)
        agreed = [n for n, column in self._columns.items() if not is_missing(self._kind_of(n), column[:count]).all()]
        for number, sums in enumerate(self._chunks):
            start, end = number * self._chunk_rows, min((number + 1) * self._chunk_rows, count)
            yield sums[: end - start], {name: self._columns[name][start:end] for name in agreed}

    def _find(self, columns: _Columns) -> _RowNumbers:
        rows = self._places.find(columns["example"], columns.get("position"))
        while len(self._chunks) * self._chunk_rows < len(self):
            # Untouched zeros take no memory yet.
            self._chunks.append(np.zeros((self._chunk_rows, self._features), self._dtype))
        if len(self) > self._room:
            self._room = max(len(self), 2 * self._room)
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, self._nothing(name, self._room - len(column))])
        return rows

    def _column(self, name: str) -> np.ndarray:
        if name not in self._columns:
            self._columns[name] = self._nothing(name, self._room)
        return self._columns[name]

    def _nothing(self, name: str, rows: int) -> np.ndarray:
        return missing(self._kind_of(name), rows).numpy()

    def _add_keys(self, rows: _RowNumbers, keys: _Keys) -> None:
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        scattered = len(breaks) * _SHORT_RUN >= len(rows)
        if scattered:
            order = np.argsort(rows, kind="stable")
            rows, keys, breaks = rows[order], keys[order], breaks[:0]
            starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
            if len(starts) < len(rows):  # `sums[rows] += keys` would take one of several keys for a row
                rows, keys = rows[starts], np.add.reduceat(keys, starts, axis=0)
        chunk_ends = np.flatnonzero(np.diff(rows // self._chunk_rows)) + 1
        for start, end in pairwise([0, *np.union1d(breaks, chunk_ends).tolist(), len(rows)]):
            number, first = divmod(int(rows[start]), self._chunk_rows)
            places = rows[start:end] - number * self._chunk_rows if scattered else slice(first, first + end - start)
            self._chunks[number][places] += keys[start:end]
