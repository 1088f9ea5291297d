"""The projections of `nn.MultiheadAttention`, and so of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`.

One matrix (`in_proj`) projects queries, keys and values, in that order, if they have the same size; otherwise there are
three. If they are different inputs, each input has its own slots, with zero errors in the rows of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from spotlights.layers.adapter import WeightPart, own_parameters
from spotlights.layers.functional import FunctionalAdapter


class AttentionAdapter(FunctionalAdapter):
    kind = "attention"
    axes = (0, 1)

    def __init__(self) -> None:
        self._batches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """The number of sequences in the running call."""

    def handles(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
            return False
        return not own_parameters(module).keys().isdisjoint({"in_proj_weight", "q_proj_weight"})  # else it is computed

    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, WeightPart | None]]:
        assert isinstance(module, nn.MultiheadAttention)
        bias, width = module.in_proj_bias, module.embed_dim
        weights: dict[str, tuple[nn.Parameter, WeightPart | None]] = {}
        in_proj = own_parameters(module).get("in_proj_weight")
        if in_proj is not None:
            weights["in_proj"] = in_proj, None if bias is None else WeightPart(bias)
        else:
            for at, name in enumerate(("q_proj", "k_proj", "v_proj")):
                rows = slice(at * width, (at + 1) * width)
                weight = module.get_parameter(f"{name}_weight")
                weights[name] = weight, None if bias is None else WeightPart(bias, rows)
        out_bias: nn.Parameter | None = module.out_proj.bias
        out_weight = module.out_proj.get_parameter("weight")
        weights["out_proj"] = out_weight, None if out_bias is None else WeightPart(out_bias)
        return weights

    def arrange(self, module: nn.Module, name: str, input: Tensor) -> Callable[[Tensor], Tensor]:
        if name != "out_proj":
            self._batches[module] = input.shape[1]
            return lambda tensor: tensor.transpose(0, 1)
        batch = self._batches[module]  # the rows are (positions · sequences), position by position
        return lambda tensor: tensor.unflatten(0, (-1, batch)).transpose(0, 1)
