"""A memory's files, read and written through its store: the manifest, files of tensors, and segments.

`Committed` is a memory that this process writes. Readers use the functions before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from spotlights.errors import MemoryExistsError, MemoryFormatError, SpotlightsError, StoreError
from spotlights.memory.buffers import PAGE
from spotlights.memory.format import names
from spotlights.memory.format.manifest import FileEntry, Manifest, SegmentEntry, manifest_content, parse_manifest
from spotlights.memory.format.recipe import RECIPE
from spotlights.memory.format.tensors import LENGTH_BYTES, Blocks, TensorPlace, lay_out, parse_header
from spotlights.memory.store import Store
from spotlights.memory.store.local import becoming

_READ_BYTES = 16 << 20
"""Of a file that is read from its beginning to its end."""
_HEADER_BYTES = 16 << 10
"""Read at once at the beginning of a file: few headers are longer."""
_SMALL_BYTES, _TOGETHER_BYTES = 64 << 10, 512 << 10
"""Tensors so small are read with their neighbours, so many bytes at a time: a request costs more than the bytes."""
_PIECE_BYTES = 12 << 10
"""What can be read in the time that one more call of the system takes."""


def read_manifest(store: Store) -> tuple[Manifest, str]:
    """The manifest, checked, and its version in the store."""
    try:
        content, version = store.committed()
    except FileNotFoundError:
        with contextlib.suppress(NotADirectoryError):
            if next(iter(store.list()), None) is None:
                raise MemoryFormatError(f"There is no memory at {store}: nothing is there.") from None
        raise MemoryFormatError(
            f"{store} is not a memory: it has no {names.MANIFEST}. Give the address that `record` wrote to."
        ) from None
    except OSError as error:
        raise MemoryFormatError(f"{store.describe(names.MANIFEST)} cannot be read: {error}.") from error
    return parse_manifest(content, store.describe(names.MANIFEST)), version


def write_tensors(store: Store, name: str, tensors: Blocks, *, new: bool = False) -> FileEntry:
    """Writes a file of tensors; returns what the manifest is to say of it. `new` as in `Store.write`."""
    beginning, blocks, size = lay_out(tensors)
    checksum = xxhash.xxh3_64()

    def stream() -> Iterator[UInt8[np.ndarray, "bytes"]]:
        for block in (np.frombuffer(beginning, dtype=np.uint8), *blocks):
            flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            checksum.update(flat.data)
            yield flat

    store.write(name, stream(), new=new)
    return FileEntry(name, size, checksum.hexdigest())


def check_size(store: Store, entry: FileEntry, size: int | None = None) -> None:
    """Raises an error if a file does not have the size that the manifest says; `size` if it is known."""
    address = store.describe(entry.file)
    try:
        size = store.size(entry.file) if size is None else size
    except FileNotFoundError:
        raise MemoryFormatError(
            f"{address} is missing, but memory.json lists it. Restore it from a copy of the memory; or, if this is a "
            "folded memory that is being recorded, which replaces its files, open it again."
        ) from None
    except OSError as error:
        raise MemoryFormatError(f"{address} cannot be read: {error}.") from error
    if size != entry.bytes:
        raise MemoryFormatError(
            f"{address} has {size:,} bytes, but memory.json says {entry.bytes:,}: "
            "it was truncated or replaced. Restore it from a copy of the memory."
        )


def read_layout(store: Store, entry: FileEntry) -> dict[str, TensorPlace]:
    """Where each tensor of a file lies, from the file's header."""
    try:
        header = store.load(entry.file, range(min(_HEADER_BYTES, entry.bytes)), entry.checksum)
        length = int.from_bytes(header[:LENGTH_BYTES].tobytes(), "little")
        end = LENGTH_BYTES + length
        if end > entry.bytes:
            raise ValueError(f"its header would have {length:,} bytes")
        if end > len(header):
            header = store.load(entry.file, range(end), entry.checksum)
        return parse_header(header[LENGTH_BYTES:end].tobytes(), entry.bytes - end)
    except (ValueError, RecursionError, OSError) as error:
        check_size(store, entry)  # says more, if the file is missing or too short
        raise MemoryFormatError(f"{store.describe(entry.file)} is not a readable safetensors file: {error}.") from error


class FileTensors(Mapping[str, Tensor]):
    """The tensors of a file. Each one is read when it is first used, and kept."""

    def __init__(self, store: Store, entry: FileEntry, layout: Mapping[str, TensorPlace] | None = None) -> None:
        self._store, self._entry = store, entry
        self.layout = read_layout(store, entry) if layout is None else layout
        self._spans = _spans(self.layout)
        self._fetched: dict[range, Future[UInt8[np.ndarray, "bytes"]]] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        """What is kept, or will be."""

    def fetch(self, name: str) -> UInt8[np.ndarray, "bytes"]:
        """The bytes of a tensor's span: read by the first thread that asks for them, others wait."""
        span = self._spans[name]
        with self._lock:
            fetched = self._fetched.get(span)
            first = fetched is None or (fetched.done() and fetched.exception() is not None)
            if fetched is None or first:
                fetched = self._fetched[span] = Future()
                self.nbytes += len(span)
        if first:
            try:
                fetched.set_result(self._store.load(self._entry.file, span, self._entry.checksum))
            except BaseException as error:
                fetched.set_exception(error)
        return fetched.result()

    def is_fetched(self, name: str) -> bool:
        """Whether nobody need begin to read a tensor."""
        return self._spans.get(name) in self._fetched or name not in self.layout

    def __getitem__(self, name: str) -> Tensor:
        place = self.layout[name]
        numbers, size = math.prod(place.shape), place.dtype.itemsize
        if not numbers:
            return torch.empty(place.shape, dtype=place.dtype)
        first = place.start * size - self._spans[name].start
        with self._readable():
            content = torch.from_numpy(self.fetch(name))
        return content[first : first + numbers * size].view(place.dtype).view(place.shape)

    def rows(
        self, name: str, rows: slice | Int64[Tensor, "rows"], into: Shaped[Tensor, "most ..."]
    ) -> Shaped[Tensor, "rows ..."]:
        """Some rows of a tensor that is near, at the beginning of a buffer; nothing is kept.

        Args:
            name: the tensor.
            rows: a slice with both ends, or numbers in ascending order, which may come more than once.
            into: a buffer of the tensor's type, with enough rows of its shape.
        """
        place = self.layout[name]
        entries, size = math.prod(place.shape[1:]), place.dtype.itemsize
        if isinstance(rows, slice):
            first, last, count = rows.start, rows.stop, rows.stop - rows.start
        else:
            first, last, count = int(rows[0]), int(rows[-1]) + 1, len(rows)
        if not 0 <= first <= last <= place.shape[0]:
            file = self._store.describe(self._entry.file)
            raise MemoryFormatError(f"{file}: {name!r} has {place.shape[0]} rows, and no row {last - 1}.")
        start, width, among = place.start * size, entries * size, last - first
        result = into[:count]
        with self._readable():
            if isinstance(rows, slice):
                self._load(name, [start + first * width], among * width, result)
            elif among * width <= count * (width + _PIECE_BYTES):
                every = into.new_empty(among, *place.shape[1:])
                self._load(name, [start + first * width], among * width, every)
                torch.index_select(every, 0, rows - first, out=result)
            else:
                self._load(name, (start + rows * width).tolist(), width, result)
        return result

    def is_near(self, name: str) -> bool:
        """Whether some rows of a tensor are read at the cost of their bytes, so that nobody need keep the whole."""
        with self._readable():
            return self._load_pieces(name, [], 0, np.empty(0, np.uint8))

    def _load(self, name: str, starts: Sequence[int], width: int, into: Shaped[Tensor, "..."]) -> None:
        room = into.view(-1).numpy().view(np.uint8)
        if not self._load_pieces(name, starts, width, room):  # a cache has made room meanwhile
            whole, first = self.fetch(name), self._spans[name].start
            room[:] = np.concatenate([whole[start - first : start - first + width] for start in starts])

    def _load_pieces(self, name: str, starts: Sequence[int], width: int, room: UInt8[np.ndarray, "bytes"]) -> bool:
        entry = self._entry
        return self._store.load_pieces(entry.file, self._spans[name], entry.checksum, (starts, width), room)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            check_size(self._store, self._entry)  # says more, if the file is missing or too short
            raise MemoryFormatError(f"{self._store.describe(self._entry.file)} cannot be read: {error}.") from error

    def __contains__(self, name: object) -> bool:
        return name in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def _spans(layout: Mapping[str, TensorPlace]) -> dict[str, range]:
    """Which bytes of the file are fetched for each tensor: its own, or those of some small ones side by side."""
    groups: list[tuple[range, list[str]]] = []
    joinable = False
    for name, place in sorted(layout.items(), key=lambda item: item[1].start * item[1].dtype.itemsize):
        first = place.start * place.dtype.itemsize
        last = first + math.prod(place.shape) * place.dtype.itemsize
        small = last - first < _SMALL_BYTES
        if small and joinable and last - groups[-1][0].start <= _TOGETHER_BYTES:
            groups[-1] = (range(groups[-1][0].start, last), [*groups[-1][1], name])
        else:
            groups.append((range(first - first % 8, last), [name]))  # where any type of number may begin
        joinable = small
    return {name: span for span, together in groups for name in together}


@contextlib.contextmanager
def writable(store: Store | str | Path) -> Iterator[None]:
    """Raises a StoreError in place of what a system says of a full or read-only disk, or of a name that is too long."""
    try:
        yield
    except SpotlightsError:
        raise
    except OSError as error:
        raise StoreError(f"{store} cannot be written: {error}. Choose another path, or make room there.") from error


def write_whole(path: str | Path, content: bytes) -> None:
    """Writes a file of an answer: until it is complete, what was there before stays; a full disk is a StoreError."""
    with writable(path), contextlib.ExitStack() as opened:
        place, mode = os.path.realpath(path), "wb"
        if os.path.isfile(place) or not os.path.exists(place):  # else a pipe, or a terminal
            place, mode = opened.enter_context(becoming(place)), "xb"
        opened.enter_context(open(place, mode)).write(content)


def checked_blocks(store: Store, entry: FileEntry) -> Iterator[UInt8[np.ndarray, "bytes"]]:
    """A file, block by block; at its end, an error if it does not have the checksum that the manifest says."""
    check_size(store, entry)
    checksum = xxhash.xxh3_64()
    for start in range(0, entry.bytes, _READ_BYTES):
        try:
            block = store.load(entry.file, range(start, min(start + _READ_BYTES, entry.bytes)), "")
        except OSError as error:
            raise MemoryFormatError(f"{store.describe(entry.file)} cannot be read: {error}.") from error
        checksum.update(block.data)
        yield block
    if checksum.hexdigest() != entry.checksum:
        raise MemoryFormatError(
            f"{store.describe(entry.file)} has checksum {checksum.hexdigest()}, memory.json says {entry.checksum}: its "
            "content has changed since it was written. Restore it from a copy of the memory."
        )


def check_content(store: Store, entry: FileEntry) -> None:
    """Raises an error if a file does not have the checksum that the manifest says."""
    for _ in checked_blocks(store, entry):
        pass


def claim(store: Store, *, overwrite: bool) -> Callable[[], None]:
    """Locks a store for a new memory and empties it; returns what releases the lock.

    A memory that is there, whole or left half made by a killed process, is deleted only with `overwrite`. Files that
    are not a memory's are never deleted.
    """
    try:
        files = list(store.list())
        is_memory = store.exists(names.MANIFEST) and _is_manifest(store)
        foreign = None if is_memory else next((name for name in files if not _is_ours(store, name)), None)
    except NotADirectoryError:
        raise MemoryExistsError(f"{store} exists and is not a memory. Choose another path.") from None
    if foreign is not None:
        raise MemoryExistsError(f"{store} exists and is not a memory: it has {foreign}. Choose another path.")
    if files and not overwrite:
        raise MemoryExistsError(
            f"{store} already holds a memory. Pass resume=True to go on with it, "
            "overwrite=True (in a command: --overwrite) to replace it, or choose another path."
        )
    release = store.lock()
    if files:  # else leave alone what another process may have begun meanwhile
        store.delete(names.MANIFEST)  # first: without a manifest no other file counts
        for name in list(store.list()):
            if names.may_be_of_a_memory(name):
                store.delete(name)
    return release


def _is_manifest(store: Store) -> bool:
    """Whether Spotlights wrote the manifest, which may be damaged: others may have a memory.json, too."""
    try:
        return all(field in store.read(names.MANIFEST) for field in (b'"spotlights"', b'"format"', b'"segments"'))
    except OSError:
        return False


def _is_ours(store: Store, name: str) -> bool:
    """Whether Spotlights wrote a file: a folder without a manifest may hold somebody else's of the same name."""
    if name == names.MANIFEST:
        return False  # not one of ours: those are told by _is_manifest
    if name == names.CALIBRATION:
        return b'"spotlights"' in store.read(name)
    if not (names.may_be_of_a_memory(name) and name.endswith(".safetensors")):
        return names.may_be_of_a_memory(name)
    if store.size(name) < LENGTH_BYTES:
        return False
    length = int.from_bytes(store.load(name, range(LENGTH_BYTES), "").tobytes(), "little")
    return length > 0 and (LENGTH_BYTES + length) % PAGE == 0  # our headers fill whole pages


@dataclass
class Committed:
    """A memory that this process writes: its manifest as last committed, and the lock."""

    store: Store
    manifest: Manifest
    version: str | None
    release: Callable[[], None]

    def replace(self, **changes: object) -> None:
        """Commits the manifest with some fields changed."""
        manifest = dataclasses.replace(self.manifest, **changes)  # type: ignore[arg-type]
        # Blanks, drawn anew: a version may be a hash of the content, and must not come back with the content.
        content = manifest_content(manifest) + f"{secrets.randbits(64):b}\n".translate({48: " ", 49: "\t"}).encode()
        self.version = self.store.commit(content, self.version)
        self.manifest = manifest

    def write_new(self, name: str, tensors: Blocks) -> FileEntry:
        """Writes a file that no other process has begun: another writer's file of the same name stays as it is."""
        try:
            return write_tensors(self.store, name, tensors, new=True)
        except FileExistsError:
            self.replace()  # raises a ResumeError if this process is no longer the memory's writer
        self.store.delete(name)  # what a former writer has left
        return write_tensors(self.store, name, tensors, new=True)

    def write_segment(self, tensors: Blocks, steps: range, slots: Mapping[str, int]) -> SegmentEntry:
        """Writes some steps under the next free number; `slots` says how many slots each layer has."""
        number = 1 + max(map(names.segment_number, self.store.list(names.SEGMENTS)), default=-1)
        file = self.write_new(names.segment_file(number, self.manifest.rank), tensors)
        layers = self.manifest.layers
        keys = {layer: sum(map(len, tensors.get(names.layer_tensor(layer, names.KEYS), ()))) for layer in layers}
        slots = {layer: slots.get(layer, 0) for layer in layers}
        errors = {
            layer: sum(map(len, tensors.get(names.layer_tensor(layer, names.ERRORS), ())))
            for layer, entry in layers.items()
            if names.ERRORS in entry.tokens
        }
        stretch = steps.start, steps.stop
        return SegmentEntry(file.file, file.bytes, file.checksum, *stretch, slots, keys, errors)

    def cut_segment(self, segment: SegmentEntry, steps: int) -> SegmentEntry:
        """Writes a new segment with those steps of a segment that come before step `steps`."""
        check_content(self.store, segment)  # or damage would get a checksum of its own
        stored = FileTensors(self.store, segment)
        tensors: dict[str, list[np.ndarray]] = {}
        for name, tensor in stored.items():
            if name.startswith(names.LOG):
                tensors[name] = [tensor[: steps - segment.first_step].numpy()]
            elif name.startswith((names.STATE, RECIPE)):
                tensors[name] = [tensor.numpy()]
        slots = {}
        for layer, entry in self.manifest.layers.items():
            column: Tensor | None = stored.get(names.column_tensor(layer, "step"))
            slots[layer] = 0 if column is None else int(torch.searchsorted(column, steps))
            # A key that is stored once may belong to slots of any step: all of these keys stay.
            rows = dict.fromkeys(names.SCALES, slots[layer])
            if entry.indexed and slots[layer]:
                rows[names.KEYS] = segment.keys[layer]
            for what in entry.tokens:
                tokens = stored.get(names.layer_tensor(layer, names.TOKENS[what]))
                if tokens is not None:
                    rows[what] = int((tokens[: slots[layer], 0] == names.IN_FULL).sum())
            of_tensor = {names.layer_tensor(layer, name): n for what, n in rows.items() for name in names.SCALES[what]}
            for name, tensor in stored.items():
                if name.startswith(names.layer_tensor(layer, "")):
                    tensors[name] = [tensor[: of_tensor.get(name, slots[layer])].numpy()]
        return self.write_segment(tensors, range(segment.first_step, steps), slots)

    def delete_unlisted(self) -> None:
        """Deletes what the manifest does not list: segments of dropped steps, and files that a killed process left."""
        listed = {names.MANIFEST, names.MOMENTS, names.CALIBRATION}
        listed |= {entry.file for entry in self.manifest.listed}
        for name in list(self.store.list()):
            if names.may_be_of_a_memory(name) and not name.startswith("rank") and name not in listed:
                self.store.delete(name)
