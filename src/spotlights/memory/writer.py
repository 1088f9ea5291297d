"""The writer: the only part of Spotlights that changes a memory.

Steps are collected until they make a segment, which a background thread writes, syncs, renames into its
place and then enters in the manifest. At most two segments wait for the thread; after that `add` waits
too, so that a slow disk slows training instead of filling the memory of the machine. What the thread computes it
computes by itself: torch would give it a pool of threads of its own, which fights with the one that trains
(measured: twice the time per step).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spotlights.memory import slots as names
from spotlights.memory.columns import ColumnTable, missing
from spotlights.memory.directory import FINAL, INITIAL, delete_unlisted, take_empty, take_lock
from spotlights.memory.gradient_block import blocks_of, compare
from spotlights.memory.key_index import KeyIndex
from spotlights.memory.manifest import (
    FileEntry,
    LayerEntry,
    Manifest,
    SegmentEntry,
    read_manifest,
    write_manifest,
)
from spotlights.memory.segment_writer import cut_segment, write_segment
from spotlights.memory.slots import LayerStep, StepRecord, plain
from spotlights.memory.storage import BufferPool, joined
from spotlights.memory.tensors import map_tensors, write_tensors

SEGMENT_BYTES = 64 << 20
SEGMENT_SECONDS = 60.0
_WAITING_SEGMENTS = 2
_SLOTS_PER_CHECKPOINT = 4
"""So many times a checkpoint's bytes are written before the next one is."""


class MemoryWriter:
    """Appends steps to one memory."""

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
        self.directory = directory
        self._manifest = manifest
        self._columns = columns
        self._pool = pool
        self._segment_bytes = segment_bytes
        self._lock = lock
        self._indexes = {name: KeyIndex() for name, e in manifest.layers.items() if e.indexed}
        self._undecided = {name for name in manifest.layers if not any(s.slots[name] for s in manifest.segments)}
        self._steps: list[StepRecord] = []
        self._bytes = 0
        self._bytes_since_checkpoint = 0
        self._since = time.monotonic()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING_SEGMENTS)
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    # -- opening -------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        directory: Path,
        manifest_without_initial: dict[str, object],
        initial: Mapping[str, Tensor],
        columns: ColumnTable,
        *,
        pool: BufferPool,
        overwrite: bool,
        segment_bytes: int,
    ) -> MemoryWriter:
        """Starts a new memory; `initial` is written before anything else."""
        lock = take_empty(directory, overwrite=overwrite)
        entry = _write_file(directory / INITIAL, initial)
        manifest = Manifest(initial=entry, **manifest_without_initial)  # type: ignore[arg-type]
        write_manifest(directory, manifest)
        return cls(directory, manifest, columns, pool=pool, segment_bytes=segment_bytes, lock=lock)

    @classmethod
    def resume(cls, directory: Path, steps: int, *, pool: BufferPool, segment_bytes: int) -> MemoryWriter:
        """Goes on with a memory after its first `steps` steps; later ones are dropped."""
        lock = take_lock(directory)
        manifest = read_manifest(directory)
        kept: list[SegmentEntry] = []
        for segment in manifest.segments:
            if segment.end_step <= steps:
                kept.append(segment)
            elif segment.first_step < steps:
                kept.append(cut_segment(directory, manifest, segment, steps))
        manifest = dataclasses.replace(manifest, segments=kept, final=None, status="recording")
        write_manifest(directory, manifest)
        delete_unlisted(directory, kept)
        (directory / FINAL).unlink(missing_ok=True)
        columns = ColumnTable(manifest.columns)
        writer = cls(directory, manifest, columns, pool=pool, segment_bytes=segment_bytes, lock=lock)
        for name, index in writer._indexes.items():
            for segment in kept:
                mapped = map_tensors(directory / segment.file, segment.bytes)
                keys = mapped.get(names.layer_tensor(name, names.KEYS))
                scale = mapped.get(names.layer_tensor(name, names.KEY_SCALE))
                if keys is not None:
                    index.add(keys.numpy(), None if scale is None else scale.numpy())
        return writer

    @property
    def columns(self) -> ColumnTable:
        return self._columns

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    # -- checkpoints of the optimizer's state ---------------------------------------------------

    @property
    def starts_segment(self) -> bool:
        """Whether the next step is the first one of a segment: only such a step can bring a checkpoint."""
        return not self._steps

    def wants(self, nbytes: int) -> bool:
        """Whether a checkpoint of that size is due: they shall add at most a quarter to what is written."""
        return 0 < nbytes * _SLOTS_PER_CHECKPOINT <= self._bytes_since_checkpoint

    # -- adding --------------------------------------------------------------------------------

    def add(self, record: StepRecord) -> None:
        """Takes the slots of one step. Waits if the disk cannot keep up."""
        self._steps.append(record)
        self._bytes += record.nbytes
        self._bytes_since_checkpoint = record.nbytes + (0 if record.state else self._bytes_since_checkpoint)
        old = time.monotonic() - self._since > SEGMENT_SECONDS
        if self._bytes >= self._segment_bytes or old:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spotlights-writer", daemon=True)
            self._thread.start()
        if self._steps and self.failure is None:
            self._queue.put(partial(self._commit, self._steps))
        self._steps, self._bytes, self._since = [], 0, time.monotonic()

    def flush(self) -> None:
        """Waits until all steps added so far are committed."""
        self._hand_over()
        self._queue.join()

    def close(self, final: Mapping[str, Tensor] | None, status: str = "closed", *, interrupted: bool = False) -> None:
        """Writes what is left and, if nothing failed, the final weights.

        `interrupted`: an exception ended the run, which may go on from a checkpoint: a folded memory keeps what
        that needs.
        """
        self._hand_over()
        self._queue.put(None)
        assert self._thread is not None
        self._thread.join()
        if self.failure is None and final is not None:
            try:
                entry = _write_file(self.directory / FINAL, final)
                self._replace(final=entry, status=status)
            except OSError as error:
                self.failure = error
        elif self.failure is not None:
            # The disk that failed may fail again; the committed segments stay readable all the same.
            with contextlib.suppress(OSError):
                self._replace(status=f"stopped: {self.failure}")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- the background thread ---------------------------------------------------------------

    def _run(self) -> None:
        _compute_alone()
        while (task := self._queue.get()) is not None:
            try:
                if self.failure is None:  # else only empty the queue: training must never wait for it
                    task()
            except BaseException as error:
                self.failure = error
            finally:
                self._queue.task_done()

    def _commit(self, steps: list[StepRecord]) -> None:
        tensors: dict[str, list[np.ndarray]] = {names.STEPS: [np.array([record.step for record in steps])]}
        tensors |= {name: [state.numpy()] for name, state in steps[0].state.items()}
        slots, keys = {}, {}
        for layer in self._manifest.layers:
            slots[layer], keys[layer] = self._gather(layer, steps, tensors)
        written = range(steps[0].step, steps[-1].step + 1)
        entry = write_segment(self.directory, tensors, rank=self._manifest.rank, steps=written, slots=slots, keys=keys)
        layers = {
            name: dataclasses.replace(layer, indexed=name in self._indexes)
            for name, layer in self._manifest.layers.items()
        }
        self._replace(
            segments=[*self._manifest.segments, entry],
            columns=self._columns.entries(),
            layers=layers,
        )
        if self._manifest.sample is None:  # rows of a sample have shapes of their own, which do not come again
            for record in steps:
                for layer in record.layers.values():
                    for rows in layer.rows:
                        rows.give_back(self._pool)

    def _replace(self, **changes: object) -> None:
        manifest = dataclasses.replace(self._manifest, **changes)  # type: ignore[arg-type]
        write_manifest(self.directory, manifest)
        self._manifest = manifest

    def _gather(self, layer: str, steps: list[StepRecord], tensors: dict[str, list[np.ndarray]]) -> tuple[int, int]:
        """Adds one layer's tensors; returns its numbers of slots and of keys."""
        entry = self._manifest.layers[layer]
        rows = [rows for record in steps for rows in record.layers[layer].rows]
        coarse = {str(part.computed).removeprefix("torch.") for part in rows if part.computed is not None}
        if coarse and not entry.computed:
            entry = dataclasses.replace(entry, computed=max(coarse))
            self._manifest = dataclasses.replace(self._manifest, layers={**self._manifest.layers, layer: entry})
        parts: dict[str, list[np.ndarray]] = {}
        if rows and layer in self._undecided:
            self._undecided.remove(layer)
            if rows[0].may_repeat:
                self._indexes[layer] = KeyIndex()
        keys, scales = _arrays(part.keys for part in rows), _together(part.key_scale for part in rows)
        if layer in self._indexes:
            keys, scales, parts[names.INDEX] = self._indexes[layer].distinct(keys, scales)
        parts[names.KEYS], parts[names.KEY_SCALE] = keys, scales
        parts[names.ERRORS] = _arrays(part.errors for part in rows)
        parts[names.ERROR_SCALE] = _together(part.error_scale for part in rows)
        for name, blocks in parts.items():
            if blocks:
                tensors[names.layer_tensor(layer, name)] = blocks
        named = {name for part in rows for name in part.columns}
        if "position" in named:
            self._columns.declare("position", "int")
        for column in sorted(named):
            kind = self._columns.kind(column)
            given = (part.columns.get(column) for part in rows)
            blocks = [
                missing(kind, len(part)).numpy() if found is None else found
                for part, found in zip(rows, given, strict=True)
            ]
            tensors[names.column_tensor(layer, column)] = [np.concatenate(blocks)]
        if rows:
            counts = [sum(map(len, record.layers[layer].rows)) for record in steps]
            tensors[names.column_tensor(layer, "step")] = [np.repeat([record.step for record in steps], counts)]
        log = [record.layers[layer] for record in steps]
        tensors |= {name: [found] for name, found in self._probed(layer, entry, log).items()}
        for parameter in entry.trained:
            if self._manifest.rule is not None:
                tensors[names.rule_tensor(layer, parameter)] = [np.array([s.rule[parameter] for s in log])]
            tensors[names.sample_tensor(layer, parameter)] = [np.stack([s.samples[parameter] for s in log])]
        count = sum(len(part) for part in rows)
        return count, sum(len(block) for block in parts.get(names.KEYS, []))

    def _probed(self, layer: str, entry: LayerEntry, log: list[LayerStep]) -> dict[str, np.ndarray]:
        """How the steps' slots relate to the gradients that the optimizer saw."""
        seen, explained = blocks_of(log, entry)
        if self._manifest.ranks == 1:
            factors, share = compare(len(log), seen, explained, entry.rounding)
            found = {names.factor_tensor(layer, parameter): factor for parameter, factor in factors.items()}
        else:  # that follows from the slots of all processes
            share = np.full(len(log), np.nan)
            found = {names.explained_tensor(layer, parameter): rows for parameter, rows in explained.items()}
            if self._manifest.rank == 0:
                found |= {names.gradient_tensor(layer, parameter): rows for parameter, rows in seen.items()}
        return {names.probe_tensor(layer): np.stack([share, [float(s.moved) for s in log]], axis=1), **found}


def _compute_alone() -> None:
    """From now on, what the calling thread asks torch for is computed in it; what others ask for, as before."""
    everyone = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for those that start later, unless another one takes it back
    another = threading.Thread(target=torch.set_num_threads, args=(everyone,))
    another.start()
    another.join()


def _arrays(tensors: Iterable[Tensor | None]) -> list[np.ndarray]:
    return [block.numpy() for block in joined(tensor for tensor in tensors if tensor is not None)]


def _together(tensors: Iterable[Tensor | None]) -> list[np.ndarray]:
    """Small ones, as one array; none if there are none."""
    found = [tensor.numpy() for tensor in tensors if tensor is not None]
    return [np.concatenate(found)] if found else []


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    size, checksum = write_tensors(path, {name: [plain(tensor).numpy()] for name, tensor in tensors.items()})
    return FileEntry(path.name, size, checksum)
