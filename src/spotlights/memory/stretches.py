"""The slots of a recipe: stretches between two checkpoints, each computed again into a memory of its own.

`StretchReader` reads all of them as one memory. Their segments lie in a cache of bounded size: a segment that is not
there when it is read has its stretch computed again.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.files import read_manifest
from spotlights.memory.format import names
from spotlights.memory.format.manifest import FileEntry, Manifest
from spotlights.memory.reader import MemoryReader, Part, StepLog, joined, read_weights
from spotlights.memory.store import LocalStore, Store
from spotlights.memory.store.base import Pieces

T = TypeVar("T")
_FOLDER, _ENDING = "recipes", ".memory"
_STRETCH = re.compile(rf"[0-9a-f]{{32}}\{_ENDING}")
"""Nothing else in the directory is ever deleted."""
_TRIES = 3


@dataclass(frozen=True)
class StretchStore(LocalStore):
    """The files of one stretch. What is missing when it is read is made."""

    make: Callable[[], None] = field(default=lambda: None, compare=False, kw_only=True)

    def describe(self, name: str) -> str:
        return f"{super().describe(name)} (in the cache of a recipe: delete it, and it will be computed again)"

    def size(self, name: str) -> int:
        return self._made(name, lambda: LocalStore.size(self, name))

    def load(self, name: str, span: range, checksum: str) -> UInt8[np.ndarray, "bytes"]:
        return self._made(name, lambda: LocalStore.load(self, name, span, checksum))

    def load_pieces(
        self, name: str, span: range, checksum: str, pieces: Pieces, into: UInt8[np.ndarray, "bytes"]
    ) -> bool:
        return self._made(name, lambda: LocalStore.load_pieces(self, name, span, checksum, pieces, into))

    def _made(self, name: str, read: Callable[[], T]) -> T:
        for _ in range(_TRIES):
            try:
                return read()
            except FileNotFoundError:
                self._held.forget(name)
                self.make()
            except OSError:  # deleted meanwhile, to make room for others, or made anew
                self._held.forget(name)
        return read()


class StretchCache:
    """A directory with the stretches of some recipes, of which only so many bytes of segments stay."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit
        self._root = root / _FOLDER
        self._own: set[Path] = set()
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        """Where the stretch with a key is, or will be."""
        path = self._root / f"{key}{_ENDING}"
        self._own.add(path)
        return path

    def make_room(self, newest: Path) -> None:
        """Deletes segments of other stretches until the limit is kept: of other recipes, then the newest of this one.

        A scan reads the stretches of a recipe in their order. Deleting the oldest, the next scan would find none.
        """
        with self._lock:
            sizes = {p: _segment_bytes(p) for p in self._root.glob("*") if _STRETCH.fullmatch(p.name)}
            ages = {path: path.stat().st_mtime_ns for path in sizes if path.exists()}
            others = sorted((p for p in ages if p not in self._own), key=lambda path: ages[path])
            own = sorted((p for p in ages if p in self._own and p != newest), key=lambda path: -ages[path])
            total = sum(sizes.values())
            for path in [*others, *own]:
                if total <= self.limit:
                    break
                for file in (path / names.SEGMENTS).glob("*"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file)
                total -= sizes[path]


def _segment_bytes(path: Path) -> int:
    total = 0
    for file in (path / names.SEGMENTS).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def finished(store: Store, steps: int) -> Manifest | None:
    """The manifest of a stretch of so many steps that has been computed; its segments may be gone."""
    if not store.exists(names.MANIFEST):
        return None
    try:
        manifest = read_manifest(store)[0]
    except MemoryFormatError:  # damaged: the stretch is computed again
        with contextlib.suppress(OSError):  # no file at all: said when the stretch is written
            store.delete(names.MANIFEST)
        return None
    return manifest if manifest.recomputed is not None and manifest.steps == steps else None


class StretchReader(MemoryReader):
    """All stretches of a recipe as one memory."""

    local = True

    def __init__(self, recipe: MemoryReader, parts: Sequence[Part]) -> None:
        """`parts`: the stretches, in their order."""
        self.store, self._parts, self._recipe = recipe.store, parts, recipe
        together = joined([part.manifest for part in parts])
        self.ranks = [
            replace(
                together,
                segments=[segment for part in parts for segment in part.segments],
                status=recipe.manifest.status,
                created=recipe.manifest.created,
                recomputed=max(part.manifest.recomputed or 0.0 for part in parts),
                final=recipe.manifest.final,
            )
        ]
        self._open(self.ranks[0], parts)

    @cached_property
    def initial(self) -> Mapping[str, Tensor]:
        return self._initial_of(self._parts[0])

    @cached_property
    def final(self) -> Mapping[str, Tensor] | None:
        return self._recipe.final

    def _initial_of(self, part: Part) -> Mapping[str, Tensor]:
        return read_weights(part.store, part.manifest.initial, part.manifest)

    def every_file(self) -> Iterator[tuple[Store, FileEntry]]:
        yield from self._recipe.every_file()
        for part in self._parts:
            yield from ((part.store, entry) for entry in (part.manifest.initial, *part.manifest.segments))

    def checkpoints(self, layer: str, parameter: str) -> dict[int, set[str]]:
        start = f"{layer}/{parameter}/"
        return super().checkpoints(layer, parameter) | {
            part.shift: {n.removeprefix(start) for n in self._initial_of(part) if n.startswith(start)} | {"weights"}
            for part in self._parts
        }

    def _stored_state(self, layer: str, parameter: str, step: int, state: str) -> Tensor:
        part = next((part for part in self._parts if part.shift == step), None)
        if part is None:
            return super()._stored_state(layer, parameter, step, state)
        return self._initial_of(part)[f"{layer}/{parameter}" + ("" if state == "weights" else f"/{state}")]

    def log(self, layer: str) -> StepLog:
        """Where a stretch did not end with the weights of the next checkpoint, these were changed by nobody's slots."""
        log, recorded = super().log(layer), self._recipe.log(layer)
        for before, part in zip(self._parts, self._parts[1:], strict=False):
            again = 1 if before.manifest.recomputed else 0
            log.moved[part.shift] = float(int(log.moved[part.shift]) | int(recorded.moved[part.shift]) | again)
        return log
