"""Groups of slots: by the values of a column, or by ranges of them."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.memory.columns import MISSING_INT, MISSING_STRING
from spotlights.memory.reader import Block, LayerReader


class Grouping:
    """Numbers the groups that a column divides a layer's slots into."""

    def __init__(
        self, layer: LayerReader, column: str, strings: list[str], bins: int | None
    ) -> None:
        self.column = column
        self.kind = layer.column_kind(column)
        self._strings = strings
        values = layer.distinct(column)
        self._edges: Tensor | None = None
        if bins is not None:
            values = self._bin(values, bins)
        self._values = torch.from_numpy(np.ascontiguousarray(values))

    def _bin(self, values: np.ndarray, bins: int) -> np.ndarray:
        if self.kind == "string":
            raise SettingError(f'"{self.column}" holds strings; bins= needs a column of numbers.')
        if bins < 1:
            raise SettingError(f"bins={bins}: give at least one.")
        known = values[values != MISSING_INT] if self.kind == "int" else values[~np.isnan(values)]
        if len(known) == 0:
            return known
        first, last = (
            known[0],
            known[-1] + 1 if self.kind == "int" else np.nextafter(known[-1], np.inf),
        )
        edges = np.linspace(first, last, bins + 1)
        self._edges = torch.from_numpy(edges)
        return edges[:-1]

    def __len__(self) -> int:
        return len(self._values)

    def codes(self, block: Block) -> Int64[Tensor, "rows"]:
        """The number of each slot's group."""
        column = block.column(self.column)
        if self._edges is not None:
            found = torch.bucketize(column.double(), self._edges, right=True) - 1
            return found.clamp_(0, len(self) - 1)
        return torch.searchsorted(self._values, column).clamp_(max=len(self) - 1)

    @property
    def labels(self) -> list[int | float | str | None]:
        """What each group is called: a value, the lower edge of a bin, or None where it was not given."""
        if self._edges is not None:
            return [float(edge) for edge in self._edges[:-1]]
        return column_values(self._values, self.kind, self._strings)


def column_values(values: Tensor, kind: str, strings: list[str]) -> list[int | float | str | None]:
    """A column's numbers as a user knows them."""
    if kind == "string":
        return [None if code == MISSING_STRING else strings[code] for code in values.tolist()]
    if kind == "float":
        return [None if value != value else value for value in values.tolist()]
    return [None if value == MISSING_INT else value for value in values.tolist()]
