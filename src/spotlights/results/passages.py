"""Passages of a training text, as people and programs see them; and where the sentence around a token lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spotlights.results.tables import RowAnswer, build, layer_named

_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}
"""How an attended token that one cannot see is shown."""
_TAIL = 60
"""Characters of a prompt that a title shows."""


@dataclass(frozen=True)
class Hit:
    """A position of the training text that a token of the prompt attends to."""

    token: int
    """Which token of the prompt."""
    position: int
    """In the training text: the example's id."""
    score: float
    """Added up over its visits."""
    visits: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Passage:
    """A stretch of the training text and what in it is attended to."""

    start: int
    stop: int
    score: float
    """The sum, over the tokens asked about, of each one's best hit."""
    hits: list[Hit]
    """By token, best first."""
    text: list[str]
    """Its tokens."""

    @property
    def best(self) -> dict[int, Hit]:
        """Each token's best hit."""
        best_of: dict[int, Hit] = {}
        for hit in self.hits:
            if hit.token not in best_of or hit.score > best_of[hit.token].score:
                best_of[hit.token] = hit
        return best_of

    @property
    def attended(self) -> set[int]:
        """The places in `text` of the best hits, which are shown."""
        return {hit.position - self.start for hit in self.best.values()}


@dataclass(frozen=True, repr=False)
class Passages(RowAnswer):
    """The passages that some tokens of a prompt attend to, best first; made by `Attention.passages`."""

    layer: str
    kernel: str
    prompt: list[str] | None
    tokens: list[int]
    """Which tokens of the prompt were asked about."""
    passages: list[Passage]
    spaced: bool
    """Tokens are words, with spaces between them."""
    note: str | None = None
    what: str = "score"
    """What the numbers are: scores, or contributions to a number of interest."""

    def __len__(self) -> int:
        return len(self.passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self.passages)

    def __getitem__(self, rank: int) -> Passage:
        return self.passages[rank]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each passage, best first; `text` has «» around what is attended to."""
        for rank, passage in enumerate(self.passages, start=1):
            best = max(passage.best.values(), key=lambda hit: hit.score)
            yield {
                "rank": rank,
                "score": passage.score,
                "position": best.position,
                "visits": best.visits,
                "first_step": best.first_step,
                "last_step": best.last_step,
                "text": self._marked(passage),
            }

    # -- for people --------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """What was asked."""
        if self.prompt is None:
            return f"passages by {self.what} in {layer_named(self.layer)}"
        asked = "".join(text if not held else f"«{text}»" for text, held in self._parts(self.prompt, set(self.tokens)))
        asked = asked if len(asked) <= _TAIL else f"…{asked[-_TAIL:]}"
        return f"passages by {self.what} in {layer_named(self.layer)} for “{asked}”"

    def table(self) -> Any:
        """A table with «» around what is attended to."""
        columns = ("rank", self.what, "position", "visits", "steps", "passage")
        cells = [
            [r["rank"], r["score"], r["position"], r["visits"], f"{r['first_step']} – {r['last_step']}", r["text"]]
            for r in self.rows()
        ]
        return build(self.title, columns, cells, self.note)

    def _marked(self, passage: Passage) -> str:
        parts = self._parts(passage.text, passage.attended)
        return "".join(f"«{part}»" if attended else part for part, attended in parts)

    def _parts(self, tokens: Sequence[str], attended: set[int]) -> Iterator[tuple[str, bool]]:
        """The text in pieces, and whether each is attended to."""
        for place, token in enumerate(tokens):
            held = place in attended
            text = token if not token.isspace() else _VISIBLE.get(token, token) if held else " "
            yield text, held
            if self.spaced and place < len(tokens) - 1:
                yield " ", False


# -- sentences --------------------------------------------------------------------------------

_CHARACTERS, _WORDS = 100, 25
"""Tokens on either side of one that are shown at most."""
_ENDS = frozenset(".!?")
_CLOSES = frozenset("”’\"')]")
_END_WORDS = frozenset([*_ENDS, "<eos>"])


def sentence_at(text: Sequence[str], position: int, around: int | None = None) -> tuple[int, int]:
    """Where the sentence around a token begins and ends; `around`: at most so many tokens on either side."""
    begins = _begins_in_characters if isinstance(text, str) else _begins_in_words
    if around is None:
        around = _CHARACTERS if isinstance(text, str) else _WORDS
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
