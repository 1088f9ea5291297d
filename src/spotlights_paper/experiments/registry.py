"""Experiments by name, the contents of their `run.json`, and the conversion of dataclasses to JSON and back.

A new experiment is a file with a dictionary `EXPERIMENTS`, and a line here.
"""

from __future__ import annotations

import math
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spotlights.errors import UnknownNameError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names that a run may have: they become names of files and anchors on a page."""
_DIGITS = 7
"""Of every number in an array; as many as float32 has."""


@dataclass(frozen=True)
class Exactness:
    """How well one layer's memory reproduces its trained weights."""

    exact: bool
    relative_error: float
    change_error: float
    """Relative to what training changed."""


@dataclass(frozen=True, kw_only=True)
class RunFile(ABC):
    """How to repeat a run, and its outcome."""

    experiment: str
    preset: str
    """The preset the settings began as."""
    settings: dict[str, Any]
    seed: int
    versions: dict[str, str]
    exactness: dict[str, Exactness]
    """By layer; empty if the memory holds keys alone, which is no network."""
    slots: int
    memory_bytes: int
    seconds: dict[str, float]
    """By stage: training (with recording), verify, analyses."""

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.preset) is None:
            raise ValueError(f"{self.preset[:40]!r} is not the name of a preset")

    @property
    def exact(self) -> bool:
        return all(check.exact for check in self.exactness.values())

    @abstractmethod
    def outcome(self) -> list[list[str]]:
        """How good the network is, as rows of a name and a number."""


@dataclass(frozen=True, kw_only=True)
class ImageRun(RunFile):
    """What run.json holds about a network for images."""

    train_images: dict[str, int]
    """By source."""
    test_images: dict[str, int]
    accuracy: dict[str, float]
    """Of the trained network, by source."""

    def outcome(self) -> list[list[str]]:
        return [[f"accuracy on {source}", f"{share:.2%}"] for source, share in self.accuracy.items()]


@dataclass(frozen=True, kw_only=True)
class LanguageRun(RunFile):
    """What run.json holds about a language model."""

    unit: str
    """What it reads in one step: "character" or "word"."""
    train_tokens: int
    test_tokens: int
    vocabulary: int
    text_sha256: str
    """Of the training text: a user's file may change."""
    surprise: dict[str, float]
    """In nats, at a token of the training text (over the last epoch of training) and of the test text."""

    def outcome(self) -> list[list[str]]:
        return [[f"{self.quality_name}, {split} text", f"{self.quality(split):.4g}"] for split in self.surprise]

    @property
    def quality_name(self) -> str:
        return "bits per character" if self.unit == "character" else "perplexity"

    def quality(self, split: str) -> float:
        """What one compares: bits for each character, or the perplexity of a word."""
        nats = self.surprise[split]
        return nats / math.log(2) if self.unit == "character" else math.exp(nats)


# -- JSON -------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """Dataclasses and arrays as JSON values; NaN becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return _round(value.tolist()) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def _round(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [_round(number) for number in numbers]
    return None if numbers != numbers else float(f"{numbers:.{_DIGITS}g}")


def from_plain(kind: Any, plain: Any) -> Any:
    """The way back, led by the types of the fields. What an older version did not write has its default."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = [field.name for field in fields(kind) if field.name in plain or not _has_default(field)]
        return typing.cast(Any, kind)(**{name: from_plain(hints[name], plain[name]) for name in known})
    if getattr(kind, "array_type", None) is np.ndarray:
        dtypes = set(kind.dtypes)
        dtype = np.uint8 if dtypes == {"uint8"} else np.float64 if "float64" in dtypes else np.int64
        return np.array(plain, dtype=dtype)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if plain is None else from_plain(next(a for a in arguments if a is not type(None)), plain)
    if origin in (list, tuple):
        return origin(from_plain(arguments[0], item) for item in plain)
    if origin is dict:
        return {key: from_plain(arguments[1], item) for key, item in plain.items()}
    if kind is float:
        return float("nan") if plain is None else float(plain)
    if kind in (str, int, bool) and type(plain) is not kind:
        raise TypeError(f"{str(plain)[:40]!r} is not of type {kind.__name__}")
    return plain


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


@dataclass(frozen=True)
class Experiment:
    """One experiment: its settings, how it is trained, and what is asked afterwards."""

    presets: dict[str, Any]
    """Settings by name; the first ones are the default."""
    load: Callable[[Any], Any]
    """The data that some settings train on: a text, or images by source."""
    train: Callable[..., Any]
    """`train(settings, data=…, seed=…, path=…)` trains and records: a memory, its model, and facts() for run.json."""
    analyse: Callable[..., Any]
    """`analyse(trained, settings)` asks all questions."""
    run_file: type[RunFile]
    """What run.json holds."""
    results: type
    """What results.json holds."""

    @property
    def settings(self) -> type:
        return type(next(iter(self.presets.values())))

    def run(self, settings: Any, *, seed: int, path: Path) -> Any:
        """Loads, trains and records."""
        return self.train(settings, data=self.load(settings), seed=seed, path=path)


EXPERIMENTS = {
    "mnist-single": "mnist",
    "mnist-joint": "mnist",
    "mnist-continual": "mnist",
    "mnist-cnn": "mnist",
    "aesop-char": "language_models",
    "aesop-gpt": "language_models",
    "wikitext2-word": "language_models",
    "char-lm": "language_models",
    "word-lm": "language_models",
}
"""The module of each experiment, which is imported when the experiment is used."""


def experiment_named(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise UnknownNameError(f'No experiment "{name}". There are: {", ".join(EXPERIMENTS)}.')
    return import_module(f"spotlights_paper.experiments.{EXPERIMENTS[name]}").EXPERIMENTS[name]


def preset_named(experiment: str, preset: str) -> Any:
    presets = experiment_named(experiment).presets
    if preset not in presets:
        raise UnknownNameError(f'{experiment} has no preset "{preset}". It has: {", ".join(presets)}.')
    return presets[preset]
