"""The reader: a memory's files as mapped tensors.

Opening reads the manifest and the sizes of the files; bytes of slots are touched only by a scan. What is
committed never changes, so a memory can be read while it is being recorded: the reader sees the steps
that were committed when it opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from spotlights.errors import UnknownNameError, UnsupportedError
from spotlights.memory import slots as names
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.manifest import FILE, FileEntry, SegmentEntry
from spotlights.memory.ranks import joined, rank_directory, read_ranks, recode
from spotlights.memory.segment import Maps, Segment
from spotlights.memory.step_log import StepLog, read_step_log
from spotlights.memory.tensors import check_size, file_checksum, map_tensors

_TRIES = 5


class MemoryReader:
    """A memory's files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ranks = read_ranks(directory)
        for _ in range(_TRIES if self._ranks[0].fold else 0):  # its files may be replaced while it is being opened
            if all((directory / segment.file).exists() for segment in self._ranks[0].segments):
                break
            self._ranks = read_ranks(directory)
        self.manifest = joined(self._ranks)
        for path, entry in self._files():
            check_size(path, entry.bytes)
        maps = Maps()
        self.segments = [
            Segment(rank_directory(directory, rank), entry, own, maps, recode(own, self.manifest.columns))
            for rank, own in enumerate(self._ranks)
            for entry in own.segments
        ]
        folded = self.manifest.fold is not None
        self.layers = {
            name: LayerReader(name, entry, self.segments, folded=folded, column_kind=self.column_kind)
            for name, entry in self.manifest.layers.items()
        }
        self._logs: dict[str, StepLog] = {}
        self.moments: dict[str, Tensor] = {}
        """Of each layer's keys, once somebody has asked for them."""

    def _files(self) -> Iterator[tuple[Path, FileEntry | SegmentEntry]]:
        for rank, own in enumerate(self._ranks):
            for entry in (own.initial, *own.segments, own.final):
                if entry is not None and (rank_directory(self.directory, rank) / FILE).exists():
                    yield rank_directory(self.directory, rank) / entry.file, entry

    @property
    def steps(self) -> int:
        """How many steps all processes of the run have written."""
        return min(own.steps for own in self._ranks)

    @property
    def starts(self) -> list[int]:
        """The first steps of the segments that hold what the optimizer was told: those of the first process."""
        return [entry.first_step for entry in self._ranks[0].segments]

    @property
    def nbytes(self) -> int:
        return sum(segment.bytes for segment in self.manifest.segments)

    def layer(self, name: str) -> LayerReader:
        if name not in self.layers:
            known = ", ".join(self.layers)
            raise UnknownNameError(f'No layer "{name}" in {self.directory}. It has: {known}.')
        return self.layers[name]

    def column_kind(self, name: str) -> str:
        if name == "step":
            self.need_visits("a step of its own for each visit", 'Ask by "first_step" or "last_step"')
        if name not in self.manifest.columns:
            known = ", ".join(self.manifest.columns) or "none"
            raise UnknownNameError(f'No column "{name}" in {self.directory}. It has: {known}.')
        return self.manifest.columns[name].kind

    def need_visits(self, what: str, instead: str) -> None:
        """Refuses a question that only a memory with all visits can answer; `instead` says what to do here."""
        fold = self.manifest.fold
        if fold is not None:
            raise UnsupportedError(
                f"{self.directory} is folded: it has the sum of each example's keys over {fold.span}, not {what}. "
                f"{instead}, or record without fold=."
            )

    def need_all_slots(self, what: str, instead: str = "Ask for top or totals") -> None:
        """Refuses a question that a sample of the slots cannot answer."""
        sample = self.manifest.sample
        if sample is not None:
            raise UnsupportedError(
                f"{self.directory} is a sample: it has {sample}. {what} all of them. {instead}, or record without "
                "sample=."
            )

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        return map_tensors(self.directory / self.manifest.initial.file, self.manifest.initial.bytes)

    @cached_property
    def final(self) -> dict[str, Tensor] | None:
        entry = self.manifest.final
        return None if entry is None else map_tensors(self.directory / entry.file, entry.bytes)

    def checkpoints(self, layer: str, parameter: str) -> dict[int, set[str]]:
        """Before which steps the optimizer's state is kept, and what of it; "weights" is the parameter itself."""
        start, prefix = f"{layer}/{parameter}/", names.state_tensor(layer, parameter, "")
        found = {0: {n.removeprefix(start) for n in self.initial if n.startswith(start)} | {"weights"}}
        for segment in self.segments:
            kept = {name.removeprefix(prefix) for name in segment.layout if name.startswith(prefix)}
            if kept:
                found[segment.entry.first_step] = kept
        return found

    def state(self, layer: str, parameter: str, step: int, state: str) -> Tensor:
        """One tensor of such a checkpoint."""
        if step == 0:
            return self.initial[f"{layer}/{parameter}" + ("" if state == "weights" else f"/{state}")]
        segment = next(s for s in self.segments if s.entry.first_step == step)
        return segment.held(names.state_tensor(layer, parameter, state))

    def log(self, layer: str) -> StepLog:
        if layer not in self._logs:
            self._logs[layer] = read_step_log(layer, self.segments, self.manifest, self.steps)
        return self._logs[layer]

    def damaged(self) -> list[str]:
        """Reads every file and compares it with its checksum; returns what is wrong, in sentences."""
        found = []
        for path, entry in self._files():
            checksum = file_checksum(path)
            if checksum != entry.checksum:
                found.append(
                    f"{path} has checksum {checksum}, memory.json says "
                    f"{entry.checksum}: its content has changed since it was written."
                )
        return found
