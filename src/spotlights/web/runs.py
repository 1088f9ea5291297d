"""From the folder of a demo or of an experiment to what an explorer is about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy import ndarray
from rich.console import Console
from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import MemoryFormatError, SettingError
from spotlights.experiments import demo, mnist_cnn, running
from spotlights.experiments.images import Prepared, prepare
from spotlights.experiments.language.settings import TextSettings
from spotlights.experiments.settings import ImageSettings
from spotlights.experiments.training import recorded_network, restored
from spotlights.web.subject import Drawing, Inputs, Subject
from spotlights.web.texts import of_language_run


def subject_of(path: str | Path) -> Subject:
    """Opens a run's folder, or the memory inside one."""
    path = Path(path)
    for folder in (path, path.absolute().parent):
        if (folder / demo.MARK).is_file():
            return _of_demo(folder)
        if (folder / running.RUN).is_file() or (folder / running.STARTED).is_file():
            return _of_experiment(folder)
    if (path / "memory.json").is_file():
        raise SettingError(
            f"{path} holds a memory, but not the network and the inputs to ask about. "
            "Give them in Python: sl.explore(sl.open(path), model, inputs)."
        )
    raise MemoryFormatError(f"There is no run and no memory at {path}. Make one: spotlights demo.")


def _of_demo(folder: Path) -> Subject:
    mark = json.loads((folder / demo.MARK).read_text(encoding="utf-8"))
    images = demo.load_images(mark["data"], Console(stderr=True))
    dataset = images.dataset
    train, test = dataset.train, dataset.test
    mean, deviation = train.images.float().mean(), train.images.float().std()

    def example_input(example: int) -> Tensor:
        return images.train[train.positions(torch.tensor([example]))[0]]

    return Subject(
        title=f"{folder.name}: a network for {dataset.name}",
        reopen=lambda: sl.open(folder / demo.MEMORY),
        network=recorded_network,
        inputs=Inputs(
            images.test,
            lambda position: test.images[position],
            test.ids.tolist(),
            test.labels.tolist(),
            [dataset.name] * len(test),
        ),
        code=f'from spotlights.experiments import demo\n\nmemory, model, images = demo.reopen("{folder}")\n'
        "inputs = images.test",
        class_names=lambda source: list(dataset.classes),
        show_example=images.of_training,
        example_input=example_input,
        example_code="images.train[images.dataset.train.positions(torch.tensor([example]))[0]]",
        drawing=Drawing(
            *test.images.shape[1:], prepare=lambda pixels: (torch.from_numpy(pixels).float() - mean) / deviation
        ),
    )


def _of_experiment(folder: Path) -> Subject:
    name, settings = running.started(folder)
    if isinstance(settings, TextSettings):
        return of_language_run(folder)
    if not isinstance(settings, ImageSettings):
        raise SettingError(
            f"{folder} is a run of {name}, which the explorer cannot open by itself yet. "
            "Give it the network and the inputs in Python: sl.explore(memory, model, inputs)."
        )
    sources = ["mnist", "fashion-mnist"] if name in ("mnist-joint", "mnist-continual") else ["mnist"]
    data = {source: prepare(source, settings.train_images, settings.test_images) for source in sources}
    tests = [prepared.test for prepared in data.values()]
    pixels = torch.cat([test.pixels for test in tests])
    owner = _Examples(data)
    seen_first = data[sources[0]]
    return Subject(
        title=f"{folder.name}: a network for {' and '.join(sources)}",
        reopen=lambda: sl.open(folder / running.MEMORY),
        network=_network(settings),
        inputs=Inputs(
            torch.cat([test.inputs for test in tests]),
            lambda position: pixels[position],
            torch.cat([test.ids for test in tests]).tolist(),
            torch.cat([test.labels for test in tests]).tolist(),
            [test.source for test in tests for _ in range(len(test))],
        ),
        code=f'from spotlights.web.runs import subject_of\n\nsubject = subject_of("{folder}")\n'
        "memory = subject.reopen()\nmodel, inputs = subject.network(memory), subject.inputs.tensors",
        class_names=lambda source: list(data[source if source in data else sources[0]].classes),
        show_example=owner.pixels,
        example_input=owner.input,
        example_code="subject.example_input(example)",
        drawing=Drawing(
            *pixels.shape[1:],
            prepare=lambda drawn: (
                ((torch.from_numpy(drawn).double() - seen_first.mean) / seen_first.std).float().flatten()
            ),
        ),
    )


def _network(settings: ImageSettings) -> Callable[[sl.Memory], nn.Module]:
    if isinstance(settings, mnist_cnn.Settings):
        return lambda memory: restored(memory, mnist_cnn.ConvolutionalNetwork(settings))
    return recorded_network


class _Examples:
    """The training examples of several data sets, by their ids."""

    def __init__(self, data: Mapping[str, Prepared]) -> None:
        self._places = {
            example: (prepared.train, place)
            for prepared in data.values()
            for place, example in enumerate(prepared.train.ids.tolist())
        }

    def _find(self, example: int) -> tuple[Any, int]:
        if example not in self._places:
            raise sl.UnknownNameError(f"No training example {example} in this run.")
        return self._places[example]

    def pixels(self, example: int) -> ndarray:
        images, place = self._find(example)
        return images.pixels[place].numpy()

    def input(self, example: int) -> Tensor:
        images, place = self._find(example)
        return images.inputs[place]
