"""Running an experiment: a folder that holds what was found, and all that it takes to repeat it.

A folder such as `runs/mnist-single-paper-0/` holds

- `run.json`: settings, seed, versions, accuracies, exactness; `spotlights run --from run.json` repeats it
- `started.json`: experiment, settings and seed from the first moment on: a run can be looked at while it trains
- `results.json`: every analysis
- `model.safetensors`: the trained network
- `run.memory/`: the memory, unless it was asked to be thrown away
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from spotlights._version import __version__
from spotlights.attention.tables import build
from spotlights.errors import MemoryExistsError, MemoryFormatError, SettingError
from spotlights.experiments.progress import stage
from spotlights.experiments.registry import experiment_named, kind_named, preset_named
from spotlights.experiments.results import from_plain, load_results, save_results
from spotlights.experiments.run_file import Exactness, RunFile

RUN, STARTED, MEMORY, MODEL = "run.json", "started.json", "run.memory", "model.safetensors"


def run_experiment(
    name: str,
    *,
    preset: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    text: Path | None = None,
    out: Path | None = None,
    keep: bool = True,
    pictures: bool = True,
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
        pictures: also look at single test images.
    """
    preset = next(iter(experiment_named(name).PRESETS)) if preset is None else preset
    settings = preset_named(name, preset)
    if steps is not None:
        settings = replace(settings, steps=steps)
    if text is not None:
        if not hasattr(settings, "text"):
            raise SettingError(f"{name} has data of its own. For a text file: spotlights run char-lm --text {text}.")
        settings = replace(settings, text=str(text.absolute()))
    folder = Path("runs") / f"{name}-{preset}-{seed}" if out is None else out
    return _run(name, preset, settings, seed=seed, folder=folder, keep=keep, pictures=pictures)


def repeat(path: Path, *, out: Path | None = None, keep: bool = True) -> Path:
    """Runs again what a run.json describes, into a folder beside it unless told otherwise."""
    path = path / RUN if path.is_dir() else path
    run = load_run(path.parent) if path.name == RUN else _read(path)
    settings = from_plain(experiment_named(run.experiment).Settings, run.settings)
    folder = path.parent.with_name(f"{path.parent.name}-repeated") if out is None else out
    return _run(run.experiment, run.preset, settings, seed=run.seed, folder=folder, keep=keep, pictures=True)


def load_run(folder: Path) -> Any:
    """What a finished run says of itself: an `ImageRun` or a `LanguageRun`."""
    return _read(folder / RUN)


def started(folder: Path) -> tuple[str, Any]:
    """The name of the experiment in a folder and its settings, also while it is still training."""
    path = folder / RUN if (folder / RUN).is_file() else folder / STARTED
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
        name = begun["experiment"]
        return name, from_plain(experiment_named(name).Settings, begun["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MemoryFormatError(f"{path} is not what `spotlights run` writes ({error}).") from error


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


def _read(path: Path) -> Any:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(kind_named(plain["experiment"]).run, plain)
    except FileNotFoundError:
        raise MemoryFormatError(
            f"There is no {path}: not the folder of a finished run. Make one: spotlights run mnist-single."
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise MemoryFormatError(f"{path} is not what `spotlights run` writes ({error}).") from error


def _run(name: str, preset: str, settings: Any, *, seed: int, folder: Path, keep: bool, pictures: bool) -> Path:
    if settings.steps < 1:
        raise SettingError(f"steps={settings.steps}: give at least 1.")
    if getattr(settings, "switch", 0) >= settings.steps:
        raise SettingError(
            f"steps={settings.steps}: {name} changes the task at step {settings.switch}; give more steps."
        )
    _claim(folder)
    begun = {"experiment": name, "preset": preset, "settings": asdict(settings), "seed": seed}
    (folder / STARTED).write_text(json.dumps(begun, indent=2) + "\n", encoding="utf-8")
    experiment, kind = experiment_named(name), kind_named(name)
    seconds: dict[str, float] = {}

    started = time.perf_counter()
    trained = experiment.run(settings, seed=seed, path=folder / MEMORY)
    seconds["training"] = time.perf_counter() - started
    memory, model = trained.memory, trained.model
    # Before anything else can fail. Tied weights are two in a file.
    save_file({key: value.clone().contiguous() for key, value in model.state_dict().items()}, folder / MODEL)

    started = time.perf_counter()
    with stage("comparing the memory with the network"):
        verification = memory.verify(model) if memory.info.as_dict()["exact"] else {}
    seconds["verify"] = time.perf_counter() - started

    started = time.perf_counter()
    results = experiment.analyse(trained, settings, pictures=pictures)
    seconds["analyses"] = time.perf_counter() - started

    save_results(results, folder)
    run = kind.run(
        experiment=name,
        preset=preset,
        settings=asdict(settings),
        seed=seed,
        versions=_versions(),
        exactness={
            layer: Exactness(check.ok, check.relative_error, check.change_error)
            for layer, check in verification.items()
        },
        slots=len(memory),
        memory_bytes=memory.info.as_dict()["bytes"],
        seconds={what: round(took, 1) for what, took in seconds.items()},
        **kind.facts(trained),
    )
    (folder / RUN).write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    load_results(folder, kind.results)  # what was written can be read
    if not keep:
        del trained, memory
        shutil.rmtree(folder / MEMORY)
    return folder


def _claim(folder: Path) -> None:
    """Takes a folder that is new, empty or an earlier run's."""
    ours = {RUN, STARTED, MEMORY, MODEL, "results.json", "report"}
    if folder.exists() and (not folder.is_dir() or any(entry.name not in ours for entry in folder.iterdir())):
        raise MemoryExistsError(f"{folder} holds something else than a run. Choose another folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in (RUN, "results.json"):
        (folder / file).unlink(missing_ok=True)


def _versions() -> dict[str, str]:
    return {
        "spotlights": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
