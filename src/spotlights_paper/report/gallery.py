"""The paper's figures and tables in its order: what the paper shows, ours, and the verdicts of its statements."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from spotlights_paper.experiments.paper import PAPER_IMAGES
from spotlights_paper.pictures import Picture
from spotlights_paper.report import tables
from spotlights_paper.report.case_figures import attention_figure, describe, ranks_against_time
from spotlights_paper.report.schematic import both_forms
from spotlights_paper.report.test_set_figures import masks_figure, samples_figure
from spotlights_paper.statements import FAILING_HEAD, Findings, Judged, failing, judge, summary


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
    paper: str = ""
    """What the paper shows, in our words; empty if this is about the whole paper."""
    ours: str = ""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    command: str = ""


def exhibits(runs: Sequence[Findings], judged: list[Judged] | None = None) -> list[Exhibit]:
    """Everything that the runs can show, in the paper's order; `judged` by default are the verdicts of these runs."""
    judged = judge(runs) if judged is None else judged
    shown = []
    for experiment, presets, section in _SECTIONS:
        found = next((r for r in runs if r.run.experiment == experiment and r.run.preset in presets), None)
        exhibit = section(found, runs, judged) if found is not None else None
        if exhibit is not None:
            shown.append(exhibit)
    beside = [id(each) for exhibit in shown for each in exhibit.judged]
    told = [j for j in judged if not j.statement.shown and j.statement.section in ("5.1", "5.2", "5.3")]
    left = [each for each in told if id(each) not in beside]
    if left:
        shown.append(
            Exhibit("Section 5, without a figure", ours="Sizes, accuracies, and what is only said.", judged=left)
        )
    if failing(judged):
        shown.insert(0, _failing(judged))
    return shown


def covers(shown: str, kind: str, numbers: Sequence[int]) -> bool:
    """Whether one of some figures or tables is named by words such as “Figures 17, 19” or “Tables 2 to 4”."""
    if not shown.startswith(kind):
        return False
    wanted: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:[a-z]*(?:–| to )(\d+))?", shown):
        wanted |= set(range(int(first), int(last or first) + 1))
    return bool(wanted & set(numbers))


def _failing(judged: list[Judged]) -> Exhibit:
    return Exhibit(
        "What does not hold, and why",
        ours=f"{summary(judged)} A statement is one of section 5 or of an appendix, in our words. A program reads "
        "the verdict from the results, and nothing is tuned to a statement. These do not hold everywhere:",
        tables=[Table("", FAILING_HEAD, failing(judged))],
    )


# -- sections: of one run, of all runs and of all verdicts ------------------------------------


def _schematic(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit | None:
    if not found.results.cases:
        return None
    return Exhibit(
        "Figures 1 and 2: one layer, two forms",
        "A linear layer as a matrix that is multiplied with its input, and the same layer as an attention over all "
        "inputs and errors of training.",
        "The last layer for the “6” with its real numbers: both forms give the same logit.",
        [both_forms(found.results, found.results.cases[0], steps=found.run.settings["steps"])],
        command=found.command,
    )


def _case(figure: str, found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit | None:
    case = next((case for case in found.results.cases if case.figure == figure), None)
    if case is None:
        return None
    image = PAPER_IMAGES[figure]
    mine = [j for j in judged if covers(j.statement.shown, "Figure", image.figures)]
    if figure in ("3a", "10d"):
        whole = int(figure.rstrip("abcdef"))
        mine = [j for j in judged if covers(j.statement.shown, "Figure", [whole])] + mine
    return Exhibit(
        f"Figures {figure}, {', '.join(map(str, sorted(image.figures)))}: {image.what}",
        image.said,
        f"{describe(found.results, case)}. {_choice(figure, case)}",
        [Picture(f"figure-{figure}", _CAPTION if figure == "3a" else _AGAIN, attention_figure(found.results, case))],
        judged=mine,
        command=found.command,
    )


_CAPTION = (
    "A row for each layer, the input layer first. Left to right: the largest scores of each class, sorted; |score| "
    "added up over all slots of each class; the training images with the largest scores."
)
_AGAIN = "Laid out as Figures 4, 5 and 8 above."


def _choice(figure: str, case: Any) -> str:
    """Why this test image."""
    if figure.startswith("3"):
        return "It is the paper's own image."
    if not case.fits:
        return "No image fits all that the paper says; this is the first of its label."
    return "The paper does not say which image it shows. This is the first test image that fits."


def _table_1(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit:
    group = tables.group_of(found, runs)
    return Exhibit(
        "Table 1: the class with the most attention",
        "How often (%) the class with the largest total is the target or the output, over all test images.",
        f"Seeds {', '.join(str(run.seed) for run in group.runs)}.",
        tables=[Table("", tables.table_1_head(), tables.table_1_rows(group))],
        judged=[j for j in judged if covers(j.statement.shown, "Table", [1])],
        command=found.command,
    )


def _time(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit | None:
    if not found.results.cases:
        return None
    case = found.results.cases[0]
    medians = [f"{np.median(layer.top_steps[layer.top_steps >= 0]):,.0f}" for layer in case.layers]
    words = ("top 500 are spread", "most recent", "towards the end", "time does not matter")
    return Exhibit(
        "Section 5.2: time",
        "Time does not matter in the input layer. In later layers the top 500 are spread over training, noisily; "
        "towards the end of the list there are somewhat more recent ones.",
        f"Half of the top slots were visited before step {', '.join(medians)} (layer by layer).",
        [ranks_against_time(found.results, case, steps=found.run.settings["steps"])],
        judged=[j for j in judged if any(word in j.statement.text for word in words)],
        command=found.command,
    )


def _continual(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit:
    return Exhibit(
        "Section 5.4 and Remark 3.1: nothing is forgotten",
        "All of training is still in the memory. With a mask on the second task the network would be as good at "
        "the first as it was; there is no such mask in practice.",
        "The mask, really applied: arithmetic on the memory, without any training.",
        [masks_figure(found.results, "continual")],
        judged=[j for j in judged if j.statement.section == "5.4" and not j.statement.shown],
        command=found.command,
    )


def _passages(
    numbers: tuple[int, ...], text: str, found: Findings, runs: Sequence[Findings], judged: list[Judged]
) -> Exhibit | None:
    run, results = found.run, found.results
    if not results.tables:
        return None
    shown = []
    for query in results.tables:
        asked = (
            f"Table {query.number}: “… {_marked(query.query, run.unit)}”, which the network continues with "
            f"“{' '.join(query.continuation.split())}”"
        )
        shown.append(Table(asked, PASSAGE_HEAD, _passage_rows(query)))
        if query.papers:
            caption = f"Table {query.number}, the paper's passages in ours: rank by position · by sentence"
            shown.append(Table(caption, tables.RANK_HEAD, tables.rank_rows(query)))
    quality = "; ".join(f"{name} {value}" for name, value in run.outcome())
    return Exhibit(
        f"Tables {numbers[0]} to {numbers[-1]}: passages of {text}",
        "The training passages with the largest scores for the last token of a query.",
        f"Preset {run.preset}, {run.settings['steps']:,} steps: {quality}. The query's token and the "
        "attended tokens are between « and ». The score is the plain product, “dot”.",
        tables=shown,
        judged=[j for j in judged if j.statement.experiment == run.experiment],
        command=found.command,
    )


def _marked(query: str, unit: str) -> str:
    """A query with its last token between « and »."""
    start = len(query) - 1 if unit == "character" else query.rindex(" ") + 1
    return f"{query[:start]}«{query[start:].replace(' ', '␣')}»"


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


# -- what the authors' code can do beyond the paper -------------------------------------------


def _samples(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit | None:
    wrong = [glance for glance in found.results.samples if not glance.right]
    agree = sum(glance.layers[-1].vote == glance.output for glance in wrong)
    if not found.results.samples:
        return None
    return Exhibit(
        "Beyond the paper: ten right answers and ten wrong ones",
        "The authors' code can draw such samples; the paper does not show them.",
        f"In the last layer, the class with the most attention is the wrong answer in {agree} of {len(wrong)}.",
        [samples_figure(found.results, "samples")],
        command=found.command,
    )


def _cross_task(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit:
    return Exhibit(
        "Beyond the paper: how the scores of a data set vary",
        "The authors' code can average scores over the classes of each data set; the paper does not show them.",
        "The attention of all test images of a data set, by the data set of the slots.",
        tables=[Table("", tables.CROSS_TASK_HEAD, tables.cross_task_rows(tables.group_of(found, runs)))],
        command=found.command,
    )


def _reversed(found: Findings, runs: Sequence[Findings], judged: list[Judged]) -> Exhibit:
    results = found.results
    first, second = results.sources
    whole = next(m for m in results.masks if m.masked == second and len(m.layers) == len(results.layers))
    before, after, masked = (mask.accuracy[first] for mask in (*results.masks[:2], whole))
    return Exhibit(
        "Beyond the paper: the tasks in reversed order",
        "The authors' code can train on Fashion-MNIST first; the paper does not show it.",
        f"Fashion-MNIST falls from {before:.1%} to {after:.1%}. With MNIST's slots masked it has {masked:.1%}.",
        [masks_figure(results, "reversed")],
        command=found.command,
    )


Section = tuple[str, tuple[str, ...], Callable[..., Exhibit | None]]
"""An experiment, presets, and what is shown of the first run of both."""
_PAPER, _TEXT = ("paper", "quick"), ("paper", "bfloat16", "laptop", "quick")


def _cases(where: str) -> list[Section]:
    images = [(figure, image) for figure, image in PAPER_IMAGES.items() if figure.rstrip("abcdef") == where]
    return [(image.experiment, _PAPER, partial(_case, figure)) for figure, image in images]


_SECTIONS: list[Section] = [
    ("mnist-single", _PAPER, _schematic),
    *_cases("3"),
    ("mnist-single", ("table1", "quick"), _table_1),
    ("mnist-single", _PAPER, _time),
    ("mnist-continual", _PAPER, _continual),
    *_cases("10"),
    ("aesop-char", _TEXT, partial(_passages, (2, 3, 4), "Æsop’s Fables")),
    ("wikitext2-word", _TEXT, partial(_passages, (5, 6, 7), "WikiText-2")),
    ("mnist-single", _PAPER, _samples),
    ("mnist-joint", _PAPER, _cross_task),
    ("mnist-continual", ("reversed",), _reversed),
]
"""In the paper's order."""
