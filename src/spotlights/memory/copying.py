"""Copies a memory from one store to another: its committed files, each compared with its checksum on the way."""

from __future__ import annotations

import contextlib

from spotlights.errors import MemoryFormatError, SettingError
from spotlights.memory.files import check_content, checked_blocks, claim, read_manifest, writable
from spotlights.memory.reader import rank_store
from spotlights.memory.store import Store


def copy_memory(source: Store, target: Store, *, overwrite: bool) -> None:
    """Copies what is committed at this moment. The first process's manifest comes last: half a copy is not a memory.

    Readers' derived files are not copied. With `overwrite`, all files are read twice: nothing is deleted for a memory
    that is damaged.
    """
    if target.is_same_place(source):
        raise SettingError(f"{target} is the memory itself. Choose another path for the copy.")
    first = read_manifest(source)[0]
    if overwrite:
        for rank in range(first.ranks):
            origin = rank_store(source, rank)
            for entry in read_manifest(origin)[0].listed:
                check_content(origin, entry)
    with writable(target), contextlib.ExitStack() as after:
        after.callback(claim(target, overwrite=overwrite))
        for rank in reversed(range(first.ranks)):
            origin, place = rank_store(source, rank), rank_store(target, rank)
            content, version = origin.committed()
            manifest, read_version = read_manifest(origin)
            if version != read_version:
                raise MemoryFormatError(f"{origin} is being recorded: it changed while it was read. Copy it again.")
            for entry in {listed.file: listed for listed in manifest.listed}.values():
                place.write(entry.file, checked_blocks(origin, entry), new=True)
            place.commit(content, None)
