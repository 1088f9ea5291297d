"""A segment's file, mapped while somebody reads it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from pathlib import Path

from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory import slots as names
from spotlights.memory.manifest import Manifest, SegmentEntry
from spotlights.memory.ranks import Recode
from spotlights.memory.tensors import MappedFile, Placed, read_layout

MAPPED_BYTES = 1 << 30
"""How much of the segments stays mapped."""


class Segment:
    """One segment file, mapped while it is used."""

    def __init__(self, directory: Path, entry: SegmentEntry, manifest: Manifest, maps: Maps, recode: Recode) -> None:
        self.path = directory / entry.file
        self.entry = entry
        self.rank = manifest.rank
        self.recode = recode
        self._manifest = manifest
        self._maps = maps

    def tensor(self, name: str) -> Tensor | None:
        return self._maps.of(self).get(name)

    def held(self, name: str) -> Tensor:
        """A tensor that the segment must have."""
        tensor = self.tensor(name)
        assert tensor is not None
        return tensor

    @cached_property
    def layout(self) -> dict[str, Placed]:
        """The file's header, checked against the manifest."""
        layout = read_layout(self.path, self.entry.bytes)
        steps = self.entry.end_step - self.entry.first_step
        for layer, described in self._manifest.layers.items():
            slots, keys = self.entry.slots[layer], self.entry.keys[layer]
            shapes = {
                names.layer_tensor(layer, names.KEYS): (keys, described.in_features),
                names.layer_tensor(layer, names.KEY_SCALE): (keys,),
                names.layer_tensor(layer, names.NORMS): (keys, len(described.stretches)),
                names.layer_tensor(layer, names.INDEX): (slots,),
                names.layer_tensor(layer, names.ERRORS): (slots, described.out_features),
                names.layer_tensor(layer, names.ERROR_SCALE): (slots,),
                names.probe_tensor(layer): (steps, 2),
            }
            for column in self._manifest.columns:
                shapes[names.column_tensor(layer, column)] = (slots,)
            for name, expected in shapes.items():
                found = tuple(layout[name].shape) if name in layout else None
                if found not in (expected, None):
                    raise MemoryFormatError(
                        f"{self.path}: {name!r} has shape {found}, but memory.json says {expected}."
                    )
            if slots and names.layer_tensor(layer, names.KEYS) not in layout:
                raise MemoryFormatError(f"{self.path} has no keys of layer {layer!r}.")
        return layout


class Maps:
    """The segments mapped at the moment, the longest unused dropped first.

    Mapping is cheap and mapped bytes count as memory of the process, so a scan over a large memory keeps only
    some of it mapped.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[Segment, MappedFile] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, segment: Segment) -> MappedFile:
        with self._lock:
            if segment in self._held:
                self._held.move_to_end(segment)
                return self._held[segment]
            mapped = MappedFile(segment.path, segment.entry.bytes, segment.layout)
            self._held[segment] = mapped
            self._bytes += segment.entry.bytes
            while self._bytes > MAPPED_BYTES and len(self._held) > 1:
                dropped, _ = self._held.popitem(last=False)
                self._bytes -= dropped.entry.bytes
            return mapped
