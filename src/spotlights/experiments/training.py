"""Training with recording: the loop that the image experiments share, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.attention import Spotlights
from spotlights.experiments.images import Images, Prepared
from spotlights.experiments.network import mlp
from spotlights.experiments.progress import track
from spotlights.experiments.settings import ImageSettings, PaperSettings


@dataclass(frozen=True, eq=False)
class Batch:
    """Some training examples, and who they are."""

    inputs: Float[Tensor, "batch inputs"]
    labels: Int64[Tensor, "batch"]
    ids: Int64[Tensor, "batch"]
    sources: list[str]
    categories: list[str]
    """Source and class, such as "mnist 3"."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A recorded run, ready for questions."""

    memory: sl.Memory
    model: nn.Module
    data: Mapping[str, Prepared]
    """By source, in the order in which they were trained on."""
    layers: list[str]
    """Those that are asked about."""

    @property
    def sources(self) -> list[str]:
        return list(self.data)

    def attend(self, inputs: Float[Tensor, "n inputs"]) -> Spotlights:
        """The attention of the layers that are asked about."""
        return self.memory.attend(self.model, inputs, layers=self.layers)


def without_replacement(data: Sequence[Images], settings: ImageSettings, seed: int) -> Iterator[Batch]:
    """Batches without end: every example once, in random order, then every example again."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.cat([images.inputs for images in data])
    labels = torch.cat([images.labels for images in data])
    ids = torch.cat([images.ids for images in data])
    sources = [images.source for images in data for _ in range(len(images))]
    categories = [images.category(label) for images in data for label in images.labels.tolist()]
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < settings.batch:
            order = torch.cat([order, torch.randperm(len(labels), generator=generator)])
        chosen, order = order[: settings.batch], order[settings.batch :]
        places = chosen.tolist()
        yield Batch(
            inputs[chosen],
            labels[chosen],
            ids[chosen],
            [sources[place] for place in places],
            [categories[place] for place in places],
        )


def train(
    settings: PaperSettings, *, data: Mapping[str, Prepared], batches: Iterator[Batch], seed: int, path: Path
) -> Trained:
    """Trains the paper's network on the batches and records it."""
    torch.manual_seed(seed)
    first = next(iter(data.values()))
    model = mlp((first.train.inputs.shape[1], *settings.hidden, len(first.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    fit(model, optimizer, settings, batches=batches, path=path)
    memory = sl.open(path)
    return Trained(memory, model, data, list(memory.layers))


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: ImageSettings,
    *,
    batches: Iterator[Batch],
    path: Path,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """The loop itself: any network, any optimizer, recorded."""
    with sl.record(model, optimizer, path, dtype=settings.dtype, overwrite=True) as recorder:
        for batch in track(islice(batches, settings.steps), settings.steps, "training"):
            recorder.batch(example=batch.ids, label=batch.labels, source=batch.sources, category=batch.categories)
            loss = F.cross_entropy(model(batch.inputs), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            if settings.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
    model.eval()


def recorded_network(memory: sl.Memory) -> nn.Module:
    """The paper's network as a memory has it."""
    layers = list(memory.layers.values())
    return restored(memory, mlp([layers[0].in_features] + [layer.out_features for layer in layers]))


def restored(memory: sl.Memory, model: nn.Module) -> nn.Module:
    """A network with all its layers as a closed recording left them, or as of its last step."""
    final = memory.final_parameters()
    if final is None:
        return memory.primal(model).eval()
    with torch.no_grad():
        for layer, parameters in final.items():
            for name, value in parameters.items():
                parameter = model.get_submodule(layer).get_parameter(name)
                parameter.copy_(value.view_as(parameter))
    return model.eval()


@torch.no_grad()
def answers(model: nn.Module, images: Images) -> Int64[Tensor, "n"]:
    """The class that the model gives each image."""
    return model(images.inputs).argmax(dim=1)


def accuracy(model: nn.Module, images: Images) -> float:
    """The share of images whose class the model gives."""
    return float((answers(model, images) == images.labels).double().mean())


def facts(trained: Trained) -> dict[str, Any]:
    """What an `ImageRun` says beyond what every run says."""
    return {
        "train_images": {source: len(prepared.train) for source, prepared in trained.data.items()},
        "test_images": {source: len(prepared.test) for source, prepared in trained.data.items()},
        "accuracy": {source: accuracy(trained.model, prepared.test) for source, prepared in trained.data.items()},
    }
