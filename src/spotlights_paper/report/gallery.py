"""The paper's figures and tables in its order: what the paper shows, ours, and the verdicts of its statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotlights_paper.experiments.running import load_results, load_run
from spotlights_paper.report import tables
from spotlights_paper.report.case_figures import FIGURES, attention_figure, describe
from spotlights_paper.report.picture import Picture
from spotlights_paper.report.schematic import both_forms
from spotlights_paper.report.test_set_figures import forgetting_figures
from spotlights_paper.report.time_figure import ranks_against_time
from spotlights_paper.statements import FAILING_HEAD, Judged, failing, judge, summary


@dataclass(frozen=True)
class Table:
    """Cells to print, with a caption."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Exhibit:
    """Some figures or tables of the paper, and ours."""

    title: str
    paper: str
    """What the paper shows, in our words."""
    ours: str = ""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    command: str = ""


CASES = {
    "3a": (
        "mnist-single",
        "A “6”, MNIST test image 5938. Slots of class 6 score high in all layers, and some zeros as high.",
    ),
    "3b": (
        "mnist-joint",
        "An ankle boot, Fashion-MNIST test image 981, after joint training. Layer 0 attends to boots, layers 1 and 2 "
        "to both tasks; coats have the largest total in layer 0; digits are on top in layer 2, a “9” among them.",
    ),
    "10a": ("mnist-single", "Another example of the single task, a “3”, much like the “6”."),
    "10b": ("mnist-joint", "A dress after joint training, without digits among its top images."),
    "10c": ("mnist-joint", "A sandal with a “5” among its top images; the largest total is not the answer's."),
    "10d": (
        "mnist-continual",
        "A “1” that is answered 3 after the second task: ones and dresses (class 3) score high in layer 0, and dresses "
        "have the largest total in layer 2.",
    ),
    "10e": ("mnist-continual", "A dress, answered rightly after the second task."),
    "10f": ("mnist-continual", "A “7” that is still answered rightly after the second task."),
}
"""The paper's test images: the experiment, and what is said of the image."""


def exhibits(runs: Sequence[Path]) -> list[Exhibit]:
    """Everything that the runs can show, in the paper's order."""
    judged = judge(runs)
    return [
        *_failing(judged),
        *_schematic(runs),
        *_cases(runs, judged, "3"),
        *_table_1(runs, judged),
        *_continual(runs, judged),
        *_time(runs, judged),
        *_cases(runs, judged, "10"),
        *_passages(runs, judged),
        *_others(judged),
    ]


def covers(shown: str, kind: str, numbers: Sequence[int]) -> bool:
    """Whether one of some figures or tables is named by words such as “Figures 17, 19” or “Tables 2 to 4”."""
    if not shown.startswith(kind):
        return False
    wanted: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:[a-z]*(?:–| to )(\d+))?", shown):
        wanted |= set(range(int(first), int(last or first) + 1))
    return bool(wanted & set(numbers))


def _first(runs: Sequence[Path], experiment: str, *presets: str) -> tuple[Any, Any] | None:
    """The first of some runs that fits, and its results."""
    for folder in runs:
        run = load_run(folder)
        if run.experiment == experiment and run.preset in presets:
            return run, load_results(folder)
    return None


def _command(run: Any) -> str:
    return f"spotlights run {run.experiment} --preset {run.preset} --seed {run.seed}"


def _failing(judged: list[Judged]) -> Iterator[Exhibit]:
    if failing(judged):
        yield Exhibit(
            "What does not hold, and why",
            "Every statement of section 5 and of the appendices that a run can be asked about, in our words, is one "
            "check from results to a verdict. Nothing is tuned to a statement.",
            summary(judged),
            tables=[Table("", FAILING_HEAD, failing(judged))],
        )


def _schematic(runs: Sequence[Path]) -> Iterator[Exhibit]:
    first_run = _first(runs, "mnist-single", "paper", "quick")
    if first_run is not None and first_run[1].cases:
        run, results = first_run
        yield Exhibit(
            "Figures 1 and 2: one layer, two forms",
            "A linear layer as a matrix that is multiplied with its input, and the same layer as an attention over all "
            "inputs and errors of training.",
            "The last layer for the “6” with its real numbers: both forms give the same logit.",
            [both_forms(results, results.cases[0], steps=run.settings["steps"])],
            command=_command(run),
        )


def _cases(runs: Sequence[Path], judged: list[Judged], where: str) -> Iterator[Exhibit]:
    for figure, (experiment, paper) in CASES.items():
        first_run = _first(runs, experiment, "paper", "quick") if figure.rstrip("abcdef") == where else None
        case = next((case for case in first_run[1].cases if case.figure == figure), None) if first_run else None
        if first_run is None or case is None:
            continue
        run, results = first_run
        numbers = FIGURES[figure]
        mine = [j for j in judged if covers(j.statement.shown, "Figure", numbers)]
        if figure in ("3a", "10d"):
            mine = [j for j in judged if covers(j.statement.shown, "Figure", [int(where)])] + mine
        rule = "" if case.fits else " No image fits all that the paper says; this is the first of its label."
        yield Exhibit(
            f"Figures {figure}, {', '.join(map(str, sorted(numbers)))}",
            paper,
            describe(results, case) + "." + rule,
            [Picture(f"figure-{figure}", _caption(figure, case), attention_figure(results, case))],
            judged=mine,
            command=_command(run),
        )


def _caption(figure: str, case: Any) -> str:
    """Which part of our picture is which of the paper's figures."""
    top, totals, images = FIGURES[figure]
    return (
        f"Figure {figure}: the test image. Figure {top}: the scores of the top {case.layers[0].top.shape[2]} slots of "
        f"each class. Figure {totals}: the sums of |score| per class. Figure {images}: the training images with the "
        "largest scores. A row for each layer, the input layer first."
    )


def _table_1(runs: Sequence[Path], judged: list[Judged]) -> Iterator[Exhibit]:
    groups, _ = tables.gather(runs)
    for group in groups:
        if group.experiment == "mnist-single" and group.preset in ("table1", "quick"):
            yield Exhibit(
                "Table 1: the class with the most attention",
                "How often (%) the class with the largest total is the target or the network's output.",
                f"Seeds {', '.join(str(run.seed) for run in group.runs)}.",
                tables=[Table("", tables.table_1_head(), tables.table_1_rows(group))],
                judged=[j for j in judged if covers(j.statement.shown, "Table", [1])],
                command=_command(group.runs[0]),
            )


def _continual(runs: Sequence[Path], judged: list[Judged]) -> Iterator[Exhibit]:
    first_run = _first(runs, "mnist-continual", "paper", "quick")
    if first_run is not None:
        run, results = first_run
        yield Exhibit(
            "Section 5.4 and Remark 3.1: nothing is forgotten",
            "All of training is still in the memory. With a mask on the second task the network would be as good at "
            "the first as it was; there is no such mask in practice.",
            "The mask, really applied: arithmetic on the memory, without any training.",
            list(forgetting_figures(results, run, "continual"))[:1],
            judged=[j for j in judged if j.statement.section == "5.4" and not j.statement.shown],
            command=_command(run),
        )


def _time(runs: Sequence[Path], judged: list[Judged]) -> Iterator[Exhibit]:
    first_run = _first(runs, "mnist-single", "paper", "quick")
    if first_run is not None and first_run[1].cases:
        run, results = first_run
        words = ("top 500 are spread", "most recent", "towards the end", "time does not matter")
        yield Exhibit(
            "Section 5.2: time",
            "The top 500 are spread over training without a clear pattern; more recent slots come later in the list.",
            "When the top slots of each class were visited, by rank.",
            [ranks_against_time(results, results.cases[0], steps=run.settings["steps"])],
            judged=[j for j in judged if any(word in j.statement.text for word in words)],
            command=_command(run),
        )


def _passages(runs: Sequence[Path], judged: list[Judged]) -> Iterator[Exhibit]:
    for experiment, numbers in (("aesop-char", (2, 3, 4)), ("wikitext2-word", (5, 6, 7))):
        first_run = _first(runs, experiment, "paper", "bfloat16", "laptop", "quick")
        if first_run is None or not first_run[1].tables:
            continue
        run, results = first_run
        shown = []
        for query in results.tables:
            asked = f"Table {query.number}: “… {query.query}”, continued “{query.continuation.strip()}”"
            shown.append(Table(asked, PASSAGE_HEAD, _passage_rows(query)))
            if query.papers:
                shown.append(
                    Table(
                        f"Table {query.number}, the paper's passages in ours: rank by position · by sentence",
                        tables.RANK_HEAD,
                        tables.rank_rows(query),
                    )
                )
        text = "Æsop’s Fables" if experiment == "aesop-char" else "WikiText-2"
        quality = "; ".join(f"{name} {value}" for name, value in run.outcome())
        yield Exhibit(
            f"Tables {numbers[0]} to {numbers[-1]}: passages of {text}",
            "The training passages with the largest scores for the last token of a query.",
            f"Preset {run.preset}, {run.settings['steps']:,} steps: {quality}. The attended token is between « and ».",
            tables=shown,
            judged=[j for j in judged if j.statement.experiment == experiment],
            command=_command(run),
        )


PASSAGE_HEAD = ["rank", "cosine", "dot"]


def _passage_rows(query: Any) -> list[list[str]]:
    columns = [
        [_near(row["text"]) for row in next(o for o in query.ours if o.kernel == kernel).rows()][:3]
        for kernel in ("cosine", "dot")
    ]
    return [[str(rank), *row] for rank, row in enumerate(zip(*columns, strict=False), start=1)]


def _near(text: str) -> str:
    """What is near the attended token."""
    text = " ".join(text.split())
    mark = text.index("«")
    start, end = max(mark - 55, 0), mark + 40
    return ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")


def _others(judged: list[Judged]) -> Iterator[Exhibit]:
    left = [j for j in judged if not j.statement.shown and j.statement.section in ("5.1", "5.2", "5.3")]
    if left:
        yield Exhibit("Section 5, without a figure", "Sizes, accuracies, and what is only said.", judged=left)
