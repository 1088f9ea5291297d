"""A directory as a store: reads that cannot kill the process, writes past the page cache, renames as commits.

Nothing is mapped: a mapped file that another process shortens kills whoever reads it. Bytes are read into memory of our
own (`benchmarks/query.py --mapped` compares the speed), and a file that is not the one that was first read is an
error. The process that writes a memory holds the directory by a descriptor, wherever it is moved.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from jaxtyping import UInt8

from spotlights.errors import ResumeError
from spotlights.memory.buffers import DIRECT_BYTES, PAGE
from spotlights.memory.format.names import MANIFEST, UNFINISHED, is_name
from spotlights.memory.store.base import Pieces, Store

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None

_BUFFER_BYTES = 1 << 20
_WRITE_BYTES = 8 << 20
_OPEN_FILES = 64
"""So many files stay open for reading, and can be read after they are deleted."""
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What `flock` says when another process has the lock. Anything else says that this file system has no locks."""


class OpenFile:
    """A regular file, open for reading."""

    def __init__(self, path: str | Path, at: int | None = None) -> None:
        # Opening a pipe would wait for a writer.
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0), dir_fd=at)
        status = os.fstat(self._file)
        self.size = status.st_size
        self.identity = _identity(status)
        """What changes when somebody replaces or writes the file."""
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # opening failed
            os.close(self._file)

    def read(self, start: int, into: memoryview) -> int:
        """Fills a buffer; returns how many bytes there were."""
        filled = 0
        while filled < len(into) and (count := os.preadv(self._file, [into[filled:]], start + filled)):
            filled += count
        return filled

    def will_be_read(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_WILLNEED)

    def mark_as_used(self) -> None:
        """Gives the file the time of now."""
        os.utime(self._file)
        self.identity = _identity(os.fstat(self._file))

    def is_as_before(self) -> bool:
        """Whether nobody has written to the file since it was opened."""
        return _identity(os.fstat(self._file)) == self.identity


def read_file(path: str | Path) -> UInt8[np.ndarray, "bytes"]:
    """All of a regular file; what is none raises an OSError instead of waiting."""
    file = OpenFile(path)
    content = np.empty(file.size, dtype=np.uint8)
    return content[: file.read(0, content.data)]


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(eq=False)
class _Held:
    """What one process holds of a directory."""

    directory: int | None = None
    """A descriptor, while this process writes the memory."""
    files: OrderedDict[str, OpenFile] = field(default_factory=OrderedDict)
    identities: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of all files that were read; other content is not read under the same name."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self, name: str) -> None:
        with self.lock:
            self.files.pop(name, None)
            self.identities.pop(name, None)


_locked: dict[int, _Held] = {}
"""By descriptor. A lock lasts until every copy of its descriptor is closed: a forked process closes its own."""


def _close_in_fork() -> None:
    for descriptor, held in _locked.items():
        os.close(descriptor)
        held.directory = -1  # no file is found there any more
    _locked.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_fork)


@dataclass(frozen=True)
class LocalStore(Store):
    """The files of a memory in a directory."""

    streams = True
    root: Path
    _held: _Held = field(default_factory=_Held, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.root)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[Path]]:
        return LocalStore, (self.root,)

    def is_same_place(self, other: Store) -> bool:
        return isinstance(other, LocalStore) and os.path.realpath(self.root) == os.path.realpath(other.root)

    def at(self, prefix: str) -> LocalStore:
        self._place(prefix)
        return LocalStore(self.root / prefix)

    def _place(self, name: str) -> tuple[str, int | None]:
        """The path of a file, and the descriptor of the directory that the path begins at."""
        if not is_name(name):
            raise ValueError(f"{name!r} is not a name of a file in a memory")
        at = self._held.directory
        return (os.path.join(self.root, name), None) if at is None else (name, at)

    # -- reading ---------------------------------------------------------------------------------

    def size(self, name: str) -> int:
        path, at = self._place(name)
        try:
            status = os.stat(path, dir_fd=at)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)
        return status.st_size

    def read(self, name: str) -> bytes:
        file = self._open(name, "")
        content = bytearray(file.size)
        return bytes(content[: file.read(0, memoryview(content))])

    def load(self, name: str, span: range, checksum: str) -> UInt8[np.ndarray, "bytes"]:
        if not 0 <= span.stop <= self._open(name, checksum).size:  # before so much memory is taken
            raise OSError(f"{self.describe(name)} has fewer than {span.stop:,} bytes")
        content = np.empty(len(span), dtype=np.uint8)
        self.load_pieces(name, span, checksum, ([span.start], len(span)), content)
        return content

    def will_be_read(self, name: str) -> None:
        with contextlib.suppress(OSError):  # said when the file is read
            self._open(name, "").will_be_read()

    def load_pieces(
        self, name: str, span: range, checksum: str, pieces: Pieces, into: UInt8[np.ndarray, "bytes"]
    ) -> bool:
        (starts, width), file, room = pieces, self._open(name, checksum), into.data
        filled = (file.read(start, room[n * width : (n + 1) * width]) for n, start in enumerate(starts))
        if any(count != width for count in filled):
            raise OSError(f"{self.describe(name)} has fewer than {max(starts) + width:,} bytes")
        if checksum and not file.is_as_before():
            raise OSError(f"{self.describe(name)} was changed since the memory was opened. Open it again")
        return True

    def _open(self, name: str, checksum: str) -> OpenFile:
        """A file; if its content must not change (it has a checksum), the file that was first read under this name."""
        held = self._held
        with held.lock:
            if checksum and name in held.files:
                held.files.move_to_end(name)
                return held.files[name]
        try:
            file = OpenFile(*self._place(name))
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.describe(name)) from error
        if checksum:
            with held.lock:
                if held.identities.setdefault(name, file.identity) != file.identity:
                    raise OSError(f"{self.describe(name)} was replaced since the memory was opened. Open it again")
                file = held.files.setdefault(name, file)
                while len(held.files) > _OPEN_FILES:
                    held.files.popitem(last=False)
        return file

    def list(self, prefix: str = "") -> Iterator[str]:
        folder, at = prefix.rpartition("/")[0], self._held.directory
        path = os.path.join("." if at is not None else self.root, folder)
        with contextlib.suppress(FileNotFoundError):
            yield from (name for name in _files(path, at, folder and f"{folder}/") if name.startswith(prefix))

    # -- writing ---------------------------------------------------------------------------------

    def write(self, name: str, blocks: Iterable[UInt8[np.ndarray, "bytes"]], *, new: bool = False) -> None:
        path, at = self._place(name)
        if new and self.exists(name):  # nobody makes it meanwhile: writers of new files hold the lock
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        folder = os.path.dirname(path) or "."
        if at is None:
            os.makedirs(self.root, exist_ok=True)
        for parent in reversed(Path(name).parents[:-1]):
            _make_folder(os.path.join(path[: len(path) - len(name)], parent), at)
        with becoming(path, at) as temporary, _DirectFile(temporary, at) as file:
            for block in blocks:
                file.write(block)
        self._held.forget(name)
        _sync(folder, at)

    def delete(self, name: str) -> None:
        path, at = self._place(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path, dir_fd=at)
        self._held.forget(name)
        with contextlib.suppress(OSError):  # not empty, or gone
            for parent in Path(name).parents[:-1]:
                os.rmdir(os.path.join(path[: len(path) - len(name)], parent), dir_fd=at)

    def committed(self) -> tuple[bytes, str]:
        content = self.read(MANIFEST)
        return content, xxhash.xxh3_64_hexdigest(content)

    def commit(self, manifest: bytes, expected: str | None) -> str:
        if self._held.directory is None:
            os.makedirs(self.root, exist_ok=True)
        path, at = self._place(MANIFEST)
        temporary = path + UNFINISHED
        with _locked_file(temporary, at) as file, becoming(path, at, temporary):
            held = self.committed()[1] if self.exists(MANIFEST) else None
            if held != expected:
                raise ResumeError(
                    f"{self.describe(MANIFEST)} was changed by another process since this one last wrote or read it. "
                    "Let only one run record to a memory."
                )
            os.ftruncate(file, 0)
            rest = memoryview(manifest)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        _sync(os.path.dirname(path) or ".", at)
        return xxhash.xxh3_64_hexdigest(manifest)

    def lock(self) -> Callable[[], None]:
        os.makedirs(self.root, exist_ok=True)
        if fcntl is None:  # pragma: no cover
            return lambda: None
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ResumeError(
                f"{self} is being recorded by another process. If that process belongs to the same run, record the "
                "model as DistributedDataParallel gives it, in all processes."
            ) from None
        self._held.directory = descriptor
        _locked[descriptor] = self._held
        return partial(_release, descriptor)


def _release(descriptor: int) -> None:
    """Ends a lock; nothing is left to do in a forked process, or the second time."""
    held = _locked.pop(descriptor, None)
    if held is not None:
        held.directory = None
        os.close(descriptor)


def _flock(descriptor: int, operation: int) -> None:
    """Locks a file; raises an OSError if another process has the lock. Some network file systems have no locks."""
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _TAKEN:
            raise


@contextlib.contextmanager
def becoming(path: str, at: int | None = None, temporary: str | None = None) -> Iterator[str]:
    """The name of a temporary file that becomes the file at a path; after an error, nothing has changed.

    By default a name of its own: two readers may derive the same file at the same time.
    """
    temporary = temporary or f"{path}.{secrets.randbits(64)}{UNFINISHED}"
    try:
        yield temporary
        os.replace(temporary, path, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise


def _files(path: str, at: int | None, prefix: str) -> Iterator[str]:
    """The names of all files below a directory; links to directories are not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.name, descriptor, f"{prefix}{entry.name}/")
                else:
                    yield prefix + entry.name
    finally:
        os.close(descriptor)


def _make_folder(path: str, at: int | None) -> None:
    """Makes a directory within the memory's, unless it is there; a link to somewhere else will not do."""
    try:
        os.mkdir(path, dir_fd=at)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(path, dir_fd=at, follow_symlinks=False).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    else:
        _sync(os.path.dirname(path) or ".", at)


@contextlib.contextmanager
def _locked_file(path: str, at: int | None) -> Iterator[int]:
    """A descriptor of the file at a path, which no other process has; the file is made if there is none."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644, dir_fd=at)
        _locked[file] = _Held()
        try:
            if fcntl is not None:
                _flock(file, fcntl.LOCK_EX)
            if _is_at(path, at, file):  # else another process has renamed it meanwhile
                yield file
                return
        finally:
            _release(file)


def _is_at(path: str, at: int | None, file: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path, dir_fd=at))
    return False


def _sync(directory: str, at: int | None) -> None:
    """A new name survives a power cut once its directory is synced."""
    descriptor = os.open(directory, os.O_RDONLY, dir_fd=at)
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

    def __init__(self, path: str, at: int | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644, dir_fd=at)
        except OSError:  # a file system without direct access
            self._file = os.open(path, flags, 0o644, dir_fd=at)
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
