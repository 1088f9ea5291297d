"""What each example did to the parameters that no adapter knows, in the history of a recipe.

Such a parameter is recorded by its gradient: one slot of the step, which belongs to no example. Where the recipe's loss
gives one number for each example, the derivative of that number along the direction in which the parameter's gradient
acts on a number of interest is the example's share: `γ_s · d/dε loss_i(W_s + ε A_s)`. It is found by differentiating
`Σ v_i loss_i` twice, by the parameters and by v. Shares are put to the first slot of the example in that step, in a
layer that has slots of examples; what is left with the parameter's own slot belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spotlights.dual_form import Scaled
from spotlights.layers.parameter import ParameterAdapter
from spotlights.memory.blocks import Block, Everything, StepBlocks
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.query.contraction import gradient_of
from spotlights.query.replica import Place, RecordedParameter
from spotlights.query.trajectory import Move

Factors = Sequence[Sequence[Scaled | None]]
"""Of each number, what multiplies each parameter's Σ δ⊗k."""


class ExampleShares:
    """The shares of examples in what unknown parameters did, step by step."""

    def __init__(self, reader: MemoryReader, places: Sequence[Place]) -> None:
        self._reader, self._places = reader, places
        layers = reader.manifest.layers
        self._unknown = [i for i, (layer, _) in enumerate(places) if layers[layer].kind == ParameterAdapter.kind]
        self._blocks = {places[i][0]: StepBlocks(reader.layer(places[i][0]), Everything()) for i in self._unknown}
        known = [layer for name, layer in reader.layers.items() if layers[name].kind != ParameterAdapter.kind]
        self.carrier: LayerReader | None = None
        """The layer at whose slots the shares are; None if there are no shares."""
        if self._unknown and known and reader.passes is not None and "example" in reader.manifest.columns:
            self.carrier = min(known, key=lambda layer: layer.slots)
            self._slots = StepBlocks(self.carrier, Everything())
        self.reason = ""
        """Why there are none, although there could be."""

    def of(self, move: Move, factors: Factors) -> tuple[Block, Float[Tensor, "numbers rows"], dict[str, Tensor]] | None:
        """The slots of a step with their shares, and the sum of the shares in each parameter's layer."""
        if self.carrier is None:
            return None
        block = self._slots.block(move.step, move.step + 1)
        first: dict[int, int] = {}
        for row, example in enumerate(block.column("example").tolist() if len(block) else []):
            first.setdefault(example, row)
        shares = torch.zeros(len(factors), len(block), dtype=torch.float64)
        sums = {layer: torch.zeros(len(factors), dtype=torch.float64) for layer in self._blocks}
        try:
            for examples, place, derivatives in self._derivatives(move, factors):
                rows = [first.get(example, -1) for example in examples.tolist()]
                seen = [i for i, row in enumerate(rows) if row >= 0]
                shares.index_add_(1, torch.tensor([rows[i] for i in seen], dtype=torch.int64), derivatives[:, seen])
                sums[self._places[place][0]] += derivatives[:, seen].sum(dim=1)
        except _OneLossForAllError:
            self.carrier, self.reason = None, "recompute= gives one loss for all examples"
        except RuntimeError as error:  # an operation that cannot be differentiated twice
            self.carrier, self.reason = None, f"the loss cannot be differentiated twice ({error})"
        return None if self.carrier is None else (block, shares, sums)

    def _derivatives(
        self, move: Move, factors: Factors
    ) -> Iterator[tuple[Int64[np.ndarray, "examples"], int, Float[Tensor, "numbers examples"]]]:
        """Of each batch and each unknown parameter, each example's share in every number."""
        assert self._reader.passes is not None
        layers = self._reader.manifest.layers
        used = [i for i in self._unknown if any(own[i] is not None for own in factors)]
        batches, raw = [], {i: torch.zeros(()) for i in used}
        with self._reader.passes(move.step) as (model, passes), sdpa_kernel(SDPBackend.MATH):
            own = [RecordedParameter(model, layers[layer], layer, name) for layer, name in self._places]
            for parameter, moved in zip(own, move.parameters, strict=True):
                parameter.set(moved.before)
            asked = [own[i].parameter for i in used]
            directions = {i: _stacked([f[i] for f in factors], p) for i, p in zip(used, asked, strict=True)}
            for examples, losses in passes:
                if losses.shape != (len(examples),):
                    raise _OneLossForAllError
                v = torch.full_like(losses, 1 / len(losses), requires_grad=True)
                gradients = torch.autograd.grad((v * losses).sum(), asked, create_graph=True, allow_unused=True)
                for i, gradient in zip(used, gradients, strict=True):
                    if gradient is not None:
                        raw[i] = raw[i] + gradient.detach()
                        (gradient,) = torch.autograd.grad(
                            gradient, v, directions[i], is_grads_batched=True, retain_graph=True
                        )
                        batches.append((examples, i, (gradient / len(losses)).double()))
        factor = {}
        for i in used:  # what clipping did to the gradient
            recorded = gradient_of(self._blocks[self._places[i][0]].block(move.step, move.step + 1))[0].reshape(-1)
            mine = raw[i].reshape(-1).to(recorded)
            factor[i] = float(mine @ recorded) / max(float(mine @ mine), torch.finfo(torch.float64).tiny)
        for examples, i, derivatives in batches:
            yield examples, i, derivatives * factor[i]


def _stacked(factors: Sequence[Scaled | None], like: Tensor) -> Float[Tensor, "numbers ..."]:
    """In the shape of the parameter."""
    return torch.stack([torch.zeros_like(like) if f is None else f.value.reshape(like.shape).to(like) for f in factors])


class _OneLossForAllError(Exception):
    """The loss has one number for a batch."""
