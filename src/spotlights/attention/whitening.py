"""Whitened queries: `(C + λ·mean(diag C)·I)⁻¹ [q; 1]`, with `C = E[[k; 1] [k; 1]ᵀ]` over the memory's slots.

Directions in which all keys are alike say little about a single example: what it taught there, the others teach
as well. Whitening divides them out, as an influence function does with the curvature of the loss; the keys' part of the
curvature is all it takes. The score `k·q` becomes `k·q̃`, so that whatever scans for scores scans for these.
Where a layer has several rows for an input, as a convolution has, the curvature adds up over them, and so does C.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.attention.reducers import Reducer
from spotlights.attention.scan import Job, scan
from spotlights.errors import SettingError
from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.moments import Moments, load_moments, save_moments
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Between

STRETCHES = 48
"""Of training, into which the scan for the moments is divided at most: somebody else may ask between two of them."""
_NO_VALUES = torch.empty(0, 0)


def key_moments(
    reader: MemoryReader,
    *,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: Callable[[float], object] = lambda share: None,
) -> Moments:
    """The moments of all layers' keys, over the whole memory: as kept with it, or from one scan of what is new.

    Args:
        reader: of the memory.
        turn: what to hold while a stretch of training is looked through.
        progress: is told the share that is done.
    """
    if not reader.moments:
        held, covered = load_moments(reader.directory, reader.manifest)
        segments = reader.manifest.segments
        if covered < len(segments) or not held:
            steps = range(segments[covered].first_step if held else 0, reader.manifest.steps)
            fresh = _scanned(reader, steps, turn, progress)
            held = {name: moment + held[name] if name in held else moment for name, moment in fresh.items()}
            save_moments(reader.directory, reader.manifest, held)
        reader.moments = dict(held)
    return reader.moments


def _scanned(
    reader: MemoryReader,
    steps: range,
    turn: Callable[[], AbstractContextManager[object]],
    progress: Callable[[float], object],
) -> dict[str, Tensor]:
    reducers = {name: MomentsReducer(layer) for name, layer in reader.layers.items()}
    stretch = max(1, -(-len(steps) // STRETCHES))
    for first in range(0, len(steps), stretch):
        some = Between("step", steps[first : first + stretch])
        with turn():
            scan([Job(reader.layers[name], some, 0, lambda block: _NO_VALUES, [r]) for name, r in reducers.items()])
        progress((first + stretch) / (len(steps) + stretch))
    return {name: reducer.result() for name, reducer in reducers.items()}


class MomentsReducer(Reducer):
    """`Σ [k; 1] [k; 1]ᵀ`, in float64; where keys are kept once, how often each was visited."""

    def __init__(self, layer: LayerReader) -> None:
        self._layer = layer
        size = layer.entry.in_features + 1
        self._sum = torch.zeros(size, size, dtype=torch.float64)
        self._visits = torch.zeros(layer.distinct_keys if layer.entry.indexed else 0, dtype=torch.int64)

    def fresh(self) -> MomentsReducer:
        return type(self)(self._layer)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        if self._layer.entry.indexed:
            self._visits += torch.bincount(block.key_numbers(), minlength=len(self._visits))
            return
        for keys in block.keys():  # noqa: SIM118
            self._add(keys.rows if keys.scale is None else keys.rows * keys.scale[:, None], None)

    def _add(self, keys: Float[Tensor, "rows in_features"], counts: Float[Tensor, "rows"] | None) -> None:
        weighted = keys if counts is None else keys * counts[:, None]
        self._sum[:-1, :-1] += weighted.T @ keys
        self._sum[:-1, -1] += weighted.sum(dim=0)
        self._sum[-1, -1] += len(keys) if counts is None else counts.sum()

    def merge(self, other: MomentsReducer) -> None:
        self._sum += other._sum
        self._visits += other._visits

    def result(self) -> Float[Tensor, "keys_and_1 keys_and_1"]:
        """The whole matrix."""
        whole = self.fresh()
        whole.merge(self)
        if self._layer.entry.indexed:
            for keys in self._layer.key_table():
                rows = keys.rows if keys.scale is None else keys.rows * keys.scale[:, None]
                whole._add(rows, self._visits[keys.place].to(rows.dtype))
        whole._sum[-1, :-1] = whole._sum[:-1, -1]
        return whole._sum


def whitened(
    queries: Float[Tensor, "queries in_features"],
    moment: Float[Tensor, "keys_and_1 keys_and_1"],
    *,
    damping: float,
    bias: bool,
    rows: float = 1.0,
) -> tuple[Float[Tensor, "queries in_features"], Float[Tensor, "queries"]]:
    """Queries for the keys, and for the key 1 of the bias, such that plain products with them are whitened scores.

    Args:
        queries: the layer's inputs.
        moment: as `key_moments` gives it.
        damping: λ. The larger, the more the scores are like plain ones.
        bias: whether the layer learned a bias, and so has the key 1.
        rows: how many rows the layer has for an input. C is the moment of an input: that of all its rows together.
    """
    if not damping > 0:
        raise SettingError(f"damping={damping}: give a number above 0; the larger, the more like contributions.")
    count = moment[-1, -1].clamp_min(1.0)
    size = len(moment) - (0 if bias else 1)
    covariance = moment[:size, :size] * (rows / count)
    strength = damping * covariance.diagonal().mean()
    if not strength > 0:  # no slots, or keys that are all zero: nothing to divide out
        return queries, torch.ones(len(queries), dtype=queries.dtype)
    wide = torch.cat([queries.double(), torch.ones(len(queries), 1, dtype=torch.float64)], dim=1)[:, :size]
    factor = torch.linalg.cholesky(covariance + strength * torch.eye(size, dtype=torch.float64))
    solved = torch.cholesky_solve(wide.T, factor).T
    ones = solved[:, -1] if bias else torch.zeros(len(queries), dtype=torch.float64)
    return solved[:, : queries.shape[1]].to(queries.dtype), ones.to(queries.dtype)
