"""The shapes that a memory's tensors must have, by the manifest: what is read is compared before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from spotlights.memory.format import names
from spotlights.memory.format.manifest import LayerEntry, Manifest
from spotlights.memory.format.storage import storage_named
from spotlights.memory.format.tensors import TensorPlace
from spotlights.optimizers import rule_named

Layout = Mapping[str, TensorPlace]


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
    for name, place in layout.items():
        if name in shapes and not place.dtype.is_floating_point:
            yield f"{name!r} has numbers of type {place.dtype}"
        if name in shapes and tuple(place.shape) != shapes[name]:
            yield f"{name!r} has shape {tuple(place.shape)}, but memory.json says {shapes[name]}"
        yield from _fault_of_state(name, place, shapes)


def _fault_of_state(name: str, place: TensorPlace, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    shape = shapes.get(name.rpartition("/")[0])
    if shape is not None and tuple(place.shape) != shape and math.prod(place.shape) != 1:
        yield f"{name!r} has shape {tuple(place.shape)}, but its parameter has {shape}"


def faults_in_segment(
    manifest: Manifest,
    layout: Layout,
    steps: int,
    slots: Mapping[str, int],
    keys: Mapping[str, int],
    errors: Mapping[str, int],
) -> Iterator[str]:
    """What is wrong with a segment of so many steps; `slots`, `keys` and `errors` are counted by layer."""
    logged = steps if manifest.fold is None else 1  # a folded memory has the last step alone
    parameters = {names.STATE + name: shape for name, shape in stored_shapes(manifest).items()}
    for name, place in layout.items():
        yield from _fault_of_state(name, place, parameters)
        if name.startswith(names.LOG) and place.shape[:1] != [logged]:
            yield f"{name!r} has shape {tuple(place.shape)}, but the file has {logged} steps"
    for layer, entry in manifest.layers.items():
        shapes = _rows(layer, entry, slots[layer], keys[layer], errors.get(layer, slots[layer]))
        shapes |= {names.column_tensor(layer, column): (slots[layer],) for column in manifest.columns}
        for what in entry.tokens:
            for name in (names.layer_tensor(layer, names.TOKENS[what]), names.layer_tensor(layer, names.AMOUNTS[what])):
                wide = layout[name].shape[-1] if name in layout and layout[name].shape else 1
                shapes[name] = slots[layer], max(1, wide)
        log = _log(layer, entry, manifest, logged)
        for name in log:
            if name in layout and not layout[name].dtype.is_floating_point:
                yield f"{name!r} has numbers of type {layout[name].dtype}"
        for name, shape in (shapes | log).items():
            if name in layout and tuple(layout[name].shape) != shape:
                yield f"{name!r} has shape {tuple(layout[name].shape)}, but memory.json says {shape}"
        for name, dtype in _dtypes(layer, entry, manifest).items():
            if name in layout and layout[name].dtype != dtype:
                yield f"{name!r} has numbers of type {layout[name].dtype}, not {dtype}"


def _rows(layer: str, entry: LayerEntry, slots: int, keys: int, errors: int) -> dict[str, tuple[int, ...]]:
    return {
        names.layer_tensor(layer, names.KEYS): (keys, entry.in_features),
        names.layer_tensor(layer, names.KEY_SCALE): (keys,),
        names.layer_tensor(layer, names.NORMS): (keys, len(entry.stretches)),
        names.layer_tensor(layer, names.INDEX): (slots,),
        names.layer_tensor(layer, names.ERRORS): (errors, entry.out_features),
        names.layer_tensor(layer, names.ERROR_SCALE): (errors,),
    }


def _log(layer: str, entry: LayerEntry, manifest: Manifest, steps: int) -> dict[str, tuple[int, ...]]:
    """Of the step log: a row for each step."""
    shapes: dict[str, tuple[int, ...]] = {names.log_tensor(layer, names.PROBE): (steps, 2)}
    for parameter in entry.trained:
        probed = probed_count(math.prod(entry.shape_of(parameter)))
        shapes[names.log_tensor(layer, parameter, names.FACTOR)] = (steps,)
        rule = rule_named(entry.rules.get(parameter))
        fields = manifest.log_fields if rule is None else rule.fields  # another optimizer's parameters have its fields
        shapes[names.log_tensor(layer, parameter, names.RULE)] = (steps, len(fields))
        shapes[names.log_tensor(layer, parameter, names.PROBED)] = (steps, probed)
    return shapes


def probed_count(numel: int) -> int:
    return len(range(numel)[names.probed_entries(numel)])


def _dtypes(layer: str, entry: LayerEntry, manifest: Manifest) -> dict[str, torch.dtype]:
    """The types of a layer's tensors."""
    storage = storage_named(entry.storage).dtype
    rows = {names.KEYS: storage, names.ERRORS: storage, names.INDEX: torch.int64}
    rows |= {names.KEY_SCALE: torch.float32, names.ERROR_SCALE: torch.float32}
    rows |= dict.fromkeys(names.TOKENS.values(), torch.int64)
    kinds = {column: described.kind for column, described in manifest.columns.items()}
    columns = {c: torch.float64 if kind == "float" else torch.int64 for c, kind in kinds.items()}
    return {
        **{names.layer_tensor(layer, what): dtype for what, dtype in rows.items()},
        **{names.column_tensor(layer, column): dtype for column, dtype in columns.items()},
    }
