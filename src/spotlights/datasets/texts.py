"""Texts as tokens, each with a place that it keeps for ever: its position in the training text is its example id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from spotlights.datasets.catalogue import TEXTS, TextEntry
from spotlights.datasets.sources import find_files
from spotlights.datasets.vocabulary import Vocabulary, split_text
from spotlights.errors import DatasetError, SettingError

_FEWEST = 20
"""A text with fewer tokens is no text."""


@dataclass(frozen=True, eq=False)
class TextSplit:
    """The training or the test text."""

    tokens: Sequence[str]
    """A `str` of characters, or a list of words."""
    numbers: Int64[Tensor, "tokens"]
    """The same, as numbers of the vocabulary."""

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, eq=False)
class TextDataset:
    """A text: what to train on and what to ask about. The id of a training token is its position."""

    name: str
    vocabulary: Vocabulary
    """Of the training text."""
    train: TextSplit
    test: TextSplit


def load_text(name: str) -> TextDataset:
    """A text of the catalogue."""
    entry = TEXTS[name]
    contents = find_files(entry, [split for split in entry.files if split != "valid"])
    parts = {split: _tokens(contents[file.name], entry) for split, (file,) in entry.files.items() if split != "valid"}
    if entry.test_tokens is None:
        return _dataset(name, entry.unit, parts["train"], parts["test"])
    return _cut(name, entry.unit, parts["text"], entry.test_tokens)


def read_text(path: str | Path, unit: str, *, test_tokens: int | None = None) -> TextDataset:
    """A text file of your own.

    Args:
        path: the file, in UTF-8.
        unit: "character" or "word".
        test_tokens: the last so many tokens are the test text; by default a tenth, at most 20,000.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}).") from error
    tokens = split_text(text, unit)
    if len(tokens) < _FEWEST:
        raise DatasetError(f"{path} has {len(tokens)} {unit}s, which are too few to train on. Give a longer text.")
    return _cut(path.stem, unit, tokens, min(20_000, len(tokens) // 10) if test_tokens is None else test_tokens)


def _tokens(content: bytes, entry: TextEntry) -> Sequence[str]:
    return split_text(content.decode("utf-8"), entry.unit, spaced=True)


def _cut(name: str, unit: str, tokens: Sequence[str], test_tokens: int) -> TextDataset:
    if not 0 < test_tokens < len(tokens):
        raise SettingError(f"test_tokens={test_tokens}: {name} has {len(tokens)} {unit}s in all.")
    return _dataset(name, unit, tokens[:-test_tokens], tokens[-test_tokens:])


def _dataset(name: str, unit: str, train: Sequence[str], test: Sequence[str]) -> TextDataset:
    vocabulary = Vocabulary.of(train, unit)
    return TextDataset(
        name,
        vocabulary,
        TextSplit(train, vocabulary.encode(train)),
        TextSplit(test, vocabulary.encode(test)),
    )
