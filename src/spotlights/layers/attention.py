"""`nn.MultiheadAttention`: its projections, and with them those of `nn.TransformerEncoderLayer` and `DecoderLayer`.

Queries, keys and values are projected by one matrix (`in_proj`, in that order) where they have the same size, else by
three. Where they are different inputs, each use has its slots, whose errors are zero in the rows of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from spotlights.layers.adapter import Part
from spotlights.layers.functional import FunctionalAdapter, FunctionalCall


class AttentionAdapter(FunctionalAdapter):
    kind = "attention"

    def __init__(self) -> None:
        self._batches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """How many sequences the call that is under way has; torch puts them second."""

    def handles(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward

    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, Part | None]]:
        assert isinstance(module, nn.MultiheadAttention)
        packed, width = module.in_proj_bias, module.embed_dim
        found: dict[str, tuple[nn.Parameter, Part | None]] = {}
        if module._qkv_same_embed_dim:
            found["in_proj"] = module.get_parameter("in_proj_weight"), None if packed is None else Part(packed)
        else:
            for at, name in enumerate(("q_proj", "k_proj", "v_proj")):
                rows = slice(at * width, (at + 1) * width)
                weight = module.get_parameter(f"{name}_weight")
                found[name] = weight, None if packed is None else Part(packed, rows)
        bias: nn.Parameter | None = module.out_proj.bias
        found["out_proj"] = module.out_proj.get_parameter("weight"), None if bias is None else Part(bias)
        return found

    def use(self, module: nn.Module, name: str, input: Tensor, rows: slice) -> FunctionalCall:
        weight, _ = self.weights(module)[name]
        if name != "out_proj":
            self._batches[module] = input.shape[1]
            return FunctionalCall(name, weight.shape[0], input, rows, lambda t: t.transpose(0, 1))
        batch = self._batches[module]  # here all positions are in a row, the sequences' first ones first

        def arrange(t: Tensor) -> Tensor:
            return t.unflatten(0, (-1, batch)).transpose(0, 1)

        return FunctionalCall(name, weight.shape[0], input, rows, arrange)
