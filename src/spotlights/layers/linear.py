"""`nn.Linear`, with any leading shape, with or without bias; and Hugging Face's `Conv1D`, a linear layer too."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, computes_as


class LinearAdapter(LayerAdapter):
    kind = "linear"

    def handles(self, module: nn.Module) -> bool:
        return computes_as(module, nn.Linear)

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return inputs


class TransposedLinearAdapter(LinearAdapter):
    """Hugging Face's `Conv1D`: `x @ weight + bias`."""

    kind = "transposed-linear"
    transposed = True

    def handles(self, module: nn.Module) -> bool:
        # By name: a model that has such a layer brings its class along, and nobody else needs the package.
        cls = type(module)
        return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
