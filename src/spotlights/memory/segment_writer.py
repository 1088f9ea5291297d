"""Segment files: each is written once, whole, under the next free number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from spotlights.memory import slots as names
from spotlights.memory.directory import SEGMENTS
from spotlights.memory.manifest import Manifest, SegmentEntry
from spotlights.memory.tensors import map_tensors, write_tensors


def write_segment(
    directory: Path,
    tensors: Mapping[str, list[np.ndarray]],
    *,
    rank: int,
    steps: range,
    slots: dict[str, int],
    keys: dict[str, int],
) -> SegmentEntry:
    """Writes some steps; returns what the manifest is to say of them.

    Args:
        directory: of this process.
        tensors: by name, each as blocks of rows that follow one another.
        rank: the process' number.
        steps: which ones.
        slots: how many each layer has.
        keys: how many of its keys are kept.
    """
    taken = [int(path.name[:6]) for path in (directory / SEGMENTS).glob("[0-9]*.safetensors")]
    path = directory / SEGMENTS / f"{max(taken, default=-1) + 1:06d}-rank{rank}.safetensors"
    size, checksum = write_tensors(path, tensors)
    return SegmentEntry(
        file=str(path.relative_to(directory)),
        bytes=size,
        checksum=checksum,
        first_step=steps.start,
        end_step=steps.stop,
        slots=slots,
        keys=keys,
    )


def cut_segment(directory: Path, manifest: Manifest, segment: SegmentEntry, steps: int) -> SegmentEntry:
    """Writes the part of a segment that lies before step `steps` as a segment of its own."""
    mapped = map_tensors(directory / segment.file, segment.bytes)
    logged = steps - segment.first_step
    tensors: dict[str, list[np.ndarray]] = {
        name: [tensor[:logged].numpy()] for name, tensor in mapped.items() if name.startswith(names.LOG)
    }
    tensors |= {name: [tensor.numpy()] for name, tensor in mapped.items() if name.startswith(names.STATE)}
    slots, keys = {}, {}
    for layer, entry in manifest.layers.items():
        column: Shaped[Tensor, "slots"] | None = mapped.get(names.column_tensor(layer, "step"))
        slots[layer] = 0 if column is None else int(torch.searchsorted(column, steps))
        keys[layer] = segment.keys[layer] if entry.indexed and slots[layer] else slots[layer]
        whole = {names.layer_tensor(layer, names.KEYS), names.layer_tensor(layer, names.KEY_SCALE)}
        for name, tensor in mapped.items():
            if name.startswith(layer + "/"):
                keep = keys[layer] if name in whole else slots[layer]
                tensors[name] = [tensor[:keep].numpy()]
    kept = range(segment.first_step, steps)
    return write_segment(directory, tensors, rank=manifest.rank, steps=kept, slots=slots, keys=keys)
