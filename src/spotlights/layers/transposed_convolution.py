"""`nn.ConvTranspose1d`, `2d`, `3d`: one row for each position of the output, its key what reaches it of the input.

A transposed convolution is a convolution over its input with zeros between the positions (as many as its stride leaves
out), with the kernel the other way round. So keys are patches, mostly zeros where the stride is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from spotlights.errors import UnsupportedError
from spotlights.layers.adapter import LinearMap, Part, computes_as
from spotlights.layers.convolution import ConvolutionAdapter


class TransposedConvolutionAdapter(ConvolutionAdapter):
    kind = "transposed-convolution"
    transposed = True

    def handles(self, module: nn.Module) -> bool:
        return any(computes_as(module, kind) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        groups, bias = self.groups(module), self.bias(module)
        return {
            "": LinearMap(
                weights={"weight": Part(self.weight(module))},
                biases={} if bias is None else {"bias": Part(bias)},
                groups=groups,
                transposed=True,
                as_matrix=partial(_matrix, groups=groups),
            )
        }

    def lead(self, module: nn.Module, inputs: Shaped[Tensor, "..."], output: Shaped[Tensor, "..."]) -> Sequence[int]:
        lead = super().lead(module, inputs, output)
        if tuple(output.shape[-_dimensions(module) :]) != _output_size(module, inputs):
            raise UnsupportedError(
                "A transposed convolution was called with another output_size than its own, which is not recorded. "
                "Give the layer output_padding instead, or leave it out with layers=…."
            )
        return lead

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        settings, dimensions = _settings(module), _dimensions(module)
        first = inputs.ndim - dimensions
        sizes = [(size - 1) * each.stride + 1 for size, each in zip(inputs.shape[first:], settings, strict=True)]
        spread = inputs.new_zeros(*inputs.shape[:first], *sizes)
        spread[(..., *(slice(None, None, each.stride) for each in settings))] = inputs
        padding = [side for each in reversed(settings) for side in (each.before, each.after)]
        windows = F.pad(spread, padding)
        for at, each in enumerate(settings, start=first):
            windows = windows.unfold(at, each.reach + 1, 1)[..., :: each.dilation]
        windows = windows.flip([*range(-dimensions, 0)])
        # (…, channels, *positions, *kernel) → (…, *positions, channels, *kernel)
        return windows.movedim(first - 1, first - 1 + dimensions).flatten(-1 - dimensions)


class _Setting:
    """A transposed convolution along one dimension."""

    def __init__(self, module: _ConvTransposeNd, at: int) -> None:
        self.stride, self.dilation = module.stride[at], module.dilation[at]
        self.reach = self.dilation * (module.kernel_size[at] - 1)
        padding = module.padding[at]
        assert isinstance(padding, int)
        self.before = self.reach - padding
        """Zeros before the spread input; a negative number cuts some of it off."""
        self.after = self.before + module.output_padding[at]


def _settings(module: nn.Module) -> list[_Setting]:
    assert isinstance(module, _ConvTransposeNd)
    return [_Setting(module, at) for at in range(_dimensions(module))]


def _dimensions(module: nn.Module) -> int:
    assert isinstance(module, _ConvTransposeNd)
    return len(module.kernel_size)


def _output_size(module: nn.Module, inputs: Shaped[Tensor, "..."]) -> tuple[int, ...]:
    settings = _settings(module)
    return tuple(
        (size - 1) * each.stride + 1 + each.before + each.after - each.reach
        for size, each in zip(inputs.shape[-len(settings) :], settings, strict=True)
    )


def _matrix(weight: Shaped[Tensor, "..."], groups: int) -> Shaped[Tensor, "out_features in_group"]:
    """`(groups · in, out, *kernel)` as `(groups · out, in · kernel)`."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)
