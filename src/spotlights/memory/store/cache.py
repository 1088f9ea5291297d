"""A directory with bytes that were read from a bucket, so that the second question is answered at disk speed.

A file holds one range of one object, and a checksum of that. Its name is a hash of the address, the range, and the
checksum that the manifest has for the object, so a file never becomes stale; a damaged one does not count. Several
processes may share the directory. When it grows beyond its limit, the files not used for the longest time are deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import UInt8

from spotlights.errors import SettingError
from spotlights.memory.store.local import read_file

LIMIT = 10 << 30
_AT_ONCE = 1 << 20
_ENDING, _UNFINISHED = ".bytes", ".part"
_OURS = re.compile(rf"[0-9a-f]{{32}}\{_ENDING}")
"""Nothing else in the directory is ever deleted."""


@dataclass(frozen=True)
class Cache:
    """A directory that takes up to `limit` bytes."""

    root: Path
    limit: int = LIMIT

    @classmethod
    def at(cls, root: str | os.PathLike[str] | None, limit: int = LIMIT) -> Cache | None:
        """The cache in a directory; None for the one that the environment names, `SPOTLIGHTS_CACHE`, or the user's."""
        if not isinstance(root, str | os.PathLike | None):
            raise SettingError(f"cache={root!r} is not a path.")
        if not isinstance(limit, int):
            raise SettingError(f"cache_bytes={limit!r} is not a number of bytes. Give one such as {LIMIT}.")
        if root is None:
            user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
            root = os.environ.get("SPOTLIGHTS_CACHE", f"{user}/spotlights")
        return cls(Path(root).expanduser(), limit) if str(root) and limit > 0 else None

    def get(self, key: str, size: int) -> UInt8[np.ndarray, "bytes"] | None:
        """The bytes that were kept under a key; None if there are none."""
        path = self._path(key)
        try:
            content = read_file(path)
            os.utime(path)  # used now
        except OSError:
            return None
        content, stated = content[:size], content[size:]
        return content if len(content) == size and stated.tobytes() == _checksum(key, [content]) else None

    def load(self, key: str, size: int, pieces: tuple[Sequence[int], int], into: UInt8[np.ndarray, "bytes"]) -> bool:
        """Loads pieces (their starts and their width) of the bytes under a key, one behind the other, into a buffer.

        False if there are no such bytes. They are compared with their checksum if that has not been done yet, and again
        if somebody else has touched the file. Without pieces, the file counts as used now.
        """
        path, (starts, width) = self._path(key), pieces
        try:
            with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                state = _touched(file.fileno())
                if state != _compared.get(path) and not _is_whole(file.fileno(), key, size):
                    return False
                _compared[path] = state
                room = (into.data[n * width : (n + 1) * width] for n in range(len(starts)))
                read = [os.preadv(file.fileno(), [part], start) for start, part in zip(starts, room, strict=True)]
                if not starts:
                    os.utime(file.fileno())
                    _compared[path] = _touched(file.fileno())
        except OSError:
            return False
        return all(count == width for count in read)

    def put(self, key: str, blocks: Sequence[Any]) -> None:
        """Keeps bytes under a key, if the directory can take them."""
        blocks, path = [*blocks, _checksum(key, blocks)], self._path(key)
        size = sum(map(len, blocks))
        if size > self.limit:
            return
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_native_id()}{_UNFINISHED}")
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.writelines(memoryview(block) for block in blocks)
            os.replace(temporary, path)
            _compared[path] = _touched(path)
            self._make_room(size)
        except OSError:  # a full disk; or deleted by another process
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _path(self, key: str) -> Path:
        return self.root / f"{xxhash.xxh3_128_hexdigest(key.encode())}{_ENDING}"

    def _make_room(self, added: int) -> None:
        with _sizes_lock:
            size = _sizes.get(self.root)
            if size is not None and size + added <= self.limit:
                _sizes[self.root] = size + added
                return
            kept, size = [], 0
            for entry in os.scandir(self.root):
                with contextlib.suppress(FileNotFoundError):
                    if _OURS.fullmatch(entry.name):
                        kept.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
                        size += entry.stat().st_size
            for _, file_size, path in sorted(kept):
                if size <= self.limit:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                size -= file_size
            _sizes[self.root] = size


def _checksum(key: str, blocks: Sequence[Any]) -> bytes:
    checksum = xxhash.xxh3_64(key.encode())
    for block in blocks:
        checksum.update(memoryview(block))
    return checksum.digest()


def _touched(file: int | Path) -> tuple[int, int, int]:
    """What changes when somebody replaces or writes a file."""
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{file} is not a file")
    return status.st_ino, status.st_size, status.st_ctime_ns


def _is_whole(file: int, key: str, size: int) -> bool:
    """Whether a file holds bytes of that size, and their checksum behind them."""
    checksum, room = xxhash.xxh3_64(key.encode()), bytearray(min(size, _AT_ONCE))
    for start in range(0, size, _AT_ONCE):
        count = os.preadv(file, [memoryview(room)[: size - start]], start)
        checksum.update(memoryview(room)[:count])
    return os.pread(file, checksum.digest_size + 1, size) == checksum.digest()


_compared: dict[Path, tuple[int, int, int]] = {}
"""The files that hold what this process has written, or has compared with their checksums."""
_sizes: dict[Path, int] = {}
"""What each directory held when this process last looked, and what the process has added since."""
_sizes_lock = threading.Lock()
