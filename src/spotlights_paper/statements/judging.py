"""Statements of the paper, how runs are checked against them, and the table of verdicts.

A check reads a run's results and nothing else. Its bound is taken from the wording of the paper. Two second
readings of a statement and the check of Table 4 were added after the first verdicts were seen. An accuracy holds within
one point of the paper's rounded number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spotlights.results import build
from spotlights_paper.experiments.analyses.cases import Case, LayerCase
from spotlights_paper.experiments.paper import ACCURACIES
from spotlights_paper.experiments.running import load_results, load_run

SINGLE, JOINT, CONTINUAL = "mnist-single", "mnist-joint", "mnist-continual"
AESOP, WIKITEXT = "aesop-char", "wikitext2-word"

Verdict = tuple[bool, tuple[float, ...]]
"""Whether a statement holds for one run, and our numbers."""


class NotThereError(Exception):
    """A run lacks the results that a statement is about."""


@dataclass(frozen=True, eq=False)
class Findings:
    """One run and its results."""

    run: Any
    """An `ImageRun` or a `LanguageRun`."""
    results: Any
    """`ImageResults` or `LanguageResults`."""

    @staticmethod
    def of(folders: Iterable[Path]) -> list[Findings]:
        """Of finished runs, by their folders."""
        return [Findings(load_run(folder), load_results(folder)) for folder in folders]

    @property
    def name(self) -> str:
        return f"{self.run.experiment}-{self.run.preset}-{self.run.seed}"

    @property
    def command(self) -> str:
        return f"spotlights run {self.run.experiment} --preset {self.run.preset} --seed {self.run.seed}"

    def case(self, figure: str) -> Case:
        """The test image of one of the paper's figures."""
        case = next((case for case in self.results.cases if case.figure == figure), None)
        if case is None:
            raise NotThereError(f"no image for Figure {figure}")
        return case

    def query(self, table: int) -> Any:
        """The passages for the query of one of the paper's tables."""
        query = next((query for query in self.results.tables if query.number == table), None)
        if query is None:
            raise NotThereError(f"no query of Table {table}")
        return query


Check = Callable[[Findings], Verdict]


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
    check: Check
    why: str
    """Why it may not hold, as far as we know."""


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
        runs = f" in {self.held} of {len(self.verdicts)}" if len(self.verdicts) > 1 else ""
        return f"holds{runs}" if self.held else f"does not hold{runs.replace(' in 0 of', ' in any of')}"

    @property
    def ours(self) -> str:
        """Our numbers, on average over the runs."""
        means = np.mean([numbers for _, numbers in self.verdicts], axis=0)
        return self.statement.numbers.format(*means.tolist()).replace("-", "−")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        said = self.statement
        return {
            "section": said.section,
            "shown": said.shown,
            "statement": said.text,
            "ours": self.ours,
            "held": self.held,
            "runs": len(self.verdicts),
        }


STATEMENTS: list[Statement] = []


def statement(
    experiment: str,
    section: str,
    shown: str,
    numbers: str,
    *,
    text: str | None = None,
    presets: tuple[str, ...] = ("paper", "quick"),
    why: str = "",
) -> Callable[[Check], Check]:
    """Enters a check into the list; its docstring is the statement, unless there is a text."""

    def enter(check: Check) -> Check:
        said = " ".join((text or check.__doc__ or "").split())
        STATEMENTS.append(Statement(section, shown, experiment, presets, said, numbers, check, why))
        return check

    return enter


single, joint, continual = (partial(statement, name) for name in (SINGLE, JOINT, CONTINUAL))


def judge(runs: Iterable[Findings]) -> list[Judged]:
    """Every statement that some of the runs can be asked about, in the order of the paper."""
    runs, judged = list(runs), []
    for statement in sorted(STATEMENTS, key=lambda statement: statement.section):
        verdicts = []
        for findings in runs:
            if findings.run.experiment == statement.experiment and findings.run.preset in statement.presets:
                try:
                    verdicts.append(statement.check(findings))
                except NotThereError:
                    continue
        if verdicts:
            judged.append(Judged(statement, verdicts))
    return judged


def failing(judged: Iterable[Judged]) -> list[list[str]]:
    """Those that do not hold in every run, with the reason, below `FAILING_HEAD`."""
    return [
        [j.statement.section, j.statement.text, j.ours, j.verdict, j.statement.why]
        for j in judged
        if j.held < len(j.verdicts)
    ]


FAILING_HEAD = ["section", "statement", "ours", "verdict", "why, as far as we know"]
HEAD = ["section", "shown in", "statement", "ours", "verdict"]


def rows(judged: list[Judged]) -> list[list[str]]:
    """All verdicts, below `HEAD`."""
    return [[j.statement.section, j.statement.shown, j.statement.text, j.ours, j.verdict] for j in judged]


def summary(judged: list[Judged]) -> str:
    """How many statements hold."""
    every = sum(j.held == len(j.verdicts) for j in judged)
    return f"{every} of {len(judged)} statements hold in every run; {sum(not j.held for j in judged)} hold in none."


def table(judged: list[Judged]) -> Any:
    """All verdicts, to print."""
    return build("The paper's statements", HEAD, rows(judged), summary(judged))


# -- what several checks need -------------------------------------------------------------------


def top_mean(layer: LayerCase) -> np.ndarray:
    """The mean score of the top slots of each class, task by task."""
    return np.nanmean(layer.top, axis=2)


def rank(values: np.ndarray, at: tuple[int, int]) -> int:
    """1 for the largest."""
    return int((values > values[at]).sum()) + 1


def at(case: Case, results: Any) -> tuple[int, int]:
    """The task and the class of a test image."""
    return results.sources.index(case.source), case.label


def share_of_top(case: Case, keep: Callable[[int, int], bool]) -> list[float]:
    """The share of each layer's top slots, of all classes together, of some tasks and labels."""
    shares = []
    for layer in case.layers:
        tasks, labels = np.divmod(layer.top_category, layer.absolute.shape[1])
        shares.append(float(np.mean([keep(int(t), int(c)) for t, c in zip(tasks, labels, strict=True)])))
    return shares


def accuracy(section: str, experiment: str, source: str) -> None:
    """Enters the statement about one test accuracy."""
    paper = ACCURACIES[experiment][source]
    text = f"Test accuracy on {source}, at the end: {paper:.0f} %."
    why = "The paper gives one rounded number without a spread; the bound of one point is ours."

    @statement(experiment, section, "", "{:.1f} %", text=text, why=why)
    def _check(findings: Findings) -> Verdict:
        ours = 100 * findings.run.accuracy[source]
        return abs(ours - paper) <= 1, (ours,)
