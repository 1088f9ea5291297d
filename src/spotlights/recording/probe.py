"""The probe: which block of the gradient is kept with a step, to be compared with what its slots explain.

One block of some output units by some input features, another one at each step, so that all have their
turn. Here it is only cut out; the comparison is `GradientBlock.compare`, in the writer's own time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.layers import LinearMap
from spotlights.memory.gradient_block import FEATURES, UNITS, GradientBlock, Part


class Probe:
    """Goes round the blocks of one layer."""

    def __init__(self, linear: LinearMap) -> None:
        out_features, in_features = linear.matrix_shape
        self._group = out_features // linear.groups, in_features
        dtype = next(iter(linear.weights.values())).parameter.dtype
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._biases = list(linear.biases)
        self._starts = dict(zip(linear.weights, accumulate(linear.columns.values(), initial=0), strict=False))
        """The first column of each weight."""
        self._units = _blocks(out_features, UNITS)
        self._features = [(name, block) for name, count in linear.columns.items() for block in _blocks(count, FEATURES)]
        self._turn = 0

    def cut(self, gradients: Mapping[str, Tensor | None], loss_scale: float) -> GradientBlock | None:
        """A block of the gradients, seen as matrices and rows, that is not all zero; None if there is none."""
        self._turn += 1
        units = self._units[self._turn % len(self._units)]
        weight, features = self._features[self._turn % len(self._features)]
        block = self._block(gradients, units, weight, features, loss_scale)
        if block.any():
            return block
        for name, gradient in gradients.items():
            if gradient is not None and bool(gradient.any()):
                at = int(gradient.detach().abs().argmax())
                unit, feature = divmod(at, gradient.shape[1]) if name in self._starts else (at, 0)
                weight = name if name in self._starts else weight
                around = next(b for n, b in self._features if n == weight and b.start <= feature < b.stop)
                return self._block(gradients, slice(unit, unit + 1), weight, around, loss_scale)
        return None

    def _block(
        self, gradients: Mapping[str, Tensor | None], units: Part, name: str, features: Part, loss_scale: float
    ) -> GradientBlock:
        weight = gradients.get(name)
        bias = next((g for b in self._biases if (g := gradients.get(b)) is not None), None)
        start = self._starts[name]
        return GradientBlock(
            units,
            slice(start + features.start, start + features.stop),
            None if weight is None else self._numbers(weight, (units, features), loss_scale),
            None if bias is None else self._numbers(bias, (units,), loss_scale),
            self._group,
        )

    def _numbers(self, gradient: Float[Tensor, "..."], at: tuple[Part, ...], loss_scale: float) -> np.ndarray:
        # numpy: for so few numbers, most of the time of a torch operation is its call.
        if gradient.device.type == "cpu" and gradient.dtype == self._dtype:
            part = gradient.detach().numpy()[at].copy()
        else:
            part = gradient.detach()[at].to("cpu", self._dtype).numpy().copy()
        return part if loss_scale == 1.0 else part / part.dtype.type(loss_scale)


def _blocks(size: int, step: int) -> list[Part]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
