"""A language model of characters, trained on Æsop's Fables.

`spotlights run aesop-char`; the first three queries of the paper's appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotlights import datasets
from spotlights.datasets import TextDataset
from spotlights.experiments.language import paper
from spotlights.experiments.language.analyses import analyse_language
from spotlights.experiments.language.results import LanguageResults
from spotlights.experiments.language.settings import LAPTOP_CHARACTERS, QUICK, SGD_CHARACTERS, LanguageSettings
from spotlights.experiments.language.text import shortened
from spotlights.experiments.language.training import TrainedLanguage, train


@dataclass(frozen=True, kw_only=True)
class Settings(LanguageSettings):
    """The paper's: 263 epochs, hours on a CPU."""

    steps: int = 5000
    embedding: int = 64
    projection: int | None = 1024
    hidden: int = 1024
    lr: float = 1e-3
    clip: float = 1.0
    batch: int = 64
    unroll: int = 100


PRESETS = {
    "laptop": Settings(**LAPTOP_CHARACTERS),
    "paper": Settings(),
    "sgd": Settings(**SGD_CHARACTERS),
    "quick": Settings(tokens=6000, **QUICK),
}


def load(settings: Settings) -> TextDataset:
    return shortened(datasets.load("aesop"), settings)


def run(settings: Settings, *, seed: int, path: Path) -> TrainedLanguage:
    return train(settings, data=load(settings), seed=seed, path=path)


def analyse(trained: TrainedLanguage, settings: Settings, *, pictures: bool) -> LanguageResults:
    return analyse_language(trained, settings, paper.AESOP, pictures=pictures)
