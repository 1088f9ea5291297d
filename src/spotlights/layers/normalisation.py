"""The scale and shift of `nn.LayerNorm`, `nn.RMSNorm`, `nn.BatchNorm1d/2d/3d` and `nn.GroupNorm`.

They multiply each feature of the normalised input by a number and add another: a linear map with a diagonal matrix. The
key is the normalised input. The normalisation itself has no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter


class NormAdapter(LayerAdapter):
    """A scale for each feature of a normalised input.

    The features are the last dimensions, as many as the weight has, or (`channels`) the second dimension: each position
    of an input is then a row.
    """

    def __init__(
        self, kind: str, *modules: type[nn.Module], channels: bool, normalise: Callable[[Any, Tensor], Tensor]
    ) -> None:
        self.kind, self.modules = kind, modules  # type: ignore[misc]
        self._channels = channels
        self._normalise = normalise

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.reshape(-1, 1)

    def channel_groups(self, module: nn.Module) -> int:
        return self.weight(module).numel()

    def lead(self, module: nn.Module, inputs: Shaped[Tensor, "..."], output: Shaped[Tensor, "..."]) -> Sequence[int]:
        return self.errors(module, output).shape[:-1]

    def axes(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> tuple[int, ...] | None:
        return (0,) if self._channels else None

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return self.errors(module, self._normalise(module, inputs))

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.movedim(1, -1) if self._channels else gradient.flatten(-self.weight(module).ndim)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.movedim(-1, 1) if self._channels else rows.unflatten(-1, self.weight(module).shape)


def _layer_norm(module: nn.LayerNorm, inputs: Tensor) -> Tensor:
    return F.layer_norm(inputs, list(module.normalized_shape), eps=module.eps)


def _rms_norm(module: nn.RMSNorm, inputs: Tensor) -> Tensor:
    return F.rms_norm(inputs, list(module.normalized_shape), eps=module.eps)


def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, inputs: Tensor) -> Tensor:
    if module.training or module.running_mean is None:
        return F.batch_norm(inputs, None, None, training=True, eps=module.eps)
    return F.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)


def _group_norm(module: nn.GroupNorm, inputs: Tensor) -> Tensor:
    return F.group_norm(inputs, module.num_groups, eps=module.eps)


NORMS = (
    NormAdapter("layer-norm", nn.LayerNorm, channels=False, normalise=_layer_norm),
    NormAdapter("rms-norm", nn.RMSNorm, channels=False, normalise=_rms_norm),
    NormAdapter("batch-norm", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, channels=True, normalise=_batch_norm),
    NormAdapter("group-norm", nn.GroupNorm, channels=True, normalise=_group_norm),
)
