"""Where the sentence around a token begins and ends, in characters or in words."""

from __future__ import annotations

from collections.abc import Sequence

AROUND = {"character": 100, "word": 25}
"""Tokens on either side of one that are shown at most."""

_ENDS = frozenset(".!?")
_CLOSES = frozenset("”’\"')]")
_END_WORDS = frozenset([*_ENDS, "<eos>"])


def sentence_at(text: Sequence[str], position: int, around: int) -> tuple[int, int]:
    """The sentence that the token at `position` is in, cut to at most `around` tokens on either side of it."""
    begins = _begins_in_characters if isinstance(text, str) else _begins_in_words
    start, stop = position, position + 1
    while start > max(0, position - around) and not begins(text, start):
        start -= 1
    while stop < min(len(text), position + 1 + around) and not begins(text, stop):
        stop += 1
    return start, stop


def _begins_in_words(text: Sequence[str], place: int) -> bool:
    return text[place - 1] in _END_WORDS


def _begins_in_characters(text: Sequence[str], place: int) -> bool:
    """A sentence begins after an end, its quotation marks and white space; or after an empty line."""
    if text[place].isspace() or not text[place - 1].isspace():
        return False
    before = place - 1
    while before > 0 and text[before].isspace():
        before -= 1
    if list(text[before:place]).count("\n") > 1:
        return True
    while before > 0 and text[before] in _CLOSES:
        before -= 1
    return text[before] in _ENDS
