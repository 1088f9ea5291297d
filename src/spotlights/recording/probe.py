"""The probe: which blocks of the gradients are kept with a step, to be compared with what its slots explain.

One block of some output units by some input features of each weight, other ones after some steps, so that all have
their turn. Here they are only cut out; the comparison is `memory.gradient_block.compare`, in the writer's own time.
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

_STAYS = 16
"""Steps that look at the same block: the writer compares them at once."""


class Probe:
    """Goes round the blocks of one layer."""

    def __init__(self, linear: LinearMap) -> None:
        dtype = next(iter(linear.weights.values())).parameter.dtype
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._starts = dict(zip(linear.weights, accumulate(linear.columns.values(), initial=0), strict=False))
        """The first column of each weight."""
        self._units = _blocks(linear.matrix_shape[0], UNITS)
        self._features = {name: _blocks(count, FEATURES) for name, count in linear.columns.items()}
        self._turn = 0

    def cut(self, gradients: Mapping[str, Tensor], loss_scale: float) -> dict[str, GradientBlock] | None:
        """A block of each gradient, seen as matrix or row, that is not all zero; None if all gradients are."""
        self._turn += 1
        found: dict[str, GradientBlock] = {}
        used = False
        turn = self._turn // _STAYS
        units = self._units[turn % len(self._units)]
        for name, gradient in gradients.items():
            at = (units,)
            if name in self._features:
                blocks = self._features[name]
                at = (units, blocks[(turn + turn // len(self._units)) % len(blocks)])
            seen = self._numbers(gradient, at, loss_scale)
            if not (seen.size and seen.item(0)) and not seen.any():
                if not bool(gradient.any()):
                    found[name] = GradientBlock(seen, None)
                    continue
                at = self._largest(name, gradient)
                seen = self._numbers(gradient, at, loss_scale)
            found[name] = GradientBlock(seen, self._in_map(name, at))
            used = True
        return found if used else None

    def _largest(self, name: str, gradient: Float[Tensor, "..."]) -> tuple[Part, ...]:
        """The block with the largest entry of a gradient in it."""
        index = np.unravel_index(int(gradient.detach().abs().argmax()), tuple(gradient.shape))
        choices = [self._units, *([self._features[name]] if name in self._features else [])]
        return tuple(
            next(block for block in blocks if block.start <= i < block.stop)
            for blocks, i in zip(choices, index, strict=True)
        )

    def _in_map(self, name: str, at: tuple[Part, ...]) -> tuple[Part, ...]:
        """The same block, with its features counted over all weights of the map."""
        if self._starts.get(name, 0) == 0:
            return at
        units, features = at
        return units, slice(self._starts[name] + features.start, self._starts[name] + features.stop)

    def _numbers(self, gradient: Float[Tensor, "..."], at: tuple[Part, ...], loss_scale: float) -> np.ndarray:
        # numpy: for so few numbers, most of the time of a torch operation is its call.
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.is_cpu and gradient.dtype == self._dtype:
            part = gradient.numpy()[at].copy()
        else:
            part = gradient[at].to("cpu", self._dtype).numpy().copy()
        return part if loss_scale == 1.0 else part / part.dtype.type(loss_scale)


def _blocks(size: int, step: int) -> list[Part]:
    """All of the same length, so that those of many steps can be compared at once."""
    step = min(size, step)
    starts = (min(start, size - step) for start in range(0, size, step))
    return [slice(start, start + step) for start in starts]
