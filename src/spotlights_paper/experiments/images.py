"""The paper's images: which images are for training, which are for testing, and how they are normalised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from spotlights.errors import UnknownNameError
from spotlights_paper.datasets import Dataset, Split, load

HELD_OUT = 10_000
"""Images that the paper sets aside first: the last ones of a permutation. (With the first ones instead, Table 1's
seed-independent cell, 75.1 in the input layer, comes out as 76.1.)"""
PERMUTATION_SEED = 0x1234
VALIDATION_SHARE = 0.2
"""The share of the others that the paper sets aside, drawn for each image."""
VALIDATION_SEED = 0xC1CAFA52


@dataclass(frozen=True, eq=False)
class Images:
    """Examples of one data set, ready for the network."""

    source: str
    classes: tuple[str, ...]
    pixels: UInt8[Tensor, "n height width"]
    """For display."""
    inputs: Float[Tensor, "n inputs"]
    """For the network: one row each, with mean 0 and standard deviation 1 over the training images."""
    labels: Int64[Tensor, "n"]
    ids: Int64[Tensor, "n"]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Images:
        """The first `count` images; None for all."""
        return replace(
            self,
            pixels=self.pixels[:count],
            inputs=self.inputs[:count],
            labels=self.labels[:count],
            ids=self.ids[:count],
        )

    def position(self, example: int) -> int:
        """Where the example with this id is."""
        places = (self.ids == example).nonzero()
        if not len(places):
            low, high = int(self.ids.min()), int(self.ids.max())
            raise UnknownNameError(f"No example {example} among these. Their ids lie in {low} to {high}.")
        return int(places[0])

    def pixels_of(self, example: int) -> np.ndarray:
        """The picture of the example with this id."""
        return self.pixels[self.position(example)].numpy()

    def category(self, label: int) -> str:
        """Source and class in one word: two data sets may use the same labels for different things."""
        return f"{self.source} {self.classes[label]}"


@dataclass(frozen=True, eq=False)
class Prepared:
    """One data set: what to train on and what to ask about."""

    train: Images
    test: Images
    mean: float
    std: float
    """Of the pixels of the training images: inputs are (pixels − mean) / std."""


def training_positions(n: int) -> Int64[Tensor, "kept"]:
    """Which of a data set's n training images the paper trains on: 40,053 of 60,000."""
    remaining = np.random.RandomState(PERMUTATION_SEED).permutation(n)[: n - HELD_OUT]
    kept = np.random.RandomState(VALIDATION_SEED).rand(len(remaining)) > VALIDATION_SHARE
    return torch.from_numpy(remaining[kept])


def prepare(source: str, train: int | None = None, test: int | None = None) -> Prepared:
    """Loads a data set as the paper splits and normalises it.

    Args:
        source: "mnist" or "fashion-mnist".
        train: only that many of its 40,053 training images.
        test: only that many of its 10,000 test images.
    """
    dataset = load(source)
    return normalised(dataset, training_positions(len(dataset.train))[:train], test)


def normalised(dataset: Dataset, train: Int64[Tensor, "kept"] | None = None, test: int | None = None) -> Prepared:
    """Some of a data set's training images (all by default) and its first test images, normalised by the former."""
    pixels = dataset.train.images if train is None else dataset.train.images[train]
    # Sums of bytes in float64: exact, so the same on every machine.
    mean, std = pixels.double().mean(), pixels.double().std()

    def images(split: Split, rows: Int64[Tensor, "kept"] | slice) -> Images:
        shown = split.images[rows]
        inputs = ((shown.double() - mean) / std).float().flatten(1)
        return Images(dataset.name, dataset.classes, shown, inputs, split.labels[rows], split.ids[rows])

    chosen = slice(None) if train is None else train
    return Prepared(images(dataset.train, chosen), images(dataset.test, slice(test)), float(mean), float(std))
