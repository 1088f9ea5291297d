"""Scores weighted by the norm of the error: a slot that taught nothing has no weight, however similar."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.attention.attention import Attention
from spotlights.attention.measure import Measure
from spotlights.attention.products import Products
from spotlights.attention.scan import Values
from spotlights.errors import UnsupportedError
from spotlights.memory.blocks import Block


class WeightedScores(Measure):
    """`(key·query) ‖error‖` for each query and slot; answers the same questions as an `Attention`."""

    what = "weighted score"

    def __init__(self, attention: Attention) -> None:
        if attention.kernel != "dot":
            raise UnsupportedError(
                f'Weighted scores are about the plain product, not about kernel="{attention.kernel}".'
            )
        if attention.turned:
            raise UnsupportedError(f'Weighted scores are about "{attention.layer.name}", not about "{attention.use}".')
        attention.view.reader.need_visits("the error of each visit to weight by", "Ask for plain scores")
        if not attention.view.reader.manifest.errors:
            raise UnsupportedError(
                f"{attention.view.reader.directory} was recorded with errors=False: there is nothing to weight by."
            )
        super().__init__(attention.view, attention.layer, attention.queries)

    def values(self, chosen: slice) -> Values:
        products = Products(self.layer, self.queries[chosen])
        return lambda block: products(block).mul_(error_norms(block))

    def __repr__(self) -> str:
        return f"WeightedScores({self.layer.name}: {len(self.queries)} queries)"


def error_norms(block: Block) -> Float[Tensor, "rows"]:
    """‖δ‖ for each slot of a block."""
    norms = torch.empty(len(block), dtype=block.layer.storage.compute_dtype)
    for rows in block.errors():
        found = rows.rows.norm(dim=1)
        norms[rows.place] = found if rows.scale is None else found * rows.scale
    return norms
