"""Key·query, for one block of slots and many queries: the inner loop of every question.

Stored rows are multiplied as they lie in the file; a row's scale is applied to its scores, not to the
row. Where a layer's keys are kept once, each distinct key is multiplied once and its score looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.stored_rows import StoredRows


class Products:
    """Scores some queries against any block of a layer.

    With `cosine`, keys and queries have length 1. With `parts` (each some neighbouring stretches of the layer's keys),
    only these count, each normalised by itself, and their scores are added up.
    """

    def __init__(
        self,
        layer: LayerReader,
        queries: Float[Tensor, "queries in_features"],
        *,
        cosine: bool = False,
        parts: Sequence[Sequence[str]] | None = None,
    ) -> None:
        queries = queries.to(layer.storage.compute_dtype)
        self._cosine = cosine
        self._count = len(queries)
        self._dtype = queries.dtype
        self._parts = [_Part(layer.entry.stretches, part, queries, cosine) for part in parts or [layer.entry.stretches]]
        self._table: Tensor | None = None
        if layer.entry.indexed:
            self._table = queries.new_zeros(len(queries), layer.distinct_keys)
            for rows in layer.key_table():
                self._fill(self._table[:, rows.place], rows)

    def __call__(self, block: Block) -> Float[Tensor, "queries rows"]:
        if self._table is not None:
            return self._table.index_select(1, block.key_numbers())
        scores = torch.empty(self._count, len(block), dtype=self._dtype)
        for rows in block.keys():  # noqa: SIM118
            self._fill(scores[:, rows.place], rows)
        return scores

    def _fill(self, scores: Float[Tensor, "queries rows"], rows: StoredRows) -> None:
        first, *others = self._parts
        first.score(rows, scores)
        for part in others:
            scores += part.score(rows, torch.empty_like(scores))
        if rows.scale is not None and (rows.norms is not None or not self._cosine):
            scores *= rows.scale


class _Part:
    """Some neighbouring stretches of the keys, and the same of the queries."""

    def __init__(
        self,
        stretches: Mapping[str, slice],
        chosen: Iterable[str],
        queries: Float[Tensor, "queries in_features"],
        cosine: bool,
    ) -> None:
        names = list(chosen)
        self._numbers = [number for number, name in enumerate(stretches) if name in names]
        self._place = slice(stretches[names[0]].start, stretches[names[-1]].stop)
        queries = queries[:, self._place]
        self._queries = _unit(queries) if cosine else queries.contiguous()
        self._cosine = cosine

    def score(self, rows: StoredRows, out: Float[Tensor, "queries rows"]) -> Float[Tensor, "queries rows"]:
        keys = rows.rows[:, self._place]
        if len(self._queries) == 1:
            torch.mv(keys, self._queries[0], out=out[0])
        else:
            out.copy_(self._queries @ keys.T)
        if self._cosine:
            norms = keys if rows.norms is None else rows.norms[:, self._numbers]
            out /= norms.norm(dim=1).clamp_min_(torch.finfo(keys.dtype).tiny)
        return out


def error_products(block: Block, directions: Float[Tensor, "queries out_features"]) -> Float[Tensor, "queries rows"]:
    """δ·g for each slot of a block."""
    result = directions.new_empty(len(directions), len(block))
    for rows in block.errors():
        part = directions @ rows.rows.T
        result[:, rows.place] = part if rows.scale is None else part * rows.scale
    return result


def _unit(rows: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
