"""Runs of the same experiment and preset, with different seeds, belong together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotlights.errors import SettingError
from spotlights.experiments.language.results import LanguageResults
from spotlights.experiments.paper import TABLE_1_COLUMNS
from spotlights.experiments.results import Results, load_results
from spotlights.experiments.run_file import ImageRun, LanguageRun
from spotlights.experiments.running import load_run


@dataclass(frozen=True)
class MeanOver:
    """A number over several runs, in percent."""

    mean: float
    deviation: float | None
    """Sample standard deviation; None for a single run."""

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in their seeds only."""

    experiment: str
    preset: str
    runs: list[ImageRun]
    results: list[Results]

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.preset}"

    @property
    def shown(self) -> int:
        """The run whose pictures are shown: the first that looked at single test images."""
        return next((i for i, found in enumerate(self.results) if found.cases), 0)

    def accuracy(self, source: str) -> MeanOver:
        return mean_over([run.accuracy[source] for run in self.runs])

    def vote(self, layer: str, source: str, column: str) -> MeanOver:
        """One cell of Table 1."""
        assert column in TABLE_1_COLUMNS
        cells = [
            getattr(vote, column)
            for found in self.results
            for vote in found.votes
            if (vote.layer, vote.source) == (layer, source)
        ]
        return mean_over([cell for cell in cells if cell == cell])


@dataclass(frozen=True, eq=False)
class Language:
    """A language model's run."""

    run: LanguageRun
    results: LanguageResults

    @property
    def name(self) -> str:
        return f"{self.run.experiment}-{self.run.preset}-{self.run.seed}"


def mean_over(shares: Sequence[float]) -> MeanOver:
    percents = [100 * share for share in shares]
    if not percents:
        return MeanOver(float("nan"), None)
    deviation = statistics.stdev(percents) if len(percents) > 1 else None
    return MeanOver(statistics.fmean(percents), deviation)


def gather(folders: Iterable[Path]) -> list[Group]:
    """Groups of image runs in the order of the folders, each sorted by seed."""
    found: dict[tuple[str, str, str], list[tuple[ImageRun, Results]]] = {}
    for folder in folders:
        run = load_run(folder)
        key = (run.experiment, run.preset, repr(sorted(run.settings.items())))
        found.setdefault(key, []).append((run, load_results(folder)))
    groups = []
    for (experiment, preset, _), pairs in found.items():
        pairs.sort(key=lambda pair: pair[0].seed)
        groups.append(Group(experiment, preset, [run for run, _ in pairs], [results for _, results in pairs]))
    return groups


def sorted_out(folders: Iterable[Path]) -> tuple[list[Group], list[Language]]:
    """Runs about images, in groups, and runs about language, each by itself."""
    runs = {folder: load_run(folder) for folder in folders}
    if not runs:
        raise SettingError("Give at least one run: spotlights report runs/mnist-single-paper-0.")
    spoken = {folder: run for folder, run in runs.items() if isinstance(run, LanguageRun)}
    languages = [Language(run, load_results(folder, LanguageResults)) for folder, run in spoken.items()]
    return gather(folder for folder in runs if folder not in spoken), languages
