"""Passages of a training text, as people and programs see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from spotlights.attention.results import frame
from spotlights.attention.tables import Printable, build, shown

if TYPE_CHECKING:
    import pandas

_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}
"""How an attended token that one cannot see is shown."""
_TAIL = 60
"""Characters of a prompt that a title shows."""
_MARK = "black on bright_yellow"


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
        found: dict[int, Hit] = {}
        for hit in self.hits:
            if hit.token not in found or hit.score > found[hit.token].score:
                found[hit.token] = hit
        return found

    @property
    def attended(self) -> set[int]:
        """The places in `text` of the best hits, which are shown."""
        return {hit.position - self.start for hit in self.best.values()}


@dataclass(frozen=True, repr=False)
class Passages(Printable):
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

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        found = asdict(self)
        for passage, row in zip(found["passages"], self.rows(), strict=True):
            passage |= {"rank": row["rank"], "text": row["text"]}
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each passage."""
        return frame(self.rows())

    # -- for people --------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """What was asked."""
        if self.prompt is None:
            return f"passages by {self.what} in {self.layer}"
        asked = "".join(text if not held else f"«{text}»" for text, held in self._parts(self.prompt, set(self.tokens)))
        asked = asked if len(asked) <= _TAIL else f"…{asked[-_TAIL:]}"
        return f"passages by {self.what} in {self.layer} for “{asked}”"

    def table(self) -> Any:
        """A table with «» around what is attended to."""
        return self._table([self._marked(passage) for passage in self.passages])

    def __rich__(self) -> Any:
        return self

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        if not console.color_system:
            yield self.table()
            return
        texts = []
        for passage in self.passages:
            text = Text()
            for part, attended in self._parts(passage.text, passage.attended):
                text.append(part, style=_MARK if attended else "")
            texts.append(text)
        yield self._table(texts)

    def _table(self, texts: Sequence[Any]) -> Any:
        rows = [[*cells, text] for cells, text in zip(self._cells(), texts, strict=True)]
        return build(self.title, self._columns, rows, self.note)

    @property
    def _columns(self) -> Sequence[str]:
        return ("rank", self.what, "position", "visits", "steps", "passage")

    def _cells(self) -> Iterator[list[Any]]:
        for row in self.rows():
            first, last = row["first_step"], row["last_step"]
            yield [row["rank"], row["score"], row["position"], row["visits"], f"{first} – {last}"]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self._columns)
        lines = []
        for passage, cells in zip(self.passages, self._cells(), strict=True):
            text = "".join(
                f"<mark>{escape(part)}</mark>" if attended else escape(part)
                for part, attended in self._parts(passage.text, passage.attended)
            )
            numbers = "".join(f'<td class="n">{escape(shown(cell))}</td>' for cell in cells)
            lines.append(f'<tr>{numbers}<td style="text-align: left">{text}</td></tr>')
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return (
            f"<table><caption>{escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(lines)}</tbody></table>{note}"
        )

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
