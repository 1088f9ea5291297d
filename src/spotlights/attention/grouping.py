"""Groups of slots: by the values of a column, or by ranges of them."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.memory.blocks import Block
from spotlights.memory.columns import MISSING_INT, MISSING_STRING, VISITS
from spotlights.memory.layer_reader import LayerReader

_SMALL_TABLE = 1 << 16


class Grouping:
    """Numbers the groups that a column divides a layer's slots into."""

    def __init__(self, layer: LayerReader, column: str, strings: list[str], bins: int | None) -> None:
        self.column = column
        self.kind = layer.column_kind(column)
        self._strings = strings
        values = layer.distinct(column)
        self._edges: Tensor | None = None
        self._outside = 0
        if bins is not None:
            values = self._bin(values, bins)
        self._values = torch.from_numpy(np.ascontiguousarray(values))
        self._places = self._lookup() if bins is None and self.kind != "float" and len(values) else None
        """The number of the group of each value from the first on, where values lie close enough for a table."""

    def _bin(self, values: np.ndarray, bins: int) -> np.ndarray:
        if self.kind == "string":
            raise SettingError(f'"{self.column}" holds strings; bins= needs a column of numbers.')
        if bins < 1:
            raise SettingError(f"bins={bins}: give at least one.")
        known = values[values != MISSING_INT] if self.kind == "int" else values[~np.isnan(values)]
        self._outside = len(values) - len(known)  # at most one: slots without a value are in no range
        edges = np.empty(1)
        if len(known):
            last = known[-1] + 1 if self.kind == "int" else np.nextafter(known[-1], np.inf)
            edges = np.linspace(known[0], last, bins + 1)
        self._edges = torch.from_numpy(edges)
        return edges[:-1]

    def _lookup(self) -> Int64[Tensor, "spread"] | None:
        spread = int(self._values[-1]) - int(self._values[0]) + 1
        if spread > 4 * len(self._values) + _SMALL_TABLE:
            return None
        places = torch.zeros(spread, dtype=torch.int64)
        places[self._values - self._values[0]] = torch.arange(len(self._values))
        return places

    def __len__(self) -> int:
        return len(self._values) + self._outside

    def codes(self, block: Block) -> Int64[Tensor, "rows"]:
        """The number of each slot's group."""
        if self not in block.known:
            block.known[self] = self._codes(block.column(self.column))
        return block.known[self]

    def _codes(self, column: Shaped[Tensor, "rows"]) -> Int64[Tensor, "rows"]:
        if self._edges is not None:
            found = torch.bucketize(column.double(), self._edges, right=True) - 1
            found.clamp_(0, max(len(self._values) - 1, 0))
            return found.masked_fill_(_is_missing(column), len(self._values))
        if self._places is not None:
            place = column - self._values[0]
            return place if len(self._places) == len(self._values) else self._places[place]
        if self.kind == "float":  # among NaN, which stands for a missing value, only numpy finds its way
            return torch.from_numpy(np.searchsorted(self._values.numpy(), column.numpy()))
        return torch.searchsorted(self._values, column)

    def counts(self, block: Block) -> Int64[Tensor, "groups"]:
        """How many slots of the block each group has; in a folded memory, how many visits were added up in them."""
        codes = self.codes(block)
        if not block.layer.folded:
            return torch.bincount(codes, minlength=len(self))
        return torch.bincount(codes, block.column(VISITS).double(), minlength=len(self)).long()

    def members(self, block: Block) -> list[Int64[Tensor, "rows"]]:
        """For each group its rows of the block, in order."""
        codes = self.codes(block)
        small = codes.numpy().astype(np.uint16 if len(self) < 1 << 16 else np.int64)
        order = torch.from_numpy(small.argsort(kind="stable"))  # a radix sort, for numbers that small
        return list(order.split(torch.bincount(codes, minlength=len(self)).tolist()))

    @property
    def labels(self) -> list[int | float | str | None]:
        """What each group is called: a value, the lower edge of a bin, or None where it was not given."""
        if self._edges is not None:
            return [*self._edges[:-1].tolist(), *[None] * self._outside]
        return column_values(self._values, self.kind, self._strings)


def _is_missing(column: Shaped[Tensor, "rows"]) -> Bool[Tensor, "rows"]:
    return column.isnan() if column.is_floating_point() else column == MISSING_INT


def column_values(values: Tensor, kind: str, strings: list[str]) -> list[int | float | str | None]:
    """A column's numbers as a user knows them."""
    if kind == "string":
        return [None if code == MISSING_STRING else strings[code] for code in values.tolist()]
    if kind == "float":
        return [None if value != value else value for value in values.tolist()]
    return [None if value == MISSING_INT else value for value in values.tolist()]
