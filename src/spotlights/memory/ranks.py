"""A run in several processes: each keeps its own slots in a directory of its own, and they are read as one memory.

The first process (rank 0) writes to the memory's directory, process 1 to `rank1` inside it, and so on. While they
train they need not talk to each other: a step's gradient is that of the slots of all, and what part of it each process'
slots explain is added up when the memory is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.dual_form import probe_gradient
from spotlights.errors import MemoryFormatError
from spotlights.memory.columns import MISSING_STRING
from spotlights.memory.manifest import FILE, ColumnEntry, Manifest, read_manifest

Recode = dict[str, Int64[Tensor, "strings"]]
"""For a process' string columns: its numbers as those of the whole memory. The last one stands for a missing value."""


def rank_directory(directory: Path, rank: int) -> Path:
    """Where a process keeps its slots."""
    return directory if rank == 0 else directory / f"rank{rank}"


def read_ranks(directory: Path) -> list[Manifest]:
    """The manifest of each process; one that has not written anything yet has no segments."""
    first = read_manifest(directory)
    found = [first]
    for rank in range(1, first.ranks):
        own = rank_directory(directory, rank)
        manifest = read_manifest(own) if (own / FILE).exists() else dataclasses.replace(first, segments=[], columns={})
        if (manifest.run, set(manifest.layers)) != (first.run, set(first.layers)):
            raise MemoryFormatError(f"{own} is not of the same run as {directory}.")
        found.append(manifest)
    return found


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest for all: the segments of the first process, then those of the next."""
    first = manifests[0]
    if len(manifests) == 1:
        return first
    layers = {}
    for name, entry in first.layers.items():
        with_slots = [m.layers[name] for m in manifests if any(s.slots[name] for s in m.segments)]
        if len({own.indexed for own in with_slots}) > 1:
            raise MemoryFormatError(f'The processes of this memory keep the keys of layer "{name}" differently.')
        layers[name] = with_slots[0] if with_slots else entry
    return dataclasses.replace(
        first,
        layers=layers,
        columns=_columns(manifests),
        segments=[segment for manifest in manifests for segment in manifest.segments],
        status=next((m.status for m in manifests if m.status != "closed"), "closed"),
    )


def _columns(manifests: Sequence[Manifest]) -> dict[str, ColumnEntry]:
    found: dict[str, ColumnEntry] = {}
    for manifest in manifests:
        for name, entry in manifest.columns.items():
            held = found.setdefault(name, ColumnEntry(entry.kind))
            if held.kind != entry.kind:
                raise MemoryFormatError(
                    f'The column "{name}" holds {held.kind} values in one process of the run and {entry.kind} values '
                    "in another. Give every process the same type."
                )
            held.strings.extend(text for text in entry.strings if text not in held.strings)
    return found


def recode(manifest: Manifest, columns: dict[str, ColumnEntry]) -> Recode:
    """A process numbers strings as it meets them; here they get the numbers of the whole memory."""
    found: Recode = {}
    for name, entry in manifest.columns.items():
        if entry.strings != columns[name].strings[: len(entry.strings)]:
            numbers = [columns[name].strings.index(text) for text in entry.strings]
            found[name] = torch.tensor([*numbers, MISSING_STRING])
    return found


def joined_probe(
    gradient: Float[Tensor, "steps entries"], explained: Sequence[Float[Tensor, "steps entries"]], rounding: float
) -> Float[Tensor, "steps 2"]:
    """γ and the unexplained share of each step, from what the slots of each process explain of the gradient."""
    total = sum(explained[1:], start=explained[0]).numpy()
    probes = [probe_gradient(g, e, rounding) for g, e in zip(gradient.numpy(), total, strict=True)]
    return torch.tensor(np.array([[p.factor, p.residual] for p in probes]).reshape(-1, 2), dtype=torch.float64)
