"""Sections 5.1, 5.2, A and B.1: one task."""

from __future__ import annotations

import numpy as np

from spotlights_paper.experiments.paper import TABLE_1, TABLE_1_COLUMNS, Estimate, holds
from spotlights_paper.statements.judging import SINGLE, Findings, Verdict, accuracy, at, rank, single, top_mean


@single("5.1", "", "{:.0f} numbers")
def _size(findings: Findings) -> Verdict:
    """The keys take about 3 · 800 numbers for each slot."""
    numbers = 784 + sum(findings.run.settings["hidden"])
    return abs(numbers / 2400 - 1) < 0.05, (float(numbers),)


@single("5.2", "", "{:,.0f}")
def _slots(findings: Findings) -> Verdict:
    """3,000 updates of 128 images make 384,000 slots."""
    return findings.run.slots == 384_000, (float(findings.run.slots),)


accuracy("5.2", SINGLE, "mnist")


@single("5.2", "Figure 3", "answer {:.0f}")
def _six_is_right(findings: Findings) -> Verdict:
    """The “6” is answered rightly."""
    case = findings.case("3a")
    return case.right, (float(case.output),)


def _class_is_high(section: str, shown: str, figure: str, name: str) -> None:
    @single(
        section,
        shown,
        "ranks {:.0f}, {:.0f}, {:.0f}",
        text=f"Slots of class {name} have high scores in all layers (among the three highest of ten, by the top 500).",
    )
    def _check(findings: Findings) -> Verdict:
        case = findings.case(figure)
        ranks = [rank(top_mean(layer), at(case, findings.results)) for layer in case.layers]
        return max(ranks) <= 3, tuple(map(float, ranks))


_class_is_high("5.2", "Figure 4", "3a", "6")


@single("5.2", "Figure 4", "{:.0%}, {:.0%}, {:.0%} of class 6")
def _zeros_compare(findings: Findings) -> Verdict:
    """Some slots of class 0 have scores comparable with or higher than those of class 6 (largest score, at least 90
    %)."""
    shares = [float(layer.top[0, 0, 0] / layer.top[0, 6, 0]) for layer in findings.case("3a").layers]
    return min(shares) >= 0.9, tuple(shares)


@single("5.2", "Figure 8", "in {:.0f} of 3 layers")
def _zeros_on_top(findings: Findings) -> Verdict:
    """Images of class 0 are among the top images of the “6”."""
    count = sum(any(image.label == 0 for image in layer.pictures) for layer in findings.case("3a").layers)
    return count > 0, (float(count),)


def _class_has_largest_total(section: str, shown: str, figure: str, name: str) -> None:
    text = f"Class {name} has the largest total score, in all layers."

    @single(section, shown, "ranks {:.0f}, {:.0f}, {:.0f}", text=text)
    def _check(findings: Findings) -> Verdict:
        case = findings.case(figure)
        ranks = [rank(layer.absolute, at(case, findings.results)) for layer in case.layers]
        return max(ranks) == 1, tuple(map(float, ranks))


_class_has_largest_total("5.2", "Figure 5", "3a", "6")


@single("5.2", "", "{:.0%}, {:.0%}, {:.0%} of the images")
def _nearest_is_another(findings: Findings) -> Verdict:
    """Often the top slot is of another class although the answer is right (over a tenth, in some layer)."""
    shares = [1 - votes.nearest for votes in findings.results.other_votes]
    return max(shares) > 0.1, tuple(shares)


TABLE1 = ("table1", "quick")


def _votes(findings: Findings, column: str) -> list[float]:
    return [100 * getattr(vote, column) for vote in findings.results.votes]


def _cells(column: str, words: str, paper: list[Estimate]) -> None:
    text = f"{words}: {', '.join(f'{cell.mean:.1f}' for cell in paper)} %."
    why = "Run by run. The mean over five seeds is in the paper's range (reproduction.md)."

    @single("5.2", "Table 1", "{:.1f}, {:.1f}, {:.1f} %", text=text, presets=TABLE1, why=why)
    def _check(findings: Findings) -> Verdict:
        ours = _votes(findings, column)
        return all(map(holds, paper, ours)), tuple(ours)


for _index, (_column, _words) in enumerate(TABLE_1_COLUMNS.items()):
    _cells(_column, _words, [cells[_index] for cells in TABLE_1.values()])


@single("5.2", "Table 1", "{:.1f} < {:.1f} < {:.1f} %", presets=TABLE1)
def _later_is_better(findings: Findings) -> Verdict:
    """Where the answer is right, later layers vote better."""
    ours = _votes(findings, "target_given_right")
    return ours[0] < ours[1] < ours[2], tuple(ours)


@single("5.2", "Table 1", "{:+.0f}, {:+.0f}, {:+.0f} points", presets=TABLE1)
def _votes_for_the_answer(findings: Findings) -> Verdict:
    """Where the answer is wrong, the vote agrees with the answer more than with the target, in all layers."""
    pairs = zip(_votes(findings, "output_given_wrong"), _votes(findings, "target_given_wrong"), strict=True)
    more = [output - target for output, target in pairs]
    return min(more) > 0, tuple(more)


@single("5.2", "", "{:.0%}, {:.0%}, {:.0%} right")
def _weighted(findings: Findings) -> Verdict:
    """Scores times the norm of the error show no consistent trend (their vote is worse than the plain one)."""
    votes = findings.results.other_votes
    return all(vote.weighted < vote.totals for vote in votes), tuple(vote.weighted for vote in votes)


@single("5.2", "", "{:.1%}")
def _no_time_in_the_input(findings: Findings) -> Verdict:
    """In the input layer time does not matter (totals of stretches of steps vary by < 5 %)."""
    share = next(timeline.share for timeline in findings.results.over_time if timeline.layer == "layers.0")
    share = share[:-1] if len(share) > 1 else share  # the last stretch may be shorter
    variation = float(share.std() / share.mean())
    return variation < 0.05, (variation,)


def _top_steps(findings: Findings) -> list[np.ndarray]:
    """The steps of the top slots of each class for the “6”, by rank, in layers 1 and 2."""
    return [layer.top_steps[0] for layer in findings.case("3a").layers[1:]]


@single("5.2", "", "{:+,.0f}, {:+,.0f} steps")
def _recent_towards_the_end(findings: Findings) -> Verdict:
    """In later layers, slots towards the end of the top 500 are more recent (last fifth of ranks against the first)."""
    later = []
    for steps in _top_steps(findings):
        fifth = max(steps.shape[1] // 5, 1)
        later.append(float(steps[:, -fifth:].mean() - steps[:, :fifth].mean()))
    return min(later) > 0, tuple(later)


def _tenths(findings: Findings) -> list[np.ndarray]:
    """How the top slots of each class are spread over the tenths of training, in layers 1 and 2."""
    edges = np.linspace(0, findings.run.settings["steps"], 11)
    return [
        np.array([np.histogram(row[row >= 0], edges)[0] / max((row >= 0).sum(), 1) for row in steps])
        for steps in _top_steps(findings)
    ]


@single(
    "5.2",
    "",
    "{:.1f}, {:.1f} tenths",
    why="The bound of 8 tenths is ours. Few of the top slots are from the first 250 steps, where scores of the later "
    "layers are small, and many from around step 500, where they are largest.",
)
def _spread_over_time(findings: Findings) -> Verdict:
    """The top 500 are spread over time without a clear pattern (they fill 8 tenths of training, by entropy)."""
    filled = [
        float(np.exp(-(share * np.log(np.where(share > 0, share, 1))).sum(axis=1)).mean())
        for share in _tenths(findings)
    ]
    return min(filled) >= 8, tuple(filled)


@single("5.2", "", "{:.0%}, {:.0%}")
def _not_the_last_ones(findings: Findings) -> Verdict:
    """The most recent slots are not the most important ones (at most a fifth of the top 500 is of the last tenth)."""
    last = [float(share[:, -1].mean()) for share in _tenths(findings)]
    return max(last) <= 0.2, tuple(last)


# -- A and B.1 --------------------------------------------------------------------------------

CLASS_0 = 10245
"""The training image of a "0" that Figure 8a probably shows: on top in many settings."""


@single("A", "Figure 8a", "in {:.0f} of {:.0f} layers")
def _the_zero(findings: Findings) -> Verdict:
    """One image of a “0” is among the top images in many settings."""
    layers = [layer for case in findings.results.cases for layer in case.layers]
    count = sum(any(image.example == CLASS_0 for image in layer.pictures) for layer in layers)
    return count >= 2, (float(count), float(len(layers)))


_class_is_high("B.1", "Figure 12", "10a", "3")
_class_has_largest_total("B.1", "Figure 13", "10a", "3")
