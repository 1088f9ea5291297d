"""Runs an experiment into a folder that holds the results and everything needed to repeat the run.

A folder such as `runs/mnist-single-paper-0/` holds

- `run.json`: settings, seed, versions, accuracies, exactness; `spotlights run --from run.json` repeats it
- `started.json`: experiment, settings and seed, written first: a run can be looked at while it trains
- `results.json`: every analysis
- `model.safetensors`: the trained network
- `run.memory/`: the memory, unless `--discard-memory` was given
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import spotlights as sl
from spotlights.errors import MemoryExistsError, MemoryFormatError, SettingError
from spotlights.results import build
from spotlights_paper.experiments import progress
from spotlights_paper.experiments.progress import stage
from spotlights_paper.experiments.registry import (
    Exactness,
    RunFile,
    experiment_named,
    from_plain,
    preset_named,
    to_plain,
)

RUN, STARTED, RESULTS = "run.json", "started.json", "results.json"
MEMORY, MODEL = "run.memory", "model.safetensors"


def run_experiment(
    name: str,
    *,
    preset: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    text: Path | None = None,
    out: Path | None = None,
    keep: bool = True,
) -> Path:
    """Trains, records, verifies and analyses; returns the folder.

    Args:
        name: an experiment of the registry.
        preset: one of its presets; the first one by default.
        seed: of the initial weights and of the order of the examples.
        steps: another number of steps than the preset's.
        text: the text file to train on, for an experiment on a text of your own.
        out: the folder; `runs/NAME-PRESET-SEED` by default. An earlier run there is replaced.
        keep: False throws the memory away when it has been analysed.
    """
    preset = next(iter(experiment_named(name).presets)) if preset is None else preset
    settings = preset_named(name, preset)
    if steps is not None:
        settings = replace(settings, steps=steps)
    if text is not None:
        if not hasattr(settings, "text"):
            raise SettingError(f"{name} has data of its own. For a text file: spotlights run char-lm --text {text}.")
        settings = replace(settings, text=str(text.absolute()))
    folder = Path("runs") / f"{name}-{preset}-{seed}" if out is None else out
    return _run(name, preset, settings, seed=seed, folder=folder, keep=keep)


def repeat(path: Path, *, out: Path | None = None, keep: bool = True) -> Path:
    """Runs again what a run.json describes, into a folder beside it unless told otherwise."""
    path = path / RUN if path.is_dir() else path
    run = _read(path, _run_file)
    settings = from_plain(experiment_named(run.experiment).settings, run.settings)
    folder = path.parent.with_name(f"{path.parent.name}-repeated") if out is None else out
    return _run(run.experiment, run.preset, settings, seed=run.seed, folder=folder, keep=keep)


def load_run(folder: Path) -> Any:
    """What a finished run says of itself: an `ImageRun` or a `LanguageRun`."""
    return _read(folder / RUN, _run_file)


def save_results(results: Any, folder: Path) -> Path:
    path = folder / RESULTS
    path.write_text(json.dumps(to_plain(results), ensure_ascii=False, allow_nan=False), encoding="utf-8")
    return path


def load_results(folder: Path) -> Any:
    """The results of a finished run: `ImageResults` or `LanguageResults`."""
    kind = experiment_named(load_run(folder).experiment).results
    return _read(folder / RESULTS, lambda plain: from_plain(kind, plain))


def started(folder: Path) -> tuple[str, Any]:
    """The name of the experiment in a folder and its settings, also while it is still training."""

    def settings(plain: Any) -> tuple[str, Any]:
        name = plain["experiment"]
        return name, from_plain(experiment_named(name).settings, plain["settings"])

    return _read(folder / RUN if (folder / RUN).is_file() else folder / STARTED, settings)


def summary(run: RunFile, folder: Path) -> Any:
    """A run as a table."""
    rows = run.outcome()
    rows += [
        [f"{layer}: memory and network differ by", f"{check.relative_error:.1e}"]
        for layer, check in run.exactness.items()
    ]
    rows += [["memory", f"{run.slots:,} slots, {run.memory_bytes / 1e6:,.0f} MB"]]
    rows += [[f"seconds of {what}", f"{took}"] for what, took in run.seconds.items()]
    return build(f"{run.experiment}, {run.preset}, seed {run.seed}", ["", ""], rows, str(folder))


def _run_file(plain: Any) -> Any:
    return from_plain(experiment_named(plain["experiment"]).run_file, plain)


def _read(path: Path, understand: Callable[[Any], Any]) -> Any:
    """What a file of a run holds."""
    try:
        return understand(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise MemoryFormatError(
            f"There is no {path}: not the folder of a finished run. Make one: spotlights run mnist-single. A "
            "memory of your own is for spotlights explore, top, totals, history, mask and audit."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MemoryFormatError(f"{path} is not what `spotlights run` writes ({error}). Repeat the run.") from error


def _run(name: str, preset: str, settings: Any, *, seed: int, folder: Path, keep: bool) -> Path:
    if settings.steps < 1:
        raise SettingError(f"steps={settings.steps}: give at least 1.")
    if (getattr(settings, "switch", None) or 0) >= settings.steps:
        raise SettingError(
            f"steps={settings.steps}: {name} changes the task at step {settings.switch}; give more steps."
        )
    _claim(folder)
    begun = {"experiment": name, "preset": preset, "settings": asdict(settings), "seed": seed}
    (folder / STARTED).write_text(json.dumps(begun, indent=2) + "\n", encoding="utf-8")
    experiment = experiment_named(name)
    seconds: dict[str, float] = {}

    started = time.perf_counter()
    trained = experiment.run(settings, seed=seed, path=folder / MEMORY)
    seconds["training"] = time.perf_counter() - started
    memory, model = trained.memory, trained.model
    # Before anything else can fail. Tied weights are two in a file.
    save_file({key: value.clone().contiguous() for key, value in model.state_dict().items()}, folder / MODEL)

    started = time.perf_counter()
    with stage("comparing the memory with the network"):
        verification = memory.verify(model) if memory.info.as_dict()["contributions"] else {}
    seconds["verify"] = time.perf_counter() - started

    started = time.perf_counter()
    results = experiment.analyse(trained, settings)
    seconds["analyses"] = time.perf_counter() - started

    save_results(results, folder)
    run = experiment.run_file(
        experiment=name,
        preset=preset,
        settings=asdict(settings),
        seed=seed,
        versions={
            "spotlights": sl.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        },
        exactness={
            layer: Exactness(check.ok, check.relative_error, check.change_error)
            for layer, check in verification.items()
        },
        slots=len(memory),
        memory_bytes=memory.info.as_dict()["bytes"],
        seconds={what: round(took, 1) for what, took in seconds.items()},
        **trained.facts(),
    )
    (folder / RUN).write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    load_results(folder)  # what was written can be read
    if not keep:
        del trained, memory
        shutil.rmtree(folder / MEMORY)
    return folder


def _claim(folder: Path) -> None:
    """Takes a folder that is new, empty or holds an earlier run."""
    ours = {RUN, STARTED, MEMORY, MODEL, RESULTS, "checkpoint.pt", "checkpoint.part", "report"}
    if folder.exists() and (not folder.is_dir() or any(entry.name not in ours for entry in folder.iterdir())):
        raise MemoryExistsError(f"{folder} holds something other than a run. Choose another folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in (RUN, RESULTS):
        (folder / file).unlink(missing_ok=True)


# -- all of the paper's experiments ---------------------------------------------------------


PLAN = {
    ("mnist-single", "table1"): 3,
    ("mnist-single", "paper"): 2,
    ("mnist-joint", "paper"): 4,
    ("mnist-continual", "paper"): 6,
    ("mnist-single", "text"): 2,
    ("mnist-continual", "long"): 8,
    ("mnist-continual", "reversed"): 6,
    ("aesop-char", "laptop"): 10,
    ("wikitext2-word", "laptop"): 17,
}
"""Experiments and presets, with about how many minutes each takes on two cores. "text" is the paper's text to the
letter, which does not reach its accuracies."""
ONE_SEED = ("text", "long", "reversed", "laptop")
"""Variants that one seed is enough for, and language models."""
QUICK_PLAN = {("mnist-single", "quick"): 1, ("mnist-joint", "quick"): 1, ("mnist-continual", "quick"): 1}

LARGEST_GB = 17
"""Free space that the largest memory and the results take."""


def run_plan(*, seeds: int, out: Path, keep: bool, quick: bool = False) -> list[Path]:
    """Runs what is not there yet; returns all folders in the order of the plan.

    Args:
        seeds: 0, 1, … up to that many.
        out: the folder of the folders.
        keep: keep the memories of the "paper" presets' seed 0 for looking further (23 GB); all others go.
        quick: small networks on a few hundred images, to see that it works.
    """
    plan = QUICK_PLAN if quick else PLAN
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free / 1e9
    if not quick and free < LARGEST_GB:
        raise SettingError(f"{out} has {free:.0f} GB left, and the largest memory takes {LARGEST_GB} GB. Choose --out.")
    folders = {
        (planned, seed): out / f"{planned[0]}-{planned[1]}-{seed}"
        for seed in range(seeds)  # all experiments with seed 0 come first
        for planned in plan
        if seed == 0 or planned[1] not in ONE_SEED
    }
    missing = []
    for run, folder in folders.items():
        if (folder / RUN).exists():  # an interrupted reproduction goes on where it stopped
            load_results(folder)  # refuses a folder that cannot be read
        else:
            missing.append(run)
    started, done, planned = time.perf_counter(), 0, sum(plan[run] for run, _ in missing)
    for number, ((experiment, preset), seed) in enumerate(missing, start=1):
        pace = (time.perf_counter() - started) / 60 / done if done else 1.0  # of this machine, once it is known
        left = f"about {max(round(pace * (planned - done)), 1)} minutes left"
        progress.say(f"{number} of {len(missing)}: {experiment}, {preset}, seed {seed}; {left}")
        kept = keep and seed == 0 and preset in ("paper", "quick")
        run_experiment(experiment, preset=preset, seed=seed, out=folders[(experiment, preset), seed], keep=kept)
        done += plan[experiment, preset]
    return [folder for planned in plan for (run, _), folder in folders.items() if run == planned]
