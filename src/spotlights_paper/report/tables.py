"""The rows of the report's tables. Runs that differ only in their seeds are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.experiments.language.asking import QueryPassages
from spotlights_paper.experiments.language.evaluation import MEASURES, Evaluation
from spotlights_paper.experiments.language.ranks import KERNELS
from spotlights_paper.experiments.paper import ACCURACIES, BEFORE_SWITCH, TABLE_1, TABLE_1_COLUMNS, Estimate, holds
from spotlights_paper.experiments.registry import ImageRun
from spotlights_paper.report.test_set_figures import mask_name
from spotlights_paper.statements import Findings

Rows = list[list[object]]


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Image runs that differ in their seeds only."""

    experiment: str
    preset: str
    runs: list[ImageRun]
    results: list[ImageResults]

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.preset}"


def groups_of(runs: Iterable[Findings]) -> list[RunGroup]:
    """The image runs among some runs, in their order; in each group sorted by seed."""
    groups: dict[tuple[str, str, str], list[Findings]] = {}
    for found in runs:
        if isinstance(found.run, ImageRun):
            key = found.run.experiment, found.run.preset, repr(sorted(found.run.settings.items()))
            groups.setdefault(key, []).append(found)
    for some in groups.values():
        some.sort(key=lambda found: found.run.seed)
    return [
        RunGroup(experiment, preset, [found.run for found in some], [found.results for found in some])
        for (experiment, preset, _), some in groups.items()
    ]


def group_of(found: Findings, runs: Iterable[Findings]) -> RunGroup:
    """The group of one of the runs."""
    return next(group for group in groups_of(runs) if found.run in group.runs)


# -- images -----------------------------------------------------------------------------------


def accuracy_rows(groups: Sequence[RunGroup]) -> Rows:
    """Every experiment's accuracies beside the paper's."""
    rows: Rows = []
    for group in groups:
        first, seeds = group.results[0], len(group.runs)
        for source in first.sources:
            reported = ACCURACIES.get(group.experiment, {}).get(source)
            paper = f"{reported:.0f}" if reported else "–"
            ours = _over_seeds(run.accuracy[source] for run in group.runs)
            rows.append([group.experiment, group.preset, f"{source}, at the end", paper, ours, seeds])
        if first.masks:
            before = _over_seeds(results.masks[0].accuracy["mnist"] for results in group.results)
            when = f"mnist, at step {first.masks[0].as_of:,}"
            rows.append([group.experiment, group.preset, when, f"{BEFORE_SWITCH:.0f}", before, seeds])
    return rows


def table_1_head() -> list[str]:
    return ["layer", *(name for heading in TABLE_1_COLUMNS.values() for name in (heading, "paper"))]


def table_1_rows(group: RunGroup) -> Rows:
    """Table 1: for each layer ours and the paper's, side by side."""
    return [
        [layer, *(text for ours, paper in cells for text in (percent(ours), paper.text(1)))]
        for layer, cells in _table_1(group)
    ]


def cells_that_hold(group: RunGroup) -> tuple[int, int]:
    """How many cells of Table 1 are within the paper's bounds, and how many there are."""
    verdicts = [holds(paper, 100 * ours.mean) for _, cells in _table_1(group) for ours, paper in cells]
    return sum(verdicts), len(verdicts)


def _table_1(group: RunGroup) -> Iterator[tuple[str, list[tuple[Estimate, Estimate]]]]:
    """For each layer the cells, ours and the paper's."""
    for layer, reported in TABLE_1.items():
        votes = [vote for results in group.results for vote in results.votes if vote.layer == layer]
        shares = [[getattr(vote, column) for vote in votes] for column in TABLE_1_COLUMNS]
        ours = [Estimate.over_seeds([share for share in some if share == share]) for some in shares]
        yield layer, list(zip(ours, reported, strict=True))


CROSS_TASK_HEAD = ["layer", "test images", "slots", "share (%)", "spread over images", "mean |score| of a slot"]


def cross_task_rows(group: RunGroup) -> Rows:
    """Shares of the attention, over the runs, and mean scores of a slot in the first run."""
    return [
        [
            part.layer,
            part.test,
            part.train,
            _over_seeds(results.cross_task[index].share for results in group.results),
            f"{100 * part.share_spread:.1f}",
            f"{part.mean:.3g} ± {part.mean_spread:.2g}",
        ]
        for index, part in enumerate(group.results[0].cross_task)
    ]


def mask_head(group: RunGroup) -> list[str]:
    return ["mask", *(f"{source} (%)" for source in group.results[0].sources)]


def mask_rows(group: RunGroup) -> Rows:
    """Accuracies under masks, over the runs."""
    first = group.results[0]
    return [
        [
            mask_name(first, mask),
            *(_over_seeds(results.masks[index].accuracy[s] for results in group.results) for s in first.sources),
        ]
        for index, mask in enumerate(first.masks)
    ]


def exactness_rows(groups: Sequence[RunGroup]) -> Rows:
    """The worst layer of each run."""
    rows: Rows = []
    for group in groups:
        for run in group.runs:
            checks = run.exactness.values()
            rows.append(
                [
                    group.name,
                    run.seed,
                    "yes" if run.exact else "NO",
                    f"{max(check.relative_error for check in checks):.1e}",
                    f"{max(check.change_error for check in checks):.1e}",
                    f"{run.slots:,}",
                    f"{run.memory_bytes / 1e9:.1f} GB",
                    f"{run.seconds['training']:.0f} s",
                    f"{run.seconds['verify'] + run.seconds['analyses']:.0f} s",
                ]
            )
    return rows


# -- language models --------------------------------------------------------------------------


def evaluation_head() -> list[str]:
    return ["passages", "kernel", *(name for measure in MEASURES.values() for name in (measure, "trained has more"))]


def evaluation_rows(evaluation: Evaluation) -> Rows:
    """Every way of finding passages, and how much more the trained network's passages have."""
    rows: Rows = []
    for judged in evaluation.judged:
        row: list[object] = [judged.how, judged.kernel or "–"]
        for name in MEASURES:
            digits, percent = (2, False) if name == "suffix" else (1, True)  # a number of tokens, or shares
            gain = judged.gain[name].text(digits, percent=percent, sign="+")
            row += [judged.measures[name].text(digits, percent=percent), "–" if judged.how == "trained" else gain]
        rows.append(row)
    return rows


RANK_HEAD = [
    "the paper's passage",
    *(f"{network}, {kernel}" for network in ("trained", "untrained") for kernel in KERNELS),
]
"""Each cell has the rank by position, then the rank by sentence."""


def rank_rows(query: QueryPassages) -> Rows:
    """The paper's passages for one query, with their ranks in ours."""
    return [
        [passage.text, *(f"{rank.by_position:,} · {rank.by_sentence:,}" for rank in passage.ranks)]
        for passage in query.papers
    ]


def percent(estimate: Estimate) -> str:
    return estimate.text(1, percent=True)


def _over_seeds(shares: Iterable[float]) -> str:
    return percent(Estimate.over_seeds(list(shares)))
