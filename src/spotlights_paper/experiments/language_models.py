"""The language models: the paper's LSTM on characters or on words, and beyond the paper a GPT.

- `spotlights run aesop-char`: characters of Æsop's Fables (the first three queries of the paper's appendix C).
- `spotlights run wikitext2-word`: words of WikiText-2 (the last three queries).
- `spotlights run char-lm --text book.txt` and `word-lm`: the same networks on a text of your own.
- `spotlights run aesop-gpt`: a small GPT of characters with AdamW; then `spotlights passages RUN --prompt …`
  for what speaks for the next character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from spotlights_paper import datasets
from spotlights_paper.datasets import TextDataset
from spotlights_paper.experiments import paper
from spotlights_paper.experiments.language.asking import LanguageResults, analyse
from spotlights_paper.experiments.language.gpt import GPTSettings, train_gpt
from spotlights_paper.experiments.language.lstm import LanguageSettings, train_lstm
from spotlights_paper.experiments.language.trained import TrainedLanguage, own_text, shortened
from spotlights_paper.experiments.registry import Experiment, LanguageRun

Presets = dict[str, LanguageSettings]

PAPER_CHARACTERS = LanguageSettings(
    steps=5000,
    embedding=64,
    projection=1024,
    hidden=1024,
    weight_decay=1e-7,
    state_drop=0.01,
    lr=1e-3,
    clip=1.0,
    batch=64,
    unroll=100,
    checkpoint_every=250,
)
"""As the authors' code trains: 263 epochs of Æsop's Fables, hours on a CPU."""

CHARACTERS: Presets = {
    # A quarter of an hour at most on two cores, whatever the text; 50 epochs of Æsop's Fables.
    "laptop": replace(PAPER_CHARACTERS, steps=1900, projection=256, hidden=256, lr=2e-3, falls_from=0.5, batch=32),
    "paper": PAPER_CHARACTERS,
    # The same in a third of the time; docs/language_models.md says what rounding changes.
    "bfloat16": replace(PAPER_CHARACTERS, bfloat16="states", checkpoint_every=100),
    # Every visit with its errors, for exact contributions.
    "sgd": replace(
        PAPER_CHARACTERS,
        steps=380,
        projection=None,
        hidden=128,
        optimizer="sgd",
        lr=0.5,
        batch=32,
        layers=None,
        errors=True,
        fold=False,
    ),
}

PAPER_WORDS = LanguageSettings(
    steps=10_000,
    embedding=200,
    hidden=200,
    weight_decay=1e-7,
    state_drop=0.01,
    dropout=0.5,
    lr=3e-3,
    clip=0.3,
    batch=128,
    unroll=100,
    checkpoint_every=250,
)
"""As the authors' code trains: 61 epochs of WikiText-2, a day on a CPU."""

WORDS: Presets = {
    # A quarter of an hour at most on two cores; 5 epochs of WikiText-2.
    "laptop": replace(
        PAPER_WORDS,
        steps=9330,
        lr=2e-3,
        falls_from=0.5,
        dropout=0.2,
        output_dropout=0.2,
        cutoffs=(1000, 6000),
        sparse=True,
        batch=32,
        unroll=35,
    ),
    "paper": PAPER_WORDS,
    "bfloat16": replace(PAPER_WORDS, bfloat16="softmax", checkpoint_every=100),
    # Every visit with its errors, for exact contributions.
    "sgd": replace(
        PAPER_WORDS,
        tokens=300_000,
        steps=540,
        optimizer="sgd",
        lr=0.5,
        dropout=0.2,
        cutoffs=(1000, 6000),
        batch=32,
        unroll=35,
        errors=True,
        fold=False,
    ),
}


def _with_quick(presets: Presets, tokens: int | None) -> Presets:
    """The presets and one small enough for a test: a few seconds, and still some learning."""
    quick = replace(
        presets["paper"],
        tokens=tokens,
        steps=40,
        embedding=16,
        projection=None,
        hidden=24,
        lr=1e-2,
        batch=8,
        unroll=20,
        context=40,
        asked=40,
    )
    return {**presets, "quick": quick}


GPT_CHARACTERS = {
    # Seven epochs of Æsop's Fables: each token that is read costs 10 kB of memory.
    "laptop": GPTSettings(steps=800, lr=3e-3, clip=1.0, batch=16),
    "quick": GPTSettings(tokens=6000, steps=30, width=24, heads=2, context=20, lr=1e-2, clip=1.0, batch=8, warm_up=5),
}


def _known(name: str) -> Callable[[Any], TextDataset]:
    return lambda settings: shortened(datasets.load_text(name), settings)


def _experiment(
    presets: dict[str, Any],
    load: Callable[[Any], TextDataset],
    queries: Sequence[paper.PaperQuery] = (),
    train: Callable[..., TrainedLanguage] = train_lstm,
) -> Experiment:
    return Experiment(presets, load, train, partial(analyse, queries=queries), LanguageRun, LanguageResults)


EXPERIMENTS = {
    "aesop-char": _experiment(_with_quick(CHARACTERS, 6000), _known("aesop"), paper.AESOP),
    "aesop-gpt": _experiment(GPT_CHARACTERS, _known("aesop"), paper.AESOP, train_gpt),
    "wikitext2-word": _experiment(_with_quick(WORDS, 6000), _known("wikitext-2"), paper.WIKITEXT_2),
    "char-lm": _experiment(_with_quick(CHARACTERS, None), partial(own_text, unit="character")),
    "word-lm": _experiment(_with_quick(WORDS, None), partial(own_text, unit="word")),
}
