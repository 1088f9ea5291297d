"""`moments.safetensors`: the second moments of each layer's keys, kept with the memory so that they are computed once.

The file belongs to a list of segments, by their checksums. If the memory has grown since, what is new is added;
if it has been cut or replaced, the file does not count. It holds nothing that the segments do not hold, so a
missing, foreign or damaged file is no error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.manifest import Manifest, SegmentEntry
from spotlights.memory.tensors import map_tensors, write_tensors

FILE = "moments.safetensors"
_SEGMENTS = "/segments"
"""No layer can have this name: names of layers are never empty."""

Moments = Mapping[str, Float[Tensor, "keys_and_1 keys_and_1"]]
"""By layer: Σ [k; 1] [k; 1]ᵀ over the slots, in float64. The last entry is their number."""


def load_moments(directory: Path, manifest: Manifest) -> tuple[Moments, int]:
    """What is kept, and how many of the memory's segments it covers: none of them if it does not fit."""
    path = directory / FILE
    try:
        held = map_tensors(path, path.stat().st_size)
    except (OSError, MemoryFormatError):
        return {}, 0
    covered = held.pop(_SEGMENTS, torch.empty(0, dtype=torch.int64)).tolist()
    shapes = {name: (entry.in_features + 1,) * 2 for name, entry in manifest.layers.items()}
    if {name: tuple(moment.shape) for name, moment in held.items()} != shapes:
        return {}, 0
    if any(moment.dtype != torch.float64 for moment in held.values()):
        return {}, 0
    if not covered or covered != _checksums(manifest.segments)[: len(covered)]:
        return {}, 0
    if manifest.ranks > 1 and len(covered) < len(manifest.segments):
        return {}, 0  # what is new is not of later steps alone
    return {name: moment.clone() for name, moment in held.items()}, len(covered)


def save_moments(directory: Path, manifest: Manifest, moments: Moments) -> None:
    """Keeps the moments of all segments of the manifest; silently not, where the memory cannot be written to."""
    tensors = {name: [moment.numpy()] for name, moment in moments.items()}
    tensors[_SEGMENTS] = [torch.tensor(_checksums(manifest.segments), dtype=torch.int64).numpy()]
    mine = directory / f"{FILE}.{os.getpid()}"  # two readers may both want to keep them
    with contextlib.suppress(OSError):
        try:
            write_tensors(mine, tensors)
            os.replace(mine, directory / FILE)
        finally:
            mine.unlink(missing_ok=True)


def _checksums(segments: Sequence[SegmentEntry]) -> list[int]:
    unsigned = (int(segment.checksum, 16) for segment in segments)
    return [number - (1 << 64) if number >= 1 << 63 else number for number in unsigned]
