"""What the image experiments share: settings, the network, and the training loop with recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import spotlights as sl
from spotlights.errors import SettingError
from spotlights_paper.experiments.images import Images, Prepared
from spotlights_paper.experiments.progress import track


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How an image classifier is trained and recorded, and how many test images are asked about afterwards."""

    steps: int
    """Optimizer steps in all."""
    lr: float
    """Of the first step."""
    clip: float | None = None
    """The norm that gradients are clipped to; None for no clipping."""
    batch: int
    """Examples in a step, drawn without replacement until all have been seen."""
    train_images: int | None = None
    """Only that many training images of each data set; None for all 40,053."""
    test_images: int | None = None
    """Only that many test images of each data set; None for all 10,000."""
    dtype: str = "float32"
    """How keys and errors are stored: float32 is exact for a float32 network."""
    top: int = 500
    """How many slots of each class the figures show."""
    bins: int = 60
    """How many ranges the training time is divided into."""
    voting_images: int | None = None
    """Test images of each data set that every slot is compared with, for the votes of classes; None for all."""
    timeline_images: int = 1000
    """Test images of each data set over which attention over training time is averaged."""


@dataclass(frozen=True, kw_only=True)
class PaperSettings(ImageSettings):
    """The paper's network and optimizer."""

    hidden: tuple[int, ...] = (800, 800)
    """Sizes of the hidden layers; ReLU between them, biases everywhere, PyTorch's own initialisation."""
    lr: float = 3e-3
    """Of plain SGD, constant."""
    momentum: float = 0.9
    """The text says "vanilla SGD"; the authors' code has momentum, which its accuracies need."""
    clip: float | None = 1.0
    """As in the authors' code; None for the text's vanilla SGD."""
    batch: int = 128
    switch: int | None = None
    """The step at which the second data set takes over; None: all data sets are mixed."""
    reversed_order: bool = False
    """Fashion-MNIST comes first."""
    lost_images: int = 500
    """Forgotten test images whose logits are taken apart (continual training only)."""


class MLP(nn.Module):
    """Linear layers `layers.0`, `layers.1`, … with ReLU between them. Images are flattened."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in pairwise(sizes))

    def forward(self, inputs: Float[Tensor, "batch *features"]) -> Float[Tensor, "batch classes"]:
        hidden = inputs.flatten(start_dim=1)
        for layer in self.layers[:-1]:
            hidden = layer(hidden).relu()
        return self.layers[-1](hidden)


def mlp(sizes: Sequence[int]) -> MLP:
    """A network of these sizes, from inputs to classes: `mlp((784, 800, 800, 10))` is the paper's."""
    if len(sizes) < 2:
        raise SettingError(f"sizes={tuple(sizes)}: give at least the inputs and the classes, such as (784, 10).")
    return MLP(sizes)


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Some training examples, with their ids and other columns."""

    inputs: Float[Tensor, "batch inputs"]
    labels: Int64[Tensor, "batch"]
    ids: Int64[Tensor, "batch"]
    columns: Mapping[str, Any]
    """Such as `source` and `category` (source and class, "mnist 3")."""

    @property
    def recorded(self) -> dict[str, Any]:
        return {"example": self.ids, "label": self.labels, **self.columns}


@dataclass(frozen=True, eq=False)
class Trained:
    """A recorded run, ready for questions."""

    memory: sl.Memory
    model: nn.Module
    data: Mapping[str, Prepared]
    """By source, in the order in which they were trained on."""
    layers: list[str]
    """The layers that questions are about."""

    @property
    def sources(self) -> list[str]:
        return list(self.data)

    def facts(self) -> dict[str, Any]:
        """What an `ImageRun` says beyond what every run says."""
        return {
            "train_images": {source: len(prepared.train) for source, prepared in self.data.items()},
            "test_images": {source: len(prepared.test) for source, prepared in self.data.items()},
            "accuracy": self.accuracies(self.model),
        }

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """Of a network, on the test images of each source."""
        return {source: accuracy(model, prepared.test) for source, prepared in self.data.items()}

    def attend(self, inputs: Float[Tensor, "n inputs"]) -> sl.Spotlights:
        """The attention of the layers that are asked about."""
        return self.memory.attend(self.model, inputs, layers=self.layers)


def without_replacement(data: Sequence[Images], settings: ImageSettings, seed: int) -> Iterator[ImageBatch]:
    """Batches without end: every example once, in random order, then every example again."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels, ids = (
        torch.cat([getattr(images, name) for images in data]) for name in ("inputs", "labels", "ids")
    )
    columns = {
        "source": np.array([images.source for images in data for _ in range(len(images))]),
        "category": np.array([images.category(label) for images in data for label in images.labels.tolist()]),
    }
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < settings.batch:
            order = torch.cat([order, torch.randperm(len(labels), generator=generator)])
        rows, order = order[: settings.batch], order[settings.batch :]
        yield ImageBatch(
            inputs[rows],
            labels[rows],
            ids[rows],
            {name: values[rows.numpy()].tolist() for name, values in columns.items()},
        )


def train_on_images(
    model: nn.Module,
    optimizer: Optimizer,
    settings: ImageSettings,
    *,
    data: Mapping[str, Prepared],
    batches: Iterator[ImageBatch],
    path: Path,
    schedules: Sequence[LRScheduler] = (),
    layers: list[str] | None = None,
) -> Trained:
    """Trains any classifier with any optimizer and records it; `layers` are those to ask about, by default all."""
    recorder = sl.record(model, optimizer, path, dtype=settings.dtype, overwrite=True)

    def loss(batch: ImageBatch) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch.inputs), batch.labels)

    fit(recorder, [optimizer], settings, batches=batches, loss=loss, schedules=schedules)
    memory = sl.open(path)
    return Trained(memory, model.eval(), data, layers or list(memory.layers))


def paper_network(settings: PaperSettings, data: Mapping[str, Prepared], seed: int) -> tuple[nn.Module, Optimizer]:
    """The paper's network with fresh weights, and its optimizer."""
    torch.manual_seed(seed)
    first = next(iter(data.values()))
    model = mlp((first.train.inputs.shape[1], *settings.hidden, len(first.train.classes)))
    return model, torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)


def fit(
    recorder: sl.Recorder | None,
    optimizers: Sequence[Optimizer],
    settings: Any,
    *,
    batches: Iterator[Any],
    loss: Callable[[Any], Float[Tensor, ""]],
    schedules: Sequence[LRScheduler] = (),
    done: int = 0,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The training loop, with recording, of images and of texts; returns the loss of each step.

    Args:
        recorder: records the first optimizer, if at all; the others go along.
        optimizers: their parameters' gradients are clipped for the first one only.
        settings: how many steps, and the norm to clip to.
        batches: the batch of each step, with the columns to record (`batch.recorded`).
        loss: of a batch.
        schedules: of learning rates; they step with the optimizers.
        done: steps that an interrupted run has taken already; their batches are skipped.
        after: called after each step with the number of steps taken.
    """
    clipped = [parameter for group in optimizers[0].param_groups for parameter in group["params"]]
    losses = []
    with recorder or nullcontext():
        left = islice(batches, done, settings.steps)
        for step, batch in enumerate(track(left, settings.steps - done, "training"), start=done + 1):
            if recorder is not None:
                recorder.batch(**batch.recorded)
            value = loss(batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            value.backward()
            if settings.clip is not None:
                nn.utils.clip_grad_norm_(clipped, settings.clip)
            for stepped in (*optimizers, *schedules):
                stepped.step()
            losses.append(value.item())
            after(step)
    return losses


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
