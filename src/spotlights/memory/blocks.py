"""A layer's selected slots as blocks: some at a time in the order of their numbers, or step by step.

A selection is made of conditions on columns, which are evaluated block by block. It holds no list of slots, so a view
of a memory costs nothing until it is scanned. `meeting` makes a selection of the conditions that users write, `label=3`
or `step=range(0, 3000)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from spotlights.errors import SettingError, UnknownNameError
from spotlights.memory.format import names
from spotlights.memory.layer_reader import LayerReader, SegmentSlots, StoredRows
from spotlights.memory.reader import MemoryReader

GetColumn = Callable[[str], Shaped[Tensor, "rows"]]


class Selection(ABC):
    """Says of each slot whether it is in."""

    @abstractmethod
    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        """True for the slots that are in; None if all are."""

    def __and__(self, other: Selection) -> Selection:
        return other if isinstance(self, Everything) else Both(self, other)

    def __invert__(self) -> Selection:
        return Complement(self)


@dataclass(frozen=True)
class Everything(Selection):
    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        return None

    def __str__(self) -> str:
        return "all slots"


@dataclass(frozen=True)
class OneOf(Selection):
    """Slots whose column holds one of some values, or a number of a range that counts up."""

    column: str
    values: tuple[int | float, ...] | range
    shown: str = ""

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        numbers = column(self.column)
        if isinstance(self.values, range):
            inside = (numbers >= self.values.start) & (numbers < self.values.stop)
            return inside & ((numbers - self.values.start) % self.values.step == 0)
        if len(self.values) == 1:
            return numbers == self.values[0]
        return torch.isin(numbers, torch.tensor(self.values, dtype=numbers.dtype))

    def __str__(self) -> str:
        return f"{self.column}={self.shown or self.values}"


@dataclass(frozen=True)
class Both(Selection):
    first: Selection
    second: Selection

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        first, second = self.first.mask(column, rows), self.second.mask(column, rows)
        if first is None or second is None:
            return second if first is None else first
        return first & second

    def __str__(self) -> str:
        return f"{self.first} and {self.second}"


@dataclass(frozen=True)
class Complement(Selection):
    inner: Selection

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        inner = self.inner.mask(column, rows)
        return torch.zeros(rows, dtype=torch.bool) if inner is None else ~inner

    def __str__(self) -> str:
        return f"not ({self.inner})"


def as_of(reader: MemoryReader, selection: Selection, step: int) -> Selection:
    """The selected slots of the first `step` steps."""
    return selection if step == reader.manifest.steps else selection & OneOf("step", range(step))


def meeting(reader: MemoryReader, conditions: Mapping[str, Any]) -> Selection:
    """The slots that meet all conditions: a value, a list of values, or a range per column."""
    if not conditions:
        raise SettingError('Give at least one condition, such as where(label=3) or where(source="mnist").')
    selected: Selection = Everything()
    for column, wanted in conditions.items():
        selected = selected & _condition(reader, column, wanted)
    return selected


def _condition(reader: MemoryReader, column: str, wanted: Any) -> Selection:
    kind = reader.column_kind(column)
    if isinstance(wanted, range) and kind != "string":
        return OneOf(column, wanted if wanted.step > 0 else wanted[::-1])
    if isinstance(wanted, Tensor | np.ndarray):
        wanted = wanted.tolist()
    several = isinstance(wanted, Sequence | set | frozenset | range) and not isinstance(wanted, str)
    items: list[Any] = list(wanted) if several else [wanted]
    items = [item.item() if isinstance(item, Tensor | np.generic) else item for item in items]
    shown = str(wanted) if len(items) <= 8 else f"one of {len(items):,} values"
    if kind != "string":
        if not all(isinstance(item, int | float) for item in items):
            raise SettingError(f'The column "{column}" holds numbers; {shown} cannot be one of them.')
        if kind == "int":
            items = [item for item in items if float(item).is_integer()]  # 2.5 is not a label
        return OneOf(column, tuple(items), shown)
    strings = reader.manifest.columns[column].strings
    for item in items:
        if item not in strings:
            raise UnknownNameError(f"No slot has {column}={item!r}. The column has: {', '.join(strings[:20])}.")
    return OneOf(column, tuple(strings.index(item) for item in items), shown)


@dataclass(frozen=True)
class Piece:
    """Some slots of a layer in one segment."""

    segment: SegmentSlots
    rows: slice | Int64[Tensor, "rows"]
    """Their positions in the segment; a slice if they are all slots of a range."""

    @classmethod
    def of(cls, segment: SegmentSlots, start: int, stop: int, mask: Bool[Tensor, "slots"] | None) -> Piece:
        """The slots of a range that a mask of the segment's slots selects; None selects all of them."""
        if mask is not None:
            selected = mask[start:stop].nonzero().flatten()
            if len(selected) < stop - start:
                return cls(segment, selected.add_(start))
        return cls(segment, slice(start, stop))

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def slots(self) -> Int64[Tensor, "rows"]:
        rows = self.rows
        return self.segment.start + (torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows)


@dataclass(frozen=True)
class Block:
    """Some slots of a layer, in the order of their numbers."""

    layer: LayerReader
    pieces: tuple[Piece, ...]
    known: dict[object, Tensor] = field(default_factory=dict)
    """What one question has computed about these slots and another one may need too."""

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @cached_property
    def slots(self) -> Int64[Tensor, "rows"]:
        """The slots' numbers."""
        return torch.cat([piece.slots for piece in self.pieces])

    def column(self, name: str) -> Shaped[Tensor, "rows"]:
        return torch.cat([piece.segment.column(name)[piece.rows] for piece in self.pieces])

    def errors(self) -> Iterator[StoredRows]:
        """The errors, some thousand rows at a time."""
        return self._rows(names.ERRORS)

    def keys(self) -> Iterator[StoredRows]:
        """The keys, some thousand rows at a time: as many as of the errors, so that the two can be zipped."""
        return self._rows(names.KEYS)

    def _rows(self, what: str) -> Iterator[StoredRows]:
        first = 0
        for piece in self.pieces:
            if what == names.KEYS and self.layer.entry.indexed:
                for numbers in piece.segment.key_numbers()[piece.rows].split(self.layer.rows_at_once):
                    keys = self.layer.keys_numbered(numbers)
                    yield StoredRows(slice(first, first + len(keys)), keys, None)
                    first += len(keys)
            else:
                yield from piece.segment.decoded(what, piece.rows, first)
                first += len(piece)

    def key_numbers(self) -> Int64[Tensor, "rows"]:
        """The number of each slot's key, if keys are stored once."""
        return torch.cat([piece.segment.key_numbers()[piece.rows] for piece in self.pieces])


def in_blocks(
    layer: LayerReader, selection: Selection, rows: int, segments: Sequence[SegmentSlots] | None = None
) -> Iterator[Block]:
    """The selected slots in order, about `rows` at a time; of all segments, or of some."""
    pieces: list[Piece] = []
    filled = 0
    for segment in layer.segments if segments is None else segments:
        mask = selection.mask(segment.column, segment.slots)
        for start in range(0, segment.slots, rows):
            piece = Piece.of(segment, start, min(start + rows, segment.slots), mask)
            if not len(piece):
                continue
            if filled and filled + len(piece) > rows:
                yield Block(layer, tuple(pieces))
                pieces, filled = [], 0
            pieces.append(piece)
            filled += len(piece)
    if pieces:
        yield Block(layer, tuple(pieces))


class StepBlocks:
    """A layer's selected slots by their steps, for scans that go step by step."""

    def __init__(self, layer: LayerReader, selection: Selection) -> None:
        self._layer = layer
        self._selection = selection
        self._known: dict[int, tuple[SegmentSlots, list[int], Tensor | None]] = {}
        """Of each rank, the segment that was asked for last."""

    def block(self, first: int, end: int) -> Block:
        """The slots of the steps from `first` to before `end`; the block may be empty."""
        pieces = []
        for segment in self._layer.segments:
            entry = segment.file.entry
            if entry.first_step >= end or entry.end_step <= first:
                continue
            bounds, mask = self._look_up(segment)
            start = bounds[max(first, entry.first_step) - entry.first_step]
            stop = bounds[min(end, entry.end_step) - entry.first_step]
            piece = Piece.of(segment, start, stop, mask)
            if len(piece):
                pieces.append(piece)
        return Block(self._layer, tuple(pieces))

    def _look_up(self, segment: SegmentSlots) -> tuple[list[int], Tensor | None]:
        """Where each step of the segment begins (and the last one ends), and which slots are selected."""
        entry = segment.file.entry
        known = self._known.get(segment.file.manifest.rank)
        if known is None or known[0] is not segment:
            steps = torch.arange(entry.first_step, entry.end_step + 1)
            bounds = torch.searchsorted(segment.column("step"), steps).tolist()
            known = (segment, bounds, self._selection.mask(segment.column, segment.slots))
            self._known[segment.file.manifest.rank] = known
        return known[1:]
