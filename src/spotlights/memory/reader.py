"""The reader: a memory's files as tensors.

Opening reads the manifest and the sizes of the files; a scan reads the bytes of slots. What is committed never changes,
so a memory can be read while it is being recorded: the reader sees the steps that were committed when it opened.

Each process of a run (rank) writes a memory of its own slots, and all are read as one memory. Rank 0 writes to the
memory's own names, rank 1 to names under `rank1/`, and so on. The processes do not talk to each other while they train.
A step's gradient is explained by the slots of all ranks; `log` adds up the shares of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import MemoryFormatError, UnknownNameError, UnsupportedError
from spotlights.memory.files import FileTensors, check_content, check_size, read_manifest
from spotlights.memory.format import names
from spotlights.memory.format.columns import MISSING_STRING
from spotlights.memory.format.manifest import ColumnEntry, FileEntry, Manifest, SegmentEntry
from spotlights.memory.format.shapes import faults_in_weights
from spotlights.memory.layer_reader import LayerReader, Loaded, Segment
from spotlights.memory.shards import WholeTensors, whole
from spotlights.memory.slots import compare
from spotlights.memory.store import Store

_TRIES = 5


@dataclass(frozen=True)
class StepLog:
    """A layer's step log."""

    factor: dict[str, Float[Tensor, "steps"]]
    """γ of each trained parameter."""
    residual: Float[Tensor, "steps"]
    """The share of the gradient that the slots do not explain."""
    moved: Float[Tensor, "steps"]
    """1 if the weights were changed outside the optimizer before the step."""
    rule: dict[str, Float[Tensor, "steps fields"]]
    """The optimizer's settings for each trained parameter: the fields of the update rule."""
    probed: dict[str, Float[Tensor, "steps entries"]]
    """Entries of each trained parameter after the step (see `probed_entries`)."""


@dataclass(frozen=True)
class Part:
    """Some files of a memory: those of one process, or of one stretch of a recipe."""

    store: Store
    manifest: Manifest
    shift: int = 0
    """The step of the memory that the part counts as 0."""

    @property
    def segments(self) -> list[SegmentEntry]:
        """With the steps of the whole memory."""
        if not self.shift:
            return self.manifest.segments
        steps = (
            (entry, entry.first_step + self.shift, entry.end_step + self.shift) for entry in self.manifest.segments
        )
        return [dataclasses.replace(entry, first_step=first, end_step=end) for entry, first, end in steps]


def rank_store(store: Store, rank: int) -> Store:
    """Where a process keeps its files."""
    return store if rank == 0 else store.at(f"rank{rank}")


class MemoryReader:
    """A memory's files."""

    local = False
    """Whether other machines cannot open the slots by the memory's address."""
    passes: Callable[[int], AbstractContextManager[tuple[Any, Iterable[tuple[Any, Tensor]]]]] | None = None
    """Of a recipe: the network in training, and a step's batches again: their examples and what the loss gives."""

    def __init__(self, store: Store, ranks: Sequence[Manifest] | None = None) -> None:
        """`ranks`: the manifests of another reader, to see the memory as that one does; by default they are read, and
        compared with the sizes of the files."""
        self.store = store
        self.ranks = list(_read_ranks(store) if ranks is None else ranks)
        """The manifest of each process of the run."""
        for _ in range(_TRIES if self.ranks[0].fold else 0):  # its files may be replaced while it is being opened
            if all(store.exists(segment.file) for segment in self.ranks[0].segments):
                break
            self.ranks = _read_ranks(store)
        stores = [rank_store(store, rank) for rank in range(len(self.ranks))]
        self._open(joined(self.ranks), [Part(of_rank, own) for of_rank, own in zip(stores, self.ranks, strict=True)])
        sizes = {of_rank: of_rank.sizes() for of_rank in stores} if ranks is None else {}
        for of_rank, entry in self.every_file() if ranks is None else ():
            check_size(of_rank, entry, sizes[of_rank].get(entry.file))

    def _open(self, manifest: Manifest, parts: Sequence[Part]) -> None:
        """`manifest`: of all parts together."""
        self.manifest = manifest
        loaded = Loaded()
        self.segments = loaded.segments = [
            Segment(part.store, entry, part.manifest, loaded, _recode(part.manifest, manifest.columns), part.shift)
            for part in parts
            for entry in part.segments
        ]
        self.layers = {
            name: LayerReader(name, self.manifest, self.segments, self.column_kind, self.need_slots)
            for name in self.manifest.layers
        }
        self.moments: dict[str, Tensor] = {}
        """Of each layer's keys, once they have been computed or loaded."""

    def every_file(self) -> Iterator[tuple[Store, FileEntry]]:
        """The files that are read: of all processes but the first, segments alone, unless they hold shards."""
        for own in self.ranks if self._sharded else self.ranks[:1]:
            yield from ((rank_store(self.store, own.rank), entry) for entry in own.files)
        if not self._sharded:
            yield from ((segment.store, segment.entry) for segment in self.segments if segment.manifest.rank)

    @property
    def _sharded(self) -> bool:
        return any(entry.shards for entry in self.ranks[0].layers.values())

    def _of_all(self, files: Sequence[FileEntry]) -> Mapping[str, Tensor]:
        """The tensors of one file of each process, or of the first one alone."""
        stores = [rank_store(self.store, own.rank) for own in self.ranks]
        of_ranks = [read_weights(*of_rank) for of_rank in zip(stores, files, self.ranks, strict=False)]
        return WholeTensors(self.ranks, of_ranks) if self._sharded else of_ranks[0]

    @property
    def address(self) -> str:
        """Where the memory is, for messages."""
        return str(self.store)

    @property
    def steps(self) -> int:
        """How many steps all processes of the run have written."""
        return min(own.steps for own in self.ranks)

    @property
    def starts(self) -> list[int]:
        """The first steps of the segments that hold the optimizer's settings: those of the first process."""
        return [entry.first_step for entry in self.ranks[0].segments]

    def will_be_read(self, steps: range) -> None:
        """A hint that the slots of some steps will soon be read."""
        for segment in self.segments:
            if segment.entry.first_step < steps.stop and segment.entry.end_step > steps.start:
                segment.store.will_be_read(segment.entry.file)

    @property
    def nbytes(self) -> int:
        return sum(segment.bytes for segment in self.manifest.segments)

    def layer(self, name: str) -> LayerReader:
        if name not in self.layers:
            known = ", ".join(self.layers)
            raise UnknownNameError(f'No layer "{name}" in {self.address}. It has: {known}.')
        return self.layers[name]

    def column_kind(self, name: str) -> str:
        if name == "step":
            self.need_visits("a step of its own for each visit", 'Ask by "first_step" or "last_step"')
        if name not in self.manifest.columns:
            known = ", ".join(self.manifest.columns) or "none"
            raise UnknownNameError(f'No column "{name}" in {self.address}. It has: {known}.')
        return self.manifest.columns[name].kind

    def need_visits(self, what: str, instead: str) -> None:
        """Refuses a question that only a memory with all visits can answer; `instead` says what to do."""
        fold = self.manifest.fold
        if fold is not None:
            raise UnsupportedError(
                f"{self.address} is folded: it has the sum of each example's keys over {fold.span}, not {what}. "
                f"{instead}, or record without fold=."
            )

    def need_all_slots(self, what: str, instead: str = "Ask for top or totals") -> None:
        """Refuses a question that a sample of the slots cannot answer."""
        sample = self.manifest.sample
        if sample is not None:
            raise UnsupportedError(
                f"{self.address} is a sample: it has {sample}. {what} all of them. {instead}, or record without "
                "sample=."
            )

    def need_recording(self, what: str) -> None:
        """Refuses a question about training, where a network was observed that had been trained before."""
        if self.manifest.observed:
            raise UnsupportedError(
                f"{self.address} was observed: it has gradients of a network that was already trained, and nothing of "
                f"the training itself. {what} that. Scores, influence and suspects work, as estimates; for the rest, "
                "record a training with sl.record."
            )

    def need_errors(self, what: str) -> None:
        """Refuses a question about errors, where none were recorded."""
        if not self.manifest.errors:
            raise UnsupportedError(
                f"{self.address} was recorded with errors=False: it has keys only. {what} errors; scores, top and "
                "totals do not."
            )

    def need_examples(self) -> None:
        """Refuses a question about examples, where nobody named them."""
        if "example" not in self.manifest.columns:
            raise UnknownNameError(
                f"{self.address} does not say which example a slot belongs to. Record with recorder.batch(example=ids)."
            )

    def need_slots(self) -> None:
        """Refuses a question about slots that a recipe does not keep."""
        if self.manifest.recipe is not None:
            raise UnsupportedError(
                f"{self.address} is a recipe: it keeps no slots. To compute them again, open it with the network and "
                "its loss: sl.open(path, model=model, recompute=loss), where loss(model, ids) is the loss of a batch."
            )

    @cached_property
    def initial(self) -> Mapping[str, Tensor]:
        return self._of_all([own.initial for own in (self.ranks if self._sharded else self.ranks[:1])])

    @cached_property
    def final(self) -> Mapping[str, Tensor] | None:
        files = [own.final for own in (self.ranks if self._sharded else self.ranks[:1])]
        return None if None in files else self._of_all([file for file in files if file is not None])

    def checkpoints(self, layer: str, parameter: str) -> dict[int, set[str]]:
        """Before which steps the optimizer's state is stored, and its names; "weights" is the parameter itself."""
        start, prefix = f"{layer}/{parameter}/", names.state_tensor(layer, parameter, "")
        states = {0: {n.removeprefix(start) for n in self.initial if n.startswith(start)} | {"weights"}}
        writers = self._writers(layer, parameter)
        stored_by_rank: dict[int, list[set[str]]] = {}
        for segment in self.segments:
            stored = {name.removeprefix(prefix) for name in segment.layout if name.startswith(prefix)}
            if stored and segment.manifest.rank in writers:
                stored_by_rank.setdefault(segment.entry.first_step, []).append(stored)
        complete = {
            step: set.intersection(*of_ranks)
            for step, of_ranks in stored_by_rank.items()
            if len(of_ranks) == len(writers)
        }
        return states | {step: stored for step, stored in sorted(complete.items()) if stored}

    def _writers(self, layer: str, parameter: str) -> list[int]:
        """The processes that write a part of the parameter; the first one alone if it has all of it."""
        boxes = [own.layers[layer].shards.get(parameter, []) for own in self.ranks]
        sharded = [r for r, box in enumerate(boxes) if box and all(map(operator.lt, box[::2], box[1::2]))]
        return sharded or [0]

    def state(self, layer: str, parameter: str, step: int, state: str) -> Tensor:
        """One tensor of such a checkpoint, of as many numbers as the parameter has."""
        value, shape = (
            self._stored_state(layer, parameter, step, state),
            self.manifest.layers[layer].shape_of(parameter),
        )
        if value.numel() != math.prod(shape):
            raise MemoryFormatError(
                f"{self.address} is damaged: {state} of {layer}.{parameter} has shape {tuple(value.shape)} at step "
                f"{step}, but the parameter has {shape}."
            )
        return value

    def _stored_state(self, layer: str, parameter: str, step: int, state: str) -> Tensor:
        if step == 0:
            return self.initial[f"{layer}/{parameter}" + ("" if state == "weights" else f"/{state}")]
        writers, name = self._writers(layer, parameter), names.state_tensor(layer, parameter, state)
        segments = [s for s in self.segments if s.entry.first_step == step and s.manifest.rank in writers]
        if not self.ranks[0].layers[layer].shards:
            return segments[0].read_once(name)
        return whole([s.manifest.layers[layer] for s in segments], parameter, [s.read_once(name) for s in segments])

    def log(self, layer: str) -> StepLog:
        """The log of the steps that all processes of the run have written."""
        return self.layers[layer].once("log", lambda: self._read_log(layer))

    def _read_log(self, layer: str) -> StepLog:
        entry, manifest = self.manifest.layers[layer], self.manifest
        damaged = MemoryFormatError(f'The step log of layer "{layer}" in {self.address} is damaged.')

        def read(*what: str, shape: tuple[int, ...] = (), rank: int = 0) -> Tensor:
            if not self.steps:
                return torch.empty(0, *shape, dtype=torch.float64)
            name = names.log_tensor(layer, *what)
            parts = [s.required(name) for s in self.segments if s.manifest.rank == rank]
            return torch.cat(alike(parts, first=1))[: self.steps]

        def alike(parts: list[Tensor], *, first: int = 0) -> list[Tensor]:
            if len({part.shape[first:] for part in parts}) > 1:
                raise damaged
            return parts

        def of_ranks(*what: str, ranks: int) -> Tensor:
            return torch.stack(alike([read(*what, shape=(0,), rank=rank) for rank in range(ranks)])).sum(dim=0)

        def of_all(*what: str) -> Tensor:
            """Of a sharded layer, the sum over the processes, each of which has zeros where others have numbers."""
            return of_ranks(*what, ranks=manifest.ranks if entry.shards else 1)

        residual = read(names.PROBE, shape=(2,))[:, 0]
        reasons = torch.zeros(self.steps, dtype=torch.int64)
        for rank in range(manifest.ranks if entry.shards else 1):  # each process looks after its own part
            logged = read(names.PROBE, shape=(2,), rank=rank)[:, 1]
            if not ((logged >= 0) & (logged < 2 * max(names.MOVED))).all():
                raise damaged
            reasons |= logged.long()
        if manifest.ranks == 1:
            factor = {p: read(p, names.FACTOR) for p in entry.trained}
        else:
            seen = {p: of_all(p, names.GRADIENT).numpy() for p in entry.trained}
            explained = {p: of_ranks(p, names.EXPLAINED, ranks=manifest.ranks).numpy() for p in entry.trained}
            if any(rows.ndim != 2 or rows.shape != explained[p].shape for p, rows in seen.items()):
                raise damaged
            factors, share = compare(self.steps, seen, explained, entry.rounding)
            factor, residual = {p: torch.from_numpy(f) for p, f in factors.items()}, torch.from_numpy(share)
        ruled = entry.trained if manifest.rule is not None else []
        return StepLog(
            factor,
            residual,
            reasons.double(),
            rule={p: read(p, names.RULE, shape=(len(manifest.log_fields),)) for p in ruled},
            probed={p: of_all(p, names.PROBED) for p in entry.trained},
        )

    @cached_property
    def statistics(self) -> dict[str, Tensor]:
        """Running statistics of normalisations by name: a row before the first step, and one after every step."""
        statistics = {}
        for name in (n.removeprefix(names.STATISTICS) for n in self.initial if n.startswith(names.STATISTICS)):
            rows = [s.required(names.LOG + names.STATISTICS + name) for s in self.segments if s.manifest.rank == 0]
            if any(of_segment.shape[1:] != self.initial[names.STATISTICS + name].shape for of_segment in rows):
                raise MemoryFormatError(f"The statistics {name!r} in {self.address} change their shape.")
            statistics[name] = torch.cat([self.initial[names.STATISTICS + name][None], *rows])[: self.steps + 1]
        return statistics

    @property
    def files(self) -> int:
        """How many files `damaged` reads."""
        return sum(1 for _ in self.every_file())

    def damaged(self, among: slice = slice(None)) -> list[str]:
        """Reads all files, or some, and compares them with their checksums; a sentence for each that has changed."""
        sentences = []
        for store, entry in list(self.every_file())[among]:
            try:
                check_content(store, entry)
            except MemoryFormatError as error:
                sentences.append(str(error))
        return sentences


def read_weights(store: Store, entry: FileEntry, manifest: Manifest) -> Mapping[str, Tensor]:
    """A file of weights, checked."""
    if store.streams:  # else a whole file might be fetched for one tensor of it
        check_content(store, entry)
    tensors = FileTensors(store, entry)
    for fault in faults_in_weights(manifest, tensors.layout):
        raise MemoryFormatError(f"{store.describe(entry.file)}: {fault}.")
    return tensors


def _read_ranks(store: Store) -> list[Manifest]:
    """The manifest of each rank; a rank that has not written anything yet has no segments and no initial weights."""
    first = read_manifest(store)[0]
    manifests = [first]
    for rank in range(1, first.ranks):
        own = rank_store(store, rank)
        if not own.exists(names.MANIFEST):
            manifests.append(dataclasses.replace(first, rank=rank, segments=[], columns={}))
            continue
        manifests.append(read_manifest(own)[0])
        if (manifests[-1].run, set(manifests[-1].layers)) != (first.run, set(first.layers)):
            raise MemoryFormatError(f"{own} is not of the same run as {store}.")
    return manifests


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest for all ranks: the segments of rank 0, then those of rank 1, and so on."""
    first = manifests[0]
    if len(manifests) == 1:
        return first
    layers = {}
    for name, entry in first.layers.items():
        with_slots = [m.layers[name] for m in manifests if any(s.slots[name] for s in m.segments)]
        if len({own.indexed for own in with_slots}) > 1:
            raise MemoryFormatError(f'The processes of this memory store the keys of layer "{name}" differently.')
        layers[name] = with_slots[0] if with_slots else entry
    return dataclasses.replace(
        first,
        layers=layers,
        columns=_columns(manifests),
        segments=[segment for manifest in manifests for segment in manifest.segments],
        status=next((m.status for m in manifests if m.status != "closed"), "closed"),
    )


def _columns(manifests: Sequence[Manifest]) -> dict[str, ColumnEntry]:
    columns: dict[str, ColumnEntry] = {}
    for manifest in manifests:
        for name, entry in manifest.columns.items():
            column = columns.setdefault(name, ColumnEntry(entry.kind))
            if column.kind != entry.kind:
                raise MemoryFormatError(
                    f'The column "{name}" holds {column.kind} values in one process of the run and {entry.kind} values '
                    "in another. Give every process the same type."
                )
            column.strings.extend(text for text in entry.strings if text not in column.strings)
    return columns


def _recode(manifest: Manifest, columns: dict[str, ColumnEntry]) -> dict[str, Tensor]:
    """A rank numbers the strings of a column in the order of their coming; here are their numbers in `columns`."""
    numbers = {}
    for name, entry in manifest.columns.items():
        strings = columns[name].strings
        if entry.strings != strings[: len(entry.strings)]:
            numbers[name] = torch.tensor([*(strings.index(text) for text in entry.strings), MISSING_STRING])
    return numbers
