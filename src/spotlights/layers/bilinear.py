"""`nn.Bilinear`: linear in the products of the entries of its two inputs, which are its key."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, computes_as


class BilinearAdapter(LayerAdapter):
    kind = "bilinear"

    def handles(self, module: nn.Module) -> bool:
        return computes_as(module, nn.Bilinear)

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.flatten(1)

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shaped[Tensor, "..."]:
        first, second = (*args, *(kwargs[name] for name in ("input1", "input2") if name in kwargs))
        with torch.no_grad():
            products = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
        return products.requires_grad_(first.requires_grad or second.requires_grad)

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return inputs
