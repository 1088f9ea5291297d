"""One layer of a memory: where its slots lie in the segments, its distinct keys and its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from spotlights.memory import slots as names
from spotlights.memory.columns import missing
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.segment import Segment
from spotlights.memory.selection import Selection
from spotlights.memory.storage import Storage, storage_named
from spotlights.memory.stored_rows import StoredRows, decoded


@dataclass(frozen=True)
class Part:
    """A layer's slots in one segment."""

    layer: LayerReader
    segment: Segment
    start: int
    """The number of the first slot."""
    slots: int
    first_key: int
    numbered_from: int = 0
    """Each process of a run numbers its keys from 0 on: what its numbers count from here."""

    def tensor(self, what: str) -> Tensor | None:
        return self.segment.tensor(names.layer_tensor(self.layer.name, what))

    def held(self, what: str) -> Tensor:
        """A tensor that the part must have."""
        return self.segment.held(names.layer_tensor(self.layer.name, what))

    def column(self, name: str) -> Shaped[Tensor, "slots"]:
        found = self.segment.tensor(names.column_tensor(self.layer.name, name))
        if found is None:
            return missing(self.layer.column_kind(name), self.slots)
        return self.segment.recode[name][found] if name in self.segment.recode else found

    def key_numbers(self) -> Int64[Tensor, "slots"]:
        """The number of each slot's key, where keys are kept once."""
        numbers = self.held(names.INDEX)
        return numbers + self.numbered_from if self.numbered_from else numbers


class LayerReader:
    """One layer of a memory."""

    def __init__(
        self,
        name: str,
        entry: LayerEntry,
        segments: Sequence[Segment],
        *,
        folded: bool,
        column_kind: Callable[[str], str],
    ) -> None:
        self.name = name
        self.entry = entry
        self.storage: Storage = storage_named(entry.storage)
        self.folded = folded
        """Whether a slot is the sum of all visits of its example."""
        self.column_kind = column_kind
        """What a column holds; a column that is not there gets its error here."""
        self._distinct: dict[str, np.ndarray] = {}
        self._first: dict[str, np.ndarray] = {}
        self.parts: list[Part] = []
        slots = keys = rank = first_of_rank = 0
        for segment in segments:
            if segment.rank != rank:
                rank, first_of_rank = segment.rank, keys
            n, k = segment.entry.slots[name], segment.entry.keys[name]
            if n:
                self.parts.append(Part(self, segment, slots, n, keys, first_of_rank))
            slots, keys = slots + n, keys + k
        self.slots, self.distinct_keys = slots, keys

    def count(self, selection: Selection) -> int:
        """How many slots are selected."""
        masks = ((part, selection.mask(part.column, part.slots)) for part in self.parts)
        return sum(part.slots if mask is None else int(mask.sum()) for part, mask in masks)

    def key_table(self) -> Iterator[StoredRows]:
        """The distinct keys of an indexed layer, some thousand at a time, placed by their numbers."""
        for part in self.parts:
            stored, scale = part.held(names.KEYS), part.tensor(names.KEY_SCALE)
            for rows in decoded(names.KEYS, stored, scale, self.storage.compute_dtype):
                yield rows.moved(part.first_key)

    def keys_numbered(self, numbers: Int64[Tensor, "rows"]) -> Float[Tensor, "rows in_features"]:
        """Some distinct keys of an indexed layer, scaled."""
        result = torch.empty(len(numbers), self.entry.in_features, dtype=self.storage.compute_dtype)
        starts = torch.tensor([part.first_key for part in self.parts])
        owner = torch.searchsorted(starts, numbers, right=True) - 1
        for index in owner.unique().tolist():
            part, mine = self.parts[index], owner == index
            local = numbers[mine] - part.first_key
            rows = part.held(names.KEYS)[local].to(result.dtype)
            scale = part.tensor(names.KEY_SCALE)
            result[mine] = rows if scale is None else rows * scale[local, None]
        return result

    def column_at(self, name: str, slots: Int64[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A column's values for some slots."""
        flat = slots.reshape(-1)
        ordered, order = flat.sort()
        starts = torch.tensor([part.start for part in self.parts])
        bounds = torch.searchsorted(ordered, torch.cat([starts, torch.tensor([self.slots])])).tolist()
        result = missing(self.column_kind(name), len(flat))
        for part, first, end in zip(self.parts, bounds[:-1], bounds[1:], strict=True):
            if end > first:
                result[order[first:end]] = part.column(name)[ordered[first:end] - part.start]
        return result.reshape(slots.shape)

    def first_slots(self, column: str) -> Int64[Tensor, "groups"]:
        """The first slot with each value of `distinct(column)`."""
        if column not in self._first:
            values = self.distinct(column)
            first = np.full(len(values), self.slots, dtype=np.int64)
            for part in self.parts:
                found, where = np.unique(part.column(column).numpy(), return_index=True)
                at = np.searchsorted(values, found)
                first[at] = np.minimum(first[at], part.start + where)
            self._first[column] = first
        return torch.from_numpy(self._first[column])

    def distinct(self, column: str) -> np.ndarray:
        """The values a column takes in this layer, sorted."""
        if column not in self._distinct:
            parts = [np.unique(part.column(column).numpy()) for part in self.parts]
            self._distinct[column] = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        return self._distinct[column]
