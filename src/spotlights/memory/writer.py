"""The writer: appends the steps of a run to a memory.

Only the writer changes the manifest and the files that the manifest lists. (Readers may add derived files beside them:
`memory/moments.py`.) Steps are collected until they fill a segment. A background thread writes the segment and then
commits a manifest that lists it. At most two segments wait for the thread; after that `add` waits too, so that a slow
disk slows training down instead of filling main memory. The thread computes without torch's thread pool, which would
compete with the training thread's (measured: twice the time per step).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from spotlights.errors import ResumeError
from spotlights.memory.buffers import BufferPool, joined
from spotlights.memory.files import Committed, FileTensors, check_content, claim, read_manifest, write_tensors
from spotlights.memory.format import names
from spotlights.memory.format.columns import ColumnTable, missing
from spotlights.memory.format.manifest import LayerEntry, Manifest, SegmentEntry
from spotlights.memory.format.recipe import recipe_tensors
from spotlights.memory.slots import (
    MOVED_CAUSES,
    NOT_EXPLAINED,
    UNEXPLAINED,
    LayerStep,
    Rows,
    StepRecord,
    blocks_of,
    compare,
    is_rounding,
    likely_cause,
    plain,
    unexplained_steps,
)
from spotlights.memory.store import Store
from spotlights.optimizers import WEIGHTS
from spotlights.sparse_rows import SparseRows

SEGMENT_BYTES = 64 << 20
SEGMENT_SECONDS = 60.0
_SLOTS_PER_CHECKPOINT = 4
"""A checkpoint is written once this many times its bytes have been written as slots."""
_SLOTS_PER_WHOLE_CHECKPOINT = 24
"""The same for a checkpoint that has the weights, too."""
_GIVE_UP_ROWS = 1 << 20
"""Keys that hardly ever repeat among so many are no longer looked for."""


class MemoryWriter:
    """Appends steps to one memory."""

    waiting: ClassVar[int] = 2
    """How many segments may wait for the background thread."""

    def __init__(self, memory: Committed, columns: ColumnTable, *, pool: BufferPool, segment_bytes: int) -> None:
        self._memory = memory
        self.columns = columns
        self._pool = pool
        self._segment_bytes = segment_bytes
        manifest = memory.manifest
        self._indexes = {name: KeyIndex() for name, e in manifest.layers.items() if e.indexed}
        self._undecided = {name for name in manifest.layers if not any(s.slots[name] for s in manifest.segments)}
        self._steps: list[StepRecord] = []
        self._bytes = 0
        self._bytes_in_all = sum(segment.bytes for segment in manifest.segments)
        self._bytes_since_checkpoint = self._bytes_since_whole_checkpoint = 0
        self._since = time.monotonic()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(self.waiting)
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.gap: str | None = None
        """The first step whose slots do not account for the weights, in a sentence."""
        self.order: Sequence[str] = ()
        """The layers as they were executed in the first step. The manifest has them in this order: the last answers."""

    # -- opening -------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        store: Store,
        manifest_without_initial: dict[str, object],
        initial: Mapping[str, Tensor],
        *,
        pool: BufferPool,
        overwrite: bool,
        segment_bytes: int,
    ) -> MemoryWriter:
        """Starts a new memory; `initial` is written before anything else."""
        with contextlib.ExitStack() as after_errors:
            release = claim(store, overwrite=overwrite)
            after_errors.callback(release)
            try:
                entry = write_tensors(store, names.INITIAL, _arrays_of(initial), new=True)
            except FileExistsError:
                raise ResumeError(f"{store} is being recorded by another process. Record to another path.") from None
            empty = {"columns": {}, "segments": [], "initial": entry, "final": None}
            manifest = Manifest(**empty, **manifest_without_initial)  # type: ignore[arg-type]
            memory = Committed(store, manifest, None, release)
            memory.replace()
            writer = cls(memory, ColumnTable(), pool=pool, segment_bytes=segment_bytes)
            after_errors.pop_all()
        return writer

    @classmethod
    def resume(cls, store: Store, steps: int, *, pool: BufferPool, segment_bytes: int) -> MemoryWriter:
        """Continues a memory after its first `steps` steps; later ones are dropped."""
        with contextlib.ExitStack() as after_errors:
            release = store.lock()
            after_errors.callback(release)
            memory = Committed(store, *read_manifest(store), release)
            memory.replace(**cls._as_of(memory, steps), final=None, status="recording")
            memory.delete_unlisted()
            writer = cls(memory, ColumnTable(memory.manifest.columns), pool=pool, segment_bytes=segment_bytes)
            for segment in memory.manifest.segments:
                if writer._indexes or memory.manifest.fold is not None:
                    check_content(store, segment)  # what is taken up is written again
                    writer._load(segment, FileTensors(store, segment))
            after_errors.pop_all()
        return writer

    @classmethod
    def _as_of(cls, memory: Committed, steps: int) -> dict[str, object]:
        """What the manifest of the first `steps` steps says differently."""
        kept = [segment for segment in memory.manifest.segments if segment.first_step < steps]
        return {"segments": [s if s.end_step <= steps else memory.cut_segment(s, steps) for s in kept]}

    def _load(self, segment: SegmentEntry, tensors: Mapping[str, Tensor]) -> None:
        """Takes up what an earlier segment holds: here, the keys that may come again."""
        for layer, index in self._indexes.items():
            keys = tensors.get(names.layer_tensor(layer, names.KEYS))
            scale = tensors.get(names.layer_tensor(layer, names.KEY_SCALE))
            if keys is not None:
                index.add(keys.numpy(), None if scale is None else scale.numpy())

    @property
    def manifest(self) -> Manifest:
        return self._memory.manifest

    # -- checkpoints of the optimizer's state ---------------------------------------------------

    @property
    def starts_segment(self) -> bool:
        """Whether the next step is the first one of a segment: only such a step can bring a checkpoint."""
        return not self._steps

    def aligned(self, step: int, nbytes: int, *, whole: bool = False) -> bool:
        """Like `wants`, for checkpoints that all processes of a run write before the same steps, without a word.

        A power of two of steps lies between two checkpoints, so that processes whose steps differ in size meet, too.
        """
        if not nbytes or not self._bytes_in_all:
            return False
        factor = _SLOTS_PER_WHOLE_CHECKPOINT if whole else _SLOTS_PER_CHECKPOINT
        interval = math.ceil(max(factor * nbytes, self._segment_bytes) * step / self._bytes_in_all)
        return step % (1 << max(interval - 1, 0).bit_length()) == 0

    def wants(self, nbytes: int, *, whole: bool = False) -> bool:
        """Whether a checkpoint of that size is due: checkpoints add at most a quarter to what is written.

        `whole`: a checkpoint of the weights, too, from which all later weights can be rebuilt; at most a twenty-fourth.
        """
        if whole:
            return 0 < nbytes * _SLOTS_PER_WHOLE_CHECKPOINT <= self._bytes_since_whole_checkpoint
        return 0 < nbytes * _SLOTS_PER_CHECKPOINT <= self._bytes_since_checkpoint

    def replace_initial(self, initial: Mapping[str, Tensor]) -> None:
        """Replaces what the memory starts from; nothing has been added yet."""
        assert not self._steps
        assert not self.manifest.segments
        self._memory.replace(initial=write_tensors(self._memory.store, names.INITIAL, _arrays_of(initial)))

    # -- adding --------------------------------------------------------------------------------

    def add(self, record: StepRecord) -> None:
        """Takes the slots of one step. Waits if the disk cannot keep up."""
        self._steps.append(record)
        size = record.nbytes
        self._bytes += size
        self._bytes_in_all += size
        self._bytes_since_checkpoint = size + (0 if record.state else self._bytes_since_checkpoint)
        whole = any(name.endswith(f"/{WEIGHTS}") for name in record.state)
        self._bytes_since_whole_checkpoint = size + (0 if whole else self._bytes_since_whole_checkpoint)
        old = time.monotonic() - self._since > SEGMENT_SECONDS
        if self._bytes >= self._segment_bytes or old:
            self._hand_over()

    def start_segment(self) -> None:
        """Hands over what has been collected: the next step is the first one of a segment."""
        if self._steps:
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

    def close(self, final: Mapping[str, Tensor] | None, *, interrupted: bool = False) -> None:
        """Writes what is left and, if nothing failed, the final weights.

        `interrupted`: an exception ended the run, which may go on from a checkpoint: a folded memory keeps the snapshot
        that belongs to the checkpoint.
        """
        self._hand_over()
        self._queue.put(None)
        assert self._thread is not None
        self._thread.join()
        try:
            if self.failure is not None:
                self._memory.replace(status=f"stopped: {self.failure}")
            elif final is not None:
                entry = self._memory.write_new(names.FINAL, _arrays_of(final))
                self._memory.replace(final=entry, status="closed")
        except (OSError, ResumeError) as error:  # the committed segments stay readable all the same
            self.failure = self.failure or error
        self._memory.release()

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
        for name in steps[0].statistics:
            rows = [record.statistics[name] for record in steps]
            tensors[names.LOG + names.STATISTICS + name] = [np.stack(rows)]
        tensors |= recipe_tensors([record.recipe for record in steps if record.recipe is not None])
        layers, slots = {}, {}
        known = self.manifest.layers
        for layer, entry in {name: known[name] for name in (*self.order, *known)}.items():
            layers[layer] = self._gather(layer, entry, steps, tensors)
            slots[layer] = sum(len(rows) for record in steps for rows in record.layers[layer].rows)
        segment = self._memory.write_segment(tensors, range(steps[0].step, steps[-1].step + 1), slots)
        self._memory.replace(segments=[*self.manifest.segments, segment], columns=self.columns.entries(), layers=layers)
        if self.manifest.sample is None:  # rows of a sample have shapes of their own, which do not come again
            for record in steps:
                for layer in record.layers.values():
                    for rows in layer.rows:
                        rows.give_back(self._pool)

    def _gather(
        self, layer: str, entry: LayerEntry, steps: list[StepRecord], tensors: dict[str, list[np.ndarray]]
    ) -> LayerEntry:
        """Adds one layer's tensors; returns what the manifest is to say of the layer."""
        log = [record.layers[layer] for record in steps]
        rows = [rows for step in log for rows in step.rows]
        coarse = {str(some.computed).removeprefix("torch.") for some in rows if some.computed is not None}
        if coarse and not entry.computed:
            entry = dataclasses.replace(entry, computed=max(coarse))
        if rows and layer in self._undecided:
            self._undecided.remove(layer)
            if rows[0].may_repeat:
                self._indexes[layer] = KeyIndex()
        stored = _sparse(names.KEYS, rows, entry) | _sparse(names.ERRORS, rows, entry)
        keys, scales = _arrays(some.keys for some in rows), _concatenated(some.key_scale for some in rows)
        if layer in self._indexes:
            keys, scales, stored[names.INDEX] = self._indexes[layer].distinct(keys, scales)
        stored[names.KEYS], stored[names.KEY_SCALE] = keys, scales
        stored[names.ERRORS] = _arrays(some.errors for some in rows)
        stored[names.ERROR_SCALE] = _concatenated(some.error_scale for some in rows)
        tensors |= {names.layer_tensor(layer, what): blocks for what, blocks in stored.items() if blocks}
        given = {column for some in rows for column in some.columns}
        if "position" in given:
            self.columns.declare("position", "int")
        for column in sorted(given):
            kind = self.columns.kind(column)
            blocks = [
                some.columns[column] if column in some.columns else missing(kind, len(some)).numpy() for some in rows
            ]
            tensors[names.column_tensor(layer, column)] = [np.concatenate(blocks)]
        if rows:
            counts = [sum(map(len, step.rows)) for step in log]
            tensors[names.column_tensor(layer, "step")] = [np.repeat([record.step for record in steps], counts)]
        tensors |= {name: [values] for name, values in self._compared(layer, entry, log, steps[0].step).items()}
        for name in entry.trained:
            if self.manifest.rule is not None:
                tensors[names.log_tensor(layer, name, names.RULE)] = [np.array([step.rule[name] for step in log])]
            tensors[names.log_tensor(layer, name, names.PROBED)] = [np.stack([step.probed[name] for step in log])]
        return dataclasses.replace(entry, indexed=layer in self._indexes)

    def _compared(self, layer: str, entry: LayerEntry, log: list[LayerStep], first_step: int) -> dict[str, np.ndarray]:
        """How the steps' slots relate to the gradients that the optimizer saw."""
        seen, explained = blocks_of(log, entry)
        if self.manifest.ranks == 1:
            factors, share = compare(len(log), seen, explained, entry.rounding)
            per_parameter = {names.FACTOR: factors}
            for bad in unexplained_steps(torch.from_numpy(share), entry):
                rest = {p: seen[p][bad] - factors[p][bad] * explained[p][bad] for p in log[bad].gradients}
                share[bad] = -min(share[bad], UNEXPLAINED) if is_rounding(log[bad], entry, rest) else share[bad]
            if self.gap is None and (bad := _first_gap(log, share, entry)) is not None:
                reasons = names.moved_steps([log[bad].moved])
                what = " and ".join(reasons)
                what += f". Likely {MOVED_CAUSES}" if names.MOVED[1] in reasons else ""
                if not log[bad].moved:
                    both = (np.concatenate([of[name][bad] for name in entry.trained]) for of in (seen, explained))
                    what = f"{NOT_EXPLAINED} ({share[bad]:.0%} of the gradient). Likely {likely_cause(*both)}"
                self.gap = f'At step {first_step + bad}, layer "{layer}": {what}'
        else:  # the reader compares the gradients with the slots of all processes
            share = np.full(len(log), np.nan)
            per_parameter = {names.EXPLAINED: explained}
            if self.manifest.rank == 0 or entry.shards:
                per_parameter[names.GRADIENT] = seen
        tensors = {names.log_tensor(layer, names.PROBE): np.stack([share, [float(s.moved) for s in log]], axis=1)}
        for what, values in per_parameter.items():
            tensors |= {names.log_tensor(layer, parameter, what): rows for parameter, rows in values.items()}
        return tensors


def _first_gap(log: Sequence[LayerStep], share: np.ndarray, entry: LayerEntry) -> int | None:
    """The first step that the slots do not account for; steps without any slots are reported elsewhere."""
    unexplained = set(unexplained_steps(torch.from_numpy(share), entry))
    gaps = (number for number, step in enumerate(log) if step.moved or (number in unexplained and step.rows))
    return next(gaps, None)


def _compute_alone() -> None:
    """From now on, torch computes what the calling thread asks for in that thread; other threads are not affected."""
    everyone = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for those that start later, unless another one takes it back
    another = threading.Thread(target=torch.set_num_threads, args=(everyone,))
    another.start()
    another.join()


def _arrays(tensors: Iterable[Tensor | SparseRows | None]) -> list[np.ndarray]:
    return [block.numpy() for block in joined(tensor for tensor in tensors if isinstance(tensor, Tensor))]


def _sparse(what: str, rows: list[Rows], entry: LayerEntry) -> dict[str, list[np.ndarray]]:
    """The tokens of keys or errors, as wide as the largest bag among them; their amounts where some are not 1."""
    given = [some.keys if what == names.KEYS else some.errors for some in rows]
    if what not in entry.tokens or not given:
        return {}
    width = max((some.places.shape[1] for some in given if isinstance(some, SparseRows)), default=1)
    tokens = np.full((sum(map(len, rows)), width), names.IN_FULL)
    amounts = np.zeros(tokens.shape, np.float64 if entry.storage == "float64" else np.float32)
    end = 0
    for some, call in zip(given, rows, strict=True):
        start, end = end, end + len(call)
        if isinstance(some, SparseRows):
            entries = some.places.shape[1]
            tokens[start:end], tokens[start:end, :entries] = 0, some.places.numpy()
            amounts[start:end, :entries] = some.amounts.numpy()
    stored = {names.TOKENS[what]: [tokens]}
    plain = width == 1 and (amounts[tokens != names.IN_FULL] == 1.0).all()
    return stored if plain else {**stored, names.AMOUNTS[what]: [amounts]}


def _concatenated(tensors: Iterable[Tensor | None]) -> list[np.ndarray]:
    """Small tensors, as one array; no array if there are none."""
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None]
    return [np.concatenate(arrays)] if arrays else []


def _arrays_of(parameters: Mapping[str, Tensor]) -> dict[str, list[np.ndarray]]:
    return {name: [plain(tensor).numpy()] for name, tensor in parameters.items()}


class KeyIndex:
    """Numbers the distinct keys of a layer, by a 128-bit hash of their stored bytes."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] | None = {}
        """By hash; None if too few keys repeat."""
        self._count = 0
        self._seen = 0

    def distinct(
        self, keys: list[np.ndarray], scales: list[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """The keys that are new, their scales, and the numbers of all keys; `scales` is one array, or none."""
        ends = np.cumsum([len(block) for block in keys])[:-1]
        scale_blocks = np.split(scales[0], ends) if scales else [None] * len(keys)
        added = [self.add(block, scale) for block, scale in zip(keys, scale_blocks, strict=True)]
        new = [block[rows] for block, (_, rows) in zip(keys, added, strict=True)]
        new_scales = [s[rows] for s, (_, rows) in zip(scale_blocks, added, strict=True) if s is not None]
        return new, new_scales, [numbers for numbers, _ in added]

    def add(self, keys: np.ndarray, scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The number of each row's key, and which rows hold a new key."""
        if self._numbers is None:
            self._count += len(keys)
            return np.arange(self._count - len(keys), self._count), np.arange(len(keys))
        digests = list(map(xxhash.xxh3_128_digest, keys))
        if scale is not None:
            digests = list(map(operator.add, digests, scale.view("V4").tolist()))
        numbers = list(map(self._numbers.get, digests))
        new_rows = []
        for row in [row for row, number in enumerate(numbers) if number is None]:
            numbers[row] = self._numbers.setdefault(digests[row], self._count)
            if numbers[row] == self._count:
                self._count += 1
                new_rows.append(row)
        self._seen += len(keys)
        # Inputs that never repeat (augmentation, streams) would only grow the table.
        if self._seen >= _GIVE_UP_ROWS and self._count > 0.9 * self._seen:
            self._numbers = None
        return np.array(numbers, dtype=np.int64), np.array(new_rows, dtype=np.int64)
