"""`Σ c δ⊗k` for each of many groups of slots: what every class, source or example makes up of a layer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.reducers import Reducer
from spotlights.dual_form import outer_sum
from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.stored_rows import ROWS


@runtime_checkable
class Groups(Protocol):
    """Numbers the groups of a layer's slots: a `Grouping`, or `Cells`."""

    def __len__(self) -> int: ...

    def codes(self, block: Block) -> Int64[Tensor, "rows"]: ...


class CellSums:
    """Adds up the slots of a block by group; has buffers of its own, so each thread needs one."""

    def __init__(self, layer: LayerReader) -> None:
        self._groups = layer.entry.groups
        dtype = layer.storage.compute_dtype
        sizes = layer.entry.in_features, layer.entry.out_features
        self._keys, self._errors = (torch.empty(ROWS, features, dtype=dtype) for features in sizes)
        self._product = torch.empty(layer.entry.matrix_shape, dtype=dtype)

    def of(
        self,
        block: Block,
        codes: Int64[Tensor, "rows"],
        weight: Float[Tensor, "rows"],
        biases: Float[Tensor, "biases rows"],
    ) -> Iterator[tuple[int, int, Float[Tensor, "out_features in_group"], Float[Tensor, "biases out_features"]]]:
        """A group, how many slots it has here, and their sums for weight and biases; a group may come more than once.

        The sums are valid until the next ones are asked for.

        Args:
            block: some slots.
            codes: the group of each.
            weight: what its `δ⊗k` is multiplied by.
            biases: what its δ is multiplied by, for each bias.
        """
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            of_weight, of_biases = weight[errors.place], biases[:, errors.place]
            if errors.scale is not None:
                of_weight, of_biases = of_weight * errors.scale, of_biases * errors.scale
            if keys.scale is not None:
                of_weight = of_weight * keys.scale
            here, order = codes[errors.place].sort(stable=True)
            present, counts = here.unique_consecutive(return_counts=True)
            sorted_keys, sorted_errors = self._keys[: len(order)], self._errors[: len(order)]
            torch.index_select(keys.rows, 0, order, out=sorted_keys)
            torch.index_select(errors.rows, 0, order, out=sorted_errors)
            of_weight, of_biases = (each[..., order].to(sorted_errors.dtype) for each in (of_weight, of_biases))
            end = 0
            for cell, count in zip(present.tolist(), counts.tolist(), strict=True):
                first, end = end, end + count
                some = sorted_errors[first:end]
                of_ones = of_biases[:, first:end] @ some
                some *= of_weight[first:end, None]
                yield cell, count, outer_sum(some, sorted_keys[first:end], self._groups, out=self._product), of_ones


class CellPartsReducer(Reducer):
    """`Σ c δ⊗k` and `Σ c δ` for each cell, in float64: cells are large, and cancel each other."""

    def __init__(
        self,
        layer: LayerReader,
        cells: Groups,
        weight: Float[Tensor, "steps"],
        biases: Float[Tensor, "biases steps"],
    ) -> None:
        self._made_of = layer, cells, weight, biases
        shape = layer.entry.matrix_shape
        self.weights = torch.zeros(len(cells), *shape, dtype=torch.float64)
        self.biases = torch.zeros(len(cells), len(biases), shape[0], dtype=torch.float64)
        self.counts = torch.zeros(len(cells), dtype=torch.int64)
        self._sums = CellSums(layer)

    def fresh(self) -> CellPartsReducer:
        return type(self)(*self._made_of)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        _, cells, weight, biases = self._made_of
        codes, steps = cells.codes(block), block.column("step")
        for cell, count, of_weight, of_biases in self._sums.of(block, codes, weight[steps], biases[:, steps]):
            self.weights[cell] += of_weight
            self.biases[cell] += of_biases
            self.counts[cell] += count

    def merge(self, other: CellPartsReducer) -> None:
        self.weights += other.weights
        self.biases += other.biases
        self.counts += other.counts
