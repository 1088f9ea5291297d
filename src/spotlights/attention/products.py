"""Key·query, for one block of slots and many queries: the inner loop of every question.

Stored rows are multiplied as they lie in the file; a row's scale is applied to its scores, not to the
row. Where a layer's keys are kept once, each distinct key is multiplied once and its score looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.memory.reader import Block, LayerReader, StoredRows


class Products:
    """Scores some queries against any block of a layer.

    With `cosine`, keys and queries have length 1. With `parts`, stretches of the keys, only these count, each
    normalised by itself, and their scores are added up.
    """

    def __init__(
        self,
        layer: LayerReader,
        queries: Float[Tensor, "queries in_features"],
        *,
        cosine: bool = False,
        parts: Sequence[slice] | None = None,
    ) -> None:
        queries = queries.to(layer.storage.compute_dtype)
        self._cosine = cosine
        self._count = len(queries)
        self._dtype = queries.dtype
        self._parts = [
            (part, _unit(queries[:, part]) if cosine else queries[:, part].contiguous())
            for part in parts or [slice(0, queries.shape[1])]
        ]
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
        for number, (part, queries) in enumerate(self._parts):
            keys = rows.rows[:, part]
            found = torch.empty_like(scores) if number else scores
            if self._count == 1:
                torch.mv(keys, queries[0], out=found[0])
            else:
                found.copy_(queries @ keys.T)
            if self._cosine:
                found /= keys.norm(dim=1).clamp_min_(torch.finfo(keys.dtype).tiny)
            if number:
                scores += found
        if not self._cosine and rows.scale is not None:
            scores *= rows.scale


def error_products(block: Block, directions: Float[Tensor, "queries out_features"]) -> Float[Tensor, "queries rows"]:
    """δ·g for each slot of a block."""
    result = directions.new_empty(len(directions), len(block))
    for rows in block.errors():
        part = directions @ rows.rows.T
        result[:, rows.place] = part if rows.scale is None else part * rows.scale
    return result


def _unit(rows: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
