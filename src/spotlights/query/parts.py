"""Job arrays: each job answers a question for its share of a memory, and the parts are merged afterwards.

`Shard` is an engine for one of the jobs, `Merged` one for whoever puts the parts together. Both run the same question:
plans with an answer (top, totals) are divided; all else that a question needs, such as which groups there are,
every job computes for the whole memory. A part is a safetensors file with the filled reducers and a JSON description:
loading it executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.files import write_whole
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store.local import read_file
from spotlights.query.engine import Engine, Threads
from spotlights.query.plan import Plan
from spotlights.query.reducers import Reducer, TopReducer, TotalsReducer

_FORMAT = "spotlights-part-1"
_KIND = "a part that `--shard` wrote"


class Shard(Engine):
    """Answers questions for one of several shares of a memory: `memory.on(sl.Shard(3, 20))`, then `save`."""

    def __init__(self, number: int, count: int) -> None:
        """
        Args:
            number: which share, from 1 to `count`.
            count: into how many shares the memory is divided.
        """
        if not 1 <= number <= count:
            raise SettingError(f"There is no shard {number}/{count}: they are numbered 1/{count} to {count}/{count}.")
        self.number, self.count = number, count
        self._memory = ""
        self._plans: list[str] = []
        self._tensors: dict[str, Tensor] = {}

    def run(self, plans: Sequence[Plan], reader: MemoryReader) -> list[tuple[Reducer, ...]]:
        divided = [plan for plan in plans if _is_divided(plan)]
        answers = iter(Threads(share=(self.number - 1, self.count)).run(divided, reader))
        others = iter(Threads().run([plan for plan in plans if not _is_divided(plan)], reader))
        filled = [next(answers if _is_divided(plan) else others) for plan in plans]
        self._memory = _state_of(reader)
        for plan, reducers in zip(plans, filled, strict=True):
            if _is_divided(plan):
                for index, reducer in enumerate(reducers):
                    tensors = _tensors(reducer)
                    self._tensors |= {f"{len(self._plans)}/{index}/{name}": t for name, t in tensors.items()}
                self._plans.append(_described(plan))
        return filled

    @property
    def of_the_whole(self) -> Engine:
        return Threads()

    def save(self, path: str | Path, about: Any = None) -> None:
        """Writes what has been answered so far.

        Args:
            path: the file.
            about: what JSON can hold, for whoever merges the parts.
        """
        if not self._plans:
            raise UnsupportedError("This question cannot be divided: ask for top or totals of scores or contributions.")
        described = {"number": self.number, "count": self.count, "memory": self._memory, "plans": self._plans}
        text = json.dumps({"format": _FORMAT, **described, "about": about})
        tensors = {name: t.contiguous() for name, t in self._tensors.items()}
        content = save(tensors, metadata={"part": text, "checksum": checksum_of_part(text, tensors)})
        write_whole(path, content)


class Merged(Engine):
    """Answers the question of which all parts are given, without another pass: `memory.on(sl.Merged(paths))`."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        parts = [_load(Path(path)) for path in paths]
        if not parts:
            raise SettingError("Give the files of all parts.")
        described, _ = parts[0]
        for other, _ in parts[1:]:
            for field in ("count", "memory", "about", "plans"):
                if other[field] != described[field]:
                    raise SettingError(
                        f"The parts do not belong together: their {field} is not the same. Give the parts of one "
                        "question about a memory that did not grow meanwhile."
                    )
        numbers = [part["number"] for part, _ in parts]
        missing = sorted(set(range(1, described["count"] + 1)) - set(numbers))
        if missing or len(numbers) != described["count"]:
            fault = f"{', '.join(map(str, missing))} missing" if missing else "some are given twice"
            raise SettingError(f"Each of the {described['count']} parts must be given once: {fault}.")
        self.about: Any = described["about"]
        """What `Shard.save` was given."""
        self._described = described
        self._parts = [tensors for _, tensors in parts]
        self._next = 0

    def run(self, plans: Sequence[Plan], reader: MemoryReader) -> list[tuple[Reducer, ...]]:
        others = iter(Threads().run([plan for plan in plans if not _is_divided(plan)], reader))
        return [self._merged(plan, reader) if _is_divided(plan) else next(others) for plan in plans]

    @property
    def of_the_whole(self) -> Engine:
        return Threads()

    def _merged(self, plan: Plan, reader: MemoryReader) -> tuple[Reducer, ...]:
        number, known = self._next, self._described["plans"]
        self._next += 1
        if _state_of(reader) != self._described["memory"]:
            raise SettingError(f"The parts are not of {reader.address} as it is now.")
        if number >= len(known) or _described(plan) != known[number]:
            raise SettingError("The parts answer another question.")
        merged = tuple(reducer.fresh() for reducer in plan.reducers)
        slots = reader.layers[plan.layer].slots
        for tensors in self._parts:
            for index, reducer in enumerate(merged):
                prefix = f"{number}/{index}/"
                own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                reducer.merge(_filled(reducer.fresh(), own, slots))
        return merged


def _is_divided(plan: Plan) -> bool:
    return plan.measure is not None and all(
        isinstance(reducer, TopReducer | TotalsReducer) for reducer in plan.reducers
    )


def _state_of(reader: MemoryReader) -> str:
    """What tells a memory from others, and from itself when it has grown."""
    return xxhash.xxh3_64_hexdigest(repr([segment.checksum for segment in reader.manifest.segments]).encode())


def _described(plan: Plan) -> str:
    """What must be equal in the plan of a part and in that of the merged answer."""
    selected = xxhash.xxh3_64_hexdigest(repr(plan.selection).encode())
    asked = [
        (type(r).__name__, r.queries, getattr(r, "k", None), getattr(r, "largest", None), getattr(r, "absolute", None))
        for r in plan.reducers
        if isinstance(r, TopReducer | TotalsReducer)
    ]
    return f"{plan.layer}: {type(plan.measure).__name__} of {selected}: {asked}"


def _tensors(reducer: Reducer) -> dict[str, Tensor]:
    if not isinstance(reducer, TopReducer):
        return {name: getattr(reducer, name) for name in reducer.adds}
    values = {f"values{group}": values for group, (values, _) in enumerate(reducer.kept)}
    return values | {f"slots{group}": slots for group, (_, slots) in enumerate(reducer.kept)}


def _filled(reducer: Reducer, tensors: Mapping[str, Tensor], slots: int) -> Reducer:
    """A reducer with the tensors of a part, which must be of the shapes that such a reducer has."""
    if isinstance(reducer, TopReducer):
        for group in range(len(reducer.kept)):
            values, numbers = (tensors.get(f"{what}{group}", torch.empty(0)) for what in ("values", "slots"))
            fits = values.ndim == 2 and values.shape == numbers.shape
            fits = fits and len(values) == reducer.queries and values.shape[1] <= reducer.k
            if not (fits and values.is_floating_point() and numbers.dtype == torch.int64):
                raise SettingError(f"This is not {_KIND}: its tensors do not fit the question.")
            if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < slots:
                raise SettingError(f"This is not {_KIND}: it names slots that the memory does not have.")
            reducer.kept[group] = values, numbers
        return reducer
    for name in reducer.adds:
        empty, given = getattr(reducer, name), tensors.get(name)
        if given is None or (given.shape, given.dtype) != (empty.shape, empty.dtype):
            raise SettingError(f"This is not {_KIND}: its tensors do not fit the question.")
        setattr(reducer, name, given)
    return reducer


def checksum_of_part(text: str, tensors: Mapping[str, Tensor]) -> str:
    checksum = xxhash.xxh3_64(text.encode())
    for name, tensor in sorted(tensors.items()):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        content = read_file(path).tobytes()
        tensors = load(content)
        stated = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        described = json.loads(stated.get("part", "null"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{path} is not {_KIND}: {error}.") from None
    if stated.get("checksum") != checksum_of_part(stated.get("part", ""), tensors):
        raise SettingError(f"{path} is not {_KIND}, or was changed since: it does not have its checksum.")
    kinds = {"format": str, "number": int, "count": int, "memory": str, "plans": list}
    if not isinstance(described, dict) or described.get("format") != _FORMAT or "about" not in described:
        raise SettingError(f"{path} is not {_KIND}.")
    if not all(isinstance(described.get(field), kind) for field, kind in kinds.items()):
        raise SettingError(f"{path} is not {_KIND}: its description is damaged.")
    return described, tensors
