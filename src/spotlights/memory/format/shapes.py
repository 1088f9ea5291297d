"""The shapes that a memory's tensors must have, by the manifest: what is read is compared before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from spotlights.memory.format import names
from spotlights.memory.format.manifest import LayerEntry, Manifest, SegmentEntry
from spotlights.memory.format.storage import storage_named
from spotlights.memory.format.tensors import TensorPlace
from spotlights.optimizers import rule_named

Layout = Mapping[str, TensorPlace]
_Expected = tuple[tuple[int, ...], torch.dtype | None]
"""The shape of a tensor, and the type of its numbers: None for any fractions."""


def stored_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in this process' files, under `LAYER/PARAMETER`."""
    shapes = {}
    for name, entry in manifest.layers.items():
        for parameter in (*entry.weight_columns, *entry.bias_names):
            box = entry.shards.get(parameter)
            if box is None:
                shapes[f"{name}/{parameter}"] = entry.shape_of(parameter)
            elif box:
                shapes[f"{name}/{parameter}"] = tuple(b - a for a, b in zip(box[::2], box[1::2], strict=True))
    return shapes


def faults_in_weights(manifest: Manifest, layout: Layout) -> Iterator[str]:
    """What is wrong with a file of weights: each parameter must be there, with the optimizer's state in its shape."""
    shapes = stored_shapes(manifest)
    for name in shapes.keys() - layout.keys():
        yield f"it has no {name!r}"
    yield from _differences(layout, {name: (shape, None) for name, shape in shapes.items()})
    for name, place in layout.items():
        yield from _fault_of_state(name, place, shapes)


def _differences(layout: Layout, expected: Mapping[str, _Expected]) -> Iterator[str]:
    """Which of the tensors that are there have another type or shape than they must have."""
    for name, (shape, dtype) in expected.items():
        if name not in layout:
            continue
        stored = layout[name].dtype
        if stored != dtype if dtype is not None else not stored.is_floating_point:
            yield f"{name!r} has numbers of type {stored}" + (f", not {dtype}" if dtype is not None else "")
        if tuple(layout[name].shape) != shape:
            yield f"{name!r} has shape {tuple(layout[name].shape)}, but memory.json says {shape}"


def _fault_of_state(name: str, place: TensorPlace, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    shape = shapes.get(name.rpartition("/")[0])
    if shape is not None and tuple(place.shape) != shape and math.prod(place.shape) != 1:
        yield f"{name!r} has shape {tuple(place.shape)}, but its parameter has {shape}"


def faults_in_segment(manifest: Manifest, layout: Layout, segment: SegmentEntry) -> Iterator[str]:
    """What is wrong with a segment, by its header."""
    # A folded memory has the last step alone.
    steps = segment.end_step - segment.first_step if manifest.fold is None else 1
    parameters = {names.STATE + name: shape for name, shape in stored_shapes(manifest).items()}
    for name, place in layout.items():
        yield from _fault_of_state(name, place, parameters)
        if name.startswith(names.LOG) and place.shape[:1] != [steps]:
            yield f"{name!r} has shape {tuple(place.shape)}, but the file has {steps} steps"
    for layer, entry in manifest.layers.items():
        yield from _differences(layout, _rows(layer, entry, segment, layout))
        columns = {
            names.column_tensor(layer, name): torch.float64 if column.kind == "float" else torch.int64
            for name, column in manifest.columns.items()
        }
        shape = (segment.slots[layer],)
        yield from _differences(layout, {name: (shape, dtype) for name, dtype in columns.items()})
        yield from _differences(layout, _log(layer, entry, manifest, steps))


def _rows(layer: str, entry: LayerEntry, segment: SegmentEntry, layout: Layout) -> dict[str, _Expected]:
    """Of keys and errors."""
    stored, slots, keys = storage_named(entry.storage).dtype, segment.slots[layer], segment.keys[layer]
    errors = segment.errors.get(layer, slots)
    expected: dict[str, _Expected] = {
        names.KEYS: ((keys, entry.in_features), stored),
        names.KEY_SCALE: ((keys,), torch.float32),
        names.NORMS: ((keys, len(entry.stretches)), None),
        names.INDEX: ((slots,), torch.int64),
        names.ERRORS: ((errors, entry.out_features), stored),
        names.ERROR_SCALE: ((errors,), torch.float32),
    }
    for what in entry.tokens:
        for tokens, dtype in ((names.TOKENS[what], torch.int64), (names.AMOUNTS[what], None)):
            place = layout.get(names.layer_tensor(layer, tokens))
            expected[tokens] = (slots, max(1, place.shape[-1] if place is not None and place.shape else 1)), dtype
    return {names.layer_tensor(layer, what): of_tensor for what, of_tensor in expected.items()}


def _log(layer: str, entry: LayerEntry, manifest: Manifest, steps: int) -> dict[str, _Expected]:
    """Of the step log: a row for each step."""
    shapes: dict[str, tuple[int, ...]] = {names.log_tensor(layer, names.PROBE): (steps, 2)}
    for parameter in entry.trained:
        probed = probed_count(math.prod(entry.shape_of(parameter)))
        shapes[names.log_tensor(layer, parameter, names.FACTOR)] = (steps,)
        rule = rule_named(entry.rules.get(parameter))
        fields = manifest.log_fields if rule is None else rule.fields  # another optimizer's parameters have its fields
        shapes[names.log_tensor(layer, parameter, names.RULE)] = (steps, len(fields))
        shapes[names.log_tensor(layer, parameter, names.PROBED)] = (steps, probed)
    return {name: (shape, None) for name, shape in shapes.items()}


def probed_count(numel: int) -> int:
    return len(range(numel)[names.probed_entries(numel)])
