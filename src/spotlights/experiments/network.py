"""The paper's network: linear layers with biases, ReLU between them, PyTorch's own initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from spotlights.errors import SettingError


class MLP(nn.Module):
    """Linear layers `layers.0`, `layers.1`, … with ReLU between them. Images are flattened."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in pairwise(sizes))

    def forward(self, inputs: Float[Tensor, "batch *features"]) -> Float[Tensor, "batch classes"]:
        hidden = inputs.flatten(start_dim=1)
        for layer in self.layers[:-1]:
            hidden = layer(hidden).relu()
        return self.layers[-1](hidden)


def mlp(sizes: Sequence[int]) -> MLP:
    """A network of these sizes, from inputs to classes: `mlp((784, 800, 800, 10))` is the paper's."""
    if len(sizes) < 2:
        raise SettingError(f"sizes={tuple(sizes)}: give at least the inputs and the classes, such as (784, 10).")
    return MLP(sizes)
