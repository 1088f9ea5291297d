"""The image experiments: the paper's three, on one network with ten outputs, and a convolutional network.

- `spotlights run mnist-single`: MNIST alone (section 5.2; `--preset table1` for Table 1).
- `spotlights run mnist-joint`: MNIST and Fashion-MNIST mixed (section 5.3).
- `spotlights run mnist-continual`: MNIST, then Fashion-MNIST (section 5.4), and the masks that the paper proposes but
  does not try; `--preset reversed` for the other order.
- `spotlights run mnist-cnn`: a small convolutional network with Adam on MNIST (not in the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from spotlights_paper.experiments.analyses.cases import WantedImage
from spotlights_paper.experiments.analyses.glances import (
    class_of_the_other_task_on_top,
    no_other_task_on_top,
    other_task_has_the_largest_total,
    vote_is_the_class_everywhere,
    vote_of_the_last_layer_disagrees,
)
from spotlights_paper.experiments.analyses.results import ImageResults, ask_everything
from spotlights_paper.experiments.images import Prepared, prepare
from spotlights_paper.experiments.registry import Experiment, ImageRun
from spotlights_paper.experiments.training import (
    ImageBatch,
    ImageSettings,
    PaperSettings,
    Trained,
    fit,
    paper_network,
    train_on_images,
    without_replacement,
)


@dataclass(frozen=True, kw_only=True)
class CNNSettings(ImageSettings):
    """Few positions and many channels: a convolution keeps a patch for each position."""

    steps: int = 2500
    """Four epochs."""
    channels: tuple[int, int] = (16, 32)
    """Of the two convolutions. Both take every second position, so there are 14 × 14 and 7 × 7."""
    hidden: int = 128
    """Units of the linear layer between them and the classes."""
    lr: float = 2e-3
    """Of Adam; it falls to zero along half a cosine."""
    batch: int = 64
    dtype: str = "float16"
    """Half the size of float32."""
    voting_images: int | None = 2000
    """Fewer than all, because a row of its linear layer has twice as many numbers as in the paper's network."""


ASKED = ["hidden", "classes"]
"""Its last two layers: one row for each image, as in the paper's network."""
SIDE, CLASSES = 28, 10


class ConvolutionalNetwork(nn.Module):
    """Two convolutions and two linear layers. Images come as rows, as in the other experiments."""

    def __init__(self, settings: CNNSettings) -> None:
        super().__init__()
        first, second = settings.channels
        self.strokes = nn.Conv2d(1, first, 5, stride=2, padding=2)
        self.shapes = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(second * (SIDE // 4) ** 2, settings.hidden)
        self.classes = nn.Linear(settings.hidden, CLASSES)

    def forward(self, inputs: Float[Tensor, "batch pixels"]) -> Float[Tensor, "batch classes"]:
        images = inputs.unflatten(1, (1, SIDE, SIDE))
        maps = self.shapes(self.strokes(images).relu()).relu()
        return self.classes(self.hidden(self.dropout(maps.flatten(1))).relu())


def train_cnn(settings: CNNSettings, *, data: Mapping[str, Prepared], seed: int, path: Path) -> Trained:
    """Trains the network on the images and records it."""
    torch.manual_seed(seed)
    model = ConvolutionalNetwork(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    batches = without_replacement([prepared.train for prepared in data.values()], settings, seed)
    return train_on_images(
        model, optimizer, settings, data=data, batches=batches, path=path, schedules=[schedule], layers=ASKED
    )


QUICK = PaperSettings(
    steps=80,
    hidden=(32, 24),
    lr=0.03,
    train_images=600,
    test_images=200,
    top=20,
    bins=10,
    timeline_images=100,
    lost_images=50,
)
"""Small enough for a test: a few seconds, and still some learning."""

CONTINUAL = PaperSettings(steps=6000, switch=3000)
"""3,000 steps of each data set; the optimizer keeps its state."""


def _vanilla(settings: PaperSettings) -> PaperSettings:
    """The optimizer of the paper's text."""
    return replace(settings, momentum=0.0, clip=None)


def batches(settings: PaperSettings, data: Mapping[str, Prepared], seed: int) -> Iterator[ImageBatch]:
    """The batches of a run: all data sets mixed, or one after the other."""
    images = [prepared.train for prepared in data.values()]
    if settings.switch is None:
        return without_replacement(images, settings, seed)
    first, second = (without_replacement([task], settings, seed) for task in images)
    return chain(islice(first, settings.switch), second)


def train_mlp(settings: PaperSettings, *, data: Mapping[str, Prepared], seed: int, path: Path) -> Trained:
    """Trains the paper's network on the run's batches and records it."""
    model, optimizer = paper_network(settings, data, seed)
    return train_on_images(model, optimizer, settings, data=data, batches=batches(settings, data, seed), path=path)


def trained_without(
    settings: PaperSettings, data: Mapping[str, Prepared], left_out: Sequence[int], *, seed: int
) -> nn.Module:
    """A run's own training, without recording, on its own batches without the examples that are left out."""
    model, optimizer = paper_network(settings, data, seed)
    gone = torch.tensor(left_out, dtype=torch.int64)

    def rest(batch: ImageBatch) -> ImageBatch:
        stays = ~torch.isin(batch.ids, gone)
        return ImageBatch(batch.inputs[stays], batch.labels[stays], batch.ids[stays], {})

    def loss(batch: ImageBatch) -> Float[Tensor, ""]:
        # The mean over those that stay would give each of them more weight than it had.
        return F.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / settings.batch

    rests = map(rest, islice(batches(settings, data, seed), settings.steps))
    fit(None, [optimizer], settings, batches=(batch for batch in rests if len(batch.ids)), loss=loss)
    return model


def _experiment(
    sources: Sequence[str],
    presets: dict[str, Any],
    cases: Sequence[WantedImage],
    train: Callable[..., Trained] = train_mlp,
) -> Experiment:
    """An experiment on some data sets, with the test images that are looked at closely."""

    def load(settings: ImageSettings) -> dict[str, Prepared]:
        order = reversed(sources) if getattr(settings, "reversed_order", False) else sources
        return {source: prepare(source, settings.train_images, settings.test_images) for source in order}

    return Experiment(presets, load, train, partial(ask_everything, wanted=cases), ImageRun, ImageResults)


EXPERIMENTS = {
    "mnist-single": _experiment(
        ["mnist"],
        {
            "paper": PaperSettings(steps=3000),
            "table1": PaperSettings(steps=5000),  # as the authors' code trains where Table 1 is made
            "text": _vanilla(PaperSettings(steps=3000)),
            "quick": QUICK,
        },
        (
            WantedImage("mnist", 6, figure="3a", number=5938),
            WantedImage("mnist", 3, right=True, figure="10a", also=(vote_is_the_class_everywhere,)),
        ),
    ),
    "mnist-joint": _experiment(
        ["mnist", "fashion-mnist"],
        {
            "paper": PaperSettings(steps=5000),
            "text": _vanilla(PaperSettings(steps=5000)),
            "quick": replace(QUICK, steps=120),
        },
        (
            WantedImage("fashion-mnist", 9, figure="3b", number=981),
            WantedImage("fashion-mnist", 3, right=True, figure="10b", also=(no_other_task_on_top,)),
            WantedImage(
                "fashion-mnist",
                5,
                right=True,
                figure="10c",
                also=(class_of_the_other_task_on_top, vote_of_the_last_layer_disagrees),
            ),
        ),
    ),
    "mnist-continual": _experiment(
        ["mnist", "fashion-mnist"],
        {
            "paper": CONTINUAL,
            "long": replace(CONTINUAL, steps=10_000),
            "reversed": replace(CONTINUAL, reversed_order=True),
            "text": _vanilla(CONTINUAL),
            "quick": replace(QUICK, steps=160, switch=80),
        },
        (
            WantedImage("mnist", 1, says=3, figure="10d", also=(other_task_has_the_largest_total,)),
            WantedImage("fashion-mnist", 3, right=True, figure="10e"),
            WantedImage("mnist", 7, right=True, figure="10f"),
        ),
    ),
    "mnist-cnn": _experiment(
        ["mnist"],
        {
            "laptop": CNNSettings(),
            "quick": CNNSettings(
                steps=30,
                channels=(4, 6),
                hidden=16,
                lr=1e-2,
                train_images=600,
                test_images=200,
                top=20,
                bins=10,
                timeline_images=100,
            ),
        },
        (WantedImage("mnist", 6, right=True), WantedImage("mnist", 9, right=False)),
        train_cnn,
    ),
}
