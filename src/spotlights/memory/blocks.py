"""A layer's selected slots as blocks: some at a time in the order of their numbers, or step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from spotlights.memory import slots as names
from spotlights.memory.layer_reader import LayerReader, Part
from spotlights.memory.selection import Selection
from spotlights.memory.stored_rows import ROWS, StoredRows, decoded


@dataclass(frozen=True)
class Piece:
    """Some slots of one part: a range, or chosen ones in it."""

    part: Part
    start: int
    stop: int
    chosen: Int64[Tensor, "rows"] | None
    """Positions within the range, or None for all of it."""

    @classmethod
    def of(cls, part: Part, start: int, stop: int, mask: Bool[Tensor, "slots"] | None) -> Piece:
        """Those slots of a range that a mask of the part lets through; None lets all through."""
        chosen = None if mask is None else mask[start:stop].nonzero().flatten()
        return cls(part, start, stop, None if chosen is None or len(chosen) == stop - start else chosen)

    def __len__(self) -> int:
        return self.stop - self.start if self.chosen is None else len(self.chosen)

    @property
    def slots(self) -> Int64[Tensor, "rows"]:
        first = self.part.start + self.start
        return torch.arange(first, first + self.stop - self.start) if self.chosen is None else self.chosen + first

    def take(self, tensor: Shaped[Tensor, "slots ..."]) -> Shaped[Tensor, "rows ..."]:
        """These slots' rows of a tensor of the part; a view where that is possible."""
        rows = tensor[self.start : self.stop]
        return rows if self.chosen is None else rows[self.chosen]


@dataclass(frozen=True)
class Block:
    """Some slots of a layer, in the order of their numbers."""

    layer: LayerReader
    pieces: tuple[Piece, ...]
    known: dict[object, Tensor] = field(default_factory=dict)
    """What one question has found out about these slots and another one may want too."""

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @cached_property
    def slots(self) -> Int64[Tensor, "rows"]:
        """The slots' numbers."""
        return torch.cat([piece.slots for piece in self.pieces])

    def column(self, name: str) -> Shaped[Tensor, "rows"]:
        return torch.cat([piece.take(piece.part.column(name)) for piece in self.pieces])

    def errors(self) -> Iterator[StoredRows]:
        """The errors, some thousand rows at a time."""
        return self._rows(names.ERRORS, names.ERROR_SCALE)

    def keys(self) -> Iterator[StoredRows]:
        """The keys, some thousand rows at a time."""
        if self.layer.entry.indexed:
            return self._indexed_keys()
        return self._rows(names.KEYS, names.KEY_SCALE)

    def _rows(self, what: str, scale: str) -> Iterator[StoredRows]:
        at = 0
        for piece in self.pieces:
            stored, scales = piece.part.held(what), piece.part.tensor(scale)
            chosen = None if scales is None else piece.take(scales)
            lengths = piece.part.tensor(names.NORMS) if what == names.KEYS else None
            norms = None if lengths is None else piece.take(lengths)
            for rows in decoded(what, piece.take(stored), chosen, self.layer.storage.compute_dtype):
                yield (rows if norms is None else replace(rows, norms=norms[rows.place])).moved(at)
            at += len(piece)

    def _indexed_keys(self) -> Iterator[StoredRows]:
        at = 0
        for piece in self.pieces:  # in the same steps as the errors, so that the two can be zipped
            numbers = piece.take(piece.part.key_numbers())
            for start in range(0, len(numbers), ROWS):
                some = self.layer.keys_numbered(numbers[start : start + ROWS])
                yield StoredRows(slice(at + start, at + start + len(some)), some, None)
            at += len(piece)

    def key_numbers(self) -> Int64[Tensor, "rows"]:
        """The number of each slot's key, where keys are kept once."""
        return torch.cat([piece.take(piece.part.key_numbers()) for piece in self.pieces])


def in_blocks(layer: LayerReader, selection: Selection, rows: int) -> Iterator[Block]:
    """The selected slots in order, about `rows` at a time."""
    pieces: list[Piece] = []
    filled = 0
    for part in layer.parts:
        mask = selection.mask(part.column, part.slots)
        for start in range(0, part.slots, rows):
            piece = Piece.of(part, start, min(start + rows, part.slots), mask)
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
    """A layer's selected slots by their steps, for those who go through a memory step by step."""

    def __init__(self, layer: LayerReader, selection: Selection) -> None:
        self._layer = layer
        self._selection = selection
        self._known: dict[int, tuple[Part, list[int], Tensor | None]] = {}
        """Of each process of the run, the part that was asked for last."""

    def block(self, first: int, end: int) -> Block:
        """The slots of the steps from `first` to before `end`; it may be empty."""
        pieces = []
        for part in self._layer.parts:
            entry = part.segment.entry
            if entry.first_step >= end or entry.end_step <= first:
                continue
            bounds, mask = self._look_up(part)
            start = bounds[max(first, entry.first_step) - entry.first_step]
            stop = bounds[min(end, entry.end_step) - entry.first_step]
            piece = Piece.of(part, start, stop, mask)
            if len(piece):
                pieces.append(piece)
        return Block(self._layer, tuple(pieces))

    def _look_up(self, part: Part) -> tuple[list[int], Tensor | None]:
        """Where each step of the part begins (and the last one ends), and which slots are selected."""
        known = self._known.get(part.segment.rank)
        if known is None or known[0] is not part:
            entry = part.segment.entry
            steps = torch.arange(entry.first_step, entry.end_step + 1)
            bounds = torch.searchsorted(part.column("step"), steps).tolist()
            known = (part, bounds, self._selection.mask(part.column, part.slots))
            self._known[part.segment.rank] = known
        return known[1:]
