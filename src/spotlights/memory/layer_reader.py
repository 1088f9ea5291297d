"""One layer of a memory: where its slots lie in the segments, its distinct keys and its columns.

Keys and errors are read some rows at a time, into a buffer that the cache of a core holds, and converted there to
numbers to compute with. The other tensors of a segment are small, and kept once they are read.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.files import FileTensors, read_layout
from spotlights.memory.format import names
from spotlights.memory.format.columns import MISSING_STRING, missing
from spotlights.memory.format.manifest import Manifest, SegmentEntry
from spotlights.memory.format.shapes import faults_in_segment
from spotlights.memory.format.storage import storage_named
from spotlights.memory.format.tensors import TensorPlace
from spotlights.memory.store import Store
from spotlights.sparse_rows import SparseRows, dense, scaled_rows

ROWS, _FEWEST_ROWS, _ROWS_BYTES = 4096, 64, 2 << 20
"""Rows that are read at once: at most, at least, and how many bytes they take in between. These stay in the cache."""
_KEPT_BYTES = 1 << 30
"""Tensors of this size in all are kept."""
_TABLE_BYTES = 512 << 20
"""Decoded distinct keys of a layer are kept if they take no more, as their rows are asked for in any order."""
T = TypeVar("T")
_SEGMENTS_AHEAD = 4
_ahead = ThreadPoolExecutor(2 * _SEGMENTS_AHEAD, thread_name_prefix="spotlights-ahead")


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

    @property
    def scaled(self) -> Float[Tensor, "rows features"] | SparseRows:
        """The rows, multiplied by their factors."""
        return self.rows if self.scale is None else scaled_rows(self.rows, self.scale)

    def times_scale(self, numbers: Float[Tensor, "*lead rows"]) -> Float[Tensor, "*lead rows"]:
        """A number for each row, multiplied by the row's factor."""
        return numbers if self.scale is None else numbers * self.scale


_buffers = threading.local()


def _buffer(what: str, rows: int, features: int) -> Float[Tensor, "rows features"]:
    """This thread's buffer for decoded rows: allocating a new one would cost more than decoding."""
    size = rows * features
    buffer = getattr(_buffers, what, None)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.float32)
        setattr(_buffers, what, buffer)
    return buffer[: rows * features].view(rows, features)


class Loaded:
    """The tensors that are kept at the moment; those of the least recently used segment are dropped first.

    From a store where reading takes long, a scan has the next segments fetched ahead.
    """

    def __init__(self) -> None:
        self.segments: Sequence[Segment] = ()
        """All of the memory, in their order."""
        self._kept: OrderedDict[Segment, FileTensors] = OrderedDict()
        self._counted: dict[Segment, int] = {}
        """The bytes of each."""
        self._bytes = 0
        self._lock = threading.Lock()
        self._last_used: dict[str, int] = {}
        """By name of a tensor: the number of the segment in which it was last used."""

    def of(self, segment: Segment) -> FileTensors:
        layout = segment.layout  # before the lock: other threads need not wait for its bytes
        with self._lock:
            if segment not in self._kept:
                self._kept[segment] = FileTensors(segment.store, segment.entry, layout)
            self._kept.move_to_end(segment)
            tensors = self._kept[segment]
            self._bytes += tensors.nbytes - self._counted.get(segment, 0)
            self._counted[segment] = tensors.nbytes
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._counted.pop(self._kept.popitem(last=False)[0])
            return tensors

    def tensor(self, segment: Segment, name: str) -> Tensor | None:
        if not segment.store.streams:
            for following in self._following(segment, name):
                if (kept := self._kept.get(following)) is not None and kept.is_fetched(name):
                    continue
                with contextlib.suppress(RuntimeError):  # the interpreter ends: nobody needs what comes next
                    _ahead.submit(self._fetch, following, name)
        return self.of(segment).get(name)

    def _fetch(self, segment: Segment, name: str) -> None:
        tensors = self.of(segment)
        if name in tensors:
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


@dataclass(eq=False)
class Segment:
    """One segment file."""

    store: Store
    entry: SegmentEntry
    manifest: Manifest
    """Of the process that wrote the file."""
    loaded: Loaded
    recode: Mapping[str, Int64[Tensor, "strings"]]
    """By string column: the numbers of this process' strings in the whole memory; the last is for missing values."""
    shift: int = 0
    """The file counts its steps from this one on."""
    _reading: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _layout: dict[str, TensorPlace] | None = None
    _in_range: set[str] = field(default_factory=set)
    """The tensors whose numbers were found to be in their range."""

    def tensor(self, name: str) -> Tensor | None:
        return self.loaded.tensor(self, name)

    def required(self, name: str) -> Tensor:
        """A tensor that the segment must have."""
        self._place(name)
        tensor = self.tensor(name)
        assert tensor is not None
        return tensor

    def read_once(self, name: str) -> Tensor:
        """A tensor that the segment must have, and that will not be asked for again: not kept where that costs none."""
        rows = (*self._place(name).shape, 0)[0]
        return next(self.rows(name, slice(0, rows), rows)) if rows else self.required(name)

    def rows(
        self, name: str, rows: slice | Int64[Tensor, "rows"], at_once: int
    ) -> Iterator[Shaped[Tensor, "rows ..."]]:
        """Some rows of a tensor that the segment must have, at most `at_once` at a time in one and the same buffer."""
        place, count = self._place(name), rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if not self.loaded.of(self).is_near(name):
            yield from self.required(name)[rows].split(at_once)
            return
        into = torch.empty(min(at_once, count), *place.shape[1:], dtype=place.dtype)
        for start in range(0, count, at_once):
            stop, tensors = min(start + at_once, count), self.loaded.of(self)
            some = slice(rows.start + start, rows.start + stop) if isinstance(rows, slice) else rows[start:stop]
            yield tensors.rows(name, some, into)

    def _place(self, name: str) -> TensorPlace:
        if name not in self.layout:
            raise MemoryFormatError(f"{self.store.describe(self.entry.file)} has no {name!r}.")
        return self.layout[name]

    @property
    def layout(self) -> dict[str, TensorPlace]:
        """The file's header, checked against the manifest."""
        with self._reading:  # threads that ask for one header read it once; those of others need not wait
            if self._layout is None:
                self._layout = self._read_layout()
            return self._layout

    def _read_layout(self) -> dict[str, TensorPlace]:
        layout = read_layout(self.store, self.entry)
        for fault in faults_in_segment(self.manifest, layout, self.entry):
            raise MemoryFormatError(f"{self.store.describe(self.entry.file)}: {fault}.")
        return layout

    def check_range(self, name: str, values: Shaped[Tensor, "rows ..."], allowed: range) -> None:
        """Raises an error if a number of a tensor is none that it can be; each tensor is looked at once."""
        if name in self._in_range:
            return
        if values.numel() and not allowed.start <= int(values.min()) <= int(values.max()) < allowed.stop:
            raise MemoryFormatError(
                f"{self.store.describe(self.entry.file)}: {name!r} has numbers outside {allowed.start} to "
                f"{allowed.stop - 1}: the file is damaged."
            )
        self._in_range.add(name)


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
    """Each rank, and each stretch of a recipe, numbers its keys from 0 on: the number of its key 0 in the memory."""

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
            for some in run.split(self.layer.rows_at_once):
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

        def find() -> tuple[Tensor, Tensor]:
            in_full = torch.ones(self.slots, dtype=torch.bool)
            if what in self.layer.entry.tokens:
                tokens = self._all_tokens(what)
                in_full = tokens[:, 0] == names.IN_FULL
                name = f"{self.layer.tensors}{names.TOKENS[what]} where rows are tokens"
                self.file.check_range(name, tokens[~in_full], range(self._width(what)))
            return in_full.cumsum(0) - in_full.long(), in_full

        return self.layer.once(("in full", what, self.start), find)

    def _width(self, what: str) -> int:
        return self.layer.entry.in_features if what == names.KEYS else self.layer.entry.out_features

    def _all_tokens(self, what: str) -> Int64[Tensor, "slots tokens"]:
        """The tokens of every slot; `IN_FULL` in the first column of those that are stored in full."""
        tokens = self.required(names.TOKENS[what])
        self.file.check_range(self.layer.tensors + names.TOKENS[what], tokens, range(names.IN_FULL, self._width(what)))
        return tokens

    def tokens_in_use(self) -> Int64[Tensor, "tokens"]:
        """The tokens of those slots whose key is stored as tokens."""
        tokens = self._all_tokens(names.KEYS)
        return tokens[tokens >= 0]

    def _tokens(self, what: str, rows: Int64[Tensor, "rows"]) -> SparseRows:
        dtype, width = self.layer.storage.compute_dtype, self._width(what)
        places, amounts = self.required(names.TOKENS[what])[rows], self.tensor(names.AMOUNTS[what])
        amounts_of_rows = torch.ones(places.shape, dtype=dtype) if amounts is None else amounts[rows].to(dtype)
        return SparseRows(places, amounts_of_rows, width)

    def _in_full(self, what: str, rows: slice | Int64[Tensor, "rows"], first: int) -> Iterator[StoredRows]:
        dtype, layer = self.layer.storage.compute_dtype, self.layer
        scale = self.tensor(names.KEY_SCALE if what == names.KEYS else names.ERROR_SCALE)
        norms = self.tensor(names.NORMS) if what == names.KEYS else None
        scale, norms = (None if tensor is None else tensor[rows] for tensor in (scale, norms))
        start = 0
        for numbers in self.file.rows(layer.tensors + what, rows, layer.rows_at_once):
            some, place = slice(start, start + len(numbers)), slice(first + start, first + start + len(numbers))
            if numbers.dtype != dtype:
                numbers = _buffer(what, *numbers.shape).copy_(numbers)
            scales = None if scale is None else scale[some]
            yield StoredRows(place, numbers, scales, None if norms is None else norms[some])
            start += len(numbers)

    def column(self, name: str) -> Shaped[Tensor, "slots"]:
        tensor = self.layer.columns + name
        stored = self.file.required(tensor) if name == "step" else self.file.tensor(tensor)
        if stored is None:
            return missing(self.layer.column_kind(name), self.slots)
        described, entry = self.file.manifest.columns.get(name), self.file.entry
        if described is not None and described.kind == "string":
            self.file.check_range(self.layer.columns + name, stored, range(MISSING_STRING, len(described.strings)))
        elif name == "step":
            shift = self.file.shift
            self.file.check_range(
                self.layer.columns + name, stored, range(entry.first_step - shift, entry.end_step - shift)
            )
            return stored + shift if shift else stored
        return self.file.recode[name][stored] if name in self.file.recode else stored

    def key_numbers(self) -> Int64[Tensor, "slots"]:
        """The number of each slot's key, if keys are stored once."""
        numbers = self.required(names.INDEX)
        known = self.first_key + self.file.entry.keys[self.layer.name] - self.numbered_from
        self.file.check_range(self.layer.tensors + names.INDEX, numbers, range(known))
        return numbers + self.numbered_from if self.numbered_from else numbers


class LayerReader:
    """One layer of a memory."""

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        segments: Sequence[Segment],
        column_kind: Callable[[str], str],
        need_slots: Callable[[], None],
    ) -> None:
        self.name = name
        self.entry = manifest.layers[name]
        self.tensors, self.columns = names.layer_tensor(name, ""), names.column_tensor(name, "")
        """What the names of this layer's tensors and columns begin with."""
        self.storage = storage_named(self.entry.storage)
        widest = max(self.entry.in_features, self.entry.out_features) * self.storage.dtype.itemsize
        self.rows_at_once = max(_FEWEST_ROWS, min(ROWS, _ROWS_BYTES // widest))
        """Rows of keys, and of errors, that are read at once."""
        self.folded = manifest.fold is not None
        """Whether a slot is the sum of all visits of its example."""
        self.column_kind = column_kind
        """The kind of a column; raises an error for a column that does not exist."""
        self.known: dict[object, Any] = {}
        """What one question has computed about this layer and another one may need too."""
        self._files, self._need_slots = segments, need_slots
        self._reading = threading.Lock()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What was computed about this layer under a key, or is now."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def last(self, name: str, key: object, make: Callable[[], T]) -> T:
        """The same, but only the last result under a name is kept."""
        if self.known.get(name, (None,))[0] != key:
            self.known[name] = key, make()
        return self.known[name][1]

    @cached_property
    def _placed(self) -> tuple[list[SegmentSlots], int, int]:
        """The segments, and how many slots and keys they have: when asked for, as a memory may have many layers."""
        placed: list[SegmentSlots] = []
        slots = keys = 0
        first_key: dict[tuple[int, int], int] = {}
        for segment in self._files:
            numbered_from = first_key.setdefault((segment.manifest.rank, segment.shift), keys)
            if own := segment.entry.slots[self.name]:
                placed.append(SegmentSlots(self, segment, slots, own, keys, numbered_from))
            slots += own
            keys += segment.entry.keys[self.name]
        return placed, slots, keys

    @cached_property
    def segments(self) -> list[SegmentSlots]:
        """Those that have slots of the layer; a memory that keeps no slots refuses."""
        self._need_slots()
        return self._placed[0]

    @property
    def slots(self) -> int:
        return self._placed[1]

    @property
    def distinct_keys(self) -> int:
        return self._placed[2]

    def key_table(self) -> Iterator[StoredRows]:
        """The distinct keys of an indexed layer, some thousand at a time, placed by their numbers."""
        for segment in self.segments:
            keys = segment.file.entry.keys[self.name]
            yield from segment.decoded(names.KEYS, slice(0, keys), segment.first_key)

    def distinct_tokens(self) -> int:
        """How many tokens occur in keys that are stored as tokens."""
        seen = torch.zeros(self.entry.in_features, dtype=torch.bool)
        for segment in self.segments:
            seen[segment.tokens_in_use()] = True
        return int(seen.sum())

    def keys_numbered(self, numbers: Int64[Tensor, "rows"]) -> Float[Tensor, "rows in_features"]:
        """Some distinct keys of an indexed layer, scaled."""
        if self.distinct_keys * self.entry.in_features * self.storage.compute_dtype.itemsize > _TABLE_BYTES:
            return self._keys(numbers, [*(segment.first_key for segment in self.segments), self.distinct_keys])
        with self._reading:  # the first thread that asks reads all of them
            table = self.once("keys", self._all_keys)
        return table.index_select(0, numbers)

    def _all_keys(self) -> Float[Tensor, "keys in_features"]:
        table = torch.zeros(self.distinct_keys, self.entry.in_features, dtype=self.storage.compute_dtype)
        for rows in self.key_table():
            table[rows.place] = dense(rows.scaled)
        return table

    def keys_at(self, slots: Int64[Tensor, "rows"]) -> Float[Tensor, "rows in_features"]:
        """The keys of some slots, scaled."""
        bounds = [*(segment.start for segment in self.segments), self.slots]
        if not self.entry.indexed:
            return self._keys(slots, bounds)
        numbers = torch.empty_like(slots)
        for segment, places, local in self._by_segment(slots, bounds):
            numbers[places] = segment.key_numbers()[local]
        return self.keys_numbered(numbers)

    def _keys(self, numbers: Int64[Tensor, "rows"], bounds: list[int]) -> Float[Tensor, "rows in_features"]:
        result = torch.empty(len(numbers), self.entry.in_features, dtype=self.storage.compute_dtype)
        for segment, places, local in self._by_segment(numbers, bounds):
            for stored in segment.decoded(names.KEYS, local, 0):
                result[places[stored.place]] = dense(stored.scaled)
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
