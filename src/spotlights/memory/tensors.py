"""One safetensors file: written in a stream without copying, mapped without reading.

A file is written beside its place, synced, and renamed into it, so that it is there whole or not at
all. The layout is the published safetensors one; any safetensors reader opens it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.storage import DIRECT_BYTES

_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int8": "I8"}
_DTYPES = {code: getattr(torch, name) for name, code in _CODES.items()}
_PAGE = 4096
_BUFFER_BYTES = 1 << 20
_WRITE_BYTES = 8 << 20


def write_tensors(path: Path, tensors: Mapping[str, Sequence[np.ndarray]]) -> tuple[int, str]:
    """Writes each tensor, given as blocks to be joined along the first dimension.

    Returns the size in bytes and the checksum of the whole file.
    """
    # Tensors of whole pages first: their blocks can be written from where they are (see `_Stream`). Then wider types
    # first: each tensor starts at a multiple of its item size.
    sizes = {name: sum(block.nbytes for block in blocks) for name, blocks in tensors.items()}
    ordered = sorted(tensors.items(), key=lambda item: (sizes[item[0]] % _PAGE > 0, -item[1][0].itemsize, item[0]))
    header: dict[str, object] = {}
    offset = 0
    for name, blocks in ordered:
        header[name] = {
            "dtype": _CODES[blocks[0].dtype.name],
            "shape": [sum(map(len, blocks)), *blocks[0].shape[1:]],
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _PAGE)

    def stream() -> Iterable[np.ndarray]:
        yield np.frombuffer(len(encoded).to_bytes(8, "little") + encoded, dtype=np.uint8)
        for _, blocks in ordered:
            for block in blocks:
                yield np.ascontiguousarray(block).reshape(-1).view(np.uint8)

    temporary = path.with_name(path.name + ".part")
    try:
        with _Stream(temporary) as file:
            for piece in stream():
                file.write(piece)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    put_in_place(temporary, path)
    return 8 + len(encoded) + offset, file.checksum.hexdigest()


class _Stream:
    """Writes a file past the system's page cache where that is possible.

    Training needs the cores: filling the cache and having the system write it back later costs several
    times the processor time of handing the bytes to the disk. The disk takes whole pages: pieces that are such, and
    fall on a page of the file, are written from where they are; others pass through one aligned buffer.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError:  # a file system without direct access
            self._file = os.open(path, flags, 0o644)
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))  # anonymous maps start at a page
        self._address = np.frombuffer(self._buffer, dtype=np.uint8).ctypes.data
        self._filled = 0
        self._waiting: list[memoryview] = []
        """Whole pages, to be written before what is in the buffer."""
        self._waiting_bytes = 0
        self._size = 0
        self.checksum = xxhash.xxh3_64()

    def __enter__(self) -> _Stream:
        return self

    def write(self, piece: np.ndarray) -> None:
        address = piece.__array_interface__["data"][0]
        self._size += len(piece)
        if len(piece) >= DIRECT_BYTES and address % _PAGE == 0 and self._filled % _PAGE == 0:
            if self._filled:
                self._empty()
            whole = len(piece) // _PAGE * _PAGE
            self._waiting.append(piece[:whole].data)
            self._waiting_bytes += whole
            if self._waiting_bytes >= _WRITE_BYTES:
                self._empty()
            piece, address = piece[whole:], address + whole
        while len(piece):
            room = min(len(piece), _BUFFER_BYTES - self._filled)
            # Not numpy's copy: that one would keep the training thread from running Python meanwhile.
            ctypes.memmove(self._address + self._filled, address, room)
            self._filled += room
            piece, address = piece[room:], address + room
            if self._filled == _BUFFER_BYTES:
                self._empty()

    def _empty(self) -> None:
        if self._filled:
            self._waiting.append(self._buffer[: self._filled])
        for piece in self._waiting:
            self.checksum.update(piece)
        if self._filled:
            self._waiting[-1] = self._buffer[: -(-self._filled // _PAGE) * _PAGE]
        while self._waiting:
            written = os.writev(self._file, self._waiting)
            while self._waiting and written >= len(self._waiting[0]):
                written -= len(self._waiting.pop(0))
            if written:
                self._waiting[0] = self._waiting[0][written:]
        self._filled = self._waiting_bytes = 0

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._empty()
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
        finally:
            os.close(self._file)


def put_in_place(temporary: Path, path: Path) -> None:
    """Renames a synced file into its place, and syncs the directory that now names it."""
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_size(path: Path, expected_bytes: int) -> None:
    """A mapped file that is shorter than it should be would kill the process when it is read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise MemoryFormatError(
            f"{path} is missing, but memory.json lists it. Restore it from a copy of the memory; or, if this is a "
            "folded memory that is being recorded, which replaces its files, open it again."
        ) from None
    if size != expected_bytes:
        raise MemoryFormatError(
            f"{path} has {size:,} bytes, but memory.json says {expected_bytes:,}: "
            "it was truncated or replaced. Restore it from a copy of the memory."
        )


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """In items, from the beginning of the file."""


def read_layout(path: Path, expected_bytes: int) -> dict[str, Placed]:
    """Reads and checks a file's header."""
    check_size(path, expected_bytes)
    try:
        with safe_open(path, framework="np") as file:  # checks the header; reads no data
            names = set(file.keys())
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
    except (SafetensorError, ValueError, OSError) as error:
        raise MemoryFormatError(f"{path} is not a readable safetensors file: {error}.") from error
    layout = {}
    for name in names:
        entry = header[name]
        dtype = _DTYPES.get(entry["dtype"])
        start = 8 + length + entry["data_offsets"][0]
        if dtype is None or start % dtype.itemsize:
            raise MemoryFormatError(
                f"{path}: tensor {name!r} has dtype {entry['dtype']} at byte {start}, "
                "which no version of Spotlights writes."
            )
        layout[name] = Placed(dtype, entry["shape"], start // dtype.itemsize)
    return layout


class MappedFile:
    """A file's tensors, mapped into memory; bytes are read when they are used."""

    def __init__(self, path: Path, expected_bytes: int, layout: Mapping[str, Placed]) -> None:
        check_size(path, expected_bytes)
        self._layout = layout
        self._storage: Any = torch.UntypedStorage.from_file(str(path), False, expected_bytes)

    def get(self, name: str) -> Tensor | None:
        placed = self._layout.get(name)
        if placed is None:
            return None
        tensor: Any = torch.empty(0, dtype=placed.dtype)
        return tensor.set_(self._storage, placed.start, placed.shape)


def map_tensors(path: Path, expected_bytes: int) -> dict[str, Tensor]:
    """All tensors of a file."""
    layout = read_layout(path, expected_bytes)
    mapped = MappedFile(path, expected_bytes, layout)
    return {name: tensor for name in layout if (tensor := mapped.get(name)) is not None}


def file_checksum(path: Path) -> str:
    """The checksum that `write_tensors` returned for this file."""
    checksum = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum.update(piece)
    return checksum.hexdigest()
