"""The text that a language experiment is about, as its settings cut it."""

from __future__ import annotations

from dataclasses import replace

from spotlights.datasets import TextDataset, TextSplit, read_text
from spotlights.datasets.vocabulary import Vocabulary
from spotlights.errors import SettingError
from spotlights.experiments.language.settings import TextSettings


def own_text(settings: TextSettings, unit: str) -> TextDataset:
    """A text file of the user's."""
    if settings.text is None:
        raise SettingError("Give the text to train on: --text book.txt.")
    return shortened(read_text(settings.text, unit), settings)


def shortened(data: TextDataset, settings: TextSettings) -> TextDataset:
    """Only the first tokens of the training text, if the settings say so; what no longer comes is unknown."""
    if settings.tokens is None or settings.tokens >= len(data.train):
        return data
    tokens = data.train.tokens[: settings.tokens]
    vocabulary = Vocabulary.of(tokens, data.vocabulary.unit)
    test = data.test.tokens
    return replace(
        data,
        vocabulary=vocabulary,
        train=TextSplit(tokens, vocabulary.encode(tokens)),
        test=TextSplit(test, vocabulary.encode(test)),
    )
