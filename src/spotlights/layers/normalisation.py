"""The affine parts of `nn.LayerNorm`, `nn.RMSNorm`, `nn.BatchNorm1d/2d/3d` and `nn.GroupNorm`.

They multiply each feature of the normalised input by a number and add another one: a linear map of the normalised
input that keeps all features apart, a diagonal matrix. What normalises has no parameters and stays what it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spotlights.layers.adapter import LayerAdapter, computes_as


class _NormAdapter(LayerAdapter):
    """A scale for each feature of a normalised input."""

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.reshape(-1, 1)

    def groups(self, module: nn.Module) -> int:
        return self.weight(module).numel()

    def lead(self, module: nn.Module, inputs: Shaped[Tensor, "..."], output: Shaped[Tensor, "..."]) -> Sequence[int]:
        return self.errors(module, output).shape[:-1]

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return self.errors(module, self.normalised(module, inputs))

    @abstractmethod
    def normalised(self, module: nn.Module, inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The output of the module without its scale and shift."""


class _OverFeatures(_NormAdapter):
    """Features are the last dimensions, as many as the weight has."""

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.flatten(-self.weight(module).ndim)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.unflatten(-1, self.weight(module).shape)


class LayerNormAdapter(_OverFeatures):
    kind = "layer-norm"

    def handles(self, module: nn.Module) -> bool:
        return computes_as(module, nn.LayerNorm)

    def normalised(self, module: nn.Module, inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        assert isinstance(module, nn.LayerNorm)
        return F.layer_norm(inputs, list(module.normalized_shape), eps=module.eps)


class RmsNormAdapter(_OverFeatures):
    kind = "rms-norm"

    def handles(self, module: nn.Module) -> bool:
        return computes_as(module, nn.RMSNorm)

    def normalised(self, module: nn.Module, inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        assert isinstance(module, nn.RMSNorm)
        return F.rms_norm(inputs, list(module.normalized_shape), eps=module.eps)


class _OverChannels(_NormAdapter):
    """Features are the second dimension; each position of an input is a row."""

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.movedim(1, -1)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.movedim(-1, 1)


class BatchNormAdapter(_OverChannels):
    kind = "batch-norm"

    def handles(self, module: nn.Module) -> bool:
        return computes_as(module, _BatchNorm)

    def normalised(self, module: nn.Module, inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        assert isinstance(module, _BatchNorm)
        if module.training or module.running_mean is None:
            return F.batch_norm(inputs, None, None, training=True, eps=module.eps)
        return F.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)


class GroupNormAdapter(_OverChannels):
    kind = "group-norm"

    def handles(self, module: nn.Module) -> bool:
        return computes_as(module, nn.GroupNorm)

    def normalised(self, module: nn.Module, inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        assert isinstance(module, nn.GroupNorm)
        return F.group_norm(inputs, module.num_groups, eps=module.eps)
