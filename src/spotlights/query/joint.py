"""The joint estimate of influence: all layers together, in the space of examples.

For a visit v of example i let `G_v = Σ_rows δ ⊗ [k; 1]` be the gradient of the example's own loss, over all layers, and
`e_v` the error of the layer that answers. An example stands for one direction in the space of weights,
`A_i = mean over visits of G_v / ρ_v`. Under a squared loss `ρ_v = ±|e_v|`, and A_i is the gradient of the answer
itself; under a cross-entropy `ρ_v = |e_v|^½`. Training moved the weights along `Σ_i R_i A_i`, with `R_i = Σ_visits c_v ρ_v`.
The estimate for a number with gradient F is

    score_i = R_i · [(A Aᵀ + λ·mean(diag A Aᵀ)·I)⁻¹ A F]_i

Without the inverse this is the plain contribution, up to the mean over visits. The inverse divides out what other
examples would have taught as well: Gauss-Newton, with a matrix of examples instead of one of weights. `A Aᵀ` is a sum
over layers and over blocks of their output units, so A is never held as a whole. Where keys are stored once, a layer
needs no more than `(errors·errorsᵀ) ∘ (keys·keysᵀ)`. Beyond `EXACT` examples the inverse is that of Nyström's
approximation from `LANDMARKS` examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import SettingError, TooLargeError, UnsupportedError
from spotlights.memory.blocks import Block, Everything, OneOf, Selection, as_of
from spotlights.memory.format.columns import MISSING_INT
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.query.coefficients import unroll_plainly
from spotlights.query.columns import Grouping
from spotlights.query.contraction import DirectedQueries
from spotlights.query.engine import View
from spotlights.query.measured import LayerMeasured
from spotlights.query.plan import BlockValues, Measure
from spotlights.query.reducers import Reducer
from spotlights.query.suspects import loss_scale
from spotlights.sparse_rows import dense

LOSSES = ("classes", "squared")
DAMPING = 1.0
"""λ, as fixed before the settings of docs/truth.md were run."""
EXACT, LANDMARKS = 10_000, 2_000
"""Up to so many examples the inverse is exact; beyond, it is approximated from so many of them."""
_BYTES = 256 << 20
"""What the gradients of all examples may take at once."""
_CHUNK_BYTES = 64 << 20
MOST = 1e15
"""Multiplications: more would take hours."""
TOKENS = 4096
"""Embeddings of more tokens are left out: their gradients have a row for each."""
_SIGNED = 64
"""Errors of up to so many outputs are kept to tell their sign."""


@dataclass(frozen=True, eq=False)
class VisitNumbers:
    """A number for each visit of an example, found by the columns of a slot. Plain data."""

    examples: Int64[Tensor, "examples"]
    """The values of the column, sorted."""
    keys: Int64[Tensor, "visits"]
    """Of each visit the place of its example times `steps` plus its step, sorted."""
    steps: int
    numbers: Float[Tensor, "visits"]

    def of(self, block: Block) -> tuple[Int64[Tensor, "rows"], Float[Tensor, "rows"]]:
        """The place of each slot's example, and its visit's number; 0 for slots of no such visit."""
        column = block.column("example")
        places = torch.searchsorted(self.examples, column).clamp_(max=len(self.examples) - 1)
        wanted = places * self.steps + block.column("step")
        found = torch.searchsorted(self.keys, wanted).clamp_(max=len(self.keys) - 1)
        known = (self.examples[places] == column) & (self.keys[found] == wanted)
        return places, torch.where(known, self.numbers[found], 0.0)


# -- visits: how wrong the network was at each ----------------------------------------------------


@dataclass(eq=False)
class VisitErrorsReducer(Reducer):
    """The errors of each visit, added up over its rows: their squares, and the errors themselves where they are few."""

    adds = ("total", "size", "found")
    out_features: int
    per_step: Float[Tensor, "steps"]
    """What to multiply errors by."""

    def start(self) -> None:
        self.total, self.size = 0.0, 0.0
        """Σ|Σ_j e_j| and Σ|e_j|: next to nothing of the first is left where errors are those of probabilities."""
        self.found: list[tuple[Tensor, ...]] = []
        """Examples, steps, squares, sums and numbers of rows."""

    def update(self, block: Block, values: Any) -> None:
        examples, steps = block.column("example"), block.column("step")
        known = examples != MISSING_INT
        squares = torch.zeros(len(block), dtype=torch.float64)
        sums = torch.zeros(len(block), self.out_features if self.out_features <= _SIGNED else 0, dtype=torch.float64)
        for errors in block.errors():
            scale = self.per_step[steps[errors.place]]
            rows = dense(errors.rows).double() * (scale if errors.scale is None else scale * errors.scale)[:, None]
            self.total += float(rows.sum(dim=1).abs().sum())
            self.size += float(rows.abs().sum())
            squares[errors.place] = rows.square().sum(dim=1)
            if sums.shape[1]:
                sums[errors.place] = rows
        pairs = torch.stack([examples[known], steps[known].long()], dim=1)
        visits, owner = torch.unique(pairs, dim=0, return_inverse=True)
        none = torch.zeros(len(visits), dtype=torch.float64)
        self.found.append(
            (
                visits,
                none.index_add(0, owner, squares[known]),
                none.new_zeros(len(visits), sums.shape[1]).index_add(0, owner, sums[known]),
                none.index_add(0, owner, torch.ones_like(squares[known])),
            )
        )

    def result(self) -> tuple[Tensor, ...]:
        """The same for each visit once, sorted by example and step."""
        pairs, *amounts = (torch.cat(parts) for parts in zip(*self.found, strict=True))
        visits, owner = torch.unique(pairs, dim=0, return_inverse=True)
        return visits, *(each.new_zeros(len(visits), *each.shape[1:]).index_add(0, owner, each) for each in amounts)


@dataclass(frozen=True, eq=False)
class Visits:
    """What the joint estimate has to know of each visit."""

    loss: str
    gradient: VisitNumbers
    """What multiplies δ⊗k of a slot in A."""
    taught: VisitNumbers
    """What a visit adds to R, divided by its rows in the layer that answers."""


def find_visits(view: View, layer: str, loss: str | None) -> Visits:
    """Passes once over the errors of the layer that answers."""
    reader, recorded = view.reader, view.reader.layer(layer)
    steps = max(reader.steps, 1)
    reducer = VisitErrorsReducer(recorded.entry.out_features, loss_scale(reader.log(layer), steps))
    filled = view.reduce(layer, reducer, selection=_own_slots(reader, recorded, view.until))
    if not filled.found:
        raise SettingError(f'No slot of "{layer}" belongs to an example: there is nothing to estimate from.')
    visits, squares, sums, rows = filled.result()
    if loss is None:
        of_classes = recorded.entry.out_features > 1 and filled.total <= 1e-2 * filled.size
        loss = "classes" if of_classes else "squared"
    examples, places = torch.unique(visits[:, 0], return_inverse=True)
    at = visits[:, 1]
    batch = torch.bincount(at, minlength=steps).double()[at]  # errors are those of a mean over the batch
    sizes = squares.sqrt() * batch
    if loss == "classes":
        rho = sizes.sqrt()
    else:
        mean = sums.new_zeros(len(examples), sums.shape[1]).index_add(0, places, sums)
        along = (sums * mean[places]).sum(dim=1)
        rho = torch.where(along < 0, -sizes, sizes)
    usable = rho.abs() > 1e-6 * rho.square().mean().sqrt()
    seen = torch.zeros(len(examples), dtype=torch.float64).index_add(0, places, usable.double()).clamp_min(1.0)
    scale = loss_scale(reader.log(layer), steps)[at] * batch
    weight = torch.where(usable, scale / torch.where(usable, rho, 1.0) / seen[places], 0.0)
    taught = _step_numbers(reader, layer, view.until)[at] / scale * rho / rows
    keys = places * steps + at
    return Visits(
        loss,
        VisitNumbers(examples, keys, steps, weight),
        VisitNumbers(examples, keys, steps, torch.where(scale > 0, taught, 0.0)),
    )


def _step_numbers(reader: MemoryReader, layer: str, until: int) -> Float[Tensor, "steps"]:
    """What multiplied the gradient of each step: of the layer that answers, or of another one if that was frozen."""
    numbers = torch.zeros(max(reader.steps, 1), dtype=torch.float64)
    for name in (layer, *reader.layers):
        unrolled = unroll_plainly(reader, name, until)
        found = unrolled.weight if bool(unrolled.weight.any()) else unrolled.bias
        if bool(found.any()):
            numbers[: len(found)] = found
            break
    return numbers


def _own_slots(reader: MemoryReader, recorded: LayerReader, until: int) -> Selection:
    """All slots of a layer up to a step, without those of an embedding that shares its weight."""
    selection = as_of(reader, Everything(), until)
    if recorded.entry.turned:
        strings = reader.manifest.columns["module"].strings
        own = tuple(strings.index(path) for path in recorded.entry.modules if path in strings)
        selection = selection & OneOf("module", own, "the layer itself")
    return selection


# -- the examples' gradients, layer by layer --------------------------------------------------------


@dataclass(eq=False)
class ExampleGradientsReducer(Reducer):
    """`A` of one layer for some of its output units: `Σ w δ⊗[k; 1]` over the slots of each example."""

    adds = ("sums",)
    visits: VisitNumbers
    units: slice
    width: int
    """Numbers in a key, with the 1 of a bias."""
    bias: bool
    dtype: torch.dtype

    def start(self) -> None:
        units = self.units.stop - self.units.start
        self.sums = torch.zeros(len(self.visits.examples), units, self.width, dtype=self.dtype)

    def update(self, block: Block, values: Any) -> None:
        places, numbers = self.visits.of(block)
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            scale = numbers[errors.place] if errors.scale is None else numbers[errors.place] * errors.scale
            rows, owners = dense(keys.rows).to(self.dtype), places[errors.place]
            if keys.scale is not None:
                rows = rows * keys.scale[:, None].to(self.dtype)
            weighted = dense(errors.rows)[:, self.units].to(self.dtype) * scale[:, None].to(self.dtype)
            used = (scale != 0).nonzero().flatten()
            order = used[owners[used].argsort(stable=True)]
            self._add(owners[order], weighted[order], _with_one(rows[order], bias=self.bias))

    def _add(self, owners: Tensor, errors: Tensor, keys: Tensor) -> None:
        """Rows sorted by their examples: those of an example side by side, then one product for each example."""
        examples, counts = owners.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        size = max(1, _CHUNK_BYTES // (8 * max(errors.shape[1] * self.width, 1)))
        for first in range(0, len(examples), size):
            some = slice(first, first + size)
            most = int(counts[some].max())
            place = torch.arange(most)
            inside = place < counts[some, None]
            rows = torch.where(inside, starts[some, None] + place, 0)
            left = torch.where(inside[..., None], errors[rows], 0.0)
            self.sums.index_add_(0, examples[some], left.transpose(1, 2) @ keys[rows])


def _with_one(keys: Float[Tensor, "rows features"], *, bias: bool) -> Tensor:
    return torch.cat([keys, keys.new_ones(len(keys), 1)], dim=1) if bias else keys


@dataclass(eq=False)
class KeyPairsReducer(Reducer):
    """Which examples came with which of the keys that are stored once."""

    visits: VisitNumbers
    distinct_keys: int

    def start(self) -> None:
        self.pairs = torch.zeros(0, dtype=torch.int64)

    def update(self, block: Block, values: Any) -> None:
        places, numbers = self.visits.of(block)
        self._take((places * self.distinct_keys + block.key_numbers())[numbers != 0])

    def merge(self, other: Any) -> None:
        self._take(other.pairs)

    def _take(self, pairs: Int64[Tensor, "_"]) -> None:
        self.pairs = torch.cat([self.pairs, pairs]).unique()


@dataclass(eq=False)
class KeyErrorsReducer(Reducer):
    """`Σ w δ` over the slots of each example with the same key."""

    adds = ("sums",)
    visits: VisitNumbers
    distinct_keys: int
    pairs: Int64[Tensor, "pairs"]
    out_features: int
    dtype: torch.dtype

    def start(self) -> None:
        self.sums = torch.zeros(len(self.pairs), self.out_features, dtype=self.dtype)

    def update(self, block: Block, values: Any) -> None:
        places, numbers = self.visits.of(block)
        at = torch.searchsorted(self.pairs, places * self.distinct_keys + block.key_numbers())
        at.clamp_(max=len(self.pairs) - 1)
        for errors in block.errors():
            scale = numbers[errors.place] if errors.scale is None else numbers[errors.place] * errors.scale
            weighted = dense(errors.rows).to(self.dtype) * scale[:, None].to(self.dtype)
            self.sums.index_add_(0, at[errors.place], weighted)


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """The gradient F of each input's number of interest with respect to a layer's weights: `Σ_rows g ⊗ [q; 1]`."""

    asked: DirectedQueries
    owners: Int64[Tensor, "queries"]
    inputs: int

    def gradient(self, units: slice, *, bias: bool) -> Float[Tensor, "inputs gradient"]:
        """F for some output units, flattened."""
        queries = _with_one(dense(self.asked.queries), bias=bias)
        directions = self.asked.directions[:, units].to(queries.dtype)
        made = queries.new_zeros(self.inputs, directions.shape[1], queries.shape[1])
        for some in torch.arange(len(queries)).split(max(1, _CHUNK_BYTES // (8 * max(made[:1].numel(), 1)))):
            made.index_add_(0, self.owners[some], directions[some, :, None] * queries[some, None])
        return made.flatten(1)


class LayerGradients:
    """A of one layer, in parts whose products add up; never as a whole."""

    def __init__(self, view: View, recorded: LayerReader, visits: VisitNumbers) -> None:
        self._view, self._recorded, self._visits = view, recorded, visits
        entry, self._dtype = recorded.entry, recorded.storage.compute_dtype
        self._all = as_of(view.reader, Everything(), view.until)
        self._bias = bool(set(entry.bias_names) & set(entry.trained))
        self._width = entry.in_features + self._bias
        self._pairs: Tensor | None = None
        """Examples with their keys, where keys are stored once and that is the shorter way."""
        examples = len(visits.examples)
        self.cost = examples * min(examples, EXACT) * entry.out_features * self._width
        """Multiplications."""
        if entry.indexed:
            pairs = self._reduce(KeyPairsReducer(visits, recorded.distinct_keys)).pairs
            cost = len(pairs) * min(len(pairs), EXACT) * (self._width + entry.out_features)
            if len(pairs) and cost < self.cost:
                self._pairs, self.cost = pairs, cost

    def _reduce(self, reducer: Any) -> Any:
        return self._view.reduce(self._recorded.name, reducer, selection=self._all)

    def _blocks(self) -> Iterator[tuple[slice, Float[Tensor, "examples gradient"]]]:
        """A for some output units after the other."""
        units = max(1, _BYTES // (len(self._visits.examples) * self._width * self._dtype.itemsize))
        for first in range(0, self._recorded.entry.out_features, units):
            some = slice(first, min(first + units, self._recorded.entry.out_features))
            reducer = ExampleGradientsReducer(self._visits, some, self._width, self._bias, self._dtype)
            yield some, self._reduce(reducer).sums.flatten(1)

    def _of_pairs(self, pairs: Tensor) -> tuple[Int64[Tensor, "pairs"], Tensor, Tensor]:
        """The example, the error and the key of each pair."""
        distinct = self._recorded.distinct_keys
        out_features = self._recorded.entry.out_features
        errors = self._reduce(KeyErrorsReducer(self._visits, distinct, pairs, out_features, self._dtype)).sums
        keys = dense(self._recorded.keys_numbered(pairs % distinct)).to(self._dtype)
        return pairs // distinct, errors, _with_one(keys, bias=self._bias)

    def add_gram(
        self,
        gram: Float[Tensor, "examples landmarks"],
        diagonal: Float[Tensor, "examples"],
        landmarks: Int64[Tensor, "landmarks"],
    ) -> None:
        """Adds the layer's part of `A Aᵀ`, of its columns for some examples, and of its diagonal."""
        if self._pairs is None:
            for _, flat in self._blocks():
                diagonal += flat.square().sum(dim=1)
                gram += flat @ flat[landmarks].T
            return
        owners, errors, keys = self._of_pairs(self._pairs)
        place = torch.full((len(self._visits.examples),), -1)
        place[landmarks] = torch.arange(len(landmarks))
        chosen = (place[owners] >= 0).nonzero().flatten()
        columns = place[owners[chosen]]
        for some in torch.arange(len(owners)).split(max(1, _CHUNK_BYTES // (8 * max(len(chosen), 1)))):
            products = (errors[some] @ errors[chosen].T) * (keys[some] @ keys[chosen].T)
            summed = products.new_zeros(len(some), len(landmarks)).index_add_(1, columns, products)
            gram.index_add_(0, owners[some], summed.to(gram.dtype))
        for apart in range(int(torch.bincount(owners).max())):  # two keys of one example lie side by side
            first, second = slice(0, len(owners) - apart), slice(apart, None)
            both = (errors[first] * errors[second]).sum(dim=1) * (keys[first] * keys[second]).sum(dim=1)
            same = (owners[first] == owners[second]) * (1.0 if apart == 0 else 2.0)
            diagonal.index_add_(0, owners[first], both.double() * same)

    def add_products(self, asked: LayerQueries, products: Float[Tensor, "examples inputs"]) -> None:
        """Adds the layer's part of `A F`."""
        if self._pairs is None:
            for units, flat in self._blocks():
                products += flat @ asked.gradient(units, bias=self._bias).to(flat.dtype).T
            return
        owners, errors, keys = self._of_pairs(self._pairs)
        for some in torch.arange(len(asked.owners)).split(max(1, _CHUNK_BYTES // (8 * len(owners)))):
            queries = _with_one(dense(asked.asked.queries[some]).to(self._dtype), bias=self._bias)
            directions = asked.asked.directions[some].to(self._dtype)
            both = ((errors @ directions.T) * (keys @ queries.T)).double()
            summed = both.new_zeros(len(both), products.shape[1]).index_add_(1, asked.owners[some], both)
            products.index_add_(0, owners, summed)


# -- the inverse ------------------------------------------------------------------------------------


class Gram:
    """`A Aᵀ`, or its columns for some landmarks, and what its inverse makes of `A F`."""

    def __init__(self, layers: Sequence[LayerGradients], examples: int, *, landmarks: int | None = None) -> None:
        chosen = torch.arange(examples)
        self.landmarks = (LANDMARKS if examples > EXACT else None) if landmarks is None else landmarks
        """How many examples the inverse is approximated from; None where it is exact."""
        if self.landmarks is not None:
            self.landmarks = min(self.landmarks, examples)
            chosen = (
                torch.randperm(examples, generator=torch.Generator().manual_seed(0))[: self.landmarks].sort().values
            )
        self._chosen = chosen
        self._gram = torch.zeros(examples, len(chosen), dtype=torch.float64)
        self._diagonal = torch.zeros(examples, dtype=torch.float64)
        for layer in layers:
            layer.add_gram(self._gram, self._diagonal, chosen)

    def solve(self, products: Float[Tensor, "examples inputs"], damping: float) -> Float[Tensor, "examples inputs"]:
        strength = damping * self._diagonal.mean()
        if not strength > 0:
            return products
        if self.landmarks is None:
            damped = self._gram.clone()
            damped.diagonal().add_(strength)
            return torch.cholesky_solve(products, torch.linalg.cholesky(damped))
        # With K ≈ C W⁻¹ Cᵀ, and the diagonal as it is: (K + D)⁻¹ b = D⁻¹ b − D⁻¹ C (W + Cᵀ D⁻¹ C)⁻¹ Cᵀ D⁻¹ b.
        core = self._gram[self._chosen]
        core.diagonal().add_(1e-8 * self._diagonal.mean())
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(core), self._gram.T, upper=False)
        rest = (self._diagonal - half.square().sum(dim=0)).clamp_min(0.0) + strength
        inner = half / rest @ half.T
        inner.diagonal().add_(1.0)
        scaled = products / rest[:, None]
        solved = torch.cholesky_solve(half @ scaled, torch.linalg.cholesky(inner))
        return scaled - (half.T @ solved) / rest[:, None]


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
        self, view: View, recorded: LayerReader, solved: Float[Tensor, "inputs examples"], joint: Joint, damping: float
    ) -> None:
        super().__init__(view, recorded, solved)
        self._solved, self._joint, self._damping = solved, joint, damping

    def __len__(self) -> int:
        return len(self._solved)

    @property
    def loss(self) -> str:
        """What the estimate takes the loss for: one of `LOSSES`."""
        return self._joint.visits.loss

    @property
    def note(self) -> str:
        few = self._joint.gram.landmarks
        inverse = "" if few is None else f", from {few:,} landmarks"
        loss = "a squared loss" if self.loss == "squared" else "a cross-entropy"
        return f"joint over layers, as for {loss} (λ = {self._damping:g}{inverse})"

    def measure(self, some: slice) -> Measure:
        return JointValue(self._solved[some], self._joint.visits.taught)

    def whole(self) -> JointInfluence:
        """Added up over all inputs."""
        return self._with(_solved=self._solved.sum(dim=0, keepdim=True))

    def totals_by_input(self, groups: Grouping, owners: Tensor, inputs: int) -> None:
        """None: asking slot by slot is quick."""


@dataclass(frozen=True, eq=False)
class Joint:
    """All that the joint estimate needs to know of a memory; kept with the layer that answers."""

    view: View
    answering: str
    visits: Visits
    layers: dict[str, LayerGradients]
    gram: Gram

    def influence(
        self, view: View, asked: dict[str, LayerQueries], *, inputs: int, damping: float | None
    ) -> JointInfluence:
        """The estimate for some inputs, about the slots of a view."""
        damping = DAMPING if damping is None else damping
        if not damping > 0:
            raise SettingError(f"damping={damping}: give a number above 0; the larger, the more like contributions.")
        products = torch.zeros(len(self.visits.gradient.examples), inputs, dtype=torch.float64)
        for name, layer in self.layers.items():
            layer.add_products(asked[name], products)
        solved = self.gram.solve(products, damping).T.contiguous()
        return JointInfluence(view, view.reader.layer(self.answering), solved, self, damping)


def find_joint(
    view: View, layers: Sequence[str], answering: str, loss: str | None, *, landmarks: int | None = None
) -> Joint:
    """Passes over the memory for `A Aᵀ`; the last result is kept with the layer that answers."""
    if loss is not None and loss not in LOSSES:
        raise SettingError(f'loss="{loss}": there are {", ".join(LOSSES)}.')
    known, key = view.reader.layer(answering).known, (view.until, tuple(layers), loss, landmarks)
    if known.get("joint", (None,))[0] != key:
        reason = unsupported_joint(view.reader)
        if reason is not None:
            raise UnsupportedError(f"There is no joint estimate from {view.reader.address}: {reason}.")
        visits = find_visits(view, answering, loss)
        gradients = {name: LayerGradients(view, view.reader.layer(name), visits.gradient) for name in layers}
        cost = sum(layer.cost for layer in gradients.values())
        if cost > MOST:
            raise TooLargeError(
                f"The joint estimate would take {cost:.0e} multiplications. "
                'Ask through some layers (layers=…), or with rule="whitened".'
            )
        gram = Gram(list(gradients.values()), len(visits.gradient.examples), landmarks=landmarks)
        known["joint"] = key, Joint(view, answering, visits, gradients, gram)
    return known["joint"][1]


def unsupported_joint(reader: MemoryReader) -> str | None:
    """Why there is no joint estimate; None if there is."""
    if "example" not in reader.manifest.columns:
        return "slots belong to no example"
    if reader.manifest.sample is not None:
        return "a sample of the slots is not enough"
    return None


def joint_layers(reader: MemoryReader, layers: Sequence[str]) -> list[str]:
    """Those of some layers whose gradients can be held: not embeddings of many tokens."""
    entries = {name: reader.layer(name).entry for name in layers}
    return [name for name, entry in entries.items() if len(entry.moments_shape) > 1 or entry.in_features <= TOKENS]


def answering_layer(reader: MemoryReader, outputs: Sequence[str]) -> str:
    """The layer whose errors tell how wrong the network was: one that gives the output, or the last one."""
    return [*reader.layers, *(name for name in reader.layers if name in outputs)][-1]
