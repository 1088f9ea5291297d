"""One layer of a memory: where its slots lie in the segments, its distinct keys and its columns.

Segments are mapped while they are used. Rows are converted to numbers to compute with some thousand at a time, as
views of the file if possible.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.files import FetchedTensors, map_tensors, read_layout
from spotlights.memory.format import names
from spotlights.memory.format.columns import missing
from spotlights.memory.format.manifest import Manifest, SegmentEntry
from spotlights.memory.format.storage import storage_named
from spotlights.memory.format.tensors import TensorPlace
from spotlights.memory.store import Store
from spotlights.sparse_rows import SparseRows, dense

ROWS = 4096
"""Rows converted at once: few enough for their float32 copy to stay in the cache."""
_MAPPED_BYTES = 1 << 30
"""Segments of this size in all stay mapped."""
_SEGMENTS_AHEAD = 4
_ahead = ThreadPoolExecutor(_SEGMENTS_AHEAD, thread_name_prefix="spotlights-ahead")


@dataclass(frozen=True)
class StoredRows:
    """Some decoded rows, valid until the next ones are asked for."""

    place: slice
    """Their positions among the rows that were asked for."""
    rows: Float[Tensor, "rows features"] | SparseRows
    scale: Float[Tensor, "rows"] | None
    """The factor by which each row is still to be multiplied."""
    norms: Float[Tensor, "rows stretches"] | None = None
    """The norm of each part of a row (after that multiplication), if the memory stores norms."""


_buffers = threading.local()


def _buffer(what: str, rows: int, features: int) -> Float[Tensor, "rows features"]:
    """This thread's buffer for decoded rows: allocating a new one would cost more than decoding."""
    size = ROWS * features
    buffer = getattr(_buffers, what, None)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.float32)
        setattr(_buffers, what, buffer)
    return buffer[: rows * features].view(rows, features)


class Maps:
    """The segments that are mapped at the moment; the least recently used one is dropped first.

    Mapping is cheap, and mapped bytes count as memory of the process, so a scan over a large memory keeps only some
    segments mapped. From a store that cannot map, a scan has the next segments fetched ahead.
    """

    def __init__(self) -> None:
        self.segments: Sequence[Segment] = ()
        """All of the memory, in their order."""
        self.layouts: dict[Segment, dict[str, TensorPlace]] = {}
        self._mapped: OrderedDict[Segment, Mapping[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._last_used: dict[str, int] = {}
        """By name of a tensor: the number of the segment in which it was last used."""

    def of(self, segment: Segment) -> Mapping[str, Tensor]:
        layout = segment.layout  # before the lock: other threads need not wait for its bytes
        with self._lock:
            if segment not in self._mapped:
                self._mapped[segment] = map_tensors(segment.store, segment.entry, layout)
                self._bytes += segment.entry.bytes
                while self._bytes > _MAPPED_BYTES and len(self._mapped) > 1:
                    self._bytes -= self._mapped.popitem(last=False)[0].entry.bytes
            self._mapped.move_to_end(segment)
            return self._mapped[segment]

    def tensor(self, segment: Segment, name: str) -> Tensor | None:
        if not segment.store.maps:
            for following in self._following(segment, name):
                _ahead.submit(self._fetch, following, name)
        return self.of(segment).get(name)

    def _fetch(self, segment: Segment, name: str) -> None:
        tensors = self.of(segment)
        if isinstance(tensors, FetchedTensors) and name in tensors:
            tensors.fetch(name)

    def _following(self, segment: Segment, name: str) -> Sequence[Segment]:
        """The segments that a scan will ask for next: once it has gone from one to its neighbour."""
        with self._lock:
            number, last = self._numbers[segment], self._last_used.get(name)
            self._last_used[name] = number
        if last == number - 1:
            return self.segments[number + 1 : number + 1 + _SEGMENTS_AHEAD]
        return self.segments[max(0, number - _SEGMENTS_AHEAD) : number] if last == number + 1 else ()

    @cached_property
    def _numbers(self) -> dict[Segment, int]:
        return {segment: number for number, segment in enumerate(self.segments)}


@dataclass(frozen=True, eq=False)
class Segment:
    """One segment file, mapped while it is used."""

    store: Store
    entry: SegmentEntry
    manifest: Manifest
    """Of the process that wrote the file."""
    maps: Maps
    recode: Mapping[str, Int64[Tensor, "strings"]]
    """By string column: the numbers of this process' strings in the whole memory; the last is for missing values."""

    def tensor(self, name: str) -> Tensor | None:
        return self.maps.tensor(self, name)

    def required(self, name: str) -> Tensor:
        """A tensor that the segment must have."""
        tensor = self.tensor(name)
        if tensor is None:
            raise MemoryFormatError(f"{self.store.describe(self.entry.file)} has no {name!r}.")
        return tensor

    @property
    def layout(self) -> dict[str, TensorPlace]:
        """The file's header, checked against the manifest."""
        if self not in self.maps.layouts:  # no cached_property: that one lets one thread read at a time, in Python 3.11
            self.maps.layouts[self] = self._read_layout()
        return self.maps.layouts[self]

    def _read_layout(self) -> dict[str, TensorPlace]:
        layout = read_layout(self.store, self.entry)
        for layer, described in self.manifest.layers.items():
            slots, keys = self.entry.slots[layer], self.entry.keys[layer]
            errors = self.entry.errors.get(layer, slots)
            shapes = {
                names.layer_tensor(layer, names.KEYS): (keys, described.in_features),
                names.layer_tensor(layer, names.KEY_SCALE): (keys,),
                names.layer_tensor(layer, names.NORMS): (keys, len(described.stretches)),
                names.layer_tensor(layer, names.INDEX): (slots,),
                names.layer_tensor(layer, names.ERRORS): (errors, described.out_features),
                names.layer_tensor(layer, names.ERROR_SCALE): (errors,),
                names.log_tensor(layer, names.PROBE): (self.entry.end_step - self.entry.first_step, 2),
                **{names.column_tensor(layer, column): (slots,) for column in self.manifest.columns},
            }
            for what in described.tokens:
                for name in (names.TOKENS[what], names.AMOUNTS[what]):
                    place = layout.get(names.layer_tensor(layer, name))
                    shapes[names.layer_tensor(layer, name)] = (slots, max(1, place.shape[-1] if place else 1))
            for name, expected in shapes.items():
                if name in layout and tuple(layout[name].shape) != expected:
                    raise MemoryFormatError(
                        f"{self.store.describe(self.entry.file)}: {name!r} has shape {tuple(layout[name].shape)}, "
                        f"but memory.json says {expected}."
                    )
        return layout


@dataclass(frozen=True)
class SegmentSlots:
    """A layer's slots in one segment."""

    layer: LayerReader
    file: Segment
    start: int
    """The number of the first slot."""
    slots: int
    first_key: int
    numbered_from: int = 0
    """Each rank numbers its keys from 0 on: the number that its key 0 has in the memory."""

    def tensor(self, what: str) -> Tensor | None:
        return self.file.tensor(self.layer.tensors + what)

    def required(self, what: str) -> Tensor:
        """A tensor that the segment must have."""
        return self.file.required(self.layer.tensors + what)

    def decoded(self, what: str, rows: slice | Int64[Tensor, "rows"], first: int) -> Iterator[StoredRows]:
        """Some of the keys or the errors, converted to numbers to compute with; their places count from `first` on."""
        if self.layer.entry.tokens:
            yield from self._with_tokens(what, rows, first)
        else:
            yield from self._in_full(what, rows, first)

    def _with_tokens(self, what: str, rows: slice | Int64[Tensor, "rows"], first: int) -> Iterator[StoredRows]:
        """In runs in which keys are all tokens or none, and errors too: the same runs for both."""
        numbers = torch.arange(rows.start or 0, rows.stop) if isinstance(rows, slice) else rows
        kinds = sum(2**i * self._in_full_before(w)[1][numbers].int() for i, w in enumerate((names.KEYS, names.ERRORS)))
        assert isinstance(kinds, Tensor)
        for run in numbers.tensor_split(kinds.diff().nonzero().flatten() + 1):
            for some in run.split(ROWS):
                before, in_full = self._in_full_before(what)
                if len(some) and in_full[some[0]]:
                    stored = before[some]
                    start, stop = int(stored[0]), int(stored[-1]) + 1
                    yield from self._in_full(what, slice(start, stop) if stop - start == len(some) else stored, first)
                elif len(some):
                    yield StoredRows(slice(first, first + len(some)), self._tokens(what, some), None)
                first += len(some)

    def _in_full_before(self, what: str) -> tuple[Int64[Tensor, "slots"], Bool[Tensor, "slots"]]:
        """For each slot: how many rows before it are stored in full, and whether its own is."""
        key = "in full", what, self.start
        if key not in self.layer.known:
            tokens = self.tensor(names.TOKENS[what]) if what in self.layer.entry.tokens else None
            in_full = torch.ones(self.slots, dtype=torch.bool) if tokens is None else tokens[:, 0] == names.IN_FULL
            self.layer.known[key] = in_full.cumsum(0) - in_full.long(), in_full
        return self.layer.known[key]

    def _tokens(self, what: str, rows: Int64[Tensor, "rows"]) -> SparseRows:
        entry, dtype = self.layer.entry, self.layer.storage.compute_dtype
        width = entry.in_features if what == names.KEYS else entry.out_features
        places, amounts = self.required(names.TOKENS[what])[rows], self.tensor(names.AMOUNTS[what])
        if not 0 <= int(places.min()) <= int(places.max()) < width:
            raise MemoryFormatError(
                f'{self.file.store.describe(self.file.entry.file)}: layer "{self.layer.name}" has tokens outside '
                f"0 to {width - 1}."
            )
        made = torch.ones(places.shape, dtype=dtype) if amounts is None else amounts[rows].to(dtype)
        return SparseRows(places, made, width)

    def _in_full(self, what: str, rows: slice | Int64[Tensor, "rows"], first: int) -> Iterator[StoredRows]:
        stored, dtype = self.required(what)[rows], self.layer.storage.compute_dtype
        scale = self.tensor(names.KEY_SCALE if what == names.KEYS else names.ERROR_SCALE)
        norms = self.tensor(names.NORMS) if what == names.KEYS else None
        scale, norms = (None if tensor is None else tensor[rows] for tensor in (scale, norms))
        for start in range(0, len(stored), ROWS):
            some = slice(start, start + ROWS)
            numbers = stored[some]
            if numbers.dtype != dtype:
                numbers = _buffer(what, *numbers.shape).copy_(numbers)
            place = slice(first + start, first + start + len(numbers))
            scales = None if scale is None else scale[some]
            yield StoredRows(place, numbers, scales, None if norms is None else norms[some])

    def column(self, name: str) -> Shaped[Tensor, "slots"]:
        stored = self.file.tensor(self.layer.columns + name)
        if stored is None:
            return missing(self.layer.column_kind(name), self.slots)
        return self.file.recode[name][stored] if name in self.file.recode else stored

    def key_numbers(self) -> Int64[Tensor, "slots"]:
        """The number of each slot's key, if keys are stored once."""
        numbers = self.required(names.INDEX)
        return numbers + self.numbered_from if self.numbered_from else numbers


class LayerReader:
    """One layer of a memory."""

    def __init__(
        self, name: str, manifest: Manifest, segments: Sequence[Segment], column_kind: Callable[[str], str]
    ) -> None:
        self.name = name
        self.entry = manifest.layers[name]
        self.tensors, self.columns = names.layer_tensor(name, ""), names.column_tensor(name, "")
        """What the names of this layer's tensors and columns begin with."""
        self.storage = storage_named(self.entry.storage)
        self.folded = manifest.fold is not None
        """Whether a slot is the sum of all visits of its example."""
        self.column_kind = column_kind
        """The kind of a column; raises an error for a column that does not exist."""
        self.known: dict[object, Any] = {}
        """What one question has computed about this layer and another one may need too."""
        self.segments: list[SegmentSlots] = []
        self.slots = self.distinct_keys = 0
        first_key: dict[int, int] = {}
        for segment in segments:
            numbered_from = first_key.setdefault(segment.manifest.rank, self.distinct_keys)
            slots = segment.entry.slots[name]
            if slots:
                place = SegmentSlots(self, segment, self.slots, slots, self.distinct_keys, numbered_from)
                self.segments.append(place)
            self.slots += slots
            self.distinct_keys += segment.entry.keys[name]

    def key_table(self) -> Iterator[StoredRows]:
        """The distinct keys of an indexed layer, some thousand at a time, placed by their numbers."""
        for segment in self.segments:
            yield from segment.decoded(names.KEYS, slice(None), segment.first_key)

    def distinct_tokens(self) -> int:
        """How many tokens occur in keys that are stored as tokens."""
        seen = torch.zeros(self.entry.in_features, dtype=torch.bool)
        for segment in self.segments:
            seen[segment.required(names.TOKENS[names.KEYS]).flatten()] = True
        return int(seen.sum())

    def keys_numbered(self, numbers: Int64[Tensor, "rows"]) -> Float[Tensor, "rows in_features"]:
        """Some distinct keys of an indexed layer, scaled."""
        result = torch.empty(len(numbers), self.entry.in_features, dtype=self.storage.compute_dtype)
        bounds = [*(segment.first_key for segment in self.segments), self.distinct_keys]
        for segment, places, local in self._by_segment(numbers, bounds):
            rows, scale = segment.required(names.KEYS)[local].to(result.dtype), segment.tensor(names.KEY_SCALE)
            result[places] = rows if scale is None else rows * scale[local, None]
        return result

    def keys_at(self, slots: Int64[Tensor, "rows"]) -> Float[Tensor, "rows in_features"]:
        """The keys of some slots, scaled."""
        result = torch.empty(len(slots), self.entry.in_features, dtype=self.storage.compute_dtype)
        bounds = [*(segment.start for segment in self.segments), self.slots]
        for segment, places, local in self._by_segment(slots, bounds):
            if self.entry.indexed:
                result[places] = self.keys_numbered(segment.key_numbers()[local])
                continue
            for stored in segment.decoded(names.KEYS, local, 0):
                keys = dense(stored.rows)
                result[places[stored.place]] = keys if stored.scale is None else keys * stored.scale[:, None]
        return result

    def column_at(self, name: str, slots: Int64[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A column's values for some slots."""
        result = missing(self.column_kind(name), slots.numel())
        bounds = [*(segment.start for segment in self.segments), self.slots]
        for segment, places, local in self._by_segment(slots.reshape(-1), bounds):
            result[places] = segment.column(name)[local]
        return result.reshape(slots.shape)

    def _by_segment(
        self, numbers: Int64[Tensor, "rows"], bounds: list[int]
    ) -> Iterator[tuple[SegmentSlots, Int64[Tensor, "some"], Int64[Tensor, "some"]]]:
        """The segments that hold some numbers: which ones these are, and their positions in the segment."""
        ordered, order = numbers.sort()
        edges = torch.searchsorted(ordered, torch.tensor(bounds)).tolist()
        for segment, start, (first, end) in zip(self.segments, bounds, pairwise(edges), strict=False):
            if end > first:
                yield segment, order[first:end], ordered[first:end] - start
