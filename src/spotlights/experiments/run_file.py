"""What every run says of itself in its run.json, whatever it is about."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exactness:
    """How well one layer's memory meets its trained weights."""

    exact: bool
    relative_error: float
    change_error: float
    """Relative to what training changed."""


@dataclass(frozen=True, kw_only=True)
class RunFile(ABC):
    """What it takes to repeat a run, and what came out. Each kind of experiment adds its own."""

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
    """Of the training text: a text of one's own may change."""
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
