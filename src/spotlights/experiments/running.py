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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from spotlights._version import __version__
from spotlights.attention.tables import build
from spotlights.errors import MemoryExistsError, MemoryFormatError, SettingError
from spotlights.experiments.progress import stage
from spotlights.experiments.registry import experiment_named, preset_named
from spotlights.experiments.results import from_plain, load_results, save_results
from spotlights.experiments.training import Trained, accuracy

RUN, STARTED, MEMORY, MODEL = "run.json", "started.json", "run.memory", "model.safetensors"


@dataclass(frozen=True)
class Exactness:
    """How well one layer's memory meets its trained weights."""

    exact: bool
    relative_error: float
    change_error: float
    """Relative to what training changed."""


@dataclass(frozen=True)
class Run:
    """What run.json holds."""

    experiment: str
    preset: str
    """The preset the settings began as."""
    settings: dict[str, Any]
    seed: int
    versions: dict[str, str]
    train_images: dict[str, int]
    """By source."""
    test_images: dict[str, int]
    accuracy: dict[str, float]
    """Of the trained network, by source."""
    exactness: dict[str, Exactness]
    """By layer."""
    slots: int
    memory_bytes: int
    seconds: dict[str, float]
    """By stage: training (with recording), verify, analyses."""

    @property
    def exact(self) -> bool:
        return all(check.exact for check in self.exactness.values())


def run_experiment(
    name: str,
    *,
    preset: str = "paper",
    seed: int = 0,
    steps: int | None = None,
    out: Path | None = None,
    keep: bool = True,
    pictures: bool = True,
) -> Path:
    """Trains, records, verifies and analyses; returns the folder.

    Args:
        name: an experiment of the registry.
        preset: one of its presets.
        seed: of the initial weights and of the order of the examples.
        steps: another number of steps than the preset's.
        out: the folder; `runs/NAME-PRESET-SEED` by default. An earlier run there is replaced.
        keep: False throws the memory away when it has been analysed.
        pictures: also look at single test images.
    """
    settings = preset_named(name, preset)
    if steps is not None:
        settings = replace(settings, steps=steps)
    folder = Path("runs") / f"{name}-{preset}-{seed}" if out is None else out
    return _run(name, preset, settings, seed=seed, folder=folder, keep=keep, pictures=pictures)


def repeat(path: Path, *, out: Path | None = None, keep: bool = True) -> Path:
    """Runs again what a run.json describes, into a folder beside it unless told otherwise."""
    path = path / RUN if path.is_dir() else path
    run = load_run(path.parent) if path.name == RUN else _read(path)
    settings = from_plain(experiment_named(run.experiment).Settings, run.settings)
    folder = path.parent.with_name(f"{path.parent.name}-repeated") if out is None else out
    return _run(run.experiment, run.preset, settings, seed=run.seed, folder=folder, keep=keep, pictures=True)


def load_run(folder: Path) -> Run:
    """What a finished run says of itself."""
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


def summary(run: Run, folder: Path) -> Any:
    """A run as a table."""
    rows = [[f"accuracy on {source}", f"{share:.2%}"] for source, share in run.accuracy.items()]
    rows += [
        [f"{layer}: memory and network differ by", f"{check.relative_error:.1e}"]
        for layer, check in run.exactness.items()
    ]
    rows += [[f"seconds of {what}", took] for what, took in run.seconds.items()]
    return build(f"{run.experiment}, {run.preset}, seed {run.seed}", ["", ""], rows, str(folder))


def _read(path: Path) -> Run:
    try:
        return from_plain(Run, json.loads(path.read_text(encoding="utf-8")))
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
    experiment = experiment_named(name)
    seconds: dict[str, float] = {}

    started = time.perf_counter()
    trained: Trained = experiment.run(settings, seed=seed, path=folder / MEMORY)
    seconds["training"] = time.perf_counter() - started

    started = time.perf_counter()
    with stage("comparing the memory with the network"):
        verification = trained.memory.verify(trained.model)
    seconds["verify"] = time.perf_counter() - started

    started = time.perf_counter()
    results = experiment.analyse(trained, settings, pictures=pictures)
    seconds["analyses"] = time.perf_counter() - started

    save_results(results, folder)
    save_file({key: value.contiguous() for key, value in trained.model.state_dict().items()}, folder / MODEL)
    run = Run(
        name,
        preset,
        asdict(settings),
        seed,
        _versions(),
        {source: len(prepared.train) for source, prepared in trained.data.items()},
        {source: len(prepared.test) for source, prepared in trained.data.items()},
        {source: accuracy(trained.model, prepared.test) for source, prepared in trained.data.items()},
        {layer: Exactness(check.ok, check.relative_error, check.change_error) for layer, check in verification.items()},
        len(trained.memory),
        trained.memory.info.as_dict()["bytes"],
        {what: round(took, 1) for what, took in seconds.items()},
    )
    (folder / RUN).write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    load_results(folder)  # what was written can be read
    if not keep:
        del trained
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
