"""A language model of characters, trained on a text of your own.

`spotlights run char-lm --text book.txt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotlights.datasets import TextDataset
from spotlights.experiments import aesop_char
from spotlights.experiments.language.analyses import analyse_language
from spotlights.experiments.language.results import LanguageResults
from spotlights.experiments.language.settings import LAPTOP_CHARACTERS, QUICK, SGD_CHARACTERS
from spotlights.experiments.language.text import own_text
from spotlights.experiments.language.training import TrainedLanguage, train


@dataclass(frozen=True, kw_only=True)
class Settings(aesop_char.Settings):
    """Those of `aesop-char`, on the text that is given."""


PRESETS = {
    "laptop": Settings(**LAPTOP_CHARACTERS),
    "paper": Settings(),
    "sgd": Settings(**SGD_CHARACTERS),
    "quick": Settings(**QUICK),
}


def load(settings: Settings) -> TextDataset:
    return own_text(settings, "character")


def run(settings: Settings, *, seed: int, path: Path) -> TrainedLanguage:
    return train(settings, data=load(settings), seed=seed, path=path)


def analyse(trained: TrainedLanguage, settings: Settings, *, pictures: bool) -> LanguageResults:
    return analyse_language(trained, settings, (), pictures=pictures)
