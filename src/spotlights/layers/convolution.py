"""`nn.Conv1d`, `Conv2d`, `Conv3d` and their transposes: one row for each position of the output; its key is a patch.

Stride, dilation, groups and every kind of padding. A memory stores `positions · (in_channels · kernel + out_channels)`
numbers for each input (docs/layers.md). A transposed convolution is a convolution with the flipped kernel over its
input, with zeros inserted between positions (stride − 1 of them); its keys are mostly zeros where the stride is large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, LinearMap, OneMapCall


class ConvolutionAdapter(LayerAdapter):
    kind = "convolution"
    modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    looked_up = False  # patches are small and many: looking one up costs more than storing it

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.flatten(1)

    def channel_groups(self, module: nn.Module) -> int:
        return module.groups  # type: ignore[return-value]

    def axes(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> tuple[int, ...] | None:
        return (0,) if inputs.ndim == 2 + dimensions_of(module) else ()

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        padding = _padding(module)
        if any(padding):
            inputs = F.pad(inputs, padding, "constant" if module.padding_mode == "zeros" else module.padding_mode)
        return _patches(inputs, module.kernel_size, module.stride, module.dilation)

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.movedim(-1 - dimensions_of(module), -1)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.movedim(-1, -1 - dimensions_of(module))


class TransposedConvolutionAdapter(ConvolutionAdapter):
    kind = "transposed-convolution"
    modules = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    transposed = True

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        groups = self.channel_groups(module)

        def as_matrix(weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
            # (groups · in, out, *kernel) → (groups · out, in · kernel)
            return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)

        return {"": replace(super().maps(module)[""], as_matrix=as_matrix)}

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any
    ) -> OneMapCall:
        call = super().call(module, args, kwargs, output, before)
        sizes = output.shape[-dimensions_of(module) :]  # a call may choose it: `output_size`
        call.to_keys = partial(self._keys, module, sizes)
        return call

    def keys(self, module: Any, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        known = zip(_spread_sizes(module, inputs), _extents(module), module.padding, module.output_padding, strict=True)
        return self._keys(module, [n + extent - 2 * cut + extra for n, extent, cut, extra in known], inputs)

    def _keys(
        self, module: Any, sizes: Sequence[int], inputs: Shaped[Tensor, "..."]
    ) -> Float[Tensor, "*lead in_features"]:
        """The keys for an output of these sizes."""
        dimensions, spread_sizes = dimensions_of(module), _spread_sizes(module, inputs)
        spread = inputs.new_zeros(*inputs.shape[:-dimensions], *spread_sizes)
        spread[(..., *(slice(None, None, step) for step in module.stride))] = inputs
        # Zeros before and after each dimension; a negative number cuts some of the input off.
        known = zip(sizes, spread_sizes, _extents(module), module.padding, strict=True)
        sides = [(extent - cut, size - n + cut) for size, n, extent, cut in known]
        padded = F.pad(spread, [side for both in reversed(sides) for side in both])
        patches = _patches(padded, module.kernel_size, (1,) * dimensions, module.dilation)
        return patches.unflatten(-1, (-1, *module.kernel_size)).flip([*range(-dimensions, 0)]).flatten(-1 - dimensions)


def dimensions_of(module: nn.Module) -> int:
    """The number of spatial dimensions."""
    return len(module.kernel_size)  # type: ignore[arg-type]


def _spread_sizes(module: Any, inputs: Shaped[Tensor, "..."]) -> list[int]:
    """The input of a transposed convolution with zeros inserted."""
    return [(n - 1) * step + 1 for n, step in zip(inputs.shape[-dimensions_of(module) :], module.stride, strict=True)]


def _extents(module: Any) -> list[int]:
    """How far the last place of a kernel is from its first, in each dimension."""
    return [spacing * (size - 1) for size, spacing in zip(module.kernel_size, module.dilation, strict=True)]


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """How much is added before and after each dimension, the last dimension first, as `F.pad` takes it."""
    if module.padding == "valid":
        return []
    if module.padding == "same":
        return [side for extent in reversed(_extents(module)) for side in (extent // 2, extent - extent // 2)]
    return [size for size in reversed(module.padding) for _ in range(2)]  # type: ignore[misc]


def _patches(
    inputs: Shaped[Tensor, "..."], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Shaped[Tensor, "*lead in_features"]:
    """What is under the kernel at each position."""
    # Looking the numbers up takes a fraction of the time of copying them from strided windows.
    places = _patch_places(inputs.shape[-1 - len(kernel) :], tuple(kernel), tuple(stride), tuple(dilation))
    flat = inputs.flatten(-1 - len(kernel))
    return flat.index_select(-1, places.flatten().to(flat.device)).unflatten(-1, places.shape)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a tensor that is created in inference mode cannot be used where gradients are needed
def _patch_places(
    shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Int64[Tensor, "*positions in_features"]:
    """The indices of each patch's numbers in a flattened input of shape (channels, …)."""
    places = torch.arange(math.prod(shape)).view(shape)
    for dimension, (size, step, spacing) in enumerate(zip(kernel, stride, dilation, strict=True), start=1):
        # A window over the whole extent of a dilated kernel, of which every dilation-th place counts.
        places = places.unfold(dimension, spacing * (size - 1) + 1, step)[..., ::spacing]
    # (channels, *positions, *kernel) → (*positions, channels, *kernel)
    return places.movedim(0, len(kernel)).flatten(len(kernel))
