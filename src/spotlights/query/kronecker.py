"""Influence where an example holds many answers, as the positions of a text do: K-FAC, from the memory alone.

There are more answers than examples, so a matrix of examples is no Gauss-Newton. Instead the curvature of each layer is
taken as a product of two moments, `C = E[[k; 1] [k; 1]ᵀ]` of its keys and `B = E[δ δᵀ]` of its errors, and each input's
gradient F becomes

    (B + λ·mean(diag B)·I)⁻¹ F (C + λ·mean(diag C)·I)⁻¹

An example's number is the product of this with the mean gradient over the last half of its visits: earlier errors are
those of another network. F is a mean over training, too, of the networks after each quarter. What a single
network answers depends much on its seed; what several networks of a run have in common does so less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.errors import SpotlightsError
from spotlights.memory.blocks import Block, Everything, as_of
from spotlights.query.contraction import DirectedQueries
from spotlights.query.engine import View
from spotlights.query.example_gradients import LayerQueries, VisitNumbers
from spotlights.query.primal import primal_model
from spotlights.query.reducers import Reducer
from spotlights.query.weights import view_parameters
from spotlights.query.whitening import divided, whitened_queries
from spotlights.sparse_rows import dense, joined

_WIDE = 4096
"""Of more outputs, only the diagonal of B is taken."""
DAMPING = 0.02
"""λ, as chosen on two language models that docs/truth.md does not report."""
EARLIER = (0.25, 0.5, 0.75)
"""After which shares of training the number of interest is asked for as well, beside the trained network."""


@dataclass(eq=False)
class ErrorMomentsReducer(Reducer):
    """`Σ (w δ) (w δ)ᵀ` over the slots of some visits, or its diagonal where outputs are many; and how many slots."""

    adds = ("sum", "count")
    visits: VisitNumbers
    out_features: int
    dtype: torch.dtype

    def start(self) -> None:
        shape = (self.out_features,) * (1 if self.out_features > _WIDE else 2)
        self.sum, self.count = torch.zeros(shape, dtype=torch.float64), 0

    def update(self, block: Block, values: Any) -> None:
        _, numbers = self.visits.of(block)
        for errors in block.errors():
            scale = errors.times_scale(numbers[errors.place])
            used = (scale != 0).nonzero().flatten()
            rows = dense(errors.rows)[used].to(self.dtype) * scale[used, None].to(self.dtype)
            self.sum += rows.double().square().sum(dim=0) if self.sum.ndim == 1 else (rows.T @ rows).double()
            self.count += len(used)


def through_curvature(view: View, name: str, asked: LayerQueries, visits: VisitNumbers, damping: float) -> LayerQueries:
    """A layer's gradient of the number of interest, divided by the layer's curvature."""
    rows = len(asked.owners) / asked.inputs
    keys, ones = whitened_queries(view, name, asked.asked.queries, damping=damping, rows=rows)
    directions = asked.asked.directions
    solved = divided(directions.double(), _error_moment(view, name, visits), damping)
    return replace(asked, asked=DirectedQueries(keys, solved.to(directions.dtype), ones))


def _error_moment(view: View, name: str, visits: VisitNumbers) -> Float[Tensor, "out_features *out_features"]:
    layer = view.reader.layer(name)

    def find() -> Tensor:
        reducer = ErrorMomentsReducer(visits, layer.entry.out_features, layer.storage.compute_dtype)
        errors = view.reduce(name, reducer, selection=as_of(view.reader, Everything(), view.until))
        return errors.sum / max(errors.count, 1)

    return layer.once(("error moment", view.until), find)


def earlier_networks(view: View, model: nn.Module) -> list[nn.Module]:
    """The network as it was during training; none where nobody recorded that, or no copy of it can be made."""
    networks: list[nn.Module] = []
    try:
        for step in sorted({round(share * view.until) for share in EARLIER}):
            view.reader.need_recording("Earlier networks need")
            selection = as_of(view.reader, Everything(), step)
            then = replace(view, selection=selection, until=step, engine=view.engine.of_the_whole)
            networks.append(
                primal_model(then, model, {name: view_parameters(then, name) for name in view.reader.layers})
            )
    except (SpotlightsError, RuntimeError, TypeError):  # the last two from modules that cannot be copied
        return []
    return networks


def mean_queries(networks: Sequence[LayerQueries]) -> LayerQueries:
    """The mean over several networks of a number's gradient with respect to a layer's weights."""
    asked = [own.asked for own in networks]
    queries = DirectedQueries(
        joined([own.queries for own in asked]),
        torch.cat([own.directions for own in asked]) / len(asked),
        torch.cat([own.ones for own in asked]),
    )
    return LayerQueries(queries, torch.cat([own.owners for own in networks]), networks[0].inputs)
