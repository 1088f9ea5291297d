"""What the image experiments have in common. Each experiment adds its own on top."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How a network for images is trained and recorded, and how closely one looks afterwards."""

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
    """How keys and errors are kept: float32 is exact for a float32 network."""
    top: int = 500
    """How many slots of each class the figures show."""
    bins: int = 60
    """How many stretches the training time is divided into."""
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
    lost_images: int = 500
    """Forgotten test images whose logits are taken apart (continual training only)."""


QUICK = {
    "hidden": (32, 24),
    "lr": 0.03,
    "train_images": 600,
    "test_images": 200,
    "top": 20,
    "bins": 10,
    "timeline_images": 100,
    "lost_images": 50,
}
"""What makes an experiment small enough for a test: a few seconds, and still some learning."""

VANILLA = {"momentum": 0.0, "clip": None}
"""The optimizer of the paper's text."""
