"""From text to tokens and back: characters, or words.

A token is what a language model reads in one step. The tokens of a text are a sequence of strings: a `str` itself is
one of characters, a list is one of words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from spotlights.errors import SettingError

UNITS = ("character", "word")
UNKNOWN = {"character": "\N{REPLACEMENT CHARACTER}", "word": "<unk>"}
"""What stands for a token that the training text does not have."""
END = "<eos>"
"""Follows each paragraph of a text in words."""
MOST_WORDS = 50_000

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
        found = [self.tokens[number] for number in numbers.tolist()]
        return "".join(found) if self.unit == "character" else found


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
