"""Everything: all three experiments and their variants, over several seeds, for one report about all of it.

`spotlights reproduce`. Each memory is analysed and then thrown away, so that no more than one of them (17 GB
at most) is on the disk at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from spotlights.errors import SettingError
from spotlights.experiments.results import load_results
from spotlights.experiments.running import load_run, run_experiment


@dataclass(frozen=True)
class Planned:
    """A preset of an experiment."""

    experiment: str
    preset: str
    every_seed: bool = True
    """False for variants that one seed is enough for."""


PLAN = (
    Planned("mnist-single", "table1"),
    Planned("mnist-single", "paper"),
    Planned("mnist-joint", "paper"),
    Planned("mnist-continual", "paper"),
    Planned("mnist-single", "text", every_seed=False),
    Planned("mnist-continual", "long", every_seed=False),
)
"""Table 1 first; "text" is the paper's text to the letter, which does not reach its accuracies."""

QUICK_PLAN = (
    Planned("mnist-single", "quick"),
    Planned("mnist-joint", "quick"),
    Planned("mnist-continual", "quick"),
)

LARGEST_GB = 17
"""Free space that the largest memory and the results take."""


def planned_runs(plan: tuple[Planned, ...], seeds: int, out: Path) -> list[tuple[Planned, int, Path]]:
    """Every run with its seed and folder; the first seed of everything comes first."""
    return [
        (each, seed, out / f"{each.experiment}-{each.preset}-{seed}")
        for seed in range(seeds)
        for each in plan
        if seed == 0 or each.every_seed
    ]


def run_plan(*, seeds: int, out: Path, keep: bool, quick: bool = False) -> list[Path]:
    """Runs what is not there yet; returns all folders in the order of the plan.

    Args:
        seeds: 0, 1, … up to that many.
        out: the folder of the folders.
        keep: keep the memories of the "paper" presets' seed 0 for looking further (23 GB); all others go.
        quick: small networks on a few hundred images, to see that it works.
    """
    if seeds < 1:
        raise SettingError(f"seeds={seeds}: give at least 1.")
    plan = QUICK_PLAN if quick else PLAN
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free / 1e9
    if not quick and free < LARGEST_GB:
        raise SettingError(f"{out} has {free:.0f} GB left, and the largest memory takes {LARGEST_GB} GB. Choose --out.")
    runs = planned_runs(plan, seeds, out)
    for each, seed, folder in runs:
        if not _finished(folder):
            run_experiment(
                each.experiment,
                preset=each.preset,
                seed=seed,
                out=folder,
                keep=keep and seed == 0 and each.preset in ("paper", "quick"),
                pictures=seed == 0,
            )
    order = {(each.experiment, each.preset): place for place, each in enumerate(plan)}
    runs.sort(key=lambda run: (order[run[0].experiment, run[0].preset], run[1]))
    return [folder for _, _, folder in runs]


def _finished(folder: Path) -> bool:
    """Whether a run is there, so that an interrupted reproduction goes on where it stopped."""
    if not (folder / "run.json").exists():
        return False
    load_run(folder)
    load_results(folder)
    return True
