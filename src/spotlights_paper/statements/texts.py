"""Appendix C: language models.

The counts of characters and symbols are probably those of the whole file as it is published: with its line ends of two
characters and its byte order mark it has 185,299 bytes, and our 104 symbols of the file become 106.
"""

from __future__ import annotations

from functools import partial

from spotlights_paper.statements.judging import AESOP, WIKITEXT, Findings, NotThereError, Verdict, statement

aesop, wikitext = (
    partial(statement, name, presets=("paper", "bfloat16", "laptop", "quick")) for name in (AESOP, WIKITEXT)
)


def _token(enter: partial, attribute: str, text: str, low: float, high: float) -> None:
    why = "That fits the whole file as published: 185,299 bytes, 106 symbols. The book in it is shorter."

    @enter("C.1", "", "{:,.0f}", text=text, why=why)
    def _check(findings: Findings) -> Verdict:
        ours = float(getattr(findings.run, attribute))
        return low <= ours <= high, (ours,)


_token(wikitext, "train_tokens", "WikiText-2 has about 2 million running words.", 1.9e6, 2.2e6)
_token(wikitext, "vocabulary", "Its vocabulary has 33 thousand words.", 32_500, 33_500)
_token(aesop, "train_tokens", "The book has about 185 thousand running characters.", 180_000, 190_000)
_token(aesop, "vocabulary", "Its vocabulary has 107 symbols.", 107, 107)


def _finds(enter: partial, section: str, number: int, text: str, *words: str) -> None:
    """The three best passages by the plain product have one of some words right before «the attended token» ends."""
    why = "The plain product, which counts here, favours tokens with large keys; the cosine does not."

    @enter(section, f"Table {number}", "{:.0f} of 3 by dot, {:.0f} by cosine", text=text, why=why)
    def _check(findings: Findings) -> Verdict:
        counts = []
        for kernel in ("dot", "cosine"):
            ours = next(answer for answer in findings.query(number).ours if answer.kernel == kernel)
            shown = [row["text"].split("»")[0].replace("«", "").replace("\n", " ").lower() for row in ours.rows()][:3]
            counts.append(sum(passage.endswith(words) for passage in shown))
        return counts[0] == 3, tuple(map(float, counts))


_finds(aesop, "C.2", 2, "The passages are about doing something fast.", "as fast as")
_finds(aesop, "C.2", 3, "The passages have “single” or an adjective, then a word with d.", "single d", "little d")
_finds(aesop, "C.2", 4, "The passages have “at” before a time or a number.", "at␣")
_finds(wikitext, "C.3", 5, "The passages are about somebody's contribution.", "his contribution", "her contribution")
_finds(
    wikitext,
    "C.3",
    6,
    "The passages have “main”, “secondary” or “primary”.",
    *("her main", "her secondary", "her primary", "her principal"),
)
_finds(wikitext, "C.3", 7, "The passages judge something.", "describing it as", "described it as")


def _papers_passages(findings: Findings) -> Verdict:
    """The paper's passages are among ours (at least 6 of 9 among the first 100 positions, by dot)."""
    passages = [passage for query in findings.results.tables for passage in query.papers]
    ranks = [rank for passage in passages for rank in passage.ranks]
    places = [rank.by_position for rank in ranks if (rank.network, rank.kernel) == ("trained", "dot")]
    if not places:
        raise NotThereError("no passages of the paper")
    count = sum(place <= 100 for place in places)
    return count >= 6, (float(count),)


aesop("C.2", "Tables 2 to 4", "{:.0f} of 9")(_papers_passages)
wikitext("C.3", "Tables 5 to 7", "{:.0f} of 9")(_papers_passages)
