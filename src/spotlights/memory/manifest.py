"""`memory.json`: what a memory holds, and which of its files count.

The manifest is the only place that says so. A segment that it does not list does not exist, whatever lies
in the directory; one that it lists must be there, with that size and that checksum. Reading executes
nothing and checks every field.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.sampling import Sample
from spotlights.memory.storage import STORAGES, storage_named
from spotlights.memory.tensors import put_in_place

FORMAT = 2
FILE = "memory.json"
_MOST_RANKS = 1 << 16
"""Each is looked for: a manifest that names more is damaged."""
_ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-11}


@dataclass(frozen=True)
class LayerEntry:
    """A recorded weight."""

    kind: str
    modules: list[str]
    """Every module that uses this weight; the first one names the layer."""
    in_features: int
    out_features: int
    bias: bool
    dtype: str
    """The type of the parameters themselves."""
    storage: str
    """The type that keys and errors are kept in."""
    indexed: bool = False
    """Keys that repeat are kept once; each slot has the number of its key."""
    trained: list[str] = field(default_factory=list)
    """Which of the parameters the optimizer held; the rest is frozen."""
    groups: int = 1
    """How many parts of a key are mapped apart from each other."""
    weight_shape: list[int] = field(default_factory=list)
    """The weight's own shape, where that is not `matrix_shape`."""
    transposed: bool = False
    """The weight's own first dimension is that of the inputs."""
    parts: dict[str, int] = field(default_factory=dict)
    """What a key is put together of, in order, with the sizes: `{"x": 64, "h": 256}`. Empty if it is one thing."""
    map: str = ""
    """Which of several linear maps in its module this is."""
    weights: dict[str, int] = field(default_factory=dict)
    """Where the matrix is several weights side by side: their names, with how many columns each has."""
    biases: list[str] = field(default_factory=list)
    """Where what is added to an output is the sum of several biases: their names."""
    turned: dict[str, str] = field(default_factory=dict)
    """Modules that use the weight the other way round (an embedding beside its output layer), with their kinds: the
    errors of their slots are what they saw, and their keys what came back."""
    computed: str = ""
    """What the layer computed in, where that is coarser than `dtype` (autocast)."""

    @property
    def weight_columns(self) -> dict[str, slice]:
        """Which columns of the matrix each weight has."""
        found, start = {}, 0
        for name, count in (self.weights or {"weight": self.matrix_shape[1]}).items():
            found[name] = slice(start, start + count)
            start += count
        return found

    @property
    def bias_names(self) -> list[str]:
        return self.biases or (["bias"] if self.bias else [])

    def split(
        self, weight: Shaped[Tensor, "out_features in_group"], biases: Shaped[Tensor, "biases out_features"]
    ) -> dict[str, Tensor]:
        """The parameters by name, from the matrix and from one row for each bias."""
        found = {name: weight[:, columns] for name, columns in self.weight_columns.items()}
        return {**found, **dict(zip(self.bias_names, biases, strict=True))}

    @property
    def rounding(self) -> float:
        """The relative error of a slot's numbers: of their storage, and of the arithmetic that made them."""
        return max(storage_named(self.storage).rounding, _ROUNDING.get(self.computed or self.dtype, 0.0))

    @property
    def stretches(self) -> dict[str, slice]:
        """Where the parts of a key lie in it; one that is one thing has one part, without a name."""
        found, start = {}, 0
        for name, size in (self.parts or {"": self.in_features}).items():
            found[name] = slice(start, start + size)
            start += size
        return found

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape that the weight has in the memory."""
        return self.out_features, self.in_features // self.groups

    def own(self, matrix: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A weight in its own shape again."""
        shape = self.weight_shape or matrix.shape
        if not self.transposed:
            return matrix.reshape(shape)
        by_group = matrix.reshape(self.groups, self.out_features // self.groups, shape[0] // self.groups, -1)
        return by_group.transpose(1, 2).reshape(shape)

    def kept(self, own: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        """A weight of its own shape as the memory has it."""
        if not self.transposed:
            return own.reshape(self.matrix_shape)
        by_group = own.reshape(self.groups, own.shape[0] // self.groups, self.out_features // self.groups, -1)
        return by_group.transpose(1, 2).reshape(self.matrix_shape)


@dataclass(frozen=True)
class ColumnEntry:
    """A column of the slots: "int", "float", or "string" (numbers into `strings`)."""

    kind: str
    strings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SegmentEntry:
    """A file with the slots of some whole steps."""

    file: str
    bytes: int
    checksum: str
    first_step: int
    end_step: int
    """One past the last step."""
    slots: dict[str, int]
    keys: dict[str, int]
    """How many keys each layer has here: fewer than slots where keys repeat."""

    @cached_property
    def line(self) -> str:
        """Its line in the manifest, which is written again with every segment."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Snapshot:
    """The running sums of a folded memory as they were after some step."""

    steps: int
    """How many steps it looks back on."""
    asked: bool
    """Whether `flush` asked for it: there is then a checkpoint of the network that goes with it."""
    segments: list[SegmentEntry]


@dataclass(frozen=True)
class FoldEntry:
    """What a folded memory has added up. The manifest's segments are its newest snapshot."""

    by: str
    from_step: int
    """Visits before this step were left out."""
    steps: int = 0
    asked: bool = False
    """As in `Snapshot`, of the newest one."""
    earlier: Snapshot | None = None
    """The last one before it that `flush` asked for: the checkpoint of the newest may not have been saved yet."""

    @property
    def span(self) -> str:
        """Which steps have been added up, in words."""
        if self.steps <= self.from_step:
            return f"no steps yet (from step {self.from_step:,} on)"
        return f"steps {self.from_step:,} to {self.steps - 1:,}"


@dataclass(frozen=True)
class FileEntry:
    """A file beside the segments."""

    file: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """All of `memory.json`."""

    spotlights: str
    """Version of the library that wrote it."""
    torch: str
    created: str
    layers: dict[str, LayerEntry]
    optimizer: str
    """Name of the optimizer's class."""
    rule: str | None
    """Name of the update rule, or None if contributions cannot be computed."""
    log_fields: list[str]
    errors: bool
    initial: FileEntry
    git_revision: str | None = None
    seed: int | None = None
    uncovered: list[str] = field(default_factory=list)
    """Trained parameters that belong to no recorded layer."""
    covered_numbers: int | None = None
    """How many numbers of the parameters that the optimizer trains belong to recorded layers,"""
    trained_numbers: int | None = None
    """of so many; None in memories that did not count them."""
    columns: dict[str, ColumnEntry] = field(default_factory=dict)
    segments: list[SegmentEntry] = field(default_factory=list)
    ranks: int = 1
    """How many processes recorded the run; each has a directory of its own (`memory/ranks.py`)."""
    rank: int = 0
    run: str = ""
    """Of a run in several processes: what all of them have in common."""
    final: FileEntry | None = None
    fold: FoldEntry | None = None
    """None if every visit is a slot of its own."""
    sample: Sample | None = None
    """None if all slots were kept."""
    status: str = "recording"
    """"recording", "closed", or "stopped: …" with the reason."""
    format: int = FORMAT

    @property
    def steps(self) -> int:
        if self.fold is not None:
            return self.fold.steps
        return max((segment.end_step for segment in self.segments), default=0)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replaces the manifest in one move."""
    temporary = directory / (FILE + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(_text(manifest))
        file.flush()
        os.fsync(file.fileno())
    put_in_place(temporary, directory / FILE)


def _text(manifest: Manifest) -> str:
    rest = asdict(replace(manifest, segments=[]))
    del rest["segments"]
    lines = ",\n".join(f"  {segment.line}" for segment in manifest.segments)
    return json.dumps(rest, indent=1).removesuffix("\n}") + f',\n "segments": [\n{lines}\n ]\n}}\n'


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks the manifest; the error says which file and which field is wrong."""
    path = directory / FILE
    if not directory.exists():
        raise MemoryFormatError(f"There is no memory at {directory}: no such directory.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MemoryFormatError(
            f"{directory} is not a memory: it has no {FILE}. Give the directory that `record` wrote."
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise MemoryFormatError(f"{path} is damaged: {error}.") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise MemoryFormatError(f"{path} is not a Spotlights manifest: it has no format number.")
    if raw["format"] != FORMAT:
        raise MemoryFormatError(
            f"{path} has format {raw['format']!r}; this version of Spotlights reads format {FORMAT}. "
            "Open it with the version that wrote it, or record the run again."
        )
    try:
        manifest = _parse(raw)
        _check(manifest)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise MemoryFormatError(f"{path} is damaged: {error}.") from error
    return manifest


def _parse(raw: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **raw,
            "layers": {name: LayerEntry(**entry) for name, entry in raw["layers"].items()},
            "columns": {name: ColumnEntry(**entry) for name, entry in raw["columns"].items()},
            "segments": [SegmentEntry(**entry) for entry in raw["segments"]],
            "initial": FileEntry(**raw["initial"]),
            "final": FileEntry(**raw["final"]) if raw["final"] else None,
            "fold": _parse_fold(raw["fold"]) if raw.get("fold") else None,
            "sample": Sample(**raw["sample"]) if raw.get("sample") else None,
        }
    )


def _parse_fold(raw: dict[str, Any]) -> FoldEntry:
    earlier = raw["earlier"]
    if earlier is not None:
        earlier = Snapshot(**{**earlier, "segments": [SegmentEntry(**entry) for entry in earlier["segments"]]})
    return FoldEntry(**{**raw, "earlier": earlier})


def _check(manifest: Manifest) -> None:
    files: list[FileEntry | SegmentEntry] = [manifest.initial, *manifest.segments]
    if manifest.final:
        files.append(manifest.final)
    if manifest.fold and manifest.fold.earlier:
        files += manifest.fold.earlier.segments
    for entry in files:
        parts = Path(entry.file).parts
        if Path(entry.file).is_absolute() or ".." in parts or not parts or "\0" in entry.file:
            raise ValueError(f"it names the file {entry.file!r}, outside the memory")
        if not (isinstance(entry.bytes, int) and entry.bytes > 0):
            raise ValueError(f"{entry.file} has the size {entry.bytes!r}")
    numbers = isinstance(manifest.ranks, int) and isinstance(manifest.rank, int)
    if not (numbers and 0 <= manifest.rank < manifest.ranks <= _MOST_RANKS):
        raise ValueError(f"it is of process {manifest.rank!r} of {manifest.ranks!r}")
    if manifest.sample and not (0 < manifest.sample.rows <= 1 and 0 < manifest.sample.steps <= 1):
        raise ValueError(f"it is a sample of {manifest.sample}")
    if manifest.fold is None:
        _check_steps(manifest.segments)
    else:
        _check_fold(manifest.fold, manifest.segments)
    for segment in (entry for entry in files if isinstance(entry, SegmentEntry)):
        if set(segment.slots) != set(manifest.layers) or set(segment.keys) != set(manifest.layers):
            raise ValueError(f"{segment.file} does not have the layers of the memory")
        if any(not isinstance(n, int) or n < 0 for n in (*segment.slots.values(), *segment.keys.values())):
            raise ValueError(f"{segment.file} has a negative number of slots")
    for name, layer in manifest.layers.items():
        if layer.storage not in STORAGES:
            raise ValueError(f"layer {name!r} is stored as {layer.storage!r}, which is unknown")
        if layer.in_features < 1 or layer.out_features < 1:
            raise ValueError(f"layer {name!r} has the shape {layer.out_features} x {layer.in_features}")
        if layer.groups < 1 or layer.in_features % layer.groups or layer.out_features % layer.groups:
            raise ValueError(f"layer {name!r} cannot have {layer.groups} groups")
        if layer.weight_shape and math.prod(layer.weight_shape) != math.prod(layer.matrix_shape):
            raise ValueError(f"layer {name!r} has a weight of shape {layer.weight_shape}")
        if layer.parts and (sum(layer.parts.values()) != layer.in_features or min(layer.parts.values()) < 1):
            raise ValueError(f"layer {name!r} has keys of {layer.in_features} numbers, in parts {layer.parts}")
        if layer.weights and sum(layer.weights.values()) != layer.matrix_shape[1]:
            raise ValueError(f"layer {name!r} has weights of {layer.weights} columns")
    for name, column in manifest.columns.items():
        if column.kind not in ("int", "float", "string"):
            raise ValueError(f"column {name!r} has the unknown kind {column.kind!r}")
        if not (isinstance(column.strings, list) and all(isinstance(text, str) for text in column.strings)):
            raise ValueError(f"column {name!r} has the strings {column.strings!r}")


def _check_steps(segments: list[SegmentEntry]) -> None:
    step = 0
    for segment in segments:
        if segment.first_step != step or segment.end_step <= segment.first_step:
            raise ValueError(
                f"{segment.file} has steps {segment.first_step} to {segment.end_step}, expected to start at {step}"
            )
        step = segment.end_step


def _check_fold(fold: FoldEntry, segments: list[SegmentEntry]) -> None:
    if fold.by != "example":
        raise ValueError(f"it is folded by {fold.by!r}, which is unknown")
    kept = Snapshot(fold.steps, fold.asked, segments)
    for snapshot in [kept] if fold.earlier is None else [kept, fold.earlier]:
        if not all(isinstance(step, int) and step >= 0 for step in (fold.from_step, snapshot.steps)):
            raise ValueError(f"it is folded from step {fold.from_step!r} to {snapshot.steps!r}")
        for segment in snapshot.segments:
            if segment.end_step != snapshot.steps:
                raise ValueError(f"{segment.file} is as of step {segment.end_step}, expected {snapshot.steps}")
