"""What the visits of one example (or the slots of any other group) have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping, column_values
from spotlights.attention.scan import MAX_ROWS
from spotlights.memory.blocks import in_blocks
from spotlights.memory.layer_reader import LayerReader

if TYPE_CHECKING:
    from spotlights.attention.measure import View
    from spotlights.attention.results import Label


class Visits:
    """The slots of some groups of a view."""

    def __init__(self, layer: LayerReader, view: View, grouping: Grouping, groups: Int64[Tensor, "..."]) -> None:
        self._layer = layer
        self._view = view
        wanted = torch.zeros(len(grouping), dtype=torch.bool)
        wanted[groups] = True
        slots, codes = [groups.new_empty(0)], [groups.new_empty(0)]
        for block in in_blocks(layer, view.selection, MAX_ROWS):
            of_block = grouping.codes(block)
            rows = wanted[of_block].nonzero().flatten()
            slots.append(block.slots[rows])
            codes.append(of_block[rows])
        self._slots = torch.cat(slots)
        known, first, self._group = np.unique(torch.cat(codes).numpy(), return_index=True, return_inverse=True)
        self._first = torch.from_numpy(first)
        self._where = torch.from_numpy(np.searchsorted(known, groups.numpy()))

    @property
    def first_slots(self) -> Int64[Tensor, "..."]:
        """The first slot of each group."""
        return self._slots[self._first][self._where]

    def agreed(self, name: str) -> list[Label]:
        """A column's value for each group, flat; None where its slots do not agree."""
        entry = self._view.reader.manifest.columns[name]
        values = self._layer.column_at(name, self._slots).numpy()
        first = values[self._first.numpy()]
        differs = (values != first[self._group]) & ~((values != values) & (first != first)[self._group])
        agree = np.ones(len(first), dtype=bool)
        agree[self._group[differs]] = False
        labels = column_values(torch.from_numpy(first), entry.kind, entry.strings)
        return [labels[i] if agree[i] else None for i in self._where.reshape(-1).tolist()]

    def extent(self, name: str) -> list[tuple[int, int]]:
        """The smallest and the largest value of a column of whole numbers, for each group."""
        values = self._layer.column_at(name, self._slots).numpy()
        smallest, largest = (values[self._first.numpy()].copy() for _ in range(2))
        np.minimum.at(smallest, self._group, values)
        np.maximum.at(largest, self._group, values)
        where = self._where.reshape(-1).numpy()
        return list(zip(smallest[where].tolist(), largest[where].tolist(), strict=True))
