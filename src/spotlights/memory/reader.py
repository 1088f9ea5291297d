"""The reader: a memory's files as mapped tensors, a layer's slots as blocks.

Opening reads the manifest and the sizes of the files; bytes of slots are touched only by a scan. What is
committed never changes, so a memory can be read while it is being recorded: the reader sees the steps
that were committed when it opened.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from spotlights.errors import MemoryFormatError, UnknownNameError, UnsupportedError
from spotlights.memory import slots as names
from spotlights.memory.columns import missing
from spotlights.memory.gradient_block import compare
from spotlights.memory.manifest import FILE, FileEntry, LayerEntry, Manifest, SegmentEntry
from spotlights.memory.ranks import Recode, joined, rank_directory, read_ranks, recode
from spotlights.memory.selection import Selection
from spotlights.memory.storage import Storage, storage_named
from spotlights.memory.tensors import MappedFile, Placed, check_size, file_checksum, map_tensors, read_layout

ROWS = 4096
"""Rows worked on at once: few enough for a float32 copy of them to stay in the cache."""

MAPPED_BYTES = 1 << 30
"""How much of the segments stays mapped."""
_TRIES = 5

_buffers = threading.local()


def _buffer(what: str, rows: int, features: int) -> Float[Tensor, "rows features"]:
    """This thread's reusable room for decoded rows: allocating it anew would cost more than decoding."""
    size = ROWS * features
    held = getattr(_buffers, what, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, dtype=torch.float32)
        setattr(_buffers, what, held)
    return held[: rows * features].view(rows, features)


@dataclass(frozen=True)
class StoredRows:
    """Some decoded rows. They are valid until the next ones are asked for."""

    place: slice
    """Where they belong among the rows that were asked for."""
    rows: Float[Tensor, "rows features"]
    scale: Float[Tensor, "rows"] | None
    """What each row is still to be multiplied by."""
    norms: Float[Tensor, "rows stretches"] | None = None
    """The length of each stretch of a row, so multiplied, where the memory keeps it."""

    def moved(self, by: int) -> StoredRows:
        return replace(self, place=slice(self.place.start + by, self.place.stop + by))


class Segment:
    """One segment file, mapped while it is used."""

    def __init__(self, directory: Path, entry: SegmentEntry, manifest: Manifest, maps: Maps, recode: Recode) -> None:
        self.path = directory / entry.file
        self.entry = entry
        self.rank = manifest.rank
        self.recode = recode
        self._manifest = manifest
        self._maps = maps

    def tensor(self, name: str) -> Tensor | None:
        return self._maps.of(self).get(name)

    @cached_property
    def layout(self) -> dict[str, Placed]:
        """The file's header, checked against the manifest."""
        layout = read_layout(self.path, self.entry.bytes)
        steps = self.entry.end_step - self.entry.first_step
        for layer, described in self._manifest.layers.items():
            slots, keys = self.entry.slots[layer], self.entry.keys[layer]
            shapes = {
                names.layer_tensor(layer, names.KEYS): (keys, described.in_features),
                names.layer_tensor(layer, names.KEY_SCALE): (keys,),
                names.layer_tensor(layer, names.NORMS): (keys, len(described.stretches)),
                names.layer_tensor(layer, names.INDEX): (slots,),
                names.layer_tensor(layer, names.ERRORS): (slots, described.out_features),
                names.layer_tensor(layer, names.ERROR_SCALE): (slots,),
                names.probe_tensor(layer): (steps, 2),
            }
            for column in self._manifest.columns:
                shapes[names.column_tensor(layer, column)] = (slots,)
            for name, expected in shapes.items():
                found = tuple(layout[name].shape) if name in layout else None
                if found not in (expected, None):
                    raise MemoryFormatError(
                        f"{self.path}: {name!r} has shape {found}, but memory.json says {expected}."
                    )
            if slots and names.layer_tensor(layer, names.KEYS) not in layout:
                raise MemoryFormatError(f"{self.path} has no keys of layer {layer!r}.")
        return layout


class Maps:
    """The segments mapped at the moment, the longest unused dropped first.

    Mapping is cheap and mapped bytes count as memory of the process, so a scan over a large memory keeps only
    some of it mapped.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[Segment, MappedFile] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, segment: Segment) -> MappedFile:
        with self._lock:
            if segment in self._held:
                self._held.move_to_end(segment)
                return self._held[segment]
            mapped = MappedFile(segment.path, segment.entry.bytes, segment.layout)
            self._held[segment] = mapped
            self._bytes += segment.entry.bytes
            while self._bytes > MAPPED_BYTES and len(self._held) > 1:
                dropped, _ = self._held.popitem(last=False)
                self._bytes -= dropped.entry.bytes
            return mapped


@dataclass(frozen=True)
class Part:
    """A layer's slots in one segment."""

    layer: LayerReader
    segment: Segment
    start: int
    """The number of the first slot."""
    slots: int
    first_key: int
    keys: int
    numbered_from: int = 0
    """Each process of a run numbers its keys from 0 on: what its numbers count from here."""

    def tensor(self, what: str) -> Tensor | None:
        return self.segment.tensor(names.layer_tensor(self.layer.name, what))

    def column(self, name: str) -> Shaped[Tensor, "slots"]:
        found = self.segment.tensor(names.column_tensor(self.layer.name, name))
        if found is None:
            return missing(self.layer.column_kind(name), self.slots)
        return self.segment.recode[name][found] if name in self.segment.recode else found

    def key_numbers(self) -> Int64[Tensor, "slots"]:
        """The number of each slot's key, where keys are kept once."""
        numbers = _present(self.tensor(names.INDEX))
        return numbers + self.numbered_from if self.numbered_from else numbers


@dataclass(frozen=True)
class Piece:
    """Some slots of one part: a range, or chosen ones in it."""

    part: Part
    start: int
    stop: int
    chosen: Int64[Tensor, "rows"] | None
    """Positions within the range, or None for all of it."""

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
            stored, scales = _present(piece.part.tensor(what)), piece.part.tensor(scale)
            chosen = None if scales is None else piece.take(scales)
            lengths = piece.part.tensor(names.NORMS) if what == names.KEYS else None
            norms = None if lengths is None else piece.take(lengths)
            for rows in self.layer.decode(what, piece.take(stored), chosen):
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
            chosen = None if mask is None else mask[start:stop].nonzero().flatten()
            if chosen is not None and len(chosen) == stop - start:
                chosen = None
            piece = Piece(part, start, stop, chosen)
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


class LayerReader:
    """One layer of a memory."""

    def __init__(self, name: str, entry: LayerEntry, memory: MemoryReader) -> None:
        self.name = name
        self.entry = entry
        self.storage: Storage = storage_named(entry.storage)
        self._memory = memory
        self._distinct: dict[str, np.ndarray] = {}
        self._first: dict[str, np.ndarray] = {}
        self.parts: list[Part] = []
        slots = keys = rank = first_of_rank = 0
        for segment in memory.segments:
            if segment.rank != rank:
                rank, first_of_rank = segment.rank, keys
            n, k = segment.entry.slots[name], segment.entry.keys[name]
            if n:
                self.parts.append(Part(self, segment, slots, n, keys, k, first_of_rank))
            slots, keys = slots + n, keys + k
        self.slots, self.distinct_keys = slots, keys

    def decode(
        self,
        what: str,
        stored: Shaped[Tensor, "rows features"],
        scale: Float[Tensor, "rows"] | None,
    ) -> Iterator[StoredRows]:
        """Stored rows as rows to compute with; a view of the file where that is possible.

        Rows of one `what` ("keys", "errors") share a buffer, those of another have their own.
        """
        for start in range(0, len(stored), ROWS):
            some = stored[start : start + ROWS]
            if some.dtype != self.storage.compute_dtype:
                some = _buffer(what, *some.shape).copy_(some)
            factors = None if scale is None else scale[start : start + ROWS]
            yield StoredRows(slice(start, start + len(some)), some, factors)

    @property
    def folded(self) -> bool:
        """Whether a slot is the sum of all visits of its example."""
        return self._memory.manifest.fold is not None

    def column_kind(self, name: str) -> str:
        return self._memory.column_kind(name)

    def blocks(self, selection: Selection, rows: int) -> Iterator[Block]:
        """The selected slots in order, about `rows` at a time."""
        pieces: list[Piece] = []
        filled = 0
        for part in self.parts:
            mask = selection.mask(part.column, part.slots)
            for start in range(0, part.slots, rows):
                stop = min(start + rows, part.slots)
                chosen = None if mask is None else mask[start:stop].nonzero().flatten()
                if chosen is not None and len(chosen) == stop - start:
                    chosen = None
                piece = Piece(part, start, stop, chosen)
                if not len(piece):
                    continue
                if filled and filled + len(piece) > rows:
                    yield Block(self, tuple(pieces))
                    pieces, filled = [], 0
                pieces.append(piece)
                filled += len(piece)
        if pieces:
            yield Block(self, tuple(pieces))

    def count(self, selection: Selection) -> int:
        """How many slots are selected."""
        masks = ((part, selection.mask(part.column, part.slots)) for part in self.parts)
        return sum(part.slots if mask is None else int(mask.sum()) for part, mask in masks)

    def key_table(self) -> Iterator[StoredRows]:
        """The distinct keys of an indexed layer, some thousand at a time, placed by their numbers."""
        for part in self.parts:
            stored = _present(part.tensor(names.KEYS))
            for rows in self.decode(names.KEYS, stored, part.tensor(names.KEY_SCALE)):
                yield rows.moved(part.first_key)

    def keys_numbered(self, numbers: Int64[Tensor, "rows"]) -> Float[Tensor, "rows in_features"]:
        """Some distinct keys of an indexed layer, scaled."""
        result = torch.empty(len(numbers), self.entry.in_features, dtype=self.storage.compute_dtype)
        starts = torch.tensor([part.first_key for part in self.parts])
        owner = torch.searchsorted(starts, numbers, right=True) - 1
        for index in owner.unique().tolist():
            part, mine = self.parts[index], owner == index
            local = numbers[mine] - part.first_key
            rows = _present(part.tensor(names.KEYS))[local].to(result.dtype)
            scale = part.tensor(names.KEY_SCALE)
            result[mine] = rows if scale is None else rows * scale[local, None]
        return result

    def column_at(self, name: str, slots: Int64[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A column's values for some slots."""
        flat = slots.reshape(-1)
        ordered, order = flat.sort()
        starts = torch.tensor([part.start for part in self.parts])
        bounds = torch.searchsorted(ordered, torch.cat([starts, torch.tensor([self.slots])])).tolist()
        result = missing(self.column_kind(name), len(flat))
        for part, first, end in zip(self.parts, bounds[:-1], bounds[1:], strict=True):
            if end > first:
                result[order[first:end]] = part.column(name)[ordered[first:end] - part.start]
        return result.reshape(slots.shape)

    def first_slots(self, column: str) -> Int64[Tensor, "groups"]:
        """The first slot with each value of `distinct(column)`."""
        if column not in self._first:
            values = self.distinct(column)
            first = np.full(len(values), self.slots, dtype=np.int64)
            for part in self.parts:
                found, where = np.unique(part.column(column).numpy(), return_index=True)
                at = np.searchsorted(values, found)
                first[at] = np.minimum(first[at], part.start + where)
            self._first[column] = first
        return torch.from_numpy(self._first[column])

    def distinct(self, column: str) -> np.ndarray:
        """The values a column takes in this layer, sorted."""
        if column not in self._distinct:
            parts = [np.unique(part.column(column).numpy()) for part in self.parts]
            self._distinct[column] = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        return self._distinct[column]


@dataclass(frozen=True)
class StepLog:
    """A layer's step log."""

    factor: dict[str, Float[Tensor, "steps"]]
    """γ of each trained parameter."""
    residual: Float[Tensor, "steps"]
    moved: Float[Tensor, "steps"]
    rule: dict[str, Float[Tensor, "steps fields"]]
    samples: dict[str, Float[Tensor, "steps sample"]]


class MemoryReader:
    """A memory's files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ranks = read_ranks(directory)
        for _ in range(_TRIES if self._ranks[0].fold else 0):  # its files may be replaced while it is being opened
            if all((directory / segment.file).exists() for segment in self._ranks[0].segments):
                break
            self._ranks = read_ranks(directory)
        self.manifest = joined(self._ranks)
        for path, entry in self._files():
            check_size(path, entry.bytes)
        maps = Maps()
        self.segments = [
            Segment(rank_directory(directory, rank), entry, own, maps, recode(own, self.manifest.columns))
            for rank, own in enumerate(self._ranks)
            for entry in own.segments
        ]
        self.layers = {n: LayerReader(n, entry, self) for n, entry in self.manifest.layers.items()}
        self._logs: dict[str, StepLog] = {}
        self.moments: dict[str, Tensor] = {}
        """Of each layer's keys, once somebody has asked for them."""

    def _files(self) -> Iterator[tuple[Path, FileEntry | SegmentEntry]]:
        for rank, own in enumerate(self._ranks):
            for entry in (own.initial, *own.segments, own.final):
                if entry is not None and (rank_directory(self.directory, rank) / FILE).exists():
                    yield rank_directory(self.directory, rank) / entry.file, entry

    @property
    def steps(self) -> int:
        """How many steps all processes of the run have written."""
        return min(own.steps for own in self._ranks)

    @property
    def starts(self) -> list[int]:
        """The first steps of the segments that hold what the optimizer was told: those of the first process."""
        return [entry.first_step for entry in self._ranks[0].segments]

    @property
    def nbytes(self) -> int:
        return sum(segment.bytes for segment in self.manifest.segments)

    def layer(self, name: str) -> LayerReader:
        if name not in self.layers:
            known = ", ".join(self.layers)
            raise UnknownNameError(f'No layer "{name}" in {self.directory}. It has: {known}.')
        return self.layers[name]

    def column_kind(self, name: str) -> str:
        if name == "step":
            self.need_visits("a step of its own for each visit", 'Ask by "first_step" or "last_step"')
        if name not in self.manifest.columns:
            known = ", ".join(self.manifest.columns) or "none"
            raise UnknownNameError(f'No column "{name}" in {self.directory}. It has: {known}.')
        return self.manifest.columns[name].kind

    def need_visits(self, what: str, instead: str) -> None:
        """Refuses a question that only a memory with all visits can answer; `instead` says what to do here."""
        fold = self.manifest.fold
        if fold is not None:
            raise UnsupportedError(
                f"{self.directory} is folded: it has the sum of each example's keys over {fold.span}, not {what}. "
                f"{instead}, or record without fold=."
            )

    def need_all_slots(self, what: str, instead: str = "Ask for top or totals") -> None:
        """Refuses a question that a sample of the slots cannot answer."""
        sample = self.manifest.sample
        if sample is not None:
            raise UnsupportedError(
                f"{self.directory} is a sample: it has {sample}. {what} all of them. {instead}, or record without "
                "sample=."
            )

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        return map_tensors(self.directory / self.manifest.initial.file, self.manifest.initial.bytes)

    @cached_property
    def final(self) -> dict[str, Tensor] | None:
        entry = self.manifest.final
        return None if entry is None else map_tensors(self.directory / entry.file, entry.bytes)

    def checkpoints(self, layer: str, parameter: str) -> dict[int, set[str]]:
        """Before which steps the optimizer's state is kept, and what of it; "weights" is the parameter itself."""
        start, prefix = f"{layer}/{parameter}/", names.state_tensor(layer, parameter, "")
        found = {0: {n.removeprefix(start) for n in self.initial if n.startswith(start)} | {"weights"}}
        for segment in self.segments:
            kept = {name.removeprefix(prefix) for name in segment.layout if name.startswith(prefix)}
            if kept:
                found[segment.entry.first_step] = kept
        return found

    def state(self, layer: str, parameter: str, step: int, state: str) -> Tensor:
        """One tensor of such a checkpoint."""
        if step == 0:
            return self.initial[f"{layer}/{parameter}" + ("" if state == "weights" else f"/{state}")]
        segment = next(s for s in self.segments if s.entry.first_step == step)
        return _present(segment.tensor(names.state_tensor(layer, parameter, state)))

    def log(self, layer: str) -> StepLog:
        if layer not in self._logs:
            self._logs[layer] = self._read_log(layer)
        return self._logs[layer]

    def _read_log(self, layer: str) -> StepLog:
        entry = self.manifest.layers[layer]

        def read(name: str, *width: int, rank: int = 0) -> Tensor:
            found = []
            for segment in (s for s in self.segments if s.rank == rank):
                tensor = segment.tensor(name)
                if tensor is None:
                    raise MemoryFormatError(f"{segment.path} has no {name!r}.")
                found.append(tensor)
            return torch.cat(found)[: self.steps] if self.steps else torch.empty(0, *width, dtype=torch.float64)

        residual, moved = read(names.probe_tensor(layer), 2).unbind(1)
        if self.manifest.ranks > 1:
            ranks = range(self.manifest.ranks)
            seen = {p: read(names.gradient_tensor(layer, p), 0).numpy() for p in entry.trained}
            each = {p: [read(names.explained_tensor(layer, p), 0, rank=r) for r in ranks] for p in entry.trained}
            explained = {p: torch.stack(of_ranks).sum(dim=0).numpy() for p, of_ranks in each.items()}
            factors, share = compare(self.steps, seen, explained, entry.rounding)
            factor, residual = {p: torch.from_numpy(f) for p, f in factors.items()}, torch.from_numpy(share)
        else:
            factor = {p: read(names.factor_tensor(layer, p)) for p in entry.trained}
        fields = len(self.manifest.log_fields)
        ruled = entry.trained if self.manifest.rule is not None else []
        return StepLog(
            factor,
            residual,
            moved,
            rule={p: read(names.rule_tensor(layer, p), fields) for p in ruled},
            samples={p: read(names.sample_tensor(layer, p), 0) for p in entry.trained},
        )

    def damaged(self) -> list[str]:
        """Reads every file and compares it with its checksum; returns what is wrong, in sentences."""
        found = []
        for path, entry in self._files():
            checksum = file_checksum(path)
            if checksum != entry.checksum:
                found.append(
                    f"{path} has checksum {checksum}, memory.json says "
                    f"{entry.checksum}: its content has changed since it was written."
                )
        return found


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
