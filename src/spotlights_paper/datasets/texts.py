"""Texts as tokens: characters, or words. The example id of a token is its position in the training text.

A token is what a language model reads in one step. The tokens of a text are a sequence of strings: a `str` itself is
one of characters, a list is one of words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from spotlights.errors import SettingError, UnknownNameError
from spotlights_paper.datasets.catalogue import TEXTS
from spotlights_paper.datasets.files import DatasetError, find_files

UNITS = ("character", "word")
UNKNOWN = {"character": "\N{REPLACEMENT CHARACTER}", "word": "<unk>"}
"""Replaces a token that the training text does not have."""
END = "<eos>"
"""Follows each paragraph of a text in words."""
MOST_WORDS = 50_000
_FEWEST = 20
"""A text needs at least this many tokens."""

_WORD = re.compile(r"<unk>|<eos>|@[-,.]@|'(?:s|t|re|ve|d|ll|m)\b|\w+|[^\w\s]")


@dataclass(frozen=True)
class Vocabulary:
    """All tokens that a text is written in; a token's number is its place."""

    unit: str
    tokens: tuple[str, ...]

    @staticmethod
    def of(tokens: Sequence[str], unit: str) -> Vocabulary:
        """The tokens of a training text, and one for all others.

        Characters come in the order of their code points, words with the most frequent first, which an adaptive
        softmax wants. A word that comes only once counts as unknown, so that the unknown is trained too.
        """
        counts = Counter(tokens)
        known = sorted(counts)
        if unit == "word":
            known = [word for word, count in counts.most_common(MOST_WORDS) if count > 1]
        if UNKNOWN[unit] not in known:
            known.append(UNKNOWN[unit])
        return Vocabulary(unit, tuple(known))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def split(self, text: str) -> Sequence[str]:
        """A text that somebody typed, as tokens. Words that are not known as they are lose their punctuation."""
        if self.unit == "character":
            return text
        pieces = [[piece] if piece in self._numbers else _WORD.findall(piece) for piece in text.split()]
        return [word for piece in pieces for word in piece]

    def encode(self, tokens: Sequence[str]) -> Int64[Tensor, "tokens"]:
        """The numbers of tokens; what is not known gets the number of `UNKNOWN`."""
        unknown = self._numbers[UNKNOWN[self.unit]]
        return torch.tensor([self._numbers.get(token, unknown) for token in tokens], dtype=torch.int64)

    def decode(self, numbers: Int64[Tensor, "tokens"]) -> Sequence[str]:
        """The way back."""
        tokens = [self.tokens[number] for number in numbers.tolist()]
        return "".join(tokens) if self.unit == "character" else tokens


def split_text(text: str, unit: str, *, spaced: bool = False) -> Sequence[str]:
    """A whole text as tokens; in words, each paragraph ends with `<eos>`.

    Args:
        text: the text.
        unit: "character" or "word".
        spaced: words are those between spaces and paragraphs are lines, as in WikiText. Otherwise punctuation marks
            are words too, and paragraphs end at empty lines.
    """
    if unit not in UNITS:
        raise SettingError(f'No unit "{unit}". There are: {", ".join(UNITS)}.')
    if unit == "character":
        return text
    if spaced:
        return [word for line in text.splitlines() for word in (*line.split(), END)]
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return [word for paragraph in paragraphs for word in (*_WORD.findall(paragraph), END)]


# -- data sets --------------------------------------------------------------------------------


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

    @staticmethod
    def of(name: str, unit: str, train: Sequence[str], test: Sequence[str]) -> TextDataset:
        """The tokens of both texts; what the training text does not have is unknown in the test text."""
        vocabulary = Vocabulary.of(train, unit)
        splits = (TextSplit(tokens, vocabulary.encode(tokens)) for tokens in (train, test))
        return TextDataset(name, vocabulary, *splits)


def load_text(name: str) -> TextDataset:
    """Loads "aesop" (Æsop's Fables by Stickney, in characters) or "wikitext-2" (in words)."""
    if name not in TEXTS:
        raise UnknownNameError(f'No text "{name}". There are: {", ".join(TEXTS)}.')
    entry = TEXTS[name]
    contents = find_files(entry)
    parts = [split_text(contents[file.name].decode(), entry.unit, spaced=True) for (file,) in entry.files.values()]
    if entry.test_tokens is not None:
        parts = [parts[0][: -entry.test_tokens], parts[0][-entry.test_tokens :]]
    return TextDataset.of(name, entry.unit, *parts)


def read_text(path: str | Path, unit: str) -> TextDataset:
    """A text file of your own, in UTF-8; a tenth at its end, at most 20,000 tokens, is the test text.

    Args:
        path: the file.
        unit: "character" or "word".
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe would never end
        raise DatasetError(f"{path} is not a file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}).") from error
    tokens = split_text(text, unit)
    if len(tokens) < _FEWEST:
        raise DatasetError(f"{path} has {len(tokens)} {unit}s, which are too few to train on. Give a longer text.")
    cut = len(tokens) - min(20_000, len(tokens) // 10)
    return TextDataset.of(path.stem, unit, tokens[:cut], tokens[cut:])
