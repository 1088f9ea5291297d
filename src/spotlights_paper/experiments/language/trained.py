"""What the language models share: settings, texts, and the recorded run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int64
from torch import Tensor

import spotlights as sl
from spotlights.errors import SettingError
from spotlights_paper.datasets import TextDataset, read_text
from spotlights_paper.experiments.progress import stage


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The text, and what every network that reads one has."""

    text: str | None = None
    """A text file of your own."""
    tokens: int | None = None
    """Use only that many tokens from the start of the training text; None for all."""
    steps: int
    """Optimizer steps in all."""
    lr: float
    clip: float
    """The norm that gradients are clipped to."""
    batch: int
    """Sequences in a step."""
    dtype: str = "float32"
    """How keys and errors are kept."""
    context: int = 200
    """Tokens that the network reads before it is asked about one of the test text."""
    kernels: tuple[str, ...] = ("cosine", "cosine-parts", "dot")
    """What the passages are found with."""


@dataclass(frozen=True, eq=False)
class Window:
    """The batch of one step: the next tokens of each sequence."""

    tokens: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]
    """The token after each."""
    positions: Int64[Tensor, "batch length"]
    """Where in the text each token is: its example id."""
    first: bool
    """The sequences begin here: there is no state yet."""

    @property
    def recorded(self) -> dict[str, Any]:
        return {"example": self.positions}


@dataclass(frozen=True, eq=False)
class TrainedLanguage:
    """A recorded run, ready for questions."""

    memory: sl.Memory
    model: Any
    """A `LanguageModel` or a `GPT`."""
    data: TextDataset
    seed: int
    surprise: float
    """At the tokens of the training text, in nats, over the last epoch of training."""

    @property
    def layer(self) -> str:
        """The layer whose keys are compared to find passages."""
        return self.model.passage_layer

    @property
    def head(self) -> str:
        """The layer that predicts the next token."""
        return self.model.output_layer

    def facts(self) -> dict[str, Any]:
        """What a `LanguageRun` says beyond what every run says."""
        data = self.data
        with stage("reading the test text"):
            on_test = self.model.surprise(data.test.numbers)
        return {
            "unit": data.vocabulary.unit,
            "train_tokens": len(data.train),
            "test_tokens": len(data.test),
            "vocabulary": len(data.vocabulary),
            "text_sha256": digest(data),
            "surprise": {"train": self.surprise, "test": on_test},
        }


# -- texts ------------------------------------------------------------------------------------


def own_text(settings: TextSettings, unit: str) -> TextDataset:
    """A text file of the user's."""
    if settings.text is None:
        raise SettingError("Give the text to train on: --text book.txt.")
    return shortened(read_text(settings.text, unit), settings)


def shortened(data: TextDataset, settings: TextSettings) -> TextDataset:
    """Cuts the training text where the settings say so; tokens that are then missing become unknown."""
    if settings.tokens is None or settings.tokens >= len(data.train):
        return data
    return TextDataset.of(data.name, data.vocabulary.unit, data.train.tokens[: settings.tokens], data.test.tokens)


def digest(data: TextDataset) -> str:
    """The checksum of a training text, by which a run knows it again."""
    return hashlib.sha256(data.train.numbers.numpy().tobytes()).hexdigest()
