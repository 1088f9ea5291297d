"""A directory as a store: mapped files, writes past the page cache, renames as commits."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from jaxtyping import UInt8

from spotlights.errors import ResumeError
from spotlights.memory.buffers import DIRECT_BYTES, PAGE
from spotlights.memory.format.names import MANIFEST, UNFINISHED, is_name
from spotlights.memory.store.base import Store

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None

_BUFFER_BYTES = 1 << 20
_WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class LocalStore(Store):
    """The files of a memory in a directory."""

    maps = True
    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def at(self, prefix: str) -> LocalStore:
        return LocalStore(self._path(prefix))

    def _path(self, name: str) -> Path:
        if not is_name(name):
            raise ValueError(f"{name!r} is not a name of a file in a memory")
        return self.root / name

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            status = os.stat(path)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return status.st_size

    def read(self, name: str, span: range | None = None) -> bytes:
        self.size(name)  # raises an error if this is no regular file: opening a pipe would wait for ever
        with open(self._path(name), "rb") as file:
            if span is None:
                return file.read()
            file.seek(span.start)
            return file.read(len(span))

    def map(self, name: str, size: int) -> torch.UntypedStorage | None:
        if self.size(name) < size:  # reading beyond the end would kill the process
            raise OSError(errno.EINVAL, f"Shorter than {size} bytes", str(self._path(name)))
        storage: Any = torch.UntypedStorage
        return storage.from_file(str(self._path(name)), False, size)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder, _, _ = prefix.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            yield from (name for name in _files(self.root / folder, folder and f"{folder}/") if name.startswith(prefix))

    def write(self, name: str, blocks: Iterable[UInt8[np.ndarray, "bytes"]], *, new: bool = False) -> None:
        path = self._path(name)
        if new and path.exists():  # nobody makes it meanwhile: writers of new files hold the lock
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        # Two readers may derive the same file at the same time.
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}{UNFINISHED}")
        if not path.parent.exists():
            os.makedirs(path.parent, exist_ok=True)
            _sync(path.parent.parent)
        with _becoming(path, temporary), _DirectFile(temporary) as file:
            for block in blocks:
                file.write(block)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
        with contextlib.suppress(OSError):  # not empty, or gone
            while (path := path.parent) != self.root:
                os.rmdir(path)

    def committed(self) -> tuple[bytes, str]:
        content = self.read(MANIFEST)
        return content, xxhash.xxh3_64_hexdigest(content)

    def commit(self, manifest: bytes, expected: str | None) -> str:
        os.makedirs(self.root, exist_ok=True)
        temporary = self._path(MANIFEST + UNFINISHED)
        with open(_open_locked(temporary), "wb") as file, _becoming(self._path(MANIFEST), temporary):
            held = self.committed()[1] if self.exists(MANIFEST) else None
            if held != expected:
                raise ResumeError(
                    f"{self.describe(MANIFEST)} was changed by another process since this one last wrote or read it. "
                    "Let only one run record to a memory."
                )
            file.truncate()
            file.write(manifest)
            file.flush()
            os.fsync(file)
        return xxhash.xxh3_64_hexdigest(manifest)

    def lock(self) -> Callable[[], None]:
        os.makedirs(self.root, exist_ok=True)
        if fcntl is None:  # pragma: no cover
            return lambda: None
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ResumeError(
                f"{self} is being recorded by another process. If that process belongs to the same run, record the "
                "model as DistributedDataParallel gives it, in all processes."
            ) from None
        return partial(os.close, descriptor)


@contextlib.contextmanager
def _becoming(path: Path, temporary: Path) -> Iterator[None]:
    """What is written to a temporary file becomes the file at a path; after an error, nothing has changed."""
    try:
        yield
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync(path.parent)


def _files(folder: Path, prefix: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name


def _open_locked(path: Path) -> int:
    """A descriptor of the file at a path, which no other process has; the file is made if there is none."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # another process has renamed it meanwhile


def _sync(directory: Path) -> None:
    """A new name survives a power cut once its directory is synced."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _DirectFile:
    """Writes a file past the system's page cache where that is possible.

    Training needs the cores: filling the cache and having the system write it back later costs several times the
    processor time of handing the bytes to the disk. The disk takes whole pages. Blocks that begin at a page in main
    memory and in the file are written from where they are; others pass through one aligned buffer.
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

    def __enter__(self) -> _DirectFile:
        return self

    def write(self, block: np.ndarray) -> None:
        address = block.__array_interface__["data"][0]
        self._size += len(block)
        if len(block) >= DIRECT_BYTES and address % PAGE == 0 and self._filled % PAGE == 0:
            if self._filled:
                self._empty()
            whole = len(block) // PAGE * PAGE
            self._waiting.append(block[:whole].data)
            self._waiting_bytes += whole
            if self._waiting_bytes >= _WRITE_BYTES:
                self._empty()
            block, address = block[whole:], address + whole
        while len(block):
            room = min(len(block), _BUFFER_BYTES - self._filled)
            # Not numpy's copy: that one would keep the training thread from running Python meanwhile.
            ctypes.memmove(self._address + self._filled, address, room)
            self._filled += room
            block, address = block[room:], address + room
            if self._filled == _BUFFER_BYTES:
                self._empty()

    def _empty(self) -> None:
        if self._filled:
            self._waiting.append(self._buffer[: -(-self._filled // PAGE) * PAGE])
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
