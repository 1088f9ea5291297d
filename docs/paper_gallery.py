"""Writes docs/paper/index.md and its pictures from finished runs: `python docs/paper_gallery.py RUN…`.

The text between the pictures is what `spotlights_paper.report.gallery` says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from spotlights.figures import save
from spotlights_paper.report.gallery import Exhibit, exhibits
from spotlights_paper.statements import HEAD, rows

FOLDER = Path(__file__).parent / "paper"
INTRODUCTION = """# The paper, figure by figure

K. Irie, R. Csordás, J. Schmidhuber, *The Dual Form of Neural Networks Revisited: Connecting Test Time Predictions to
Training Patterns via Spotlights of Attention* (ICML 2022): its figures and tables in its order. Each has what the paper
shows, in our words; ours; and the verdicts of the paper's statements about it, with our number as the mean over the
runs. A statement's bound is taken from the paper's wording. Two second readings and the check of Table 4 were
added after the first verdicts were seen.
[The remarks](remarks.md) have a page of their own, and so have [the experiments](../reproduction.md) and what differs.

The one command that makes it all is `spotlights reproduce` (`--seeds 1` for one seed); `spotlights report RUN…` writes
this page as `gallery.html`. This page: `python docs/paper_gallery.py RUN…`."""


def markdown(folders: Sequence[Path]) -> str:
    """The whole page; its pictures are written beside it."""
    parts = [INTRODUCTION]
    for exhibit in exhibits(folders):
        parts += _exhibit(exhibit)
    return "\n\n".join(parts) + "\n"


def _exhibit(exhibit: Exhibit) -> list[str]:
    parts = [f"## {exhibit.title}", f"*The paper:* {exhibit.paper}"]
    command = f" `{exhibit.command}`" if exhibit.command else ""
    if exhibit.ours:
        parts.append(f"*Ours:* {exhibit.ours}{command}")
    for picture in exhibit.pictures:
        save(picture.figure, FOLDER / "images" / f"{picture.name}.png")
        parts += [f"![{picture.caption}](images/{picture.name}.png)"]
    for table in exhibit.tables:
        parts += [f"**{table.caption}**"] if table.caption else []
        parts.append(_table(table.head, table.rows))
    if exhibit.judged:
        parts.append(_table(HEAD[:1] + HEAD[2:], [[row[0], *row[2:]] for row in rows(exhibit.judged)]))
    return parts


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: object) -> str:
    return " ".join(str(cell).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").split())


if __name__ == "__main__":
    page = markdown([Path(folder) for folder in sys.argv[1:]])
    (FOLDER / "index.md").write_text(page, encoding="utf-8")
