"""Sections 5.3, 5.4, B.2 and B.3: two tasks, at once or one after the other."""

from __future__ import annotations

from spotlights_paper.experiments.paper import BEFORE_SWITCH
from spotlights_paper.statements.judging import (
    CONTINUAL,
    JOINT,
    Findings,
    Verdict,
    accuracy,
    continual,
    joint,
    rank,
    share_of_top,
    statement,
    top_mean,
)

# -- 5.3: two tasks at once -------------------------------------------------------------------

accuracy("5.3", JOINT, "mnist")
accuracy("5.3", JOINT, "fashion-mnist")


@joint("5.3", "Figure 6", "{:.0%} of them")
def _boots_dominate(findings: Findings) -> Verdict:
    """For the boot, slots of boots dominate the top 500 of the input layer."""
    share = share_of_top(findings.case("3b"), lambda task, label: (task, label) == (1, 9))[0]
    return share > 0.5, (share,)


def _spreads_over_tasks(section: str, shown: str, experiment: str, figure: str, what: str, why: str = "") -> None:
    text = f"For {what}, the top scores of layers 1 and 2 are spread more over both tasks than those of layer 0."

    @statement(experiment, section, shown, "other task: {:.0%}, {:.0%}, {:.0%} of the top 500", text=text, why=why)
    def _check(findings: Findings) -> Verdict:
        case = findings.case(figure)
        own = findings.results.sources.index(case.source)
        shares = share_of_top(case, lambda task, label: task != own)
        return min(shares[1:]) > shares[0], tuple(shares)


_spreads_over_tasks("5.3", "Figure 6", JOINT, "3b", "the boot")


@joint("5.3", "Figure 9", "{:.0f} of 3")
def _digits_on_top(findings: Findings) -> Verdict:
    """Digits are among the boot's three top images of layer 2."""
    count = sum(image.source == "mnist" for image in findings.case("3b").layers[2].pictures)
    return count > 0, (float(count),)


@joint("5.3", "Figure 9", "{:.0f} of 3", why="With seed 4 the three are an “8”, a “0” and an “8”.")
def _nine_on_top(findings: Findings) -> Verdict:
    """One of these digits is a “9”."""
    images = findings.case("3b").layers[2].pictures
    count = sum((image.source, image.label) == ("mnist", 9) for image in images)
    return count > 0, (float(count),)


@joint("5.3", "Figure 7", "coats {:.2f} × boots")
def _coats(findings: Findings) -> Verdict:
    """In the input layer, coats have the largest total, not boots."""
    totals = findings.case("3b").layers[0].absolute
    return int(totals.argmax()) == 14, (float(totals[1, 4] / totals[1, 9]),)


@joint(
    "5.3",
    "Figure 7",
    "{:.1%}, {:.1%}, {:.1%}",
    why="By rank it nearly always holds: boots are first from layer 1 on (the next statement). Only their part of the "
    "total is smaller in layer 1 than in the input layer.",
)
def _boots_rise(findings: Findings) -> Verdict:
    """In later layers boots have a larger part of the total than in the input layer."""
    shares = [float(layer.absolute[1, 9] / layer.absolute.sum()) for layer in findings.case("3b").layers]
    return min(shares[1:]) > shares[0], tuple(shares)


@joint("5.3", "Figure 7", "ranks {:.0f}, {:.0f}", why="With seed 4, dresses are 0.4 % ahead in layer 1.")
def _boots_first(findings: Findings) -> Verdict:
    """In later layers, boots have the largest total of all classes."""
    ranks = [rank(layer.absolute, (1, 9)) for layer in findings.case("3b").layers[1:]]
    return max(ranks) == 1, tuple(map(float, ranks))


# -- 5.4: one task after the other ------------------------------------------------------------

accuracy("5.4", CONTINUAL, "fashion-mnist")
accuracy("5.4", CONTINUAL, "mnist")


@continual("5.4", "", "{:.1f} %", text=f"MNIST before the second task: {BEFORE_SWITCH:.0f} %.")
def _before_the_switch(findings: Findings) -> Verdict:
    ours = 100 * findings.results.masks[0].accuracy["mnist"]
    return abs(ours - BEFORE_SWITCH) <= 1, (ours,)


@continual("5.4", "", "{:+.1f} points")
def _mask(findings: Findings) -> Verdict:
    """With the slots of Fashion-MNIST masked, MNIST is as good as before the second task (within a point)."""
    masks = findings.results.masks
    masked = next(m for m in masks if m.masked == "fashion-mnist" and len(m.layers) == len(findings.results.layers))
    change = 100 * (masked.accuracy["mnist"] - masks[0].accuracy["mnist"])
    return abs(change) <= 1, (change,)


@continual("5.4", "", "{:.0%}, {:.0%}, {:.0%}")
def _interference(findings: Findings) -> Verdict:
    """Digits attend strongly to slots of Fashion-MNIST (at least a third of their totals, in every layer)."""
    shares = [p.share for p in findings.results.cross_task if (p.test, p.train) == ("mnist", "fashion-mnist")]
    return min(shares) >= 1 / 3, tuple(shares)


@continual("5.4", "Figure 10", "{:.0f} of all forgotten ones")
def _ones_become_threes(findings: Findings) -> Verdict:
    """There are ones that are answered 3."""
    count = float(findings.results.forgetting.answered[1, 3])
    return count > 0, (count,)


# -- B.2 and B.3 ----------------------------------------------------------------------------------


def _there_is(section: str, shown: str, experiment: str, figure: str, text: str) -> None:
    why = "In some runs none of the first 60 such images is like that: we stop looking there."

    @statement(experiment, section, shown, "true of {:.0%} of 60 such images", text=text, why=why)
    def _check(findings: Findings) -> Verdict:
        case = findings.case(figure)
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


@continual("B.3", "Figures 21, 22", "ranks {:.0f}, {:.0f}")
def _ones_and_dresses(findings: Findings) -> Verdict:
    """In the input layer, ones and dresses have high scores for this “1” (among the five highest of twenty)."""
    top = top_mean(findings.case("10d").layers[0])
    ranks = rank(top, (0, 1)), rank(top, (1, 3))
    return max(ranks) <= 5, tuple(map(float, ranks))


_spreads_over_tasks(
    "B.3",
    "Figure 21",
    CONTINUAL,
    "10d",
    "this “1”",
    why="In layer 2 the very largest scores are digits' again. By totals it holds (the next statement).",
)


@continual("B.3", "Figure 22", "smaller part: {:.0%}, {:.0%}, {:.0%}")
def _totals_spread(findings: Findings) -> Verdict:
    """The same by totals: the smaller task's part grows from layer 0 to layers 1 and 2."""
    tasks = [layer.absolute.sum(axis=1) for layer in findings.case("10d").layers]
    smaller = [float(totals.min() / totals.sum()) for totals in tasks]
    return min(smaller[1:]) > smaller[0], tuple(smaller)


@continual("5.4, B.3", "Figures 23–25", "answer {:.0f}")
def _dress_is_right(findings: Findings) -> Verdict:
    """The dress is answered rightly."""
    return findings.case("10e").right, (float(findings.case("10e").output),)


_spreads_over_tasks("5.4", "Figure 24", CONTINUAL, "10e", "the dress, as for the boot")


@continual("B.3", "Figures 26–28", "answer {:.0f}")
def _seven_is_right(findings: Findings) -> Verdict:
    """There is a “7” that is still answered rightly."""
    return findings.case("10f").right, (float(findings.case("10f").output),)
