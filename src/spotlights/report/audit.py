"""`spotlights audit`: suspects as a CSV file and one HTML page, with pictures or text where they are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

import spotlights as sl
from spotlights.attention.suspects import NOTE, Suspects
from spotlights.attention.tables import shown
from spotlights.errors import SettingError
from spotlights.report import tables
from spotlights.report.page import embedded, whole_page
from spotlights.report.pictures import Shown

CSV, PAGE = "audit.csv", "audit.html"
_TEXT = 200
"""Characters of a text that the page shows."""


def write_audit(
    memory: Path, out: Path, *, k: int = 100, data: str | None = None, texts: Path | None = None
) -> tuple[Suspects, Path]:
    """Writes audit.csv and audit.html about a memory's suspects; returns them and the page.

    Args:
        memory: the memory, finished or still being recorded.
        out: the folder.
        k: how many suspects.
        data: the image data set whose ids the examples have, for pictures: "mnist", "fashion-mnist", "digits".
        texts: a file with one example on each line, for text; an example's id is its line, from 0.
    """
    if data is not None and texts is not None:
        raise SettingError("Give --data for pictures or --texts for text, not both.")
    opened = sl.open(memory)
    suspects = opened.suspects(k)
    out.mkdir(parents=True, exist_ok=True)
    suspects.to_csv(out / CSV)
    parts = [
        "<h1>Which training labels look wrong?</h1>",
        f'<p class="lead">The {len(suspects):,} training examples of {escape(str(memory))} that the network kept '
        f"disagreeing with, after {opened.steps:,} steps, by the sum over their visits of the norm of the error of "
        f"{escape(suspects.layer)}. {escape(NOTE)}. All of them: <code>{CSV}</code>.</p>",
    ]
    lines: Sequence[str] | None = None
    if data is not None:
        parts.append(_pictures(suspects, data, out))
    elif texts is not None:
        lines = texts.read_text(encoding="utf-8").splitlines()
    parts.append(_table(suspects, lines))
    page = out / PAGE
    page.write_text(whole_page("\n".join(parts), "Spotlights: audit"), encoding="utf-8")
    return suspects, page


def _pictures(suspects: Suspects, data: str, out: Path) -> str:
    dataset = sl.datasets.load(data)
    train = dataset.train
    figure = suspects.plot(
        lambda example: train.images[train.positions(torch.tensor([example]))][0].numpy(),
        names=dict(enumerate(dataset.classes)),
    )
    caption = "The first suspects. Above: the label it was trained with. Below: what the network says, id, suspicion."
    return embedded(Shown("audit", caption, figure), out)


def _table(suspects: Suspects, lines: Sequence[str] | None) -> str:
    rows = []
    for row in suspects.rows():
        cells = [shown(value) for value in row.values()]
        if lines is not None:
            example = row["example"]
            known = isinstance(example, int) and 0 <= example < len(lines)
            cells.append(lines[example][:_TEXT] if known else "–")
        rows.append(cells)
    head = list(next(suspects.rows(), {})) + ([] if lines is None else ["text"])
    return f'<div class="scroll">{tables.html_table(head, rows, numbers_from=len(head))}</div>'
