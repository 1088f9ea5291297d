"""A language model of words, trained on WikiText-2.

`spotlights run wikitext2-word`; the last three queries of the paper's appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotlights import datasets
from spotlights.datasets import TextDataset
from spotlights.experiments.language import paper
from spotlights.experiments.language.analyses import analyse_language
from spotlights.experiments.language.results import LanguageResults
from spotlights.experiments.language.settings import LAPTOP_WORDS, QUICK, SGD_WORDS, LanguageSettings
from spotlights.experiments.language.text import shortened
from spotlights.experiments.language.training import TrainedLanguage, train


@dataclass(frozen=True, kw_only=True)
class Settings(LanguageSettings):
    """The paper's: 61 epochs, a day on a CPU."""

    steps: int = 10_000
    embedding: int = 200
    hidden: int = 200
    dropout: float = 0.5
    lr: float = 3e-3
    clip: float = 0.3
    batch: int = 128
    unroll: int = 100


PRESETS = {
    "laptop": Settings(**LAPTOP_WORDS),
    "paper": Settings(),
    "sgd": Settings(**SGD_WORDS),
    "quick": Settings(tokens=6000, **QUICK),
}


def load(settings: Settings) -> TextDataset:
    return shortened(datasets.load("wikitext-2"), settings)


def run(settings: Settings, *, seed: int, path: Path) -> TrainedLanguage:
    return train(settings, data=load(settings), seed=seed, path=path)


def analyse(trained: TrainedLanguage, settings: Settings, *, pictures: bool) -> LanguageResults:
    return analyse_language(trained, settings, paper.WIKITEXT_2, pictures=pictures)
