"""A directory with bytes that were read from a bucket, so that the second question is answered at disk speed.

A file holds one range of one object, and a checksum of that. Its name is a hash of the address, the range, and the
checksum that the manifest has for the object, so a file never becomes stale; a damaged one does not count. Several
processes may share the directory. When it grows beyond its limit, the files not used for the longest time are deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import UInt8

from spotlights.errors import SettingError
from spotlights.memory.store.base import Pieces
from spotlights.memory.store.local import OpenFile, becoming

CACHE_BYTES = 10 << 30
_AT_ONCE = 1 << 20
_ENDING = ".bytes"
_OURS = re.compile(rf"[0-9a-f]{{32}}\{_ENDING}")
"""Nothing else in the directory is ever deleted."""


@dataclass(frozen=True)
class Cache:
    """A directory that takes up to `limit` bytes."""

    root: Path
    limit: int = CACHE_BYTES

    @classmethod
    def at(cls, root: str | os.PathLike[str] | None, limit: int = CACHE_BYTES) -> Cache | None:
        """The cache in a directory; None for the one that the environment names, `SPOTLIGHTS_CACHE`, or the user's."""
        if not isinstance(root, str | os.PathLike | None):
            raise SettingError(f"cache={root!r} is not a path.")
        if not isinstance(limit, int):
            raise SettingError(f"cache_bytes={limit!r} is not a number of bytes. Give one such as {CACHE_BYTES}.")
        if root is None:
            user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
            root = os.environ.get("SPOTLIGHTS_CACHE", f"{user}/spotlights")
        return cls(Path(root).expanduser(), limit) if str(root) and limit > 0 else None

    def get(self, key: str, size: int) -> UInt8[np.ndarray, "bytes"] | None:
        """The bytes that were kept under a key, which count as used now; None if there are none."""
        if not self.load(key, size, ((), 0), np.empty(0, np.uint8)):
            return None
        content = np.empty(size, np.uint8)
        return content if self.load(key, size, ([0], size), content) else None

    def load(self, key: str, size: int, pieces: Pieces, into: UInt8[np.ndarray, "bytes"]) -> bool:
        """Loads pieces of the bytes under a key, one behind the other, into a buffer.

        False if there are no such bytes. They are compared with their checksum if that has not been done yet, and again
        if somebody else has touched the file. Without pieces, the file counts as used now.
        """
        path, (starts, width) = self._path(key), pieces
        try:
            file = OpenFile(path)
            if file.identity != _compared.get(path) and not _is_whole(file, key, size):
                return False
            if not starts:
                file.mark_as_used()
            _compared[path] = file.identity
            room = (into.data[n * width : (n + 1) * width] for n in range(len(starts)))
            return all(file.read(start, part) == width for start, part in zip(starts, room, strict=True))
        except OSError:
            return False

    def put(self, key: str, blocks: Sequence[Any]) -> None:
        """Keeps bytes under a key, if the directory can take them."""
        blocks, path = [*blocks, _checksum(key, blocks)], self._path(key)
        size = sum(map(len, blocks))
        if size > self.limit:
            return
        with contextlib.suppress(OSError):  # a full disk; or deleted by another process
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with becoming(os.fspath(path)) as temporary, open(temporary, "wb") as file:
                file.writelines(memoryview(block) for block in blocks)
            _compared[path] = OpenFile(path).identity
            self._make_room(size)

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


def _is_whole(file: OpenFile, key: str, size: int) -> bool:
    """Whether a file holds bytes of that size, and their checksum behind them."""
    checksum, room = xxhash.xxh3_64(key.encode()), memoryview(bytearray(min(size, _AT_ONCE)))
    stated = bytearray(checksum.digest_size)
    if file.size != size + len(stated):
        return False
    for start in range(0, size, _AT_ONCE):
        some = room[: size - start]
        checksum.update(some[: file.read(start, some)])
    file.read(size, memoryview(stated))
    return stated == checksum.digest()


_compared: dict[Path, tuple[int, ...]] = {}
"""The files that hold what this process has written, or has compared with their checksums."""
_sizes: dict[Path, int] = {}
"""What each directory held when this process last looked, and what the process has added since."""
_sizes_lock = threading.Lock()
