"""The projections of `nn.MultiheadAttention`, and so of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`.

One matrix (`in_proj`) projects queries, keys and values, in that order, if they have the same size; otherwise there are
three. If they are different inputs, each input has its own slots, with zero errors in the rows of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from spotlights.layers.adapter import LinearMap, computes_as, own_parameters
from spotlights.layers.functional import FunctionalAdapter


class AttentionAdapter(FunctionalAdapter):
    kind = "attention"
    axes = (0, 1)

    def __init__(self) -> None:
        self._batches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """The number of sequences in the running call."""

    def handles(self, module: nn.Module) -> bool:
        computed = own_parameters(module).keys().isdisjoint({"in_proj_weight", "q_proj_weight"})
        return computes_as(module, nn.MultiheadAttention) and not computed

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        assert isinstance(module, nn.MultiheadAttention)
        own, bias, width = own_parameters(module), module.in_proj_bias, module.embed_dim
        out_proj = LinearMap.of(module.out_proj.get_parameter("weight"), module.out_proj.bias)
        if "in_proj_weight" in own:
            return {"in_proj": LinearMap.of(own["in_proj_weight"], bias), "out_proj": out_proj}
        projections = {
            name: LinearMap.of(own[f"{name}_weight"], bias, slice(at * width, (at + 1) * width))
            for at, name in enumerate(("q_proj", "k_proj", "v_proj"))
        }
        return {**projections, "out_proj": out_proj}

    def arrange(self, module: nn.Module, name: str, input: Tensor) -> Callable[[Tensor], Tensor]:
        if name != "out_proj":
            self._batches[module] = input.shape[1]
            return lambda tensor: tensor.transpose(0, 1)
        batch = self._batches[module]  # the rows are (positions · sequences), position by position
        return lambda tensor: tensor.unflatten(0, (-1, batch)).transpose(0, 1)
