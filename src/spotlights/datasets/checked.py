"""Files whose contents are what they should be, and nothing else.

Nothing is handed on, and nothing enters the cache, before its checksum has been compared.
"""

import gzip
import hashlib
import io
import os
import time
import uuid
import zlib
from pathlib import Path

from spotlights.datasets.catalogue import DataFile


class NotThisFileError(Exception):
    """Why some bytes are not the file that was wanted; caught by the sources, never shown bare."""


def check(data: bytes, file: DataFile, origin: str) -> bytes:
    """The contents of `file`, out of `data` (gzip or not), once they are known to be right."""
    content = file.cut(_unpack(data, file, origin) if data[:2] == b"\x1f\x8b" else data)
    algorithm = "md5" if len(file.digest) == 32 else "sha256"
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != file.digest:
        raise NotThisFileError(
            f"{origin} is corrupt or another file: the {algorithm} of its contents is {found}, not {file.digest}"
        )
    return content


def _unpack(data: bytes, file: DataFile, origin: str) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as unpacked:
            return unpacked.read(file.size + 1)  # a file that never ends is not read to its end
    except (EOFError, OSError, zlib.error) as error:
        raise NotThisFileError(f"{origin} is not a whole gzip file: {error}") from error


def store(content: bytes, path: Path) -> None:
    """Puts checked contents at `path`, gzipped: there whole or not at all, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("xb") as out:
            out.write(gzip.compress(content, compresslevel=1, mtime=0))
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sweep(path: Path, *, hours: float = 1) -> None:
    """Removes what a killed process left half written; a younger one may still be at it."""
    for partial in path.parent.glob(f".{path.name}.*.part"):
        if time.time() - partial.stat().st_mtime > 3600 * hours:
            partial.unlink(missing_ok=True)
