"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: one row for each position of the output, its key the patch under the kernel.

Stride, dilation, groups, every kind of padding. Slots are kept as patches: `positions · (in_channels · kernel +
out_channels)` numbers for each input (docs/layers.md); patches that come again, as black margins do, are stored
once where the layer sees data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from spotlights.layers.adapter import LayerAdapter, computes_as


class ConvolutionAdapter(LayerAdapter):
    kind = "convolution"

    def handles(self, module: nn.Module) -> bool:
        return any(computes_as(module, kind) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d))

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.flatten(1)

    def groups(self, module: nn.Module) -> int:
        return _convolution(module).groups

    def lead(self, module: nn.Module, inputs: Shaped[Tensor, "..."], output: Shaped[Tensor, "..."]) -> Sequence[int]:
        channels = output.ndim - 1 - _dimensions(module)
        return (*output.shape[:channels], *output.shape[channels + 1 :])

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        convolution, dimensions = _convolution(module), _dimensions(module)
        # Twice for each dimension, the last one first, as F.pad wants it.
        padding = convolution._reversed_padding_repeated_twice
        mode = "constant" if convolution.padding_mode == "zeros" else convolution.padding_mode
        if any(padding):
            inputs = F.pad(inputs, padding, mode=mode)
        first = inputs.ndim - dimensions
        settings = zip(convolution.kernel_size, convolution.stride, convolution.dilation, strict=True)
        for at, (size, stride, dilation) in enumerate(settings, start=first):
            # A window over the whole reach of a dilated kernel, of which only every dilation-th place counts.
            inputs = inputs.unfold(at, dilation * (size - 1) + 1, stride)[..., ::dilation]
        # (…, channels, *positions, *kernel) → (…, *positions, channels, *kernel)
        return inputs.movedim(first - 1, first - 1 + dimensions).flatten(-1 - dimensions)

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.movedim(-1 - _dimensions(module), -1)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.movedim(-1, -1 - _dimensions(module))


def _convolution(module: nn.Module) -> _ConvNd:
    assert isinstance(module, _ConvNd)
    return module


def _dimensions(module: nn.Module) -> int:
    return len(_convolution(module).kernel_size)
