"""`memory.json`: what a memory holds, and which of its files count.

A segment that the manifest does not list does not exist, whatever lies beside the manifest. A file that the manifest
lists must be there, with that size and that checksum. The manifest ends with a checksum of itself. Parsing executes
nothing and checks every field.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import xxhash
from jaxtyping import Shaped
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory.format.names import is_name
from spotlights.memory.format.sampling import Sample
from spotlights.memory.format.storage import STORAGES, storage_named

FORMAT = 2
_CHECKSUM = b',\n "checksum": '
"""Before the last field of the manifest."""
_ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-11}
_FEW_LAYERS = 8
"""The numbers of so many are written one by one."""
_MOST_FULL_MOMENTS = 4096
_MOST_RANKS = 1 << 16
"""The reader looks for the files of each rank: a manifest that names more ranks is damaged."""


def _slices(sizes: dict[str, int]) -> dict[str, slice]:
    """Slices of these sizes, one behind the other."""
    return {name: slice(end - sizes[name], end) for name, end in zip(sizes, accumulate(sizes.values()), strict=True)}


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
    """The type that keys and errors are stored in."""
    indexed: bool = False
    """Keys that repeat are stored once; each slot has the number of its key."""
    trained: list[str] = field(default_factory=list)
    """Which of the parameters the optimizer trains; the others are frozen."""
    groups: int = 1
    """The groups of a grouped convolution: each maps its own channels of a key."""
    weight_shape: list[int] = field(default_factory=list)
    """The weight's own shape, where that is not `matrix_shape`."""
    transposed: bool = False
    """The weight's own first dimension is that of the inputs."""
    parts: dict[str, int] = field(default_factory=dict)
    """The parts that a key is concatenated from, with their sizes: `{"x": 64, "h": 256}`. Empty if there are none."""
    map: str = ""
    """The name of this linear map, if its module has several."""
    weights: dict[str, int] = field(default_factory=dict)
    """If the matrix is several weights side by side: their names and numbers of columns."""
    biases: list[str] = field(default_factory=list)
    """If several biases are added to an output: their names."""
    turned: dict[str, str] = field(default_factory=dict)
    """Modules that use the transposed weight (an embedding tied to an output layer), with their kinds. In their slots,
    keys and errors swap roles."""
    rules: dict[str, str] = field(default_factory=dict)
    """Of parameters that another optimizer trains than the first one: the names of their update rules."""
    computed: str = ""
    """The type of the layer's arithmetic, if that is coarser than `dtype` (autocast)."""
    tokens: list[str] = field(default_factory=list)
    """"keys" (of an embedding) or "errors" (of an embedding tied to this layer): stored as token numbers."""
    shards: dict[str, list[int]] = field(default_factory=dict)
    """Of a run under `fully_shard`, by parameter: the rows that this process writes, from … to; for the columns of a
    matrix, two more numbers. Empty lists: another process writes them."""

    @property
    def moments_shape(self) -> tuple[int, ...]:
        """The shape of the second moments of [k; 1]: of tokens from a large vocabulary, the diagonal alone."""
        many = "keys" in self.tokens and self.in_features > _MOST_FULL_MOMENTS
        return (self.in_features + 1,) * (1 if many else 2)

    @cached_property
    def weight_columns(self) -> dict[str, slice]:
        """The columns of the matrix that each weight has."""
        return _slices(self.weights or {"weight": self.matrix_shape[1]})

    @cached_property
    def bias_names(self) -> list[str]:
        return self.biases or (["bias"] if self.bias else [])

    def shape_of(self, parameter: str) -> tuple[int, ...]:
        """The shape of a parameter in the memory."""
        columns = self.weight_columns.get(parameter)
        return (self.out_features,) if columns is None else (self.out_features, columns.stop - columns.start)

    def split(
        self, weight: Shaped[Tensor, "out_features in_group"], biases: Shaped[Tensor, "biases out_features"]
    ) -> dict[str, Tensor]:
        """The parameters by name, from the matrix and from one row for each bias."""
        weights = {name: weight[:, columns] for name, columns in self.weight_columns.items()}
        return {**weights, **dict(zip(self.bias_names, biases, strict=True))}

    @cached_property
    def rounding(self) -> float:
        """The relative error of a slot's numbers: of their storage type, or of the arithmetic that computed them."""
        return max(storage_named(self.storage).rounding, _ROUNDING.get(self.computed or self.dtype, 0.0))

    @cached_property
    def stretches(self) -> dict[str, slice]:
        """Where each part of a key lies in it; a key without parts is one part without a name."""
        return _slices(self.parts or {"": self.in_features})

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape of the weight in the memory."""
        return self.out_features, self.in_features // self.groups

    def own(self, name: str, kept: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A parameter of the memory, in the shape that the module has."""
        if name not in self.weight_columns:
            return kept
        shape = self.weight_shape or kept.shape
        return (self._swapped(kept, self.out_features, shape[0]) if self.transposed else kept).reshape(shape)

    def kept(self, own: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        """A weight of the module, in the shape that the memory has."""
        matrix = self._swapped(own, own.shape[0], self.out_features) if self.transposed else own
        return matrix.reshape(self.matrix_shape)

    def _swapped(self, weight: Shaped[Tensor, "..."], first: int, second: int) -> Shaped[Tensor, "..."]:
        """A weight of these outer dimensions, with the two exchanged within each group."""
        return weight.reshape(self.groups, first // self.groups, second // self.groups, -1).transpose(1, 2)


@dataclass(frozen=True)
class ParameterEntry:
    """What becomes of a parameter of the model."""

    numbers: int
    layer: str
    """The recorded layer that has it; empty if there is none."""
    reason: str
    """"frozen", "trained by another optimizer …", or "not recorded because …"; empty if it is recorded."""


@dataclass(frozen=True)
class ColumnEntry:
    """A column of the slots: "int", "float", or "string" (numbers into `strings`)."""

    kind: str
    strings: list[str] = field(default_factory=list)


def _short(of_layers: dict[str, int]) -> dict[str, int]:
    """Numbers of many layers, with the one that most of them have under no name."""
    if len(of_layers) <= _FEW_LAYERS:
        return of_layers
    ((most, _),) = Counter(of_layers.values()).most_common(1)
    return {"": most} | {layer: number for layer, number in of_layers.items() if number != most}


def _in_full(segment: Any, layers: Any) -> Any:
    """A segment as it was before its numbers were written short."""
    if not isinstance(segment, dict) or not isinstance(layers, dict):
        return segment
    short = {n: v for n, v in segment.items() if n in ("slots", "keys") and isinstance(v, dict) and "" in v}
    full = {n: dict.fromkeys(layers, v[""]) | {layer: v[layer] for layer in v if layer} for n, v in short.items()}
    return segment | full


@dataclass(frozen=True)
class FileEntry:
    """A file of the memory."""

    file: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class SegmentEntry(FileEntry):
    """A file with the slots of some whole steps."""

    first_step: int
    end_step: int
    """One past the last step."""
    slots: dict[str, int]
    keys: dict[str, int]
    """How many keys each layer has here: fewer than slots if keys repeat, or are tokens."""
    errors: dict[str, int] = field(default_factory=dict)
    """How many errors are stored in full, in layers where others are tokens."""

    @cached_property
    def line(self) -> str:
        """The segment's line in the manifest, which is written again with every segment."""
        return json.dumps(asdict(self) | {"slots": _short(self.slots), "keys": _short(self.keys)})


@dataclass(frozen=True)
class Snapshot:
    """The running sums of a folded memory as they were after some step."""

    steps: int
    """How many steps had been added up."""
    asked: bool
    """Whether `flush` asked for the snapshot: a checkpoint of the network may then belong to it."""
    segments: list[SegmentEntry]


@dataclass(frozen=True)
class FoldEntry:
    """What a folded memory has added up. The manifest's segments are its newest snapshot."""

    by: str
    from_step: int
    """Visits before this step were left out."""
    steps: int = 0
    asked: bool = False
    """`steps` and `asked` of the newest snapshot."""
    earlier: Snapshot | None = None
    """The last snapshot before the newest that `flush` asked for: the newest one's checkpoint may not be saved yet."""

    @property
    def span(self) -> str:
        """Which steps have been added up, in words."""
        if self.steps <= self.from_step:
            return f"no steps yet (from step {self.from_step:,} on)"
        return f"steps {self.from_step:,} to {self.steps - 1:,}"


@dataclass(frozen=True)
class RecipeEntry:
    """How the slots that a recipe does not keep are to be made: options of `record`."""

    layers: list[str]
    """Patterns of the names of the recorded layers; empty for all."""
    dtype: str
    """The storage type; empty for that of each layer's weights."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of `memory.json`."""

    spotlights: str
    """Version of the library that wrote the memory."""
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
    covered_numbers: int
    """How many numbers of the trained parameters belong to recorded layers,"""
    trained_numbers: int
    """and how many there are."""
    parameters: dict[str, ParameterEntry]
    """All parameters of the model by name."""
    columns: dict[str, ColumnEntry]
    segments: list[SegmentEntry]
    ranks: int = 1
    """How many processes recorded the run; each has files of its own (`memory/reader.py`)."""
    rank: int = 0
    run: str = ""
    """Of a run in several processes: an id that all of them share."""
    final: FileEntry | None
    fold: FoldEntry | None = None
    """None if every visit is a slot of its own."""
    sample: Sample | None = None
    """None if all slots were kept."""
    recipe: RecipeEntry | None = None
    """None if the slots themselves are kept."""
    recomputed: float | None = None
    """Of slots that were computed again from a recipe: how far the weights were off at the next checkpoint, relative to
    them, at most; 0 if they were the same bit for bit."""
    observed: int = 0
    """Of a network that was already trained: at how many sets of weights its gradients were computed. 0 if a training
    was recorded."""
    status: str = "recording"
    """"recording", "closed", or "stopped: …" with the reason."""
    format: int = FORMAT

    @property
    def steps(self) -> int:
        if self.fold is not None:
            return self.fold.steps
        return max((segment.end_step for segment in self.segments), default=0)

    @property
    def files(self) -> list[FileEntry]:
        """The files that a reader needs."""
        return [self.initial, *self.segments, *([self.final] if self.final else [])]

    @property
    def listed(self) -> list[FileEntry]:
        """The same, and those of the snapshot before."""
        return [*self.files, *(segment for snapshot in self.snapshots[1:] for segment in snapshot.segments)]

    @cached_property
    def slots_note(self) -> str | None:
        """What an answer from slots that are not those of the run says; None if they are."""
        if self.observed:
            weights = "the trained weights" if self.observed == 1 else f"{self.observed} sets of weights"
            return f"observed at {weights}, not recorded: an estimate of what training did"
        if not self.recomputed:
            return None
        return f"slots computed again from a recipe, not bit for bit: weights were off by up to {self.recomputed:.0e}"

    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots of a folded memory, the newest first."""
        if self.fold is None:
            return []
        newest = Snapshot(self.fold.steps, self.fold.asked, self.segments)
        return [newest] if self.fold.earlier is None else [newest, self.fold.earlier]


def manifest_content(manifest: Manifest) -> bytes:
    """The content of `memory.json`."""
    rest = asdict(replace(manifest, segments=[]))
    del rest["segments"]
    lines = ",\n".join(f"  {segment.line}" for segment in manifest.segments)
    text = json.dumps(rest, indent=1).removesuffix("\n}") + f',\n "segments": [\n{lines}\n ]'
    return signed(text.encode())


def signed(text: bytes) -> bytes:
    """The text of a manifest up to its last field, completed by a checksum of that text."""
    return text + _CHECKSUM + f'"{xxhash.xxh3_64_hexdigest(text)}"\n}}\n'.encode()


def unsigned(content: bytes, address: str) -> dict[str, Any]:
    """What a signed text says; an error if it does not have its checksum."""
    raw = _parsed(content, address)
    if not isinstance(raw, dict) or raw.pop("checksum", None) != _checksum(content):
        raise MemoryFormatError(f"{address} is damaged: its content does not have the checksum at its end.")
    return raw


def _parsed(content: bytes, address: str) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise MemoryFormatError(f"{address} is damaged: {error}.") from error


def _checksum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content.rpartition(_CHECKSUM)[0])


def parse_manifest(content: bytes, address: str) -> Manifest:
    """Parses and checks the content of the manifest at an address; the error says which field is wrong."""
    raw = _parsed(content, address)
    if not isinstance(raw, dict) or "format" not in raw:
        raise MemoryFormatError(f"{address} is not a Spotlights manifest: it has no format number.")
    if raw["format"] != FORMAT:
        raise MemoryFormatError(
            f"{address} has format {raw['format']!r}; this version of Spotlights reads format {FORMAT}. "
            "Open it with the version that wrote it, or record the run again."
        )
    stated = raw.pop("checksum", None)  # memories of earlier versions have none
    if stated is not None and stated != _checksum(content):
        raise MemoryFormatError(
            f"{address} is damaged: its content does not have the checksum at its end. Restore it from a copy of the "
            "memory."
        )
    if isinstance(raw.get("segments"), list):
        raw["segments"] = [_in_full(segment, raw.get("layers")) for segment in raw["segments"]]
    try:
        manifest = _typed(raw, Manifest, "memory.json")
        _check(manifest)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise MemoryFormatError(f"{address} is damaged: {error}.") from error
    return manifest


def _typed(value: Any, kind: Any, name: str) -> Any:
    """A value of JSON as a value of a field's type: tables become entries, and plain values are checked."""
    if type(value) is kind:
        return value
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _typed(value, kinds[0], name)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        types = _field_types(kind)
        return kind(**{field: _typed(given, types.get(field), field) for field, given in value.items()})
    if origin is list and isinstance(value, list):
        return [_typed(item, kinds[0], name) for item in value]
    if origin is dict and isinstance(value, dict):
        if set(map(type, value.values())) == {kinds[1]}:  # by far the most values are numbers of slots
            return value
        return {key: _typed(item, kinds[1], name) for key, item in value.items()}
    expected = origin or kind
    if expected is not None and not isinstance(value, int | float if expected is float else expected):
        raise TypeError(f"{name} is {value!r}, expected {expected.__name__}")
    return value


_field_types = lru_cache(get_type_hints)


def _is_hexadecimal(text: str) -> bool:
    return 0 < len(text) <= 64 and set(text) <= set("0123456789abcdef")


def _check(manifest: Manifest) -> None:
    """Raises a ValueError that says what is wrong."""

    def need(holds: bool, fault: str) -> None:
        if not holds:
            raise ValueError(fault)

    fold, sample, snapshots = manifest.fold, manifest.sample, manifest.snapshots
    need(manifest.observed >= 0, f"it was observed at {manifest.observed} sets of weights")
    need(not manifest.run or _is_hexadecimal(manifest.run), f"it is of the run {manifest.run!r}")
    need(0 <= manifest.rank < manifest.ranks <= _MOST_RANKS, f"it is of process {manifest.rank} of {manifest.ranks}")
    need(sample is None or (0 < sample.rows <= 1 and 0 < sample.steps <= 1), f"it is a sample of {sample}")
    if fold is not None:
        need(fold.by == "example", f"it is folded by {fold.by!r}, which is unknown")
        need(fold.from_step >= 0, f"it is folded from step {fold.from_step} on")
    for file in manifest.listed:
        need(is_name(file.file), f"it names the file {file.file!r}, outside the memory")
        need(file.bytes > 0, f"{file.file} has the size {file.bytes!r}")
        need(_is_hexadecimal(file.checksum), f"{file.file} has the checksum {file.checksum!r}")
        if isinstance(file, SegmentEntry):
            has_layers = file.slots.keys() == file.keys.keys() == manifest.layers.keys()
            need(has_layers, f"{file.file} does not have the layers of the memory")
            fewest = min((*file.slots.values(), *file.keys.values(), *file.errors.values()), default=0)
            need(fewest >= 0, f"{file.file} has a negative number of slots")
            # Sizes of files are compared before anything is read: no more is ever allocated than is there.
            steps = file.end_step - file.first_step
            need(fold is not None or 8 * steps <= file.bytes, f"{file.file} cannot have {steps} steps")
            for name, count in file.slots.items():
                layer = manifest.layers[name]
                row = max(1, layer.in_features) * STORAGES.get(layer.storage, STORAGES["int8"]).dtype.itemsize
                fits = 8 * count <= file.bytes and file.keys[name] * row <= file.bytes
                need(fits, f"{file.file} cannot have {count} slots of layer {name!r}")
    step = 0
    for segment in manifest.segments if fold is None else ():
        steps = f"{segment.first_step} to {segment.end_step}"
        need(step == segment.first_step < segment.end_step, f"{segment.file} has steps {steps}, not from {step} on")
        step = segment.end_step
    for snapshot in snapshots:
        steps = {snapshot.steps, *(segment.end_step for segment in snapshot.segments)}
        need(len(steps) == 1 and min(steps) >= 0, f"a snapshot has files as of several steps: {sorted(steps)}")
    for name, layer in manifest.layers.items():
        ins, outs, groups = layer.in_features, layer.out_features, layer.groups
        need(layer.storage in STORAGES, f"layer {name!r} is stored as {layer.storage!r}, which is unknown")
        need(ins > 0 and outs > 0, f"layer {name!r} has the shape {outs} x {ins}")
        divisible = groups > 0 and ins % groups == outs % groups == 0
        need(divisible, f"layer {name!r} cannot have {groups} groups")
        numbers = math.prod(layer.weight_shape or layer.matrix_shape)
        need(numbers == math.prod(layer.matrix_shape), f"layer {name!r} has a weight of shape {layer.weight_shape}")
        parts = [stretch.stop - stretch.start for stretch in layer.stretches.values()]
        need(sum(parts) == ins and min(parts) > 0, f"layer {name!r} has keys of {ins} numbers, in parts {layer.parts}")
        columns = sum(layer.weights.values()) if layer.weights else layer.matrix_shape[1]
        need(columns == layer.matrix_shape[1], f"layer {name!r} has weights of {layer.weights} columns")
        plain = groups == 1 and not layer.parts and not layer.indexed
        known = {"keys", "errors"} >= set(layer.tokens)
        need(known and (plain or not layer.tokens), f"layer {name!r} cannot have tokens as {layer.tokens}")
        for parameter, box in layer.shards.items():
            shape, ends = layer.shape_of(parameter), list(zip(box[::2], box[1::2], strict=False))
            whole = not box or (len(box) == 2 * len(shape))
            inside = all(0 <= start <= stop <= size for (start, stop), size in zip(ends, shape, strict=False))
            need(whole and inside, f"layer {name!r} has the shard {box} of {parameter!r}, which has the shape {shape}")
    for name, column in manifest.columns.items():
        need(column.kind in ("int", "float", "string"), f"column {name!r} has the unknown kind {column.kind!r}")
