"""The queries of the paper's appendix C, and what it found, as far as that is known here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """A text whose last token is asked about."""

    table: int
    """The number of the paper's table."""
    words: str
    source: str = "test"
    """The text that it is from."""
    papers: tuple[str, ...] = ()
    """The paper's passages, with | behind the attended token; empty where only the paper has them."""


AESOP = (
    Query(2, "glad to take himself off as fast as"),
    Query(3, "the Lamb a little d", papers=("a single d|rop", "a single d|ay", "a single d|og")),
    Query(4, "he can do no more. At ", source="train"),
)
WIKITEXT_2 = (
    Query(5, "for his contribution"),
    Query(6, "Her principal"),
    Query(7, ", describing it as"),
)
