"""The writer of folded memories: running sums in main memory, written as snapshots now and then.

The background thread adds up what training hands over, and writes all of the sums when a snapshot is due: after a
minute, or less often where writing takes more than a fiftieth of the time; when `flush` asks for one; and at the
end. Only then the manifest names the new files, and only then the old ones are deleted. The last snapshot that
`flush` asked for before the newest one stays too: whoever is killed between `flush` and saving a checkpoint has the
checkpoint before.
"""

from __future__ import annotations

import dataclasses
import math
import os
import queue
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import TooLargeError
from spotlights.memory import slots as names
from spotlights.memory.columns import FIRST_STEP, LAST_STEP, VISITS, ColumnTable
from spotlights.memory.directory import FINAL, delete_unlisted, take_lock
from spotlights.memory.folding import FoldedLayer
from spotlights.memory.manifest import FoldEntry, Manifest, SegmentEntry, Snapshot, read_manifest, write_manifest
from spotlights.memory.segment_writer import write_segment
from spotlights.memory.slots import StepRecord
from spotlights.memory.storage import BufferPool
from spotlights.memory.tensors import map_tensors
from spotlights.memory.writer import MemoryWriter

SNAPSHOT_SECONDS = 60.0
SNAPSHOT_SHARE = 1 / 50
"""Snapshots that nobody asked for take at most this share of the time."""
MEMORY_SHARE = 1 / 2
"""Sums may take this share of the machine's main memory; beyond it, recording stops rather than training."""
_WAITING = 32
"""So many portions may wait to be added up, each a sixteenth of a segment: as much as two segments elsewhere."""


class FoldedWriter(MemoryWriter):
    """Adds steps to one folded memory."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        columns: ColumnTable,
        *,
        pool: BufferPool,
        segment_bytes: int,
        lock: int | None,
    ) -> None:
        portion = max(1, 2 * segment_bytes // _WAITING)
        super().__init__(directory, manifest, columns, pool=pool, segment_bytes=portion, lock=lock)
        self._queue = queue.Queue(_WAITING)
        for name in ("position", VISITS, FIRST_STEP, LAST_STEP):
            columns.declare(name, "int")
        self._sums = {
            name: FoldedLayer(
                entry.in_features,
                np.float64 if entry.storage == "float64" else np.float32,
                columns.kind,
                chunk_bytes=segment_bytes,
            )
            for name, entry in manifest.layers.items()
        }
        self._last: tuple[int, dict[str, np.ndarray]] | None = None
        """The last step that was added up, and entries of the weights after it; None if all of it is on disk."""
        self._next_snapshot = time.monotonic() + SNAPSHOT_SECONDS

    @classmethod
    def resume(cls, directory: Path, steps: int, *, pool: BufferPool, segment_bytes: int) -> FoldedWriter:
        """Goes on from the snapshot after `steps` steps; there must be one."""
        lock = take_lock(directory)
        manifest = read_manifest(directory)
        fold = _fold(manifest)
        snapshot = next(kept for kept in snapshots(manifest) if kept.steps == steps)
        newest = dataclasses.replace(fold, steps=steps, asked=snapshot.asked, earlier=None)
        manifest = dataclasses.replace(
            manifest, segments=snapshot.segments, fold=newest, final=None, status="recording"
        )
        write_manifest(directory, manifest)
        (directory / FINAL).unlink(missing_ok=True)
        columns = ColumnTable(manifest.columns)
        writer = cls(directory, manifest, columns, pool=pool, segment_bytes=segment_bytes, lock=lock)
        writer._delete_strays()
        for segment in snapshot.segments:
            mapped = map_tensors(directory / segment.file, segment.bytes)
            for layer in manifest.layers:
                if segment.slots[layer]:
                    writer._load(layer, mapped)
        return writer

    def _load(self, layer: str, mapped: Mapping[str, Tensor]) -> None:
        keys = mapped[names.layer_tensor(layer, names.KEYS)].numpy()
        scale = mapped.get(names.layer_tensor(layer, names.KEY_SCALE))
        if scale is not None:
            keys = keys * scale.numpy()[:, None]
        prefix = names.column_tensor(layer, "")
        columns = {n.removeprefix(prefix): t.numpy() for n, t in mapped.items() if n.startswith(prefix)}
        self._sums[layer].load(keys, columns)

    # -- what the training thread calls -----------------------------------------------------------

    @property
    def starts_segment(self) -> bool:
        """Never: checkpoints of the optimizer's state are of no use without errors."""
        return False

    def flush(self) -> None:
        """Waits until a snapshot of all steps added so far is committed."""
        self._hand_over()
        self._queue.put(partial(self._snapshot, asked=True))
        self._queue.join()

    def close(self, final: Mapping[str, Tensor] | None, status: str = "closed", *, interrupted: bool = False) -> None:
        """Writes the last snapshot and, if nothing failed, the final weights."""
        self._hand_over()
        self._queue.put(partial(self._snapshot, asked=False, only=not interrupted))
        super().close(final, status)

    # -- the background thread ---------------------------------------------------------------------

    def _commit(self, steps: list[StepRecord]) -> None:
        for record in steps:
            for name, layer in record.layers.items():
                for rows in layer.rows:
                    self._sums[name].add(rows.keys.numpy(), rows.columns, record.step)
                    self._pool.give(rows.keys)
            self._need_room()
        self._last = (
            steps[-1].step,
            {
                names.sample_tensor(name, parameter): sample
                for name, layer in steps[-1].layers.items()
                for parameter, sample in layer.samples.items()
            },
        )
        if time.monotonic() >= self._next_snapshot:
            self._snapshot(asked=False)

    def _need_room(self) -> None:
        taken, room = sum(sums.nbytes for sums in self._sums.values()), MEMORY_SHARE * main_memory()
        if taken > room:
            self._sums.clear()
            raise TooLargeError(
                f"the running sums take {taken / 1e9:.1f} GB, and {room / 1e9:.1f} GB of main memory can be spared for "
                "them; fold fewer layers (layers=…)"
            )

    def _snapshot(self, *, asked: bool, only: bool = False) -> None:
        """Commits the sums as they are. `only`: no earlier snapshot is kept beside this one."""
        fold = _fold(self._manifest)
        if self._last is None:
            asked = (asked or fold.asked) and fold.steps > 0
            self._replace(fold=dataclasses.replace(fold, asked=asked, earlier=None if only else fold.earlier))
            self._delete_strays()
            return
        start = time.monotonic()
        last, samples = self._last
        newest = Snapshot(fold.steps, fold.asked, self._manifest.segments)
        earlier = newest if newest.asked else fold.earlier
        fold = dataclasses.replace(fold, steps=last + 1, asked=asked, earlier=None if only else earlier)
        try:
            segments, told = self._write_sums(fold, {names.STEPS: np.array(last), **samples})
            columns = {name: entry for name, entry in self._columns.entries().items() if name in told}
            self._replace(segments=segments, columns=columns, fold=fold)
        finally:
            self._delete_strays()
        self._last = None
        now = time.monotonic()
        self._next_snapshot = now + max(SNAPSHOT_SECONDS, (now - start) / SNAPSHOT_SHARE)

    def _write_sums(self, fold: FoldEntry, log: Mapping[str, np.ndarray]) -> tuple[list[SegmentEntry], set[str]]:
        """Writes all of the sums; returns the files, and which columns they have.

        The first file has no slots, but what a checkpoint of the network is recognised by.
        """
        segments = [self._write({name: [row[None]] for name, row in log.items()}, {}, fold)]
        told = {"example", VISITS, FIRST_STEP, LAST_STEP}
        for layer, sums in self._sums.items():
            entry = self._manifest.layers[layer]
            for keys, columns in sums.chunks():
                tensors = {names.column_tensor(layer, name): [column] for name, column in columns.items()}
                tensors[names.layer_tensor(layer, names.NORMS)] = [_norms(keys, entry.stretches.values())]
                if entry.storage == "float16":
                    keys, scale = _halved(keys)
                    tensors[names.layer_tensor(layer, names.KEY_SCALE)] = [scale]
                tensors[names.layer_tensor(layer, names.KEYS)] = [keys]
                segments.append(self._write(tensors, {layer: len(keys)}, fold))
                told |= set(columns)
        return segments, told

    def _write(self, tensors: dict[str, list[np.ndarray]], slots: dict[str, int], fold: FoldEntry) -> SegmentEntry:
        counts = {name: slots.get(name, 0) for name in self._manifest.layers}
        steps = range(min(fold.from_step, fold.steps), fold.steps)
        return write_segment(self.directory, tensors, rank=0, steps=steps, slots=counts, keys=counts)

    def _delete_strays(self) -> None:
        delete_unlisted(self.directory, (segment for kept in snapshots(self._manifest) for segment in kept.segments))


def main_memory() -> float:
    """The machine's main memory, in bytes."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # pragma: no cover - not on Windows
        return math.inf


def snapshots(manifest: Manifest) -> list[Snapshot]:
    """The snapshots of a folded memory, the newest first."""
    fold = _fold(manifest)
    newest = Snapshot(fold.steps, fold.asked, manifest.segments)
    return [newest] if fold.earlier is None else [newest, fold.earlier]


def _fold(manifest: Manifest) -> FoldEntry:
    assert manifest.fold is not None
    return manifest.fold


def _norms(rows: Float[np.ndarray, "rows features"], stretches: Iterable[slice]) -> Float[np.ndarray, "rows stretches"]:
    return np.sqrt(np.stack([np.einsum("ij,ij->i", some, some) for some in (rows[:, s] for s in stretches)], axis=1))


def _halved(rows: Float[np.ndarray, "rows features"]) -> tuple[np.ndarray, np.ndarray]:
    """As float16, each row divided by a power of two that brings its largest number near 1; and those powers."""
    largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    exponents: Any = np.frexp(largest)[1]
    scale = np.ldexp(np.float32(1), np.clip(exponents, -126, 127)).astype(np.float32)
    return (rows / scale[:, None]).astype(np.float16), scale
