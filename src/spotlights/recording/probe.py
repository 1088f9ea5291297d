"""Some numbers of the gradients that the optimizer is about to use, for comparison with what the slots explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.layers import LinearMap
from spotlights.memory.slots import FEATURES, UNITS, GradientBlock, random_sums
from spotlights.recording.shards import ParameterShard

_STEPS_PER_BLOCK = 16
"""Successive steps with the same block of a gradient: the writer compares them at once."""


class Probe:
    """Cycles through the blocks of one layer's gradients, so that in time all entries are compared.

    A block is some output units by some input features of a weight.
    """

    def __init__(self, linear: LinearMap) -> None:
        dtype = next(iter(linear.weights.values())).parameter.dtype
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._first_columns = dict(zip(linear.weights, accumulate(linear.columns.values(), initial=0), strict=False))
        """Of each weight in the map's matrix."""
        self._units = _blocks(linear.matrix_shape[0], UNITS)
        self._features = {name: _blocks(count, FEATURES) for name, count in linear.columns.items()}
        self._steps = 0

    def cut(
        self, gradients: Mapping[str, Tensor], loss_scale: float, tokens: Sequence[tuple[int, int]] = ()
    ) -> dict[str, GradientBlock] | None:
        """A block of each gradient, given as matrix or vector, that is not all zero; None if all gradients are zero.

        `tokens`: units (0) or features (1) that the step's slots have used, by number. Of a large vocabulary, most
        others have no gradient.
        """
        self._steps += 1
        cut: dict[str, GradientBlock] = {}
        any_used = False
        turn = self._steps // _STEPS_PER_BLOCK
        units = self._units[turn % len(self._units)]
        for name, gradient in gradients.items():
            if gradient.is_sparse:
                cut[name] = self._of_a_token(name, gradient, turn, loss_scale)
                any_used = True  # a lazy optimizer moves tokens whose gradient is zero, too
                continue
            block: tuple[slice, ...] = (units,)
            if name in self._features:
                features = self._features[name]
                block = (units, features[(turn + turn // len(self._units)) % len(features)])
            numbers = self._numbers(gradient, block, loss_scale)
            for axis, token in tokens if name in self._features else ():
                if numbers.any():
                    break
                around = _around((self._units, self._features[name])[axis], token)
                block = (around, block[-1]) if axis == 0 else (block[0], around)
                numbers = self._numbers(gradient, block, loss_scale)
            if not (numbers.size and numbers.item(0)) and not numbers.any():
                if not bool(gradient.any()):
                    cut[name] = GradientBlock(numbers, None)
                    continue
                block = self._largest(name, gradient)
                numbers = self._numbers(gradient, block, loss_scale)
            first = self._first_columns.get(name, 0)  # features are counted over all weights of the map
            at = block if first == 0 else (block[0], slice(first + block[-1].start, first + block[-1].stop))
            cut[name] = GradientBlock(numbers, at)
            any_used = True
        return cut if any_used else None

    def _of_a_token(
        self, name: str, gradient: Float[Tensor, "tokens units"], turn: int, loss_scale: float
    ) -> GradientBlock:
        """A block around one of the tokens of a sparse gradient: one token after the other, or the largest."""
        entries = gradient.detach().coalesce()
        tokens, values = entries.indices()[0], entries.values()
        of_unit = self._units[turn % len(self._units)]
        features = self._features[name]
        numbers = values.new_zeros(features[0].stop, of_unit.stop - of_unit.start)
        if not bool(values.any()):
            return GradientBlock(self._numbers(numbers.T, (slice(None),), loss_scale), None)
        place = turn % len(tokens)
        if not bool(values[place, of_unit].any()):
            place, unit = divmod(int(values.abs().argmax()), values.shape[1])
            of_unit = _around(self._units, unit)
        block = _around(features, int(tokens[place]))
        inside = (tokens >= block.start) & (tokens < block.stop)
        numbers[tokens[inside] - block.start] = values[inside][:, of_unit]
        return GradientBlock(self._numbers(numbers.T, (slice(None),), loss_scale), (of_unit, block))

    def _largest(self, name: str, gradient: Float[Tensor, "..."]) -> tuple[slice, ...]:
        """The block with the largest entry of a gradient."""
        index = np.unravel_index(int(gradient.detach().abs().argmax()), tuple(gradient.shape))
        choices = [self._units, *([self._features[name]] if name in self._features else [])]
        return tuple(_around(blocks, int(i)) for blocks, i in zip(choices, index, strict=True))

    def _numbers(self, gradient: Float[Tensor, "..."], block: tuple[slice, ...], loss_scale: float) -> np.ndarray:
        # numpy: for so few numbers, calling a torch operation takes longer than the operation.
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.is_cpu and gradient.dtype == self._dtype:
            numbers = gradient.numpy()[block].copy()
        else:
            numbers = gradient[block].to("cpu", self._dtype).numpy().copy()
        return numbers if loss_scale == 1.0 else numbers / numbers.dtype.type(loss_scale)


class ShardProbe:
    """Compares all entries of the gradients at every step, by random sums of them: each process adds up its part.

    A block, as `Probe` has it, would be known to one process alone, which could not tell the others where it lies.
    """

    def __init__(self, shards: Mapping[str, ParameterShard]) -> None:
        self._shards = shards
        self._sums = {name: [random_sums(size) for size in shard.matrix_shape] for name, shard in shards.items()}

    def cut(
        self, gradients: Mapping[str, Tensor], loss_scale: float, tokens: Sequence[tuple[int, int]] = ()
    ) -> dict[str, GradientBlock] | None:
        """This process' part of the sums of each gradient, given as its shard of a matrix or vector."""
        cut = {}
        for name, gradient in gradients.items():
            shard = self._shards[name]
            dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            weights = [
                by[part].to(gradient.device, dtype) for by, part in zip(self._sums[name], shard.box, strict=True)
            ]
            sums = weights[0].T @ gradient.detach().to(dtype)
            sums = sums @ weights[1] if len(weights) > 1 else sums
            numbers = (sums * float(shard.first) / loss_scale).cpu().numpy()
            cut[name] = GradientBlock(numbers, ())
        return cut


def _around(blocks: Sequence[slice], number: int) -> slice:
    """The block that has a unit, or a feature."""
    return blocks[number // (blocks[0].stop - blocks[0].start)]


def _blocks(size: int, step: int) -> list[slice]:
    """Blocks of the same length, so that those of many steps can be compared at once."""
    step = min(size, step)
    starts = (min(start, size - step) for start in range(0, size, step))
    return [slice(start, start + step) for start in starts]
