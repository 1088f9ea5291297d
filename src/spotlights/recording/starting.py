"""Starting to record: a new memory that says what it will hold, or an old one to go on with."""

from __future__ import annotations

import dataclasses
import datetime
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spotlights._version import __version__
from spotlights.memory.columns import ColumnTable
from spotlights.memory.folded_writer import FoldedWriter
from spotlights.memory.manifest import FILE
from spotlights.memory.ranks import rank_directory
from spotlights.memory.reader import MemoryReader
from spotlights.memory.storage import BufferPool
from spotlights.memory.writer import MemoryWriter
from spotlights.recording.checkpoints import Checkpoints
from spotlights.recording.coverage import Coverage
from spotlights.recording.processes import Processes
from spotlights.recording.resuming import matching_step
from spotlights.recording.settings import Settings


@dataclass(frozen=True)
class Start:
    """All that a recording starts from."""

    path: Path
    model: nn.Module
    checkpoints: Checkpoints
    """Of the model's recorded layers, and of its optimizer."""
    settings: Settings
    processes: Processes
    pool: BufferPool

    def open_writer(self, step: int) -> tuple[int, MemoryWriter]:
        """At which step recording starts, in all processes, and this one's writer.

        Args:
            step: where the memory is known to be; 0 if there is none yet, or nobody has looked.
        """
        mine: list[MemoryWriter] = []

        def decide() -> tuple[int, str]:
            """In the first process: its writer is there before any other one's."""
            first = self._matching_step() if self.settings.resume and (self.path / FILE).exists() else step
            mine.append(self._open(first, uuid.uuid4().hex if self.processes.count > 1 else ""))
            return first, mine[0].manifest.run

        first, run = self.processes.agree(decide)
        return first, mine[0] if mine else self._open(first, run)

    def _matching_step(self) -> int:
        samples = {name: layer.samples() for name, layer in self.checkpoints.layers.items()}
        return matching_step(MemoryReader(self.path), self._described(), samples)

    def _described(self) -> dict[str, Any]:
        """What the manifest says of this recording, and a resumed memory must say too."""
        layers = self.checkpoints.layers.items()
        return {
            "layers": {name: dataclasses.replace(layer.entry(), storage=self.settings.dtype) for name, layer in layers},
            "errors": self.settings.errors,
            "fold": self.settings.fold,
            "sample": self.settings.sample,
            "optimizer": type(self.checkpoints.optimizer).__name__,
            "ranks": self.processes.count,
        }

    def _open(self, step: int, run: str) -> MemoryWriter:
        if not step:
            return self._create(run)
        directory = rank_directory(self.path, self.processes.rank)
        return self._kind.resume(directory, step, pool=self.pool, segment_bytes=self.settings.segment_bytes)

    @property
    def _kind(self) -> type[MemoryWriter]:
        return MemoryWriter if self.settings.fold is None else FoldedWriter

    def _create(self, run: str) -> MemoryWriter:
        rank, rule, settings = self.processes.rank, self.checkpoints.rule, self.settings
        recorded = (p for layer in self.checkpoints.layers.values() for p in layer.parameters.values())
        coverage = Coverage.of(self.model, self.checkpoints.optimizer, recorded)
        if rank == 0:
            coverage.tell(chosen=settings.patterns is not None)
        manifest: dict[str, object] = {
            "spotlights": __version__,
            "torch": torch.__version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **self._described(),
            "rule": rule.name,
            "log_fields": list(rule.fields),
            "git_revision": _git_revision(),
            "seed": torch.initial_seed(),
            "uncovered": coverage.uncovered,
            "covered_numbers": coverage.covered,
            "trained_numbers": coverage.trained,
            "rank": rank,
            "run": run,
        }
        return self._kind.create(
            rank_directory(self.path, rank),
            manifest,
            self.checkpoints.initial() if rank == 0 else {},
            ColumnTable(),
            pool=self.pool,
            overwrite=settings.overwrite or settings.resume or rank > 0,
            segment_bytes=settings.segment_bytes,
        )


def _git_revision() -> str | None:
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
