"""The experiments by name. A new one: a file with `Settings`, `PRESETS`, `run`, `analyse`; a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spotlights.errors import UnknownNameError
from spotlights.experiments import (
    aesop_char,
    aesop_gpt,
    char_lm,
    mnist_cnn,
    mnist_continual,
    mnist_joint,
    mnist_single,
    training,
    wikitext2_word,
    word_lm,
)
from spotlights.experiments.language import training as language_training
from spotlights.experiments.language.results import LanguageResults
from spotlights.experiments.language.settings import TextSettings
from spotlights.experiments.results import Results
from spotlights.experiments.run_file import ImageRun, LanguageRun, RunFile


@runtime_checkable
class Experiment(Protocol):
    """What a module must have to be one."""

    Settings: Any
    PRESETS: dict[str, Any]

    def run(self, settings: Any, *, seed: int, path: Path) -> Any:
        """Trains and records: a `Trained` or a `TrainedLanguage`."""
        ...

    def analyse(self, trained: Any, settings: Any, *, pictures: bool) -> Any:
        """Asks all that the experiment is about; `pictures` for single test inputs too."""
        ...


@dataclass(frozen=True)
class Kind:
    """What all experiments on images, or all on language, have in common."""

    run: type[RunFile]
    """What run.json holds."""
    results: type
    """What results.json holds."""
    facts: Callable[[Any], dict[str, Any]]
    """What run.json says of a trained network."""


IMAGES = Kind(ImageRun, Results, training.facts)
LANGUAGE = Kind(LanguageRun, LanguageResults, language_training.facts)


EXPERIMENTS: dict[str, Experiment] = {
    "mnist-single": mnist_single,
    "mnist-joint": mnist_joint,
    "mnist-continual": mnist_continual,
    "mnist-cnn": mnist_cnn,
    "aesop-char": aesop_char,
    "aesop-gpt": aesop_gpt,
    "wikitext2-word": wikitext2_word,
    "char-lm": char_lm,
    "word-lm": word_lm,
}


def experiment_named(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise UnknownNameError(f'No experiment "{name}". There are: {", ".join(EXPERIMENTS)}.')
    return EXPERIMENTS[name]


def kind_named(name: str) -> Kind:
    return LANGUAGE if issubclass(experiment_named(name).Settings, TextSettings) else IMAGES


def preset_named(experiment: str, preset: str) -> Any:
    presets = experiment_named(experiment).PRESETS
    if preset not in presets:
        raise UnknownNameError(f'{experiment} has no preset "{preset}". It has: {", ".join(presets)}.')
    return presets[preset]
