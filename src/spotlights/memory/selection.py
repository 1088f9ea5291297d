"""Selections of slots: conditions on columns that combine, and are evaluated block by block.

A selection holds no list of slots, so a view of a memory costs nothing until it is scanned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

GetColumn = Callable[[str], Shaped[Tensor, "rows"]]


class Selection(ABC):
    """Says of each slot whether it is in."""

    @abstractmethod
    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        """True for the slots that are in; None if all are."""

    def __and__(self, other: Selection) -> Selection:
        return other if isinstance(self, Everything) else Both(self, other)

    def __invert__(self) -> Selection:
        return Complement(self)


@dataclass(frozen=True)
class Everything(Selection):
    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        return None

    def __str__(self) -> str:
        return "all slots"


@dataclass(frozen=True)
class OneOf(Selection):
    """Slots whose column holds one of some values."""

    column: str
    values: tuple[int | float, ...]
    shown: str

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        found = column(self.column)
        if len(self.values) == 1:
            return found == self.values[0]
        return torch.isin(found, torch.tensor(self.values, dtype=found.dtype))

    def __str__(self) -> str:
        return f"{self.column}={self.shown}"


@dataclass(frozen=True)
class Between(Selection):
    """Slots whose column lies in a range."""

    column: str
    values: range

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        found = column(self.column)
        inside = (found >= self.values.start) & (found < self.values.stop)
        return inside & ((found - self.values.start) % self.values.step == 0)

    def __str__(self) -> str:
        return f"{self.column}={self.values}"


@dataclass(frozen=True)
class Both(Selection):
    first: Selection
    second: Selection

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        first, second = self.first.mask(column, rows), self.second.mask(column, rows)
        if first is None or second is None:
            return second if first is None else first
        return first & second

    def __str__(self) -> str:
        return f"{self.first} and {self.second}"


@dataclass(frozen=True)
class Complement(Selection):
    inner: Selection

    def mask(self, column: GetColumn, rows: int) -> Bool[Tensor, "rows"] | None:
        inner = self.inner.mask(column, rows)
        return torch.zeros(rows, dtype=torch.bool) if inner is None else ~inner

    def __str__(self) -> str:
        return f"not ({self.inner})"
