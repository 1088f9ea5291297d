"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: one row for each position of the output, its key the patch under the kernel.

Stride, dilation, groups, every kind of padding. Slots are kept as patches: `positions · (in_channels · kernel +
out_channels)` numbers for each input (docs/layers.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from spotlights.layers.adapter import LayerAdapter, computes_as


class ConvolutionAdapter(LayerAdapter):
    kind = "convolution"
    looked_up = False  # patches are small and many: finding one again costs more than keeping it

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
        # Looking the numbers up takes a fraction of the time of copying them out of strided windows.
        places = _places(
            tuple(inputs.shape[-1 - dimensions :]),
            tuple(convolution.kernel_size),
            tuple(convolution.stride),
            tuple(convolution.dilation),
        )
        flat = inputs.flatten(-1 - dimensions)
        return flat.index_select(-1, places.flatten().to(flat.device)).unflatten(-1, places.shape)

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.movedim(-1 - _dimensions(module), -1)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.movedim(-1, -1 - _dimensions(module))


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is kept from there could not be used where gradients are wanted
def _places(
    shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Int64[Tensor, "*positions in_features"]:
    """Where in an input of that shape, channels first, the numbers of each patch are."""
    places = torch.arange(math.prod(shape)).view(shape)
    for at, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=1):
        # A window over the whole reach of a dilated kernel, of which only every dilation-th place counts.
        places = places.unfold(at, apart * (size - 1) + 1, step)[..., ::apart]
    # (channels, *positions, *kernel) → (*positions, channels, *kernel)
    return places.movedim(0, len(kernel)).flatten(len(kernel))


def _convolution(module: nn.Module) -> _ConvNd:
    assert isinstance(module, _ConvNd)
    return module


def _dimensions(module: nn.Module) -> int:
    return len(_convolution(module).kernel_size)
