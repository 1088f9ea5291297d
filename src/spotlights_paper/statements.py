"""The paper's statements as checks: section, statement in our own words, our number, and whether it holds.

A check reads a run's results and nothing else. Its bound was set once, from the wording of the paper, before the
five seeds were run; nothing is tuned to a statement. An accuracy holds within one point of the paper's rounded number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spotlights.results import build
from spotlights_paper.experiments.analyses.cases import Case, LayerCase
from spotlights_paper.experiments.paper import ACCURACIES, BEFORE_SWITCH, TABLE_1, TABLE_1_COLUMNS, holds
from spotlights_paper.experiments.running import load_results, load_run

SINGLE, JOINT, CONTINUAL = "mnist-single", "mnist-joint", "mnist-continual"
AESOP, WIKITEXT = "aesop-char", "wikitext2-word"
CLASS_0 = 10245
"""The training image of a "0" that Figure 8a probably shows: on top in many settings."""

Verdict = tuple[bool, tuple[float, ...]]
"""Whether a statement holds for one run, and our numbers."""


class NotThereError(Exception):
    """A run has nothing to check a statement with."""


@dataclass(frozen=True)
class Found:
    """One run and its results."""

    run: Any
    results: Any

    def case(self, figure: str) -> Case:
        """The test image of one of the paper's figures."""
        case = next((case for case in self.results.cases if case.figure == figure), None)
        if case is None:
            raise NotThereError(f"no image for Figure {figure}")
        return case

    def query(self, table: int) -> Any:
        """The passages for the query of one of the paper's tables."""
        found = next((each for each in self.results.tables if each.number == table), None)
        if found is None:
            raise NotThereError(f"no query of Table {table}")
        return found


@dataclass(frozen=True)
class Statement:
    """One statement of the paper."""

    section: str
    shown: str
    """The figure or table that shows it, such as "Figure 5"; empty for none."""
    experiment: str
    presets: tuple[str, ...]
    text: str
    """In our own words."""
    numbers: str
    """What our numbers are, with a format for each: "{:.0%} of the images"."""
    check: Callable[[Found], Verdict]


@dataclass(frozen=True)
class Judged:
    """A statement and the verdict of each run."""

    statement: Statement
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def held(self) -> int:
        return sum(verdict for verdict, _ in self.verdicts)

    @property
    def verdict(self) -> str:
        if self.held == len(self.verdicts):
            return "holds"
        return f"holds in {self.held} of {len(self.verdicts)}" if self.held else "does not hold"

    @property
    def ours(self) -> str:
        """Our numbers, on average over the runs."""
        means = np.mean([numbers for _, numbers in self.verdicts], axis=0)
        return self.statement.numbers.format(*means.tolist()).replace("-", "−")


STATEMENTS: list[Statement] = []


def statement(
    section: str, shown: str, experiment: str, text: str, numbers: str, presets: tuple[str, ...] = ("paper", "quick")
) -> Callable[[Callable[[Found], Verdict]], Callable[[Found], Verdict]]:
    """Enters a check into the list."""

    def enter(check: Callable[[Found], Verdict]) -> Callable[[Found], Verdict]:
        STATEMENTS.append(Statement(section, shown, experiment, presets, text, numbers, check))
        return check

    return enter


def judge(folders: Iterable[Path]) -> list[Judged]:
    """Every statement that some of the runs can be asked about, in the order of the paper."""
    runs = [Found(load_run(folder), load_results(folder)) for folder in folders]
    judged = []
    for each in STATEMENTS:
        verdicts = []
        for found in runs:
            if found.run.experiment == each.experiment and found.run.preset in each.presets:
                try:
                    verdicts.append(each.check(found))
                except NotThereError:
                    continue
        if verdicts:
            judged.append(Judged(each, verdicts))
    return judged


def table(judged: list[Judged]) -> Any:
    """All verdicts, to print."""
    rows = [[j.statement.section, j.statement.shown, j.statement.text, j.ours, j.verdict] for j in judged]
    every = sum(j.held == len(j.verdicts) for j in judged)
    note = f"{every} of {len(judged)} statements hold in every run; {sum(not j.held for j in judged)} hold in none."
    return build("The paper's statements", ["section", "shown in", "statement", "ours", "verdict"], rows, note)


# -- 5.1 and 5.2: one task --------------------------------------------------------------------


def _top_mean(layer: LayerCase) -> np.ndarray:
    """The mean score of the top slots of each class, task by task."""
    return np.nanmean(layer.top, axis=2)


def _rank(values: np.ndarray, at: tuple[int, int]) -> int:
    """1 for the largest."""
    return int((values > values[at]).sum()) + 1


def _at(case: Case, results: Any, label: int | None = None) -> tuple[int, int]:
    return results.sources.index(case.source), case.label if label is None else label


@statement("5.1", "", SINGLE, "The keys take about 3 · 800 numbers for each slot.", "{:.0f} numbers")
def _size(found: Found) -> Verdict:
    numbers = 784 + sum(found.run.settings["hidden"])
    return abs(numbers / 2400 - 1) < 0.05, (float(numbers),)


@statement("5.2", "", SINGLE, "3,000 updates of 128 images make 384,000 slots.", "{:,.0f}")
def _slots(found: Found) -> Verdict:
    return found.run.slots == 384_000, (float(found.run.slots),)


def _accuracy(section: str, experiment: str, source: str) -> None:
    paper = ACCURACIES[experiment][source]

    @statement(section, "", experiment, f"Test accuracy on {source}, at the end: {paper:.0f} %.", "{:.1f} %")
    def _check(found: Found) -> Verdict:
        ours = 100 * found.run.accuracy[source]
        return abs(ours - paper) <= 1, (ours,)


_accuracy("5.2", SINGLE, "mnist")


@statement("5.2", "Figure 3", SINGLE, "The “6” is answered rightly.", "answer {:.0f}")
def _six_is_right(found: Found) -> Verdict:
    case = found.case("3a")
    return case.right, (float(case.output),)


def _class_is_high(section: str, shown: str, figure: str, name: str) -> None:
    @statement(
        section,
        shown,
        SINGLE,
        f"Slots of class {name} have high scores in all layers (among the three highest of ten, by the top 500).",
        "ranks {:.0f}, {:.0f}, {:.0f}",
    )
    def _check(found: Found) -> Verdict:
        case = found.case(figure)
        ranks = [_rank(_top_mean(layer), _at(case, found.results)) for layer in case.layers]
        return max(ranks) <= 3, tuple(map(float, ranks))


_class_is_high("5.2", "Figure 4", "3a", "6")


@statement(
    "5.2",
    "Figure 4",
    SINGLE,
    "Some slots of class 0 have scores comparable with or higher than those of class 6 (largest score, at least 90 %).",
    "{:.0%}, {:.0%}, {:.0%} of class 6",
)
def _zeros_compare(found: Found) -> Verdict:
    shares = [float(layer.top[0, 0, 0] / layer.top[0, 6, 0]) for layer in found.case("3a").layers]
    return min(shares) >= 0.9, tuple(shares)


@statement("5.2", "Figure 8", SINGLE, "Images of class 0 are among the top images of the “6”.", "in {:.0f} of 3 layers")
def _zeros_on_top(found: Found) -> Verdict:
    count = sum(any(image.label == 0 for image in layer.pictures) for layer in found.case("3a").layers)
    return count > 0, (float(count),)


def _class_has_largest_total(section: str, shown: str, figure: str, name: str) -> None:
    text = f"Class {name} has the largest total score, in all layers."

    @statement(section, shown, SINGLE, text, "ranks {:.0f}, {:.0f}, {:.0f}")
    def _check(found: Found) -> Verdict:
        case = found.case(figure)
        ranks = [_rank(layer.absolute, _at(case, found.results)) for layer in case.layers]
        return max(ranks) == 1, tuple(map(float, ranks))


_class_has_largest_total("5.2", "Figure 5", "3a", "6")


@statement(
    "5.2",
    "",
    SINGLE,
    "Often the slot with the largest score is of another class although the answer is right (over a tenth, some layer).",
    "{:.0%}, {:.0%}, {:.0%} of the images",
)
def _nearest_is_another(found: Found) -> Verdict:
    shares = [1 - votes.nearest for votes in found.results.other_votes]
    return max(shares) > 0.1, tuple(shares)


TABLE1 = ("table1", "quick")


def _votes(found: Found, column: str) -> list[float]:
    return [100 * getattr(vote, column) for vote in found.results.votes]


for _column, _words in TABLE_1_COLUMNS.items():

    def _cells(found: Found, column: str = _column) -> Verdict:
        index, ours = list(TABLE_1_COLUMNS).index(column), _votes(found, column)
        held = [holds(cells[index], mine) for cells, mine in zip(TABLE_1.values(), ours, strict=True)]
        return all(held), tuple(ours)

    _paper = ", ".join(f"{cells[list(TABLE_1_COLUMNS).index(_column)].mean:.1f}" for cells in TABLE_1.values())
    statement("5.2", "Table 1", SINGLE, f"{_words}: {_paper} %.", "{:.1f}, {:.1f}, {:.1f} %", TABLE1)(_cells)


@statement(
    "5.2",
    "Table 1",
    SINGLE,
    "Where the answer is right, later layers vote better.",
    "{:.1f} < {:.1f} < {:.1f} %",
    TABLE1,
)
def _later_is_better(found: Found) -> Verdict:
    ours = _votes(found, "target_given_right")
    return ours[0] < ours[1] < ours[2], tuple(ours)


@statement(
    "5.2",
    "Table 1",
    SINGLE,
    "Where the answer is wrong, the vote agrees with the answer more than with the target, in all layers.",
    "{:+.0f}, {:+.0f}, {:+.0f} points",
    TABLE1,
)
def _votes_for_the_answer(found: Found) -> Verdict:
    pairs = zip(_votes(found, "output_given_wrong"), _votes(found, "target_given_wrong"), strict=True)
    more = [output - target for output, target in pairs]
    return min(more) > 0, tuple(more)


@statement(
    "5.2",
    "",
    SINGLE,
    "Scores times the norm of the error show no consistent trend (their vote is worse than the plain one).",
    "{:.0%}, {:.0%}, {:.0%} right",
)
def _weighted(found: Found) -> Verdict:
    votes = found.results.other_votes
    return all(each.weighted < each.totals for each in votes), tuple(each.weighted for each in votes)


@statement(
    "5.2", "", SINGLE, "In the input layer time does not matter (totals of stretches of steps vary by < 5 %).", "{:.1%}"
)
def _no_time_in_the_input(found: Found) -> Verdict:
    share = next(timeline.share for timeline in found.results.over_time if timeline.layer == "layers.0")
    share = share[:-1] if len(share) > 1 else share  # the last stretch may be shorter
    variation = float(share.std() / share.mean())
    return variation < 0.05, (variation,)


def _top_steps(found: Found) -> list[np.ndarray]:
    """The steps of the top slots of each class for the “6”, by rank, in layers 1 and 2."""
    return [layer.top_steps[0] for layer in found.case("3a").layers[1:]]


@statement(
    "5.2",
    "",
    SINGLE,
    "In later layers, more recent slots come up towards the end of the top 500 (last fifth of the ranks against the first).",
    "{:+,.0f}, {:+,.0f} steps",
)
def _recent_towards_the_end(found: Found) -> Verdict:
    later = []
    for steps in _top_steps(found):
        fifth = max(steps.shape[1] // 5, 1)
        later.append(float(steps[:, -fifth:].mean() - steps[:, :fifth].mean()))
    return min(later) > 0, tuple(later)


def _tenths(found: Found) -> list[np.ndarray]:
    """How the top slots of each class are spread over the tenths of training, in layers 1 and 2."""
    edges = np.linspace(0, found.run.settings["steps"], 11)
    return [
        np.array([np.histogram(row[row >= 0], edges)[0] / max((row >= 0).sum(), 1) for row in steps])
        for steps in _top_steps(found)
    ]


@statement(
    "5.2",
    "",
    SINGLE,
    "The top 500 are spread out over time without a clear pattern (they fill at least 8 tenths of training, by entropy).",
    "{:.1f}, {:.1f} tenths",
)
def _spread_over_time(found: Found) -> Verdict:
    filled = [
        float(np.exp(-(share * np.log(np.where(share > 0, share, 1))).sum(axis=1)).mean()) for share in _tenths(found)
    ]
    return min(filled) >= 8, tuple(filled)


@statement(
    "5.2",
    "",
    SINGLE,
    "The most recent slots are not the most important ones (at most a fifth of the top 500 is of the last tenth).",
    "{:.0%}, {:.0%}",
)
def _not_the_last_ones(found: Found) -> Verdict:
    last = [float(share[:, -1].mean()) for share in _tenths(found)]
    return max(last) <= 0.2, tuple(last)


# -- 5.3: two tasks at once -------------------------------------------------------------------

_accuracy("5.3", JOINT, "mnist")
_accuracy("5.3", JOINT, "fashion-mnist")


def _share_of_top(case: Case, keep: Callable[[int, int], bool]) -> list[float]:
    """The share of each layer's top slots, of all classes together, of some tasks and labels."""
    found = []
    for layer in case.layers:
        tasks, labels = np.divmod(layer.top_category, layer.totals.shape[1])
        found.append(float(np.mean([keep(int(t), int(c)) for t, c in zip(tasks, labels, strict=True)])))
    return found


@statement(
    "5.3", "Figure 6", JOINT, "For the boot, slots of boots dominate the top 500 of the input layer.", "{:.0%} of them"
)
def _boots_dominate(found: Found) -> Verdict:
    share = _share_of_top(found.case("3b"), lambda task, label: (task, label) == (1, 9))[0]
    return share > 0.5, (share,)


def _spreads_over_tasks(section: str, shown: str, experiment: str, figure: str, what: str) -> None:
    text = f"For {what}, the top scores of layers 1 and 2 are spread more over both tasks than those of layer 0."

    @statement(section, shown, experiment, text, "other task: {:.0%}, {:.0%}, {:.0%} of the top 500")
    def _check(found: Found) -> Verdict:
        case = found.case(figure)
        own = found.results.sources.index(case.source)
        shares = _share_of_top(case, lambda task, label: task != own)
        return min(shares[1:]) > shares[0], tuple(shares)


_spreads_over_tasks("5.3", "Figure 6", JOINT, "3b", "the boot")


@statement("5.3", "Figure 9", JOINT, "Digits are among the boot's three top images of layer 2.", "{:.0f} of 3")
def _digits_on_top(found: Found) -> Verdict:
    count = sum(image.source == "mnist" for image in found.case("3b").layers[2].pictures)
    return count > 0, (float(count),)


@statement("5.3", "Figure 9", JOINT, "One of these digits is a “9”.", "{:.0f} of 3")
def _nine_on_top(found: Found) -> Verdict:
    images = found.case("3b").layers[2].pictures
    count = sum((image.source, image.label) == ("mnist", 9) for image in images)
    return count > 0, (float(count),)


@statement(
    "5.3", "Figure 7", JOINT, "In the input layer, coats have the largest total, not boots.", "coats {:.2f} × boots"
)
def _coats(found: Found) -> Verdict:
    totals = found.case("3b").layers[0].absolute
    return int(totals.argmax()) == 14, (float(totals[1, 4] / totals[1, 9]),)


@statement(
    "5.3",
    "Figure 7",
    JOINT,
    "In later layers boots have a larger part of the total than in the input layer.",
    "{:.1%}, {:.1%}, {:.1%}",
)
def _boots_rise(found: Found) -> Verdict:
    shares = [float(layer.absolute[1, 9] / layer.absolute.sum()) for layer in found.case("3b").layers]
    return min(shares[1:]) > shares[0], tuple(shares)


# -- 5.4: one task after the other ------------------------------------------------------------

_accuracy("5.4", CONTINUAL, "fashion-mnist")
_accuracy("5.4", CONTINUAL, "mnist")


@statement("5.4", "", CONTINUAL, f"MNIST before the second task: {BEFORE_SWITCH:.0f} %.", "{:.1f} %")
def _before_the_switch(found: Found) -> Verdict:
    ours = 100 * found.results.masks[0].accuracy["mnist"]
    return abs(ours - BEFORE_SWITCH) <= 1, (ours,)


@statement(
    "5.4",
    "",
    CONTINUAL,
    "With the slots of Fashion-MNIST masked, MNIST is as good as before the second task (within a point).",
    "{:+.1f} points",
)
def _mask(found: Found) -> Verdict:
    masks = found.results.masks
    masked = next(m for m in masks if m.masked == "fashion-mnist" and len(m.layers) == len(found.results.layers))
    change = 100 * (masked.accuracy["mnist"] - masks[0].accuracy["mnist"])
    return abs(change) <= 1, (change,)


@statement(
    "5.4",
    "",
    CONTINUAL,
    "Digits attend strongly to slots of Fashion-MNIST (at least a third of their totals, in every layer).",
    "{:.0%}, {:.0%}, {:.0%}",
)
def _interference(found: Found) -> Verdict:
    shares = [p.share for p in found.results.cross_task if (p.test, p.train) == ("mnist", "fashion-mnist")]
    return min(shares) >= 1 / 3, tuple(shares)


@statement("5.4", "Figure 10", CONTINUAL, "There are ones that are answered 3.", "{:.0f} of all forgotten ones")
def _ones_become_threes(found: Found) -> Verdict:
    count = float(found.results.forgetting.answered[1, 3])
    return count > 0, (count,)


# -- A and B ----------------------------------------------------------------------------------


@statement(
    "A",
    "Figure 8a",
    SINGLE,
    "One image of a “0” is among the top images in many settings.",
    "in {:.0f} of {:.0f} layers",
)
def _the_zero(found: Found) -> Verdict:
    layers = [layer for case in found.results.cases for layer in case.layers]
    count = sum(any(image.example == CLASS_0 for image in layer.pictures) for layer in layers)
    return count >= 2, (float(count), float(len(layers)))


_class_is_high("B.1", "Figure 12", "10a", "3")
_class_has_largest_total("B.1", "Figure 13", "10a", "3")


def _there_is(section: str, shown: str, experiment: str, figure: str, text: str) -> None:
    @statement(section, shown, experiment, text, "true of {:.0%} of 60 such images")
    def _check(found: Found) -> Verdict:
        case = found.case(figure)
        return case.fits, (case.fitting,)


_there_is("B.2", "Figure 14", JOINT, "10b", "There is a dress, rightly answered, without digits among its top images.")
_there_is(
    "B.2",
    "Figures 17, 19",
    JOINT,
    "10c",
    "There is a sandal, rightly answered, with a “5” among its top images and another class ahead in the last layer.",
)
_there_is(
    "5.4, B.3",
    "Figure 22",
    CONTINUAL,
    "10d",
    "There is a “1”, answered 3, for which dresses (class 3) have the largest total of all in layer 2.",
)


@statement(
    "B.3",
    "Figures 21, 22",
    CONTINUAL,
    "In the input layer, ones and dresses have high scores for this “1” (among the five highest of twenty).",
    "ranks {:.0f}, {:.0f}",
)
def _ones_and_dresses(found: Found) -> Verdict:
    top = _top_mean(found.case("10d").layers[0])
    ranks = _rank(top, (0, 1)), _rank(top, (1, 3))
    return max(ranks) <= 5, tuple(map(float, ranks))


_spreads_over_tasks("B.3", "Figure 21", CONTINUAL, "10d", "this “1”")


@statement("5.4, B.3", "Figures 23–25", CONTINUAL, "The dress is answered rightly.", "answer {:.0f}")
def _dress_is_right(found: Found) -> Verdict:
    return found.case("10e").right, (float(found.case("10e").output),)


_spreads_over_tasks("5.4", "Figure 24", CONTINUAL, "10e", "the dress, as for the boot,")


@statement("B.3", "Figures 26–28", CONTINUAL, "There is a “7” that is still answered rightly.", "answer {:.0f}")
def _seven_is_right(found: Found) -> Verdict:
    return found.case("10f").right, (float(found.case("10f").output),)


# -- C: language models -----------------------------------------------------------------------

TEXTS = ("paper", "laptop", "quick")


def _token(section: str, experiment: str, attribute: str, text: str, low: float, high: float) -> None:
    @statement(section, "", experiment, text, "{:,.0f}", TEXTS)
    def _check(found: Found) -> Verdict:
        ours = float(getattr(found.run, attribute))
        return low <= ours <= high, (ours,)


_token("C.1", WIKITEXT, "train_tokens", "WikiText-2 has about 2 million running words.", 1.9e6, 2.2e6)
_token("C.1", WIKITEXT, "vocabulary", "Its vocabulary has 33 thousand words.", 32_500, 33_500)
_token("C.1", AESOP, "train_tokens", "The book has about 185 thousand running characters.", 180_000, 190_000)
_token("C.1", AESOP, "vocabulary", "Its vocabulary has 107 symbols.", 107, 107)


def _finds(section: str, experiment: str, table_number: int, text: str, words: tuple[str, ...]) -> None:
    """The three best passages by the plain product have one of some words right before «the attended token» ends."""

    @statement(section, f"Table {table_number}", experiment, text, "{:.0f} of 3 by dot, {:.0f} by cosine", TEXTS)
    def _check(found: Found) -> Verdict:
        counts = []
        for kernel in ("dot", "cosine"):
            ours = next(each for each in found.query(table_number).ours if each.kernel == kernel)
            shown = [row["text"].split("»")[0].replace("«", "").replace("\n", " ").lower() for row in ours.rows()][:3]
            counts.append(sum(each.endswith(words) for each in shown))
        return counts[0] == 3, tuple(map(float, counts))


_finds("C.2", AESOP, 2, "The passages are about doing something fast.", ("as fast as",))
_finds("C.2", AESOP, 3, "The passages have “single” or an adjective, then a word with d.", ("single d", "little d"))
_finds("C.2", AESOP, 4, "The passages have “at” before a time or a number.", ("at ",))
_finds("C.3", WIKITEXT, 5, "The passages are about somebody's contribution.", ("his contribution", "her contribution"))
_finds(
    "C.3",
    WIKITEXT,
    6,
    "The passages have “main”, “secondary” or “primary”.",
    ("her main", "her secondary", "her primary", "her principal"),
)
_finds("C.3", WIKITEXT, 7, "The passages judge something.", ("describing it as", "described it as"))


def _papers_passages(section: str, experiment: str) -> None:
    text = "The paper's passages are among ours (at least 6 of 9 among the first 100 positions, by dot)."

    @statement(
        section, "Tables 2 to 4" if experiment == AESOP else "Tables 5 to 7", experiment, text, "{:.0f} of 9", TEXTS
    )
    def _check(found: Found) -> Verdict:
        ranks = [
            rank.by_position
            for query in found.results.tables
            for passage in query.papers
            for rank in passage.ranks
            if (rank.network, rank.kernel) == ("trained", "dot")
        ]
        if not ranks:
            raise NotThereError("no passages of the paper")
        count = sum(rank <= 100 for rank in ranks)
        return count >= 6, (float(count),)


_papers_passages("C.2", AESOP)
_papers_passages("C.3", WIKITEXT)
