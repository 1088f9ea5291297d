"""Beyond the paper: a small GPT of characters with AdamW, trained on Æsop's Fables.

`spotlights run aesop-gpt`; then `spotlights passages RUN --prompt … --toward e` for what speaks for the next character.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotlights import datasets
from spotlights.datasets import TextDataset
from spotlights.experiments.language import paper
from spotlights.experiments.language.gpt import GPTSettings
from spotlights.experiments.language.gpt_analyses import analyse_gpt
from spotlights.experiments.language.gpt_training import train_gpt
from spotlights.experiments.language.results import LanguageResults
from spotlights.experiments.language.text import shortened
from spotlights.experiments.language.training import TrainedLanguage


@dataclass(frozen=True, kw_only=True)
class Settings(GPTSettings):
    """Seven epochs: each token that is read costs 10 kB of memory."""

    steps: int = 800
    lr: float = 3e-3
    clip: float = 1.0
    batch: int = 16


PRESETS = {
    "laptop": Settings(),
    "quick": Settings(tokens=6000, steps=30, width=24, heads=2, context=20, lr=1e-2, batch=8, warm_up=5),
}


def load(settings: Settings) -> TextDataset:
    return shortened(datasets.load("aesop"), settings)


def run(settings: Settings, *, seed: int, path: Path) -> TrainedLanguage:
    return train_gpt(settings, data=load(settings), seed=seed, path=path)


def analyse(trained: TrainedLanguage, settings: Settings, *, pictures: bool) -> LanguageResults:
    return analyse_gpt(trained, settings, paper.AESOP, pictures=pictures)
