"""Whitened queries: `(C + λ·mean(diag C)·I)⁻¹ [q; 1]`, with `C = E[[k; 1] [k; 1]ᵀ]` over all slots of a layer.

The moments C take one pass over the memory and are kept beside it. Where a layer has far fewer slots than a key has
numbers, its keys stand for C.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.blocks import OneOf
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.moments import KeyMoments, load_moments, save_moments
from spotlights.query.distinct_keys import KeysOfSlots, VisitedKeyMoments
from spotlights.query.engine import Progress, Turn, View
from spotlights.query.plan import Plan
from spotlights.query.reducers import KeyMomentsReducer
from spotlights.sparse_rows import Numbers, SparseRows, dense

STRETCHES = 48
"""The pass for the moments is divided into so many stretches of training at most; others may ask in between."""
_WIDE = 1024
"""From so many numbers in a key on, a matrix of all pairs is worth avoiding."""


def key_moments(
    view: View,
    *,
    turn: Turn = nullcontext,
    progress: Progress = lambda share: None,
) -> KeyMoments:
    """The second moments of all layers' keys, over the whole memory: as kept with it, or from a pass over what is new.

    Args:
        view: any view of the memory.
        turn: what to hold during each stretch of the pass.
        progress: is told the share that is done.
    """
    reader = view.reader
    if not reader.moments:
        wanted = {name for name, layer in reader.layers.items() if has_moments(layer)}
        known, covered = load_moments(reader.store, reader.manifest)
        known = known if set(known) == wanted else {}
        segments = reader.manifest.segments
        if covered < len(segments) or not known:
            steps = range(segments[covered].first_step if known else 0, reader.manifest.steps)
            new = new_moments(view, steps, turn, progress)
            known = {name: moment + known[name] if name in known else moment for name, moment in new.items()}
            save_moments(reader.store, reader.manifest, known)
        reader.moments = dict(known)
    return reader.moments


def new_moments(view: View, steps: range, turn: Turn, progress: Progress) -> dict[str, Tensor]:
    layers = {name: layer for name, layer in view.reader.layers.items() if has_moments(layer)}
    sums = {
        name: KeyMomentsReducer(layer.entry.moments_shape, layer.distinct_keys if layer.entry.indexed else None)
        for name, layer in layers.items()
    }
    stretch = max(1, -(-len(steps) // STRETCHES))
    for first in range(0, len(steps), stretch):
        selection = OneOf("step", steps[first : first + stretch])
        plans = [Plan(name, selection, (reducer,)) for name, reducer in sums.items()]
        with turn():
            for (filled,), total in zip(view.run(*plans), sums.values(), strict=True):
                assert isinstance(filled, KeyMomentsReducer)
                total.merge(filled)
        progress((first + stretch) / (len(steps) + stretch))
    indexed = [name for name, total in sums.items() if total.distinct_keys is not None]
    of_keys = view.values(*((name, VisitedKeyMoments(sums[name].visits)) for name in indexed))
    for name, moments in zip(indexed, of_keys, strict=True):
        sums[name].sum += moments
    return {name: total.result() for name, total in sums.items()}


def has_moments(layer: LayerReader) -> bool:
    """Whether C is kept as a matrix. Where a layer has far fewer slots than a key has numbers, their keys do."""
    entry = layer.entry
    return len(entry.moments_shape) == 1 or entry.in_features < _WIDE or 2 * layer.slots > entry.in_features


def whitened_queries(
    view: View, layer: str, queries: Numbers, *, damping: float, rows: float
) -> tuple[Numbers, Float[Tensor, "queries"]]:
    """A layer's `(C + λ·mean(diag C)·I)⁻¹ [q; 1]`, with the 1 by itself; see `whitened`."""
    recorded = view.reader.layer(layer)
    bias = bool(set(recorded.entry.bias_names) & set(recorded.entry.trained))
    if has_moments(recorded):
        return whitened(queries, key_moments(view)[layer], damping=damping, bias=bias, rows=rows)
    return whitened_by_keys(dense(queries), view, layer, damping=damping, bias=bias, rows=rows)


def whitened_by_keys(
    queries: Float[Tensor, "queries in_features"], view: View, name: str, *, damping: float, bias: bool, rows: float
) -> tuple[Float[Tensor, "queries in_features"], Float[Tensor, "queries"]]:
    """The same as `whitened`, for C of few keys: `(KᵀK/n + s)⁻¹ q = (q − Kᵀ (n·s + KKᵀ)⁻¹ K q) / s`."""
    layer = view.reader.layer(name)
    every = KeysOfSlots(torch.arange(layer.slots))
    keys = layer.once("all keys", lambda: view.values((name, every))[0].float())
    keys, wide = (with_one(vectors.float(), bias=bias) for vectors in (keys, queries))
    share = rows / max(len(keys), 1)
    strength = _strength(damping, share * float(keys.double().square().sum()) / max(keys.shape[1], 1))
    if not strength > 0:
        return queries, torch.ones(len(queries), dtype=queries.dtype)
    gram = (keys @ keys.T).double()
    gram.diagonal().add_(strength / share)
    solved = torch.linalg.solve(gram, (keys @ wide.T).double())
    return _without_one((wide.double() - solved.T @ keys.double()) / strength, queries)


def with_one(rows: Float[Tensor, "rows features"], *, bias: bool) -> Tensor:
    """With the 1 that a bias has as its key, if there is one."""
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1) if bias else rows


def _without_one(
    solved: Float[Tensor, "queries _"], queries: Float[Tensor, "queries in_features"]
) -> tuple[Float[Tensor, "queries in_features"], Float[Tensor, "queries"]]:
    """What was made of the queries, and of the 1 by itself."""
    width = queries.shape[1]
    ones = solved[:, width] if solved.shape[1] > width else solved.new_zeros(len(solved))
    return solved[:, :width].to(queries.dtype), ones.to(queries.dtype)


def whitened(
    queries: Numbers,
    moment: Float[Tensor, "keys_and_1 *keys_and_1"],
    *,
    damping: float,
    bias: bool,
    rows: float = 1.0,
) -> tuple[Numbers, Float[Tensor, "queries"]]:
    """Queries for the keys, and for the key 1 of the bias, such that plain products with them are whitened scores.

    Args:
        queries: the layer's inputs.
        moment: as `key_moments` gives it.
        damping: λ. The larger, the more the scores are like plain ones.
        bias: whether the layer learned a bias, and so has the key 1.
        rows: how many rows the layer has for an input. C is the moment of an input: that of all its rows together.
    """
    if isinstance(queries, SparseRows) and moment.ndim == 1:
        return _whitened_tokens(queries, moment, damping=damping, rows=rows)
    queries = dense(queries)
    size = len(moment) - (0 if bias else 1)
    covariance = moment[:size, :size] * (rows / moment[-1, -1].clamp_min(1.0))
    return _without_one(divided(with_one(queries.double(), bias=bias), covariance, damping), queries)


def divided(
    rows: Float[Tensor, "rows features"], moment: Float[Tensor, "features *features"], damping: float
) -> Float[Tensor, "rows features"]:
    """`(M + λ·mean(diag M)·I)⁻¹` times each row, for a second moment M or its diagonal; the rows where M is 0."""
    strength = _strength(damping, (moment if moment.ndim == 1 else moment.diagonal()).mean())
    if not strength > 0:  # no slots, or vectors that are all zero: nothing to divide out
        return rows
    if moment.ndim == 1:
        return rows / (moment + strength)
    factor, failed = torch.linalg.cholesky_ex(moment + strength * torch.eye(len(moment), dtype=moment.dtype))
    if failed:
        raise UnsupportedError(
            "Influence divides by the second moment of a layer's keys or errors, and that of these has no inverse: "
            "some are too large, or not numbers. memory.verify() says whether a file is damaged."
        )
    return torch.cholesky_solve(rows.T, factor).T


def _strength(damping: float, mean: Float[Tensor, ""] | float) -> Float[Tensor, ""] | float:
    if not damping > 0:
        raise SettingError(f"damping={damping}: give a number above 0; the larger, the more like contributions.")
    return damping * mean


def _whitened_tokens(
    queries: SparseRows, moment: Float[Tensor, "tokens_and_1"], *, damping: float, rows: float
) -> tuple[SparseRows, Float[Tensor, "queries"]]:
    """The same where C is diagonal: each token by how often it was seen."""
    variances = moment[:-1] * (rows / moment[-1].clamp_min(1.0))
    strength = _strength(damping, variances.mean())
    amounts = queries.amounts
    if strength > 0:
        amounts = (amounts.double() / (variances[queries.places] + strength)).to(amounts.dtype)
    return replace(queries, amounts=amounts), torch.zeros(len(queries), dtype=queries.dtype)
