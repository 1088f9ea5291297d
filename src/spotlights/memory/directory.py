"""The directory of a memory: who may write to it, and what of an earlier recording has to go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from spotlights.errors import MemoryExistsError, MemoryFormatError, ResumeError
from spotlights.memory.manifest import FILE, SegmentEntry
from spotlights.memory.moments import FILE as MOMENTS

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None

INITIAL, FINAL, SEGMENTS = "initial.safetensors", "final.safetensors", "segments"


def take_empty(directory: Path, *, overwrite: bool) -> int | None:
    """Holds a directory for a new memory; with `overwrite`, the one that is there is deleted. Returns the lock."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        if not ((directory / FILE).exists() or _is_unfinished(directory)):
            raise MemoryExistsError(f"{directory} exists and is not a memory. Choose another path.")
        if not overwrite:
            raise MemoryExistsError(
                f"{directory} already holds a memory. Pass resume=True to go on with it, "
                "overwrite=True to replace it, or choose another path."
            )
    directory.mkdir(parents=True, exist_ok=True)
    lock = take_lock(directory)
    (directory / FILE).unlink(missing_ok=True)  # first: without it nothing else counts
    (directory / SEGMENTS).mkdir(exist_ok=True)
    delete_unlisted(directory, [])
    for old in (directory / FINAL, directory / MOMENTS):
        old.unlink(missing_ok=True)
    for old in _rank_directories(directory):
        shutil.rmtree(old)
    return lock


def take_lock(directory: Path) -> int | None:
    """Holds the directory for this process; a killed process lets go of it by itself."""
    if fcntl is None:  # pragma: no cover
        return None
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        raise MemoryFormatError(f"There is no memory at {directory} to resume.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ResumeError(
            f"{directory} is being recorded by another process. If it is one of the same run, record the model as "
            "DistributedDataParallel gives it, in all of them."
        ) from None
    return descriptor


def delete_unlisted(directory: Path, listed: Iterable[SegmentEntry]) -> None:
    """Deletes the segments that no manifest names any more, and what was left half written."""
    kept = {directory / segment.file for segment in listed}
    for path in (directory / SEGMENTS).iterdir():
        if path not in kept:
            path.unlink()


def _is_unfinished(directory: Path) -> bool:
    """Whether a process was killed while it made this memory: all that is there is of our making."""
    if not directory.is_dir():
        return False
    files = {INITIAL, INITIAL + ".part", FINAL, MOMENTS, FILE + ".part"}
    others = _rank_directories(directory)
    mine = [p.is_file() and p.name in files for p in directory.iterdir() if p.name != SEGMENTS and p not in others]
    mine += [(other / FILE).exists() or _is_unfinished(other) for other in others]
    segments = directory / SEGMENTS
    if segments.is_dir():
        mine += [".safetensors" in p.name and p.name[:6].isdigit() for p in segments.iterdir()]
    return all(mine) and segments.is_dir()


def _rank_directories(directory: Path) -> list[Path]:
    return [path for path in directory.glob("rank[0-9]*") if path.is_dir()]
