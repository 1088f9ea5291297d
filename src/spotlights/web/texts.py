"""From the folder of a language run to what an explorer is about: prompts, windows of the test text, passages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import spotlights as sl
from spotlights.attention.sentences import AROUND, sentence_at
from spotlights.datasets import TextDataset, Vocabulary
from spotlights.errors import UnknownNameError
from spotlights.experiments.language.asking import KERNEL, before
from spotlights.experiments.language.gpt import GPTSettings
from spotlights.experiments.language.opening import open_run
from spotlights.experiments.running import MEMORY
from spotlights.web.subject import Inputs, Subject
from spotlights.web.views import Passage

WINDOWS = 120
"""Pieces of the test text, spread evenly over it."""
CONTEXT = {"character": 80, "word": 25}
"""The tokens of each."""


def of_language_run(folder: Path) -> Subject:
    """A finished language run."""
    trained, settings = open_run(folder)
    data, model = trained.data, trained.model
    unit = data.vocabulary.unit
    context = min(CONTEXT[unit], settings.context)  # of more, a GPT would not read the beginning
    length = min(context, len(data.test.tokens))
    last = len(data.test.tokens) - length
    starts = sorted({last * place // max(1, WINDOWS - 1) for place in range(WINDOWS)})
    return Subject(
        title=f"{folder.name}: a network that reads {data.name}",
        reopen=lambda: sl.open(folder / MEMORY),
        network=lambda memory: model,
        inputs=Inputs(
            torch.stack([data.test.numbers[start : start + length] for start in starts]),
            lambda place: joined(data.test.tokens[starts[place] : starts[place] + length], unit),
            starts,
        ),
        code=f'from spotlights.web.runs import subject_of\n\nsubject = subject_of("{folder}")\n'
        "memory = subject.reopen()\nmodel, inputs = subject.network(memory), subject.inputs.tensors",
        show_example=lambda position: around(data, position),
        example_input=lambda position: data.vocabulary.encode(before(data, "train", position, context)),
        example_code="subject.example_input(example)",
        tokenizer=_Tokens(data.vocabulary, settings.context if isinstance(settings, GPTSettings) else None),
        # Sums of keys favour positions with large ones; where contributions can be asked for, the plain product stays.
        kernel=KERNEL if trained.memory.info.as_dict()["folded"] else "dot",
    )


class _Tokens:
    """A vocabulary as the explorer wants it; words bring the space behind them. Of a long text the end is read."""

    def __init__(self, vocabulary: Vocabulary, longest: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._longest = longest
        self._behind = "" if vocabulary.unit == "character" else " "

    def encode(self, text: str) -> list[int]:
        tokens = self._vocabulary.encode(self._vocabulary.split(text)).tolist()
        return tokens if self._longest is None else tokens[-self._longest :]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(token + self._behind for token in self._vocabulary.decode(torch.tensor(list(tokens))))


def joined(tokens: Sequence[str], unit: str) -> str:
    """Tokens as one reads them."""
    return ("" if unit == "character" else " ").join(tokens)


def around(data: TextDataset, position: int) -> Passage:
    """A token of the training text in its sentence."""
    text, unit = data.train.tokens, data.vocabulary.unit
    if not 0 <= position < len(text):
        raise UnknownNameError(f"The training text has no position {position}: it has 0 to {len(text) - 1}.")
    start, stop = sentence_at(text, position, AROUND[unit])
    space = "" if unit == "character" else " "
    parts = [joined(text[start:position], unit), text[position], joined(text[position + 1 : stop], unit)]
    first = len(parts[0]) + len(space) * bool(parts[0])
    return Passage(space.join(part for part in parts if part), first, first + len(text[position]))
