"""Beyond the paper: a small convolutional network with Adam on MNIST.

`spotlights run mnist-cnn`. Every layer is recorded, patches and all; the last two are asked about as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

import spotlights as sl
from spotlights.experiments.analyses.cases import Wanted
from spotlights.experiments.analyses.everything import ask_everything
from spotlights.experiments.images import prepare
from spotlights.experiments.results import Results
from spotlights.experiments.settings import ImageSettings
from spotlights.experiments.training import Trained, fit, without_replacement


@dataclass(frozen=True, kw_only=True)
class Settings(ImageSettings):
    """Few positions and many channels: a convolution keeps a patch for each position."""

    steps: int = 2500
    """Four epochs."""
    channels: tuple[int, int] = (16, 32)
    """Of the two convolutions. Both take every second position, so there are 14 × 14 and 7 × 7."""
    kernels: tuple[int, int] = (5, 3)
    """Their sizes."""
    hidden: int = 128
    """Units of the linear layer between them and the classes."""
    dropout: float = 0.25
    """Of what the convolutions found, in training."""
    lr: float = 2e-3
    """Of Adam; it falls to zero along half a cosine."""
    batch: int = 64
    dtype: str = "float16"
    """Half the size of float32."""
    voting_images: int | None = 2000
    """A row of its linear layer has twice as many numbers as in the paper's network."""


PRESETS = {
    "laptop": Settings(),
    "quick": Settings(
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
}

ASKED = ["hidden", "classes"]
"""Its last two layers: one row for each image, as in the paper's network."""
CASES = (Wanted("mnist", 6, right=True), Wanted("mnist", 9, right=False))
SIDE, CLASSES = 28, 10


class ConvolutionalNetwork(nn.Module):
    """Two convolutions and two linear layers. Images come as rows, as in the other experiments."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        (first, second), (large, small) = settings.channels, settings.kernels
        self.strokes = nn.Conv2d(1, first, large, stride=2, padding=large // 2)
        self.shapes = nn.Conv2d(first, second, small, stride=2, padding=small // 2)
        self.dropout = nn.Dropout(settings.dropout)
        self.hidden = nn.Linear(second * (SIDE // 4) ** 2, settings.hidden)
        self.classes = nn.Linear(settings.hidden, CLASSES)

    def forward(self, inputs: Float[Tensor, "batch pixels"]) -> Float[Tensor, "batch classes"]:
        images = inputs.unflatten(1, (1, SIDE, SIDE))
        found = self.shapes(self.strokes(images).relu()).relu()
        return self.classes(self.hidden(self.dropout(found.flatten(1))).relu())


def run(settings: Settings, *, seed: int, path: Path) -> Trained:
    mnist = prepare("mnist", settings.train_images, settings.test_images)
    torch.manual_seed(seed)
    model = ConvolutionalNetwork(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    batches = without_replacement([mnist.train], settings, seed)
    fit(model, optimizer, settings, batches=batches, path=path, schedule=schedule)
    return Trained(sl.open(path), model, {"mnist": mnist}, ASKED)


def analyse(trained: Trained, settings: Settings, *, pictures: bool) -> Results:
    return ask_everything(trained, settings, CASES if pictures else ())
