"""The paper's figures and tables in its order: what the paper shows, ours, and the verdicts of its statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spotlights_paper.experiments.running import load_results, load_run
from spotlights_paper.report import tables
from spotlights_paper.report.case_figures import FIGURES, attention_figure, describe
from spotlights_paper.report.picture import Picture
from spotlights_paper.report.schematic import both_forms
from spotlights_paper.report.test_set_figures import forgetting_figures, samples_figure
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
    paper: str = ""
    """What the paper shows, in our words; empty if this is about the whole paper."""
    ours: str = ""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    command: str = ""


CASES = {
    "3a": (
        "mnist-single",
        "a “6”",
        "MNIST test image 5938. Slots of class 6 score high in all layers, and some zeros as high; added up over all "
        "slots, class 6 is first.",
    ),
    "3b": (
        "mnist-joint",
        "an ankle boot, after joint training",
        "Fashion-MNIST test image 981. The input layer attends to boots, the later layers to both tasks: a “9” is "
        "among the top images of the last layer. Coats have the largest total in the input layer, boots gain later.",
    ),
    "10a": ("mnist-single", "a “3”", "Another example of the single task, much like the “6”."),
    "10b": ("mnist-joint", "a dress, after joint training", "No digit is among its top images."),
    "10c": (
        "mnist-joint",
        "a sandal, after joint training",
        "A “5” is among its top images. The class with the largest total is not the answer.",
    ),
    "10d": (
        "mnist-continual",
        "a “1” that is answered 3",
        "After the second task, a clear “1” is taken for class 3, which in that task is a dress. Ones and dresses "
        "score high in the input layer; in the last layer dresses have the largest total.",
    ),
    "10e": ("mnist-continual", "a dress, after the second task", "It is answered rightly."),
    "10f": ("mnist-continual", "a “7”, after the second task", "It is still answered rightly."),
}
"""The paper's test images: the experiment, what the image is, and what the paper says of it, in our words."""


def exhibits(runs: Sequence[Path], judged: list[Judged] | None = None) -> list[Exhibit]:
    """Everything that the runs can show, in the paper's order; `judged` by default are the verdicts of these runs."""
    judged = judge(runs) if judged is None else judged
    groups, _ = tables.gather(runs)
    shown = [
        *_schematic(runs),
        *_cases(runs, judged, "3"),
        *_table_1(groups, judged),
        *_time(runs, judged),
        *_continual(runs, judged),
        *_cases(runs, judged, "10"),
        *_passages(runs, judged),
        *_options(runs, groups),
    ]
    beside = [id(each) for exhibit in shown for each in exhibit.judged]
    told = [j for j in judged if not j.statement.shown and j.statement.section in ("5.1", "5.2", "5.3")]
    left = [each for each in told if id(each) not in beside]
    others = [Exhibit("Section 5, without a figure", ours="Sizes, accuracies, and what is only said.", judged=left)]
    return [*_failing(judged), *shown, *(others if left else [])]


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
            ours=f"{summary(judged)} A statement is one of section 5 or of an appendix, in our words. A program reads "
            "the verdict from the results, and nothing is tuned to a statement. These do not hold everywhere:",
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
    for figure, (experiment, subject, paper) in CASES.items():
        first_run = _first(runs, experiment, "paper", "quick") if figure.rstrip("abcdef") == where else None
        case = next((case for case in first_run[1].cases if case.figure == figure), None) if first_run else None
        if first_run is None or case is None:
            continue
        run, results = first_run
        numbers = FIGURES[figure]
        mine = [j for j in judged if covers(j.statement.shown, "Figure", numbers)]
        if figure in ("3a", "10d"):
            mine = [j for j in judged if covers(j.statement.shown, "Figure", [int(where)])] + mine
        yield Exhibit(
            f"Figures {figure}, {', '.join(map(str, sorted(numbers)))}: {subject}",
            paper,
            f"{describe(results, case)}. {_choice(figure, case)}",
            [Picture(f"figure-{figure}", _CAPTION if figure == "3a" else _AGAIN, attention_figure(results, case))],
            judged=mine,
            command=_command(run),
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


def _table_1(groups: Sequence[tables.RunGroup], judged: list[Judged]) -> Iterator[Exhibit]:
    for group in groups:
        if group.experiment == "mnist-single" and group.preset in ("table1", "quick"):
            yield Exhibit(
                "Table 1: the class with the most attention",
                "How often (%) the class with the largest total is the target or the output, over all test images.",
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
            "Time does not matter in the input layer. In later layers the top 500 are spread over training, noisily; "
            "towards the end of the list there are somewhat more recent ones.",
            _half_before(results.cases[0]),
            [ranks_against_time(results, results.cases[0], steps=run.settings["steps"])],
            judged=[j for j in judged if any(word in j.statement.text for word in words)],
            command=_command(run),
        )


def _half_before(case: Any) -> str:
    medians = [f"{np.median(layer.top_steps[layer.top_steps >= 0]):,.0f}" for layer in case.layers]
    return f"Half of the top slots were visited before step {', '.join(medians)} (layer by layer)."


def _options(runs: Sequence[Path], groups: Sequence[tables.RunGroup]) -> Iterator[Exhibit]:
    """What the authors' code can do beyond the paper."""
    first_run = _first(runs, "mnist-single", "paper", "quick")
    if first_run is not None and first_run[1].samples:
        run, results = first_run
        wrong = [glance for glance in results.samples if not glance.right]
        agree = sum(glance.layers[-1].vote == glance.output for glance in wrong)
        yield Exhibit(
            "Beyond the paper: ten right answers and ten wrong ones",
            "The authors' code can draw such samples; the paper does not show them.",
            f"In the last layer, the class with the most attention is the wrong answer in {agree} of {len(wrong)}.",
            [samples_figure(results, "samples")],
            command=_command(run),
        )
    joint = next((group for group in groups if group.experiment == "mnist-joint"), None)
    if joint is not None:
        yield Exhibit(
            "Beyond the paper: how the scores of a data set vary",
            "The authors' code can average scores over the classes of each data set; the paper does not show them.",
            "The attention of all test images of a data set, by the data set of the slots.",
            tables=[Table("", tables.CROSS_TASK_HEAD, tables.cross_task_rows(joint))],
            command=_command(joint.runs[0]),
        )
    first_run = _first(runs, "mnist-continual", "reversed")
    if first_run is not None:
        run, results = first_run
        first, second = results.sources
        whole = next(m for m in results.masks if m.masked == second and len(m.layers) == len(results.layers))
        before, after, masked = (mask.accuracy[first] for mask in (*results.masks[:2], whole))
        yield Exhibit(
            "Beyond the paper: the tasks in reversed order",
            "The authors' code can train on Fashion-MNIST first; the paper does not show it.",
            f"Fashion-MNIST falls from {before:.1%} to {after:.1%}. With MNIST's slots masked it has {masked:.1%}.",
            list(forgetting_figures(results, run, "reversed"))[:1],
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
            asked = (
                f"Table {query.number}: “… {_marked(query.query, run.unit)}”, which the network continues with "
                f"“{' '.join(query.continuation.split())}”"
            )
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
            f"Preset {run.preset}, {run.settings['steps']:,} steps: {quality}. The query's token and the "
            "attended tokens are between « and ». The score is the plain product, “dot”.",
            tables=shown,
            judged=[j for j in judged if j.statement.experiment == experiment],
            command=_command(run),
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
