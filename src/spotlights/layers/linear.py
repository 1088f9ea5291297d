"""`nn.Linear` with any leading shape, Hugging Face's `Conv1D`, which is a linear layer, and `nn.Bilinear`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, class_of


class LinearAdapter(LayerAdapter):
    kind = "linear"
    modules = (nn.Linear,)
    used_outside = True


class TransposedLinearAdapter(LayerAdapter):
    """Hugging Face's `Conv1D`: `x @ weight + bias`."""

    kind = "transposed-linear"
    transposed = True

    def handles(self, module: nn.Module) -> bool:
        # By name, so that the package need not be installed.
        cls = class_of(module)
        return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


class BilinearAdapter(LayerAdapter):
    """A linear map of all products of an entry of one input and an entry of the other."""

    kind = "bilinear"
    modules = (nn.Bilinear,)

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.flatten(1)

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shaped[Tensor, "..."]:
        first, second = (*args, *(kwargs[name] for name in ("input1", "input2") if name in kwargs))
        with torch.no_grad():
            products = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
        return products.requires_grad_(first.requires_grad or second.requires_grad)
