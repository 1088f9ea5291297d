"""Which passages of the training text light up for the tokens of a prompt.

The memory's examples are the positions of a training text. Each token that is asked about has its *hits*, the positions
with the largest scores, or contributions to a number of interest, added up over all visits. A *passage* is a sentence
with at least one hit; hits whose sentences overlap share one passage. Its score is the sum, over the tokens asked
about, of each one's best hit in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from spotlights.errors import SettingError
from spotlights.query.columns import Visits
from spotlights.query.forward import Target
from spotlights.query.measured import LayerMeasured
from spotlights.results.passages import Hit, Passage, Passages, sentence_at

if TYPE_CHECKING:
    from spotlights.query.attention import Attention

HITS_PER_PASSAGE = 5
"""So many positions are looked at, for each token and passage, since several may share a sentence."""


def find_passages(
    attention: Attention,
    text: Sequence[str],
    *,
    prompt: Sequence[str] | None = None,
    tokens: Sequence[int] = (-1,),
    k: int = 10,
    around: int | None = None,
    target: Target | None = None,
) -> Passages:
    """The k passages of the training text that tokens of a prompt attend to most, or that add most to an answer.

    For a memory whose examples are the positions of a text: `recorder.batch(example=positions)`. The scores of a
    position are added up over its visits.

    Args:
        text: the training text: a string of characters, or a list of words.
        prompt: the tokens that the network was run on, to be shown.
        tokens: which of them to ask about; the last one by default. Each passage counts the best of its
            positions for each of them.
        k: how many passages.
        around: show at most so many tokens on either side of one that is attended to.
        target: a number of interest, as for `contributions`: passages are then found by what they add to it
            through these tokens, not by their scores.
    """
    if k < 1:
        raise SettingError(f"k={k}: ask for at least one passage.")
    rows = len(attention.queries)
    if prompt is not None and len(prompt) != rows:
        raise SettingError(f"The prompt has {len(prompt)} tokens, and there are {rows} queries. Give the same tokens.")
    if not tokens or any(not -rows <= token < rows for token in tokens):
        raise SettingError(
            f"tokens={list(tokens)}: there are tokens 0 to {rows - 1}; negative ones count from the end."
        )
    asked = sorted({token % rows for token in tokens})
    of_tokens = attention.at(asked)
    measured = of_tokens if target is None else of_tokens.contributions(target, rows=True)
    hits = _hits(measured, asked, k * HITS_PER_PASSAGE, len(text))
    passages = [_passage(span, text) for span in _merged([(*sentence_at(text, h.position, around), [h]) for h in hits])]
    passages.sort(key=lambda passage: (-passage.score, passage.start))
    return Passages(
        attention.use,
        attention.kernel,
        prompt=None if prompt is None else list(prompt),
        tokens=asked,
        passages=passages[:k],
        spaced=not isinstance(text, str),
        note=measured.note,
        what=measured.what,
    )


def _hits(measured: LayerMeasured, asked: Sequence[int], k: int, length: int) -> list[Hit]:
    """The k positions with the largest scores, for each of the queries."""
    folded = measured.recorded.folded
    top = measured.top(k) if folded else measured.top(k, by="example")  # in a folded memory each example is a slot
    rows = [(token, row) for place, token in enumerate(asked) for row in top.rows(place)]
    examples = [row.get("example") for _, row in rows]
    if any(not isinstance(example, int) or not 0 <= example < length for example in examples):
        raise SettingError(
            f"The memory has examples that are not positions of this text of {length:,} tokens. Give the text that the "
            "network was trained on, and record with its positions as examples: recorder.batch(example=positions)."
        )
    steps = {} if folded else _steps(measured, [example for example in examples if isinstance(example, int)])
    return [
        Hit(
            token,
            position=row["example"],
            score=row[top.what],
            visits=row["visits"],
            first_step=row["first_step"] if folded else steps[row["example"]][0],
            last_step=row["last_step"] if folded else steps[row["example"]][1],
        )
        for token, row in rows
    ]


def _steps(measured: LayerMeasured, examples: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The steps of the first and last visit to some examples."""
    grouping = measured.grouping("example")
    numbers = {example: number for number, example in enumerate(grouping.labels)}
    wanted = sorted(set(examples))
    groups = torch.tensor([numbers[example] for example in wanted], dtype=torch.int64)
    visits = Visits(measured.view, measured.recorded, grouping, groups, ["example", "step"])
    steps: dict[Any, list[Any]] = {example: [] for example in wanted}
    for example, step in zip(visits.values("example"), visits.values("step"), strict=True):
        steps[example].append(step)
    return {example: (min(own), max(own)) for example, own in steps.items()}


Span = tuple[int, int, list[Hit]]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans that overlap become one."""
    merged: list[Span] = []
    for start, stop, hits in sorted(spans, key=lambda span: span[:2]):
        if merged and start < merged[-1][1]:
            first, end, held = merged[-1]
            merged[-1] = first, max(end, stop), held + hits
        else:
            merged.append((start, stop, hits))
    return merged


def _passage(span: Span, text: Sequence[str]) -> Passage:
    start, stop, hits = span
    hits.sort(key=lambda hit: (hit.token, -hit.score, hit.position))
    best: dict[int, float] = {}
    for hit in hits:
        best.setdefault(hit.token, hit.score)
    return Passage(start, stop, score=sum(best.values()), hits=hits, text=list(text[start:stop]))
