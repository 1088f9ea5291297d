"""The map: one point for each training example, by the two directions in which a layer's keys differ most."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import UnsupportedError
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import Query
from spotlights.explorer.spotlight import Wanted, values_of

MOST = 60_000
"""Points. Of more examples, as many are drawn at random."""
ROWS = 20_000
"""Keys that the directions are found from."""


@dataclass(frozen=True, eq=False)
class KeyMap:
    """Where a layer's keys lie: the key of each example's last visit, projected."""

    examples: Int64[np.ndarray, "points"]
    slots: Int64[np.ndarray, "points"]
    mean: Float[Tensor, "in_features"]
    directions: Float[Tensor, "in_features 2"]
    places: Float[Tensor, "points 2"]
    explained: float
    """The share of the keys' variance that the two directions have."""


def places_of(explorer: Explorer, layer: str) -> KeyMap:
    return explorer.kept(("map", layer), lambda: _places(explorer, layer), lambda key_map: key_map.places.nbytes * 3)


def _places(explorer: Explorer, layer: str) -> KeyMap:
    memory = explorer.opened.memory
    if "example" not in memory.columns:
        raise UnsupportedError("This memory knows no examples: it was recorded without recorder.batch(example=…).")
    slots = np.arange(explorer.opened.layers[layer].slots)
    ids = np.array([-1 if example is None else example for example in memory.column("example", slots, layer=layer)])
    examples, last = np.unique(ids[::-1], return_index=True)  # the last visit: its key is what the layer has learned
    last, examples = len(ids) - 1 - last[examples >= 0], examples[examples >= 0]
    if len(examples) > MOST:
        drawn = np.sort(np.random.default_rng(0).choice(len(examples), MOST, replace=False))
        examples, last = examples[drawn], last[drawn]
    keys = memory.keys(last, layer=layer).float()
    some = keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:ROWS]]
    mean = some.mean(dim=0)
    _, sizes, directions = torch.pca_lowrank(some - mean, q=min(6, *some.shape), center=False, niter=4)
    directions = torch.nn.functional.pad(directions, (0, max(0, 2 - directions.shape[1])))[:, :2]
    variance = float((some - mean).square().sum()) or 1.0
    explained = float(sizes[:2].square().sum()) / variance
    return KeyMap(examples, last, mean, directions, (keys - mean) @ directions, explained)


def described(explorer: Explorer, layer: str, column: str | None) -> dict[str, Any]:
    """Where the points are, as bytes: 16 bits for each coordinate, and the group of each point."""
    key_map, memory = places_of(explorer, layer), explorer.opened.memory
    low, high = key_map.places.amin(dim=0), key_map.places.amax(dim=0)
    scaled = ((key_map.places - low) / (high - low).clamp_min(1e-12) * 65535).round().numpy().astype(np.uint16)
    groups = explorer.opened.groups.get(column or "", [])
    numbers = {value: number for number, value in enumerate(groups)}
    values = memory.column(column, key_map.slots, layer=layer) if groups and column else []
    return {
        "layer": layer,
        "count": len(key_map.examples),
        "explained": key_map.explained,
        "per": column if groups else None,
        "low": low.tolist(),
        "high": high.tolist(),
        "examples": _bytes(key_map.examples.astype(np.int64)),
        "places": _bytes(scaled),
        "groups": _bytes(np.array([numbers.get(value, 255) for value in values], np.uint8)),
    }


def lamp(explorer: Explorer, query: Query, wanted: Wanted) -> dict[str, Any]:
    """Where the query lies on a layer's map, and the value that each point has for it."""
    key_map, seen = places_of(explorer, wanted.layer), values_of(explorer, query, wanted)
    totals = seen.totals("example")[0]
    known = {example: place for place, example in enumerate(totals.groups)}
    order = [known.get(example, -1) for example in key_map.examples.tolist()]
    values = torch.cat([totals.values[0], totals.values[0].new_zeros(1)])[order]
    attention = explorer.attend(query)[wanted.layer]
    row = query.row(len(attention.queries))
    queries = attention.queries if row is None else attention.at(row).queries
    here = queries.dense() if not isinstance(queries, Tensor) else queries
    place = ((here.float().mean(dim=0) - key_map.mean) @ key_map.directions).tolist()
    return {**seen.facts(), "place": place, "values": _bytes(values.float().numpy())}


def _bytes(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()).decode()
