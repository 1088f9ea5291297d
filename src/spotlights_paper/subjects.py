"""The subjects of the demo and of the paper's runs: their memories, networks and data. Run files are read as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import spotlights as sl
from spotlights_paper.datasets import Vocabulary
from spotlights_paper.experiments import demo, running
from spotlights_paper.experiments.images import Images, Prepared
from spotlights_paper.experiments.language.asking import KERNEL, before, open_run
from spotlights_paper.experiments.language.gpt import GPTSettings
from spotlights_paper.experiments.language.trained import TextSettings
from spotlights_paper.experiments.mnist import CNNSettings, ConvolutionalNetwork, trained_without
from spotlights_paper.experiments.registry import EXPERIMENTS, experiment_named
from spotlights_paper.experiments.training import recorded_network, restored

WINDOWS = 120
"""Pieces of the test text, spread evenly over it."""
CONTEXT = {"character": 80, "word": 25}
"""The tokens of each piece."""


def subject_of(path: str | Path) -> sl.Subject | None:
    """The subject of a run's folder, or of the memory inside one; None if this is not such a run."""
    path = Path(path)
    for folder in (path, path.absolute().parent):
        for file in (demo.MARK, running.RUN, running.STARTED):
            name = _experiment(folder / file)
            if name == "demo":
                return _of_demo(folder)
            if name in EXPERIMENTS:
                return _of_experiment(folder)
    return None


def _experiment(file: Path) -> Any:
    """The experiment that a run's file names; None if it is not such a file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["experiment"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_demo(folder: Path) -> sl.Subject:
    mark = json.loads((folder / demo.MARK).read_text(encoding="utf-8"))
    images = demo.load_images(mark["data"], Console(stderr=True))
    return _of_images(folder, demo.MEMORY, recorded_network, {images.train.source: images})


def _of_experiment(folder: Path) -> sl.Subject:
    name, settings = running.started(folder)
    if isinstance(settings, TextSettings):
        return _of_language_run(folder)
    data = experiment_named(name).load(settings)
    if isinstance(settings, CNNSettings):
        return _of_images(folder, running.MEMORY, lambda memory: restored(memory, ConvolutionalNetwork(settings)), data)

    def retrain(left_out: Sequence[int]) -> nn.Module:
        return trained_without(settings, data, left_out, seed=running.load_run(folder).seed)

    return _of_images(folder, running.MEMORY, recorded_network, data, retrain)


def _of_images(
    folder: Path,
    memory: str,
    model: Callable[[sl.Memory], nn.Module],
    data: Mapping[str, Prepared],
    retrain: Callable[[Sequence[int]], nn.Module] | None = None,
) -> sl.Subject:
    """A network for the images of some data sets."""
    tests = [prepared.test for prepared in data.values()]
    first, pixels = next(iter(data.values())), torch.cat([test.pixels for test in tests])

    def owner(example: int) -> Images:
        """The training images that have this example; the first ones say that there is none."""
        return next((own.train for own in data.values() if (own.train.ids == example).any()), first.train)

    return sl.Subject(
        folder / memory,
        model=model,
        inputs=torch.cat([test.inputs for test in tests]),
        labels=torch.cat([test.labels for test in tests]),
        ids=torch.cat([test.ids for test in tests]),
        sources=[test.source for test in tests for _ in range(len(test))],
        classes={source: prepared.test.classes for source, prepared in data.items()},
        show=lambda example: owner(example).pixels_of(example),
        show_input=lambda position: pixels[position],
        example_input=lambda example: owner(example).inputs[owner(example).position(example)],
        retrain=retrain,
        drawing=sl.Drawing(
            *pixels.shape[1:],
            prepare=lambda drawn: ((torch.from_numpy(drawn).double() - first.mean) / first.std).float().flatten(),
        ),
        title=f"{folder.name}: a network for {' and '.join(data)}",
    )


# -- language models --------------------------------------------------------------------------


def _of_language_run(folder: Path) -> sl.Subject:
    """A finished run of a language model: prompts, windows of the test text, passages."""
    trained, settings = open_run(folder)
    data = trained.data
    unit = data.vocabulary.unit
    context = min(CONTEXT[unit], settings.context)  # of more, a GPT would not read the beginning
    length = min(context, len(data.test.tokens))
    last = len(data.test.tokens) - length
    starts = sorted({last * place // max(1, WINDOWS - 1) for place in range(WINDOWS)})
    space = "" if unit == "character" else " "
    return sl.Subject(
        folder / running.MEMORY,
        model=trained.model,
        inputs=torch.stack([data.test.numbers[start : start + length] for start in starts]),
        ids=starts,
        show_input=lambda place: space.join(data.test.tokens[starts[place] : starts[place] + length]),
        example_input=lambda position: data.vocabulary.encode(before(data, "train", position, context)),
        tokenizer=_Tokens(data.vocabulary, settings.context if isinstance(settings, GPTSettings) else None),
        text=data.train.tokens,
        layer=trained.layer,
        # Sums of keys favour positions with large ones; where contributions can be asked for, the plain product stays.
        kernel=KERNEL if trained.memory.info.as_dict()["folded"] else "dot",
        title=f"{folder.name}: a network that reads {data.name}",
    )


class _Tokens:
    """A vocabulary as a tokenizer; a decoded word ends with a space. Of a long text the end is read."""

    def __init__(self, vocabulary: Vocabulary, longest: int | None) -> None:
        self._vocabulary = vocabulary
        self._longest = longest
        self._behind = "" if vocabulary.unit == "character" else " "

    def encode(self, text: str) -> list[int]:
        tokens = self._vocabulary.encode(self._vocabulary.split(text)).tolist()
        return tokens if self._longest is None else tokens[-self._longest :]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(token + self._behind for token in self._vocabulary.decode(torch.tensor(list(tokens))))
