"""The rows of the report's tables. Runs that differ only in their seeds are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotlights.errors import SettingError
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.experiments.analyses.test_set import Vote
from spotlights_paper.experiments.language.asking import LanguageResults, QueryPassages
from spotlights_paper.experiments.language.evaluation import MEASURES, Evaluation
from spotlights_paper.experiments.language.ranks import KERNELS
from spotlights_paper.experiments.paper import ACCURACIES, BEFORE_SWITCH, TABLE_1, TABLE_1_COLUMNS, Estimate, holds
from spotlights_paper.experiments.registry import ImageRun, LanguageRun
from spotlights_paper.experiments.running import load_results, load_run
from spotlights_paper.report.test_set_figures import mask_name

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

    @property
    def shown(self) -> int:
        """The run whose pictures are shown: the first that looked at single test images."""
        return next((index for index, results in enumerate(self.results) if results.cases), 0)

    def accuracy(self, source: str) -> Estimate:
        return Estimate.over_seeds([run.accuracy[source] for run in self.runs])

    def vote(self, layer: str, source: str, column: str) -> Estimate:
        """One cell of Table 1; `column` is one of `TABLE_1_COLUMNS`."""
        cells = [getattr(vote, column) for vote in self.votes(layer, source)]
        return Estimate.over_seeds([cell for cell in cells if cell == cell])

    def votes(self, layer: str, source: str) -> list[Vote]:
        """Of every run, in one layer, on the test images of one source."""
        votes = [vote for results in self.results for vote in results.votes]
        return [vote for vote in votes if (vote.layer, vote.source) == (layer, source)]


@dataclass(frozen=True, eq=False)
class LanguageSection:
    """A language model's run."""

    run: LanguageRun
    results: LanguageResults

    @property
    def name(self) -> str:
        return f"{self.run.experiment}-{self.run.preset}-{self.run.seed}"


def gather(folders: Iterable[Path]) -> tuple[list[RunGroup], list[LanguageSection]]:
    """Image runs in groups, in the order of the folders and each sorted by seed; language runs one by one."""
    groups: dict[tuple[str, str, str], list[tuple[ImageRun, ImageResults]]] = {}
    languages = []
    for folder in folders:
        run, results = load_run(folder), load_results(folder)
        if isinstance(run, LanguageRun):
            languages.append(LanguageSection(run, results))
        else:
            key = run.experiment, run.preset, repr(sorted(run.settings.items()))
            groups.setdefault(key, []).append((run, results))
    if not groups and not languages:
        raise SettingError("Give at least one run: spotlights report runs/mnist-single-paper-0.")
    image_runs = []
    for (experiment, preset, _), pairs in groups.items():
        pairs.sort(key=lambda pair: pair[0].seed)
        image_runs.append(RunGroup(experiment, preset, [run for run, _ in pairs], [results for _, results in pairs]))
    return image_runs, languages


# -- images -----------------------------------------------------------------------------------


def accuracy_rows(groups: Sequence[RunGroup]) -> Rows:
    """Every experiment's accuracies beside the paper's."""
    rows: Rows = []
    for group in groups:
        first, seeds = group.results[0], len(group.runs)
        for source in first.sources:
            reported = ACCURACIES.get(group.experiment, {}).get(source)
            paper = f"{reported:.0f}" if reported else "–"
            rows.append(
                [group.experiment, group.preset, f"{source}, at the end", paper, percent(group.accuracy(source)), seeds]
            )
        if first.masks:
            before = _over_seeds(results.masks[0].accuracy["mnist"] for results in group.results)
            when = f"mnist, at step {first.masks[0].as_of:,}"
            rows.append([group.experiment, group.preset, when, f"{BEFORE_SWITCH:.0f}", before, seeds])
    return rows


def table_1_head() -> list[str]:
    return ["layer", *(name for heading in TABLE_1_COLUMNS.values() for name in (heading, "paper"))]


def table_1_rows(group: RunGroup) -> Rows:
    """Table 1: for each layer ours and the paper's, side by side."""
    rows: Rows = []
    source = group.results[0].sources[0]
    for layer in group.results[0].layers:
        row: list[object] = [layer]
        for index, column in enumerate(TABLE_1_COLUMNS):
            reported = TABLE_1[layer][index] if layer in TABLE_1 else None
            row += [percent(group.vote(layer, source, column)), reported.text(1) if reported else "–"]
        rows.append(row)
    return rows


def cells_that_hold(group: RunGroup) -> tuple[int, int]:
    """How many cells of Table 1 are within the paper's bounds, and how many there are."""
    source = group.results[0].sources[0]
    verdicts = [
        holds(reported, 100 * group.vote(layer, source, column).mean)
        for layer, cells in TABLE_1.items()
        if layer in group.results[0].layers
        for column, reported in zip(TABLE_1_COLUMNS, cells, strict=True)
    ]
    return sum(verdicts), len(verdicts)


def vote_rows(group: RunGroup) -> Rows:
    """The vote in every layer, on the test images of every source."""
    return [
        [layer, source, *(percent(group.vote(layer, source, column)) for column in TABLE_1_COLUMNS)]
        for layer in group.results[0].layers
        for source in group.results[0].sources
    ]


def agreement_tables(group: RunGroup) -> list[tuple[str, list[str], Rows]]:
    """The caption, head and rows of 2×2 tables, added up over the runs."""
    tables = []
    sources = group.results[0].sources
    for layer in group.results[0].layers:
        for source in sources:
            suffix = f", {source}" if len(sources) > 1 else ""
            for what in ("target", "output"):
                counts = [vote.agreement(what) for vote in group.votes(layer, source)]
                rows: Rows = [
                    [f"network {name}", *(f"{sum(table[row][column] for table in counts):,}" for column in range(2))]
                    for row, name in enumerate(("right", "wrong"))
                ]
                tables.append((f"{layer}{suffix}: vote and {what}", ["", f"= {what}", f"≠ {what}"], rows))
    return tables


CROSS_TASK_HEAD = ["layer", "test images", "slots", "share (%)", "spread over images", "mean |score| of a slot"]


def cross_task_rows(group: RunGroup) -> Rows:
    """Shares of the attention, over the runs, and mean scores of a slot in the shown run."""
    return [
        [
            part.layer,
            part.test,
            part.train,
            _over_seeds(results.cross_task[index].share for results in group.results),
            f"{100 * part.share_spread:.1f}",
            f"{part.mean:.3g} ± {part.mean_spread:.2g}",
        ]
        for index, part in enumerate(group.results[group.shown].cross_task)
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
