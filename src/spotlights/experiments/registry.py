"""The experiments by name. A new one: a file with `Settings`, `PRESETS`, `run`, `analyse`; a line here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spotlights.errors import UnknownNameError
from spotlights.experiments import mnist_continual, mnist_joint, mnist_single
from spotlights.experiments.results import Results
from spotlights.experiments.training import Trained


@runtime_checkable
class Experiment(Protocol):
    """What a module must have to be one."""

    Settings: Any
    PRESETS: dict[str, Any]

    def run(self, settings: Any, *, seed: int, path: Path) -> Trained:
        """Trains and records."""
        ...

    def analyse(self, trained: Trained, settings: Any, *, pictures: bool) -> Results:
        """Asks all that the experiment is about; `pictures` for single test images too."""
        ...


EXPERIMENTS: dict[str, Experiment] = {
    "mnist-single": mnist_single,
    "mnist-joint": mnist_joint,
    "mnist-continual": mnist_continual,
}


def experiment_named(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise UnknownNameError(f'No experiment "{name}". There are: {", ".join(EXPERIMENTS)}.')
    return EXPERIMENTS[name]


def preset_named(experiment: str, preset: str) -> Any:
    presets = experiment_named(experiment).PRESETS
    if preset not in presets:
        raise UnknownNameError(f'{experiment} has no preset "{preset}". It has: {", ".join(presets)}.')
    return presets[preset]
