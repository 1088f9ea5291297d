"""Resuming: at which step of a memory a network is, found by the entries of its weights that the memory keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spotlights.errors import ResumeError
from spotlights.memory.folded_writer import snapshots
from spotlights.memory.manifest import FoldEntry, LayerEntry
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import sample_slice, sample_tensor
from spotlights.memory.tensors import map_tensors

Samples = Mapping[str, Mapping[str, np.ndarray]]
"""By layer and parameter: its entries at `sample_slice`."""


def matching_step(reader: MemoryReader, settings: Mapping[str, Any], samples: Samples) -> int:
    """The latest step to go on from whose weights the model holds; 0 if it holds the initial ones.

    Args:
        reader: the memory.
        settings: what the manifest would say of this recording: layers, errors, fold, sample, optimizer, ranks.
        samples: entries of the model's weights.
    """
    path, manifest = reader.directory, reader.manifest
    theirs, ours = (
        (_settings(held), errors, _fold(fold), sample)
        for held, errors, fold, sample in (
            (manifest.layers, manifest.errors, manifest.fold, manifest.sample),
            (settings["layers"], settings["errors"], settings["fold"], settings["sample"]),
        )
    )
    if theirs != ours:
        raise ResumeError(
            f"{path} was recorded with other layers or settings. It has (layers, errors, fold, sample): {theirs}; this "
            f"recording has: {ours}. Record to another path."
        )
    if manifest.optimizer != settings["optimizer"]:
        raise ResumeError(
            f"{path} was recorded with {manifest.optimizer}, not with {settings['optimizer']}. Record to another path."
        )
    if manifest.ranks != settings["ranks"]:
        raise ResumeError(f"{path} was recorded in {manifest.ranks} processes; this run has {settings['ranks']}.")
    found = _matching_step(reader, samples) if manifest.fold is None else _matching_snapshot(reader, samples)
    if found is not None:
        return found
    if _are_initial(reader, samples):
        return 0
    if manifest.fold is None:
        raise ResumeError(
            f"The model holds the weights of none of the {reader.steps} steps in {path}. Load the checkpoint "
            "that goes with this memory before resuming, or record to another path."
        )
    steps = " or ".join(str(snapshot.steps) for snapshot in snapshots(manifest))
    raise ResumeError(
        f"{path} is folded, so it can be resumed only from the steps of its snapshots, and the model does not hold the "
        f"weights after {steps} steps. Call recorder.flush() just before you save a checkpoint; this time, record to "
        "another path."
    )


def _matching_step(reader: MemoryReader, samples: Samples) -> int | None:
    agrees = torch.ones(reader.steps, dtype=torch.bool)
    for layer, parameters in samples.items() if len(agrees) else ():
        for parameter, value in parameters.items():
            agrees &= (reader.log(layer).samples[parameter] == torch.from_numpy(value)).all(dim=-1)
    return int(agrees.nonzero()[-1]) + 1 if agrees.any() else None


def _matching_snapshot(reader: MemoryReader, samples: Samples) -> int | None:
    for snapshot in snapshots(reader.manifest):
        for log in snapshot.segments[:1]:
            held = map_tensors(reader.directory / log.file, log.bytes)
            if all(
                torch.equal(held[sample_tensor(layer, parameter)][0], torch.from_numpy(value))
                for layer, parameters in samples.items()
                for parameter, value in parameters.items()
            ):
                return snapshot.steps
    return None


def _are_initial(reader: MemoryReader, samples: Samples) -> bool:
    for layer, parameters in samples.items():
        for parameter, value in parameters.items():
            initial = reader.initial[f"{layer}/{parameter}"].reshape(-1)
            if not torch.equal(initial[sample_slice(initial.numel())], torch.from_numpy(value)):
                return False
    return True


def _settings(layers: Mapping[str, LayerEntry]) -> dict[str, tuple[object, ...]]:
    """What of the layers must be the same for their memory to go on."""
    return {
        name: (
            *(entry.kind, entry.map, entry.in_features, entry.out_features, entry.groups),
            *(entry.weights, entry.bias_names, entry.storage, entry.trained),
        )
        for name, entry in layers.items()
    }


def _fold(fold: FoldEntry | None) -> tuple[str, int] | None:
    return None if fold is None else (fold.by, fold.from_step)
