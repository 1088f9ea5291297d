"""Parameters of which each process of a run has written a part (`LayerEntry.shards`), as whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxtyping import Shaped
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.format.manifest import LayerEntry, Manifest


def whole(entries: Sequence[LayerEntry], parameter: str, parts: Sequence[Tensor | None]) -> Shaped[Tensor, "..."]:
    """A parameter, or a tensor of its shape, from the parts of all processes."""
    joined = None
    for entry, part in zip(entries, parts, strict=True):
        box = entry.shards.get(parameter, [])
        if not box:
            continue
        if part is None:
            raise MemoryFormatError(f'A process of the run has not written its part of "{parameter}".')
        place = tuple(map(slice, box[::2], box[1::2]))
        if part.ndim != len(place):  # a number that all processes have
            return part
        if list(part.shape) != [one.stop - one.start for one in place]:
            raise MemoryFormatError(f'A process of the run has written a part of "{parameter}" of another shape.')
        joined = part.new_zeros(entry.shape_of(parameter)) if joined is None else joined
        joined[place] = part
    assert joined is not None, "some process writes the parameter"
    return joined


class WholeTensors(Mapping[str, Tensor]):
    """The tensors `LAYER/PARAMETER` and `LAYER/PARAMETER/STATE` of all processes' files, put together when asked for;
    others as the first process has them."""

    def __init__(self, ranks: Sequence[Manifest], files: Sequence[Mapping[str, Tensor]]) -> None:
        self._ranks, self._files = ranks, files
        self._joined: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Shaped[Tensor, "..."]:
        if name not in self._joined:
            layer, parameter = self._owner(name)
            if layer is None:
                return self._files[0][name]
            parts = [file.get(name) for file in self._files]
            if all(part is None for part in parts):
                raise KeyError(name)
            self._joined[name] = whole([own.layers[layer] for own in self._ranks], parameter, parts)
        return self._joined[name]

    def _owner(self, name: str) -> tuple[str | None, str]:
        for layer, entry in self._ranks[0].layers.items():
            if name.startswith(f"{layer}/"):
                parameter = name.removeprefix(f"{layer}/").split("/")[0]
                if parameter in entry.shards:
                    return layer, parameter
        return None, ""

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for file in self._files for name in file))

    def __len__(self) -> int:
        return len(list(iter(self)))
