"""Prints the tables of docs/language_models.md from finished runs: `python docs/language_tables.py RUN…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from spotlights.results.passages import Passages
from spotlights_paper.experiments.language.asking import QueryPassages
from spotlights_paper.experiments.language.evaluation import Evaluation
from spotlights_paper.experiments.running import load_results, load_run
from spotlights_paper.report.tables import evaluation_head, evaluation_rows, percent

SHOWN, KERNELS = 3, ("cosine", "dot")
BEFORE, AFTER = 60, 45
"""Characters of a passage that are shown."""


def markdown(folder: Path) -> str:
    """All tables of one run."""
    run, results = load_run(folder), load_results(folder)
    steps = run.settings["steps"]
    parts = [f"### {run.experiment}, preset {run.preset}, {steps:,} steps, seed {run.seed}", ""]
    parts += [f"- {name}: {value}" for name, value in run.outcome()]
    parts += [f"- memory: {run.slots:,} slots, {run.memory_bytes / 1e6:,.0f} MB"]
    parts += [f"- seconds of {stage}: {took:,.0f}" for stage, took in run.seconds.items()]
    parts += [line for table in results.tables for line in ("", *_query(table))]
    if results.evaluation is not None:
        parts += ["", *_evaluation(results.evaluation)]
    return "\n".join(parts)


def _query(table: QueryPassages) -> list[str]:
    lines = [f"**Table {table.number}: “… {table.query}”** ({table.source} text, position {table.position:,})", ""]
    ours = [found for found in table.ours if found.kernel in KERNELS]
    heads = ["rank", *(f"kernel {found.kernel}" for found in ours), *(["the paper"] if table.papers else [])]
    lines += [_row(heads), _row(["---"] * len(heads))]
    for rank in range(SHOWN):
        paper = [each.text for each in table.papers[rank : rank + 1]]
        lines.append(_row([rank + 1, *(_passage(found, rank) for found in ours), *paper]))
    return [*lines, "", f"The network continues: “… {table.query}|{table.continuation}”"]


def _passage(found: Passages, rank: int) -> str:
    if rank >= len(found):
        return "–"
    row = list(found.rows())[rank]
    score = f"{row['score']:,.0f}" if row["score"] > 100 else f"{row['score']:.3f}"
    return f"{_short(row['text'].strip())} ({score})"


def _short(text: str) -> str:
    """What is near the attended token."""
    mark = text.index("«")
    start, end = max(mark - BEFORE, 0), mark + AFTER
    before = text[start:mark] if start == 0 else "… " + text[start:mark].split(" ", 1)[-1]
    after = text[mark:] if end >= len(text) else text[mark:end].rsplit(" ", 1)[0] + " …"
    return before + after


def _evaluation(found: Evaluation) -> list[str]:
    heads = evaluation_head()
    lines = [_row(heads), _row(["---"] * 2 + ["---:"] * (len(heads) - 2))]
    lines += [_row(row) for row in evaluation_rows(found)]
    right = f"The network itself is right in {percent(found.right)} %."
    return [*lines, "", right, *(found.verdict(kernel) for kernel in found.kernels)]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    print("\n\n".join(markdown(Path(folder)) for folder in sys.argv[1:]))
