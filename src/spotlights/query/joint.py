"""The joint estimate of influence: all layers together, in the space of examples.

For a visit v of example i let `G_v = Σ_rows δ ⊗ [k; 1]` be the gradient of the example's own loss, over all layers, and
`e_v` the error of the layer that answers. An example stands for one direction in the space of weights,
`A_i = mean over visits of G_v / ρ_v`. Under a squared loss `ρ_v = ±|e_v|`, and A_i is the gradient of the answer
itself; under a cross-entropy `ρ_v = |e_v|^½`. Training moved the weights along `Σ_i R_i A_i`, with
`R_i = Σ_visits c_v ρ_v`. The estimate for a number with gradient F is

    score_i = R_i · [(A Aᵀ + λ·mean(diag A Aᵀ)·I)⁻¹ A F]_i

Without the inverse this is the plain contribution, up to the mean over visits. The inverse divides out what other
examples would have taught as well: Gauss-Newton, with a matrix of examples instead of one of weights. Each layer's part
of `A Aᵀ` and `A F` is divided by its mean diagonal (`balance`): no layer counts by its scale alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import SettingError, TooLargeError, UnsupportedError
from spotlights.memory.blocks import Block, Everything, as_of
from spotlights.memory.format.columns import MISSING_INT
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.query import kronecker
from spotlights.query.coefficients import unroll_plainly
from spotlights.query.engine import View
from spotlights.query.example_gradients import Gram, LayerGradients, LayerQueries, VisitNumbers
from spotlights.query.measured import LayerMeasured
from spotlights.query.plan import BlockValues, Measure
from spotlights.query.reducers import Reducer
from spotlights.query.suspects import loss_scale, own_slots
from spotlights.sparse_rows import dense

LOSSES = ("classes", "squared", "tokens")
DAMPING = 1.0
"""λ, as fixed before the settings of docs/truth.md were run."""
MOST, MOST_UNASKED = 1e15, 1e13
"""Multiplications: more would take hours. Where nobody asked for the joint estimate, a few minutes are enough."""
LAST_VISITS = 0.5
"""The share of an example's visits that counts where an example holds many answers (query/kronecker.py)."""
TOKENS = 4096
"""Embeddings of more tokens are left out: their gradients have a row for each."""
_SIGNED = 64
"""Errors of up to so many outputs are kept to tell their sign."""


# -- visits: how wrong the network was at each ----------------------------------------------------


@dataclass(eq=False)
class VisitErrorsReducer(Reducer):
    """The errors of each visit, added up over its rows: their squares, and the errors themselves where they are few."""

    adds = ("total", "size", "answers", "visits_found")
    out_features: int
    per_step: Float[Tensor, "steps"]
    """What to multiply errors by."""

    def start(self) -> None:
        self.total, self.size, self.answers = 0.0, 0.0, 0
        """Σ|Σ_j e_j| and Σ|e_j|: next to nothing of the first is left where errors are those of probabilities. And how
        many rows have an error at all."""
        self.visits_found: list[tuple[Tensor, ...]] = []
        """Examples, steps, squares, sums and numbers of rows."""

    def update(self, block: Block, values: Any) -> None:
        examples, steps = block.column("example"), block.column("step")
        known = examples != MISSING_INT
        squares = torch.zeros(len(block), dtype=torch.float64)
        sums = torch.zeros(len(block), self.out_features if self.out_features <= _SIGNED else 0, dtype=torch.float64)
        for errors in block.errors():
            scale = errors.times_scale(self.per_step[steps[errors.place]])
            rows = dense(errors.rows).double() * scale[:, None]
            self.total += float(rows.sum(dim=1).abs().sum())
            self.size += float(rows.abs().sum())
            squares[errors.place] = rows.square().sum(dim=1)
            self.answers += int((squares[errors.place] > 0).sum())
            if sums.shape[1]:
                sums[errors.place] = rows
        pairs = torch.stack([examples[known], steps[known].long()], dim=1)
        rows = torch.ones_like(squares[known])
        self.visits_found.append(_by_visit(pairs, squares[known], sums[known], rows))

    def result(self) -> tuple[Tensor, ...]:
        """The same for each visit once, sorted by example and step."""
        return _by_visit(*(torch.cat(parts) for parts in zip(*self.visits_found, strict=True)))


def _by_visit(pairs: Int64[Tensor, "rows 2"], *amounts: Tensor) -> tuple[Tensor, ...]:
    """Each pair of an example and a step once, sorted, and the sums of its amounts."""
    visits, owner = torch.unique(pairs, dim=0, return_inverse=True)
    return visits, *(amount.new_zeros(len(visits), *amount.shape[1:]).index_add(0, owner, amount) for amount in amounts)


@dataclass(frozen=True, eq=False)
class JointVisits:
    """What the joint estimate has to know of each visit."""

    loss: str
    gradient: VisitNumbers
    """What multiplies δ⊗k of a slot in A."""
    taught: VisitNumbers
    """What a visit adds to R, divided by its rows in the layer that answers."""
    totals: Float[Tensor, "examples"]
    """R."""
    wrong: VisitNumbers
    """What a visit adds to the mean ρ of its example, divided by its rows: how wrong the network was, with a sign."""


def find_visits(view: View, layer: str, loss: str | None) -> JointVisits:
    """Passes once over the errors of the layer that answers."""
    reader, recorded = view.reader, view.reader.layer(layer)
    steps = max(reader.steps, 1)
    reducer = VisitErrorsReducer(recorded.entry.out_features, loss_scale(reader.log(layer), steps))
    slots = own_slots(reader, recorded, as_of(reader, Everything(), view.until))
    filled = view.reduce(layer, reducer, selection=slots)
    visits, squares, sums, rows = filled.result() if filled.visits_found else (torch.empty(0), *[torch.empty(0)] * 3)
    if not len(visits):
        raise UnsupportedError(f'No slot of "{layer}" belongs to an example: the joint estimate has nothing to go by.')
    if loss is None:
        of_classes = recorded.entry.out_features > 1 and filled.total <= 1e-2 * filled.size
        several = filled.answers > 1.5 * len(visits)
        loss = "squared" if not of_classes else "tokens" if several else "classes"
    examples, places = torch.unique(visits[:, 0], return_inverse=True)
    at = visits[:, 1]
    batch = torch.bincount(at, minlength=steps).double()[at]  # errors are those of a mean over the batch
    if reader.manifest.observed:  # and here those of each example's own loss
        batch = torch.ones_like(batch)
    sizes = squares.sqrt() * batch
    if loss == "classes":
        rho = sizes.sqrt()
    elif loss == "tokens":
        counts = torch.bincount(places)
        left = counts.cumsum(0)[places] - torch.arange(len(places))  # visits are sorted by example and step
        rho = (left <= (counts[places] * LAST_VISITS).ceil()).double()
    else:
        mean = sums.new_zeros(len(examples), sums.shape[1]).index_add(0, places, sums)
        along = (sums * mean[places]).sum(dim=1)
        rho = torch.where(along < 0, -sizes, sizes)
    usable = rho.abs() > 1e-6 * rho.square().mean().sqrt()
    seen = torch.zeros(len(examples), dtype=torch.float64).index_add(0, places, usable.double()).clamp_min(1.0)
    scale = loss_scale(reader.log(layer), steps)[at] * batch
    weight = torch.where(usable, scale / torch.where(usable, rho, 1.0) / seen[places], 0.0)
    taught = torch.where(scale > 0, _step_numbers(reader, layer, view.until)[at] / scale, 0.0)
    if loss == "tokens":  # a schedule that ends at 0 must not weigh the last visits of examples
        taught = taught.mean().expand_as(taught)
    taught = taught * rho / rows
    gradient = VisitNumbers(examples, places * steps + at, steps, weight)
    return JointVisits(
        loss,
        gradient,
        replace(gradient, numbers=taught),
        torch.zeros(len(examples), dtype=torch.float64).index_add(0, places, taught * rows),
        replace(gradient, numbers=rho / torch.bincount(places)[places] / rows),
    )


def _step_numbers(reader: MemoryReader, layer: str, until: int) -> Float[Tensor, "steps"]:
    """What multiplied the gradient of each step: of the layer that answers, or of another one if that was frozen."""
    numbers = torch.zeros(max(reader.steps, 1), dtype=torch.float64)
    for name in (layer, *reader.layers):
        unrolled = unroll_plainly(reader, name, until)
        per_step = unrolled.weight if bool(unrolled.weight.any()) else unrolled.bias
        if bool(per_step.any()):
            numbers[: len(per_step)] = per_step
            break
    return numbers


# -- the estimate -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JointValue(Measure):
    """What a visit taught, times what the inverse makes of it; on the slots of the layer that answers."""

    solved: Float[Tensor, "inputs examples"]
    taught: VisitNumbers

    @property
    def width(self) -> int:
        return len(self.solved)

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues:
        dtype = reader.layer(layer).storage.compute_dtype
        solved = self.solved.to(dtype)

        def values(block: Block) -> Float[Tensor, "inputs rows"]:
            places, numbers = self.taught.of(block)
            return solved[:, places] * numbers.to(dtype)

        return values


class JointInfluence(LayerMeasured):
    """The joint estimate for some inputs: a number for each visit, on the slots of the layer that answers."""

    what = "influence"
    signed = True

    def __init__(
        self,
        view: View,
        recorded: LayerReader,
        solved: Float[Tensor, "inputs examples"],
        joint: Joint,
        damping: float,
        networks: int,
    ) -> None:
        super().__init__(view, recorded, solved)
        self._solved, self._joint, self._damping, self._networks = solved, joint, damping, networks

    def __len__(self) -> int:
        return len(self._solved)

    def scaled_to(self, spread: Float[Tensor, "inputs"]) -> JointInfluence:
        """The same, scaled so that each input's values spread over the training examples as another estimate's do."""
        own = (self._solved * self._joint.visits.totals).std(dim=1, correction=0)
        return self._with(_solved=self._solved * torch.where(own > 0, spread / own, 0.0)[:, None])

    def in_unit(self, curvature: float) -> JointInfluence:
        """The same in the number's own unit, under a squared loss: with the mean error in the place of R.

        Args:
            curvature: the second derivative of an example's loss with respect to the output.
        """
        visits = replace(self._joint.visits, taught=self._joint.visits.wrong)
        return self._with(_joint=replace(self._joint, visits=visits), _solved=self._solved / -curvature)

    @property
    def layers(self) -> dict[str, LayerGradients]:
        """The layers that the estimate takes into account, with the gradients of the examples."""
        return self._joint.layers

    @property
    def solved(self) -> Float[Tensor, "inputs examples"]:
        """What the inverse makes of `A F`."""
        return self._solved

    @property
    def loss(self) -> str:
        """What the estimate takes the loss for: one of `LOSSES`."""
        return self._joint.visits.loss

    @property
    def note(self) -> str:
        gram = self._joint.gram
        few = None if gram is None else gram.landmarks
        inverse = "" if few is None else f", from {few:,} landmarks"
        loss = "a squared loss" if self.loss == "squared" else "a cross-entropy"
        alone = " of the trained network alone" if self._networks == 1 else " over training"
        how = f"by the curvature of each layer,{alone}," if gram is None else "joint over layers,"
        return (
            f"an estimate of what leaving examples out would take away, {how} "
            f"as for {loss}{' at each position' if gram is None else ''} (λ = {self._damping:g}{inverse})"
        )

    def measure(self, some: slice) -> Measure:
        return JointValue(self._solved[some], self._joint.visits.taught)

    def whole(self) -> JointInfluence:
        """Added up over all inputs."""
        return self._with(_solved=self._solved.sum(dim=0, keepdim=True))


@dataclass(frozen=True, eq=False)
class Joint:
    """All that the joint estimate needs to know of a memory; kept with the layer that answers."""

    view: View
    answering: str
    visits: JointVisits
    layers: dict[str, LayerGradients]
    gram: Gram | None
    """None where an example holds many answers: the curvature is that of each layer's weights."""

    def influence(
        self, view: View, networks: Sequence[Mapping[str, LayerQueries]], *, damping: float | None
    ) -> JointInfluence:
        """The estimate for some inputs, about the slots of a view.

        Args:
            view: the slots.
            networks: each layer's gradient of the number of interest, of one or more networks; their mean counts.
            damping: λ; None for the default.
        """
        damping = damping if damping is not None else DAMPING if self.gram is not None else kronecker.DAMPING
        if not damping > 0:
            raise SettingError(f"damping={damping}: give a number above 0; the larger, the more like contributions.")
        inputs = next(iter(networks[0].values())).inputs
        products = torch.zeros(len(self.visits.gradient.examples), inputs, dtype=torch.float64)
        for name, layer in self.layers.items():
            asked = [network[name] for network in networks]
            if self.gram is None:
                visits = self.visits.gradient
                asked = [kronecker.through_curvature(self.view, name, own, visits, damping) for own in asked]
            layer.add_products(kronecker.mean_queries(asked), products)
        solved = products if self.gram is None else self.gram.solve(products, damping)
        answering = view.reader.layer(self.answering)
        return JointInfluence(view, answering, solved.T.contiguous(), self, damping, len(networks))


def find_joint(
    view: View,
    layers: Sequence[str],
    answering: str,
    loss: str | None,
    *,
    balance: bool = True,
    landmarks: int | None = None,
    most: float = MOST,
) -> Joint:
    """Passes over the memory for `A Aᵀ`; the last result is kept with the layer that answers."""
    if loss is not None and loss not in LOSSES:
        raise SettingError(f'loss="{loss}": there are {", ".join(LOSSES)}.')

    def find() -> Joint:
        reason = unsupported_joint(view.reader)
        if reason is not None:
            raise UnsupportedError(f"There is no joint estimate from {view.reader.address}: {reason}.")
        visits = find_visits(view, answering, loss)
        of_weights = visits.loss == "tokens"
        gradients = {
            name: LayerGradients(view, view.reader.layer(name), visits.gradient, by_keys=not of_weights)
            for name in layers
        }
        cost = sum(layer.cost_of_sums if of_weights else layer.cost for layer in gradients.values())
        if cost > most:
            raise TooLargeError(
                f"The joint estimate would take {cost:.0e} multiplications. "
                'Ask through some layers (layers=…), or with rule="whitened".'
            )
        examples, parts = len(visits.gradient.examples), list(gradients.values())
        gram = None if of_weights else Gram(parts, examples, balance=balance, landmarks=landmarks)
        return Joint(view, answering, visits, gradients, gram)

    key = view.until, tuple(layers), loss, balance, landmarks
    return view.reader.layer(answering).last("joint", key, find)


def unsupported_joint(reader: MemoryReader) -> str | None:
    """Why there is no joint estimate; None if there is."""
    if "example" not in reader.manifest.columns:
        return "slots belong to no example"
    if reader.manifest.sample is not None or reader.manifest.fold is not None:
        return "the estimate needs the key and the error of every visit"
    return None


def joint_layers(reader: MemoryReader, layers: Sequence[str]) -> list[str]:
    """Those of some layers whose gradients can be held: not embeddings of many tokens."""
    entries = {name: reader.layer(name).entry for name in layers}
    return [name for name, entry in entries.items() if len(entry.moments_shape) > 1 or entry.in_features <= TOKENS]


def answering_layer(reader: MemoryReader, outputs: Sequence[str]) -> str:
    """The layer whose errors tell how wrong the network was: one that gives the output, or the last one."""
    return [*reader.layers, *(name for name in reader.layers if name in outputs)][-1]
