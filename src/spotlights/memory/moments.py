"""The second moments of each layer's keys: readers derive them and keep them beside the memory.

`moments.safetensors` says, by their checksums, which segments it covers. If the memory has grown since, a reader adds
what is new; if segments were cut or replaced, the file does not count. It holds nothing that the segments do not hold,
so a missing, foreign or damaged file is not an error, and neither is a store that cannot be written to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.files import FileTensors, write_tensors
from spotlights.memory.format import names
from spotlights.memory.format.manifest import FileEntry, Manifest, SegmentEntry
from spotlights.memory.format.tensors import Blocks
from spotlights.memory.store import Store

_SEGMENTS, _CHECKSUM = "/segments", "/checksum"
"""No layer can have these names: names of layers are never empty."""

KeyMoments = Mapping[str, Float[Tensor, "keys_and_1 *keys_and_1"]]
"""By layer: Σ [k; 1] [k; 1]ᵀ over the slots, or its diagonal, in float64. The last entry is their number."""


def load_moments(store: Store, manifest: Manifest) -> tuple[KeyMoments, int]:
    """The stored moments, and how many of the memory's segments they cover: none if the file does not fit."""
    try:
        tensors = dict(FileTensors(store, FileEntry(names.MOMENTS, store.size(names.MOMENTS), checksum="")))
        stated = tensors.pop(_CHECKSUM, torch.empty(0))
    except (OSError, MemoryFormatError):
        return {}, 0
    if not torch.equal(stated, torch.from_numpy(_checksum({n: [t.numpy()] for n, t in tensors.items()}))):
        return {}, 0
    covered = tensors.pop(_SEGMENTS, torch.empty(0, dtype=torch.int64)).flatten().tolist()
    kinds = {name: (entry.moments_shape, torch.float64) for name, entry in manifest.layers.items()}
    fits = all((tuple(moment.shape), moment.dtype) == kinds.get(name) for name, moment in tensors.items())
    # In a run of several processes, new segments are not of later steps alone.
    whole = manifest.ranks == 1 or len(covered) == len(manifest.segments)
    if not (fits and whole and covered and covered == _checksums(manifest.segments)[: len(covered)].tolist()):
        return {}, 0
    return {name: moment.clone() for name, moment in tensors.items()}, len(covered)


def save_moments(store: Store, manifest: Manifest, moments: KeyMoments) -> None:
    """Stores the moments of all segments of the manifest; does nothing if the store cannot be written to."""
    tensors = {name: [moment.numpy()] for name, moment in moments.items()}
    tensors[_SEGMENTS] = [_checksums(manifest.segments)]
    tensors[_CHECKSUM] = [_checksum(tensors)]
    with contextlib.suppress(OSError):
        write_tensors(store, names.MOMENTS, tensors)


def _checksum(tensors: Blocks) -> Int64[np.ndarray, "1"]:
    """Of all tensors of a file that no manifest lists."""
    checksum = xxhash.xxh3_64()
    for name in sorted(tensors):
        checksum.update(name.encode())
        for block in tensors[name]:
            checksum.update(np.ascontiguousarray(block).data)
    return np.array([checksum.intdigest()], np.uint64).view(np.int64)


def _checksums(segments: Sequence[SegmentEntry]) -> Int64[np.ndarray, "segments"]:
    return np.array([int(segment.checksum, 16) for segment in segments], np.uint64).view(np.int64)
