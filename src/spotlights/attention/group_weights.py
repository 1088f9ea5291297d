"""Group weights: the part of each layer's weights that every group of slots makes up, computed once.

A cell is a combination of values of some columns (label 3 of source mnist). For each cell and each of some
edges of training time this keeps `Σ v⊗k` over the cell's slots up to that edge, on disk. Any mask of cells and
of stretches between edges is then a sum of a few matrices: `W_masked = W − Σ_masked ΔW_g`, without a scan.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.cell_sums import CellPartsReducer
from spotlights.attention.grouping import Grouping
from spotlights.attention.measure import View
from spotlights.attention.results import Label
from spotlights.attention.scan import MAX_ROWS, Job, scan
from spotlights.attention.unrolled import UnrolledNumbers
from spotlights.memory.blocks import Block, in_blocks
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.selection import Between, Everything

_NO_VALUES = torch.empty(0, 0)
_ALL = -1
"""Stands for all cells together."""


def has_group_weights(view: View) -> bool:
    """Whether each step's slots all have one coefficient. Under Adam and its kin only a sweep finds a group's part."""
    return all(isinstance(view.unrolled(name), UnrolledNumbers) for name in view.reader.layers)


class Cells:
    """Numbers the combinations of some columns' values that a layer's slots have."""

    def __init__(self, view: View, layer: LayerReader, columns: Sequence[str]) -> None:
        self._groupings = [Grouping(layer, column, view.strings(column), None) for column in columns]
        found = [np.zeros(0, np.int64)]
        for block in in_blocks(layer, Everything(), MAX_ROWS):
            found.append(np.unique(self._joint(block).numpy()))
        self._present = torch.from_numpy(np.unique(np.concatenate(found)))

    def __len__(self) -> int:
        return len(self._present)

    def _joint(self, block: Block) -> Int64[Tensor, "rows"]:
        codes = torch.zeros(len(block), dtype=torch.int64)
        for grouping in self._groupings:
            codes = codes * len(grouping) + grouping.codes(block)
        return codes

    def codes(self, block: Block) -> Int64[Tensor, "rows"]:
        return torch.searchsorted(self._present, self._joint(block))

    @property
    def values(self) -> list[tuple[Label, ...]]:
        """For each cell the value of each column."""
        sizes = tuple(len(grouping) for grouping in self._groupings)
        if not sizes:
            return [()] * len(self)
        places = np.unravel_index(self._present.numpy(), sizes)
        labels = [grouping.labels for grouping in self._groupings]
        return list(zip(*([names[i] for i in place] for names, place in zip(labels, places, strict=True)), strict=True))


class GroupWeights:
    """The weights of every cell up to every edge, in a scratch file that goes away with this object."""

    def __init__(self, view: View, columns: Sequence[str], edges: Sequence[int]) -> None:
        """
        Args:
            view: a whole memory, as of its last step.
            columns: whose values make up the cells.
            edges: steps in ascending order; the first is 0, the last the number of steps.
        """
        self.columns = tuple(columns)
        self.edges = tuple(edges)
        self._view = view
        self._cells = {name: Cells(view, layer, columns) for name, layer in view.reader.layers.items()}
        self._file = tempfile.TemporaryFile(prefix="spotlights-")  # noqa: SIM115 (open as long as this lives)
        weakref.finalize(self, self._file.close)
        self._at: dict[tuple[str, int, int], int] = {}

    def build(
        self,
        *,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
        progress: Callable[[float], object] = lambda share: None,
    ) -> None:
        """Scans the memory once, taking a turn for each stretch of training."""
        done, stretches = 0, len(self._cells) * (len(self.edges) - 1)
        for name, cells in self._cells.items():
            layer, unrolled = self._view.reader.layer(name), self._view.unrolled(name)
            assert isinstance(unrolled, UnrolledNumbers), "see has_group_weights"
            sums = CellPartsReducer(layer, cells, unrolled.weight, unrolled.biases)
            for edge, (start, stop) in enumerate(zip(self.edges, self.edges[1:], strict=False), start=1):
                with turn(), _one_thread():
                    before = sums.counts.clone()
                    stretch = Between("step", range(start, stop))
                    scan([Job(layer, stretch, 1, lambda block: _NO_VALUES, [sums])], threads=1)
                    self._keep(layer, edge, sums, (sums.counts > before).tolist())
                done += 1
                progress(done / stretches)

    def _keep(self, layer: LayerReader, edge: int, sums: CellPartsReducer, grown: list[bool]) -> None:
        parts = [(cell, sums.weights[cell], sums.biases[cell]) for cell in range(len(grown)) if grown[cell]]
        if parts:
            parts.append((_ALL, sums.weights.sum(dim=0), sums.biases.sum(dim=0)))
        for cell in {_ALL, *range(len(grown))}:
            if (layer.name, cell, edge - 1) in self._at:
                self._at[layer.name, cell, edge] = self._at[layer.name, cell, edge - 1]
        for cell, weight, biases in parts:
            joined = torch.cat([weight, biases.T], dim=1).to(layer.storage.compute_dtype)
            self._at[layer.name, cell, edge] = self._file.seek(0, os.SEEK_END)
            self._file.write(joined.numpy().data)
        self._file.flush()

    def removed(
        self, layer: str, masked: Callable[[tuple[Label, ...]], bool], stretches: Iterable[tuple[int, int]]
    ) -> Float[Tensor, "out_features in_features_and_biases"]:
        """The part that a mask takes away: of some cells everything, of the others some stretches of edges.

        Args:
            layer: its name.
            masked: says of a cell, by the values of its columns, whether it is left out altogether.
            stretches: pairs of numbers of edges, which do not overlap.
        """
        stretches = list(stretches)
        whole = [cell for cell, values in enumerate(self._cells[layer].values) if masked(values)]
        others = sorted(set(range(len(self._cells[layer]))) - set(whole))
        last = len(self.edges) - 1
        one_by_one: Counter[tuple[int, int]] = Counter({(cell, last): 1 for cell in whole})
        _add_stretches(one_by_one, others, stretches, 1)
        from_all: Counter[tuple[int, int]] = Counter({(cell, last): 1 for cell in whole})
        _add_stretches(from_all, [_ALL], stretches, 1)
        _add_stretches(from_all, whole, stretches, -1)
        plan = min(one_by_one, from_all, key=lambda terms: sum(sign != 0 for sign in terms.values()))
        return self._summed(layer, plan)

    def total(self, layer: str) -> Float[Tensor, "out_features in_features_and_biases"]:
        """What all slots together make up."""
        return self._summed(layer, Counter({(_ALL, len(self.edges) - 1): 1}))

    def _summed(self, layer: str, plan: Counter[tuple[int, int]]) -> Tensor:
        reader = self._view.reader.layer(layer)
        entry = reader.entry
        shape = entry.out_features, entry.matrix_shape[1] + len(entry.bias_names)
        total = torch.zeros(shape, dtype=reader.storage.compute_dtype)
        read = torch.empty_like(total)
        for (cell, edge), sign in plan.items():
            at = self._at.get((layer, cell, edge))  # nothing was kept: no slot until then
            if sign and at is not None:
                os.preadv(self._file.fileno(), [read.numpy().data], at)
                total.add_(read, alpha=sign)
        return total


def group_weight_bytes(view: View, cells: int) -> int:
    """What one edge of training time takes on disk."""
    layers = view.reader.layers.values()
    per_cell = sum(
        layer.entry.out_features
        * (layer.entry.matrix_shape[1] + len(layer.entry.bias_names))
        * layer.storage.compute_dtype.itemsize
        for layer in layers
    )
    return per_cell * (cells + 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """This is work for the background: it leaves the other cores alone, and never waits for them."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def _add_stretches(
    plan: Counter[tuple[int, int]], cells: Iterable[int], stretches: Iterable[tuple[int, int]], sign: int
) -> None:
    stretches = list(stretches)
    for cell in cells:
        for first, end in stretches:
            plan[cell, end] += sign
            plan[cell, first] -= sign
