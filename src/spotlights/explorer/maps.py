"""The map: a point for each training example, by the two directions in which a layer's keys differ most, or by UMAP."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import UnsupportedError
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.jobs import BackgroundJob
from spotlights.explorer.queries import Query
from spotlights.explorer.spotlight import Wanted, values_of

MOST = 60_000
"""Points. Of more examples, as many are drawn at random."""
ROWS = 20_000
"""Keys that the directions are found from."""
PCA, UMAP = "pca", "umap"
PROJECTIONS = (PCA, UMAP)
REDUCED, NEIGHBOURS, NEAREST = 30, 15, 5
"""UMAP sees so many directions of the keys and so many neighbours of each; the input lies between so many of them."""


@dataclass(frozen=True, eq=False)
class KeyMap:
    """Where a layer's keys lie: the key of each example's last visit, projected."""

    examples: Int64[np.ndarray, "points"]
    slots: Int64[np.ndarray, "points"]
    mean: Float[Tensor, "in_features"]
    directions: Float[Tensor, "in_features reduced"]
    reduced: Float[Tensor, "points reduced"]
    places: Float[Tensor, "points 2"]
    explained: float | None
    """The share of the keys' variance that the two directions have; None where the places are not a projection."""

    def place(self, query: Float[Tensor, "in_features"]) -> list[float]:
        """Where a query lies: projected as the keys are, or between the keys that are nearest to it."""
        reduced = (query - self.mean) @ self.directions
        if self.explained is not None:
            return reduced[:2].tolist()
        far, nearest = (self.reduced - reduced).norm(dim=1).topk(min(NEAREST, len(self.reduced)), largest=False)
        weights = 1 / (far + 1e-6 * far.max() + 1e-12)
        return (weights @ self.places[nearest] / weights.sum()).tolist()


def places_of(explorer: Explorer, layer: str, projection: str = PCA) -> KeyMap:
    def compute() -> KeyMap:
        return _places(explorer, layer, 2 if projection == PCA else REDUCED)

    projected = explorer.kept(("map", layer, projection), compute, lambda kept: 3 * kept.reduced.nbytes)
    return projected if projection == PCA else _neighbours(explorer, layer, projected)


def _places(explorer: Explorer, layer: str, count: int) -> KeyMap:
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
    _, sizes, directions = torch.pca_lowrank(some - mean, q=min(count + 4, *some.shape), center=False, niter=4)
    directions = torch.nn.functional.pad(directions, (0, max(0, 2 - directions.shape[1])))[:, :count]
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    directions = torch.where(largest < 0, -directions, directions)  # a mirrored map is the same map: always show one
    variance = float((some - mean).square().sum()) or 1.0
    explained = float(sizes[:2].square().sum()) / variance
    reduced = (keys - mean) @ directions
    return KeyMap(examples, last, mean, directions, reduced, reduced[:, :2], explained)


# -- UMAP -------------------------------------------------------------------------------------


def _neighbours_first(projected: KeyMap, progress: Callable[[float], None]) -> Float[Tensor, "points 2"]:
    """Places found by UMAP; for 60,000 points that takes a minute or two."""
    points = projected.reduced.numpy()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own settings and dependencies
            umap = importlib.import_module("umap")
            reducer = umap.UMAP(
                n_neighbors=min(NEIGHBOURS, len(points) - 1), init=points[:, :2], random_state=0, n_jobs=1
            )
            return torch.as_tensor(np.asarray(reducer.fit_transform(points))).float()
    except Exception as error:
        raise UnsupportedError(f"UMAP failed: {error}") from error


def _neighbours(explorer: Explorer, layer: str, projected: KeyMap) -> KeyMap:
    """The same points where UMAP puts them; raises `Preparing` while that takes long."""
    if importlib.util.find_spec("umap") is None:
        raise UnsupportedError("A map by UMAP needs umap-learn: pip install 'spotlights[umap]'.")
    if len(projected.examples) <= NEAREST:
        raise UnsupportedError(f"UMAP looks at neighbours; there are {len(projected.examples)} examples.")
    key, size = ("neighbours", layer), 3 * projected.places.nbytes
    places = explorer.kept(key, lambda: BackgroundJob(partial(_neighbours_first, projected)), size).result()
    return replace(projected, places=places, explained=None)


# -- what the page shows ----------------------------------------------------------------------


def described(explorer: Explorer, layer: str, column: str | None, projection: str) -> dict[str, Any]:
    """Where the points are, as bytes: 16 bits for each coordinate, and the group of each point."""
    key_map, memory = places_of(explorer, layer, projection), explorer.opened.memory
    low, high = key_map.places.amin(dim=0), key_map.places.amax(dim=0)
    scaled = ((key_map.places - low) / (high - low).clamp_min(1e-12) * 65535).round().numpy().astype(np.uint16)
    groups = explorer.opened.groups.get(column or "", [])
    numbers = {value: number for number, value in enumerate(groups)}
    values = memory.column(column, key_map.slots, layer=layer) if groups and column else []
    return {
        "layer": layer,
        "projection": projection,
        "count": len(key_map.examples),
        "explained": key_map.explained,
        "per": column if groups else None,
        "low": low.tolist(),
        "high": high.tolist(),
        "examples": _bytes(key_map.examples.astype(np.int64)),
        "places": _bytes(scaled),
        "groups": _bytes(np.array([numbers.get(value, 255) for value in values], np.uint8)),
    }


def lamp(explorer: Explorer, query: Query, wanted: Wanted, projection: str) -> dict[str, Any]:
    """Where the query lies on a layer's map, and the value that each point has for it."""
    _, facts, values = _lit(explorer, query, wanted, projection)
    return {**facts, "values": _bytes(values.float().numpy())}


def rows(explorer: Explorer, query: Query, wanted: Wanted, projection: str) -> tuple[dict[str, Any], list[Any]]:
    """The same as rows of a table, one for each example."""
    key_map, facts, values = _lit(explorer, query, wanted, projection)
    points = zip(key_map.examples.tolist(), key_map.places.tolist(), values.tolist(), strict=True)
    return facts, [{"example": example, "x": x, "y": y, "value": value} for example, (x, y), value in points]


def _lit(
    explorer: Explorer, query: Query, wanted: Wanted, projection: str
) -> tuple[KeyMap, dict[str, Any], Float[Tensor, "points"]]:
    key_map, seen = places_of(explorer, wanted.layer, projection), values_of(explorer, query, wanted)
    totals = seen.totals("example")[0]
    known = {example: place for place, example in enumerate(totals.groups)}
    order = [known.get(example, -1) for example in key_map.examples.tolist()]
    values = torch.cat([totals.values[0], totals.values[0].new_zeros(1)])[order]
    attention = explorer.attend(query)[wanted.layer]
    row = query.row(len(attention.queries))
    queries = attention.queries if row is None else attention.at(row).queries
    here = queries.dense() if not isinstance(queries, Tensor) else queries
    return key_map, {**seen.facts(), "place": key_map.place(here.float().mean(dim=0))}, values


def _bytes(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()).decode()
