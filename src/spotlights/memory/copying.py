"""Copies a memory from one store to another: its committed files, each compared with its checksum on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import xxhash
from jaxtyping import UInt8

from spotlights.errors import MemoryFormatError
from spotlights.memory.files import READ_BYTES, claim, read_manifest, writable
from spotlights.memory.format.manifest import FileEntry
from spotlights.memory.reader import rank_store
from spotlights.memory.store import Store


def copy_memory(source: Store, target: Store, *, overwrite: bool) -> None:
    """Copies what is committed at this moment. The manifest of the first process comes last: half a copy is no memory.

    Readers' derived files are not copied.
    """
    first = read_manifest(source)[0]
    with writable(target), contextlib.ExitStack() as after:
        after.callback(claim(target, overwrite=overwrite))
        for rank in reversed(range(first.ranks)):
            origin, place = rank_store(source, rank), rank_store(target, rank)
            content, version = origin.committed()
            manifest, read_version = read_manifest(origin)
            if version != read_version:
                raise MemoryFormatError(f"{origin} is being recorded: it changed while it was read. Copy it again.")
            kept = [segment for snapshot in manifest.snapshots[1:] for segment in snapshot.segments]
            for entry in {entry.file: entry for entry in [*manifest.files, *kept]}.values():
                place.write(entry.file, _checked(origin, entry), new=True)
            place.commit(content, None)


def _checked(store: Store, entry: FileEntry) -> Iterator[UInt8[np.ndarray, "bytes"]]:
    checksum = xxhash.xxh3_64()
    for start in range(0, entry.bytes, READ_BYTES):
        block = store.load(entry.file, range(start, min(start + READ_BYTES, entry.bytes)), "")
        checksum.update(block.data)
        yield block
    if checksum.hexdigest() != entry.checksum:
        raise MemoryFormatError(
            f"{store.describe(entry.file)} is damaged: it does not have the checksum in memory.json."
        )
