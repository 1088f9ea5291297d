"""What an experiment found, and how it is kept: one JSON file that any program can read."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spotlights.errors import MemoryFormatError
from spotlights.experiments.analyses.audit import Suspect
from spotlights.experiments.analyses.cases import Case
from spotlights.experiments.analyses.class_attention import ClassAttention, CrossTask
from spotlights.experiments.analyses.interference import Forgetting
from spotlights.experiments.analyses.masks import Masked
from spotlights.experiments.analyses.over_time import OverTime
from spotlights.experiments.analyses.votes import Vote

FILE = "results.json"
_DIGITS = 7
"""Of every number in an array; as many as float32 has."""


@dataclass(frozen=True, eq=False)
class Results:
    """Every analysis of one run; what an experiment does not ask for is empty."""

    sources: list[str]
    classes: dict[str, list[str]]
    layers: list[str]
    votes: list[Vote] = field(default_factory=list)
    class_attention: list[ClassAttention] = field(default_factory=list)
    cross_task: list[CrossTask] = field(default_factory=list)
    over_time: list[OverTime] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    masks: list[Masked] = field(default_factory=list)
    forgetting: Forgetting | None = None
    suspects: list[Suspect] = field(default_factory=list)


def save_results(results: Any, folder: Path) -> Path:
    path = folder / FILE
    path.write_text(json.dumps(to_plain(results), ensure_ascii=False, allow_nan=False), encoding="utf-8")
    return path


def load_results(folder: Path, kind: type = Results) -> Any:
    """The results of a finished run, of the kind that its experiment has."""
    path = folder / FILE
    try:
        return from_plain(kind, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise MemoryFormatError(
            f"{folder} has no {FILE}: it is not the folder of a finished run. Make one: spotlights run mnist-single."
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise MemoryFormatError(f"{path} cannot be read ({error}). Repeat the run.") from error


def to_plain(value: Any) -> Any:
    """Dataclasses and arrays as what JSON has; NaN becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    if isinstance(value, dict):
        return {str(key): to_plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(held) for held in value]
    if isinstance(value, float):
        return None if value != value else value
    return value


def _plain_array(array: np.ndarray) -> list[Any]:
    if array.dtype.kind != "f":
        return array.tolist()
    rounded = [None if x != x else float(f"{x:.{_DIGITS}g}") for x in array.reshape(-1).tolist()]
    for size in reversed(array.shape[1:]):
        rounded = [rounded[start : start + size] for start in range(0, len(rounded), size)]
    return rounded


def from_plain(kind: Any, plain: Any) -> Any:
    """The way back, led by the types of the fields. What an older version did not write has its default."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = [each.name for each in fields(kind) if each.name in plain or not _has_default(each)]
        return typing.cast(Any, kind)(**{name: from_plain(hints[name], plain[name]) for name in known})
    array_type = getattr(kind, "array_type", None)
    if array_type is np.ndarray:
        return _array(plain, kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if plain is None:
            return None
        return from_plain(next(a for a in arguments if a is not type(None)), plain)
    if origin is list:
        return [from_plain(arguments[0], held) for held in plain]
    if origin is tuple:
        return tuple(from_plain(arguments[0], held) for held in plain)
    if origin is dict:
        return {key: from_plain(arguments[1], held) for key, held in plain.items()}
    if kind is float:
        return float("nan") if plain is None else float(plain)
    return plain


def _has_default(each: Field[Any]) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def _array(plain: Any, kind: Any) -> np.ndarray:
    dtypes = set(kind.dtypes)
    dtype = np.uint8 if dtypes == {"uint8"} else np.float64 if "float64" in dtypes else np.int64
    return np.array(plain, dtype=dtype)
