"""Image data sets as tensors, each example with an id that it keeps for ever.

The ids of a data set are one range: its training examples in their original order, then its test
examples. The ranges of different data sets never meet. In MNIST the id of a training example is
its position; elsewhere `split.positions(ids)` leads from ids to positions.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from spotlights.datasets import digits, idx
from spotlights.datasets.catalogue import CATALOGUE, ImageEntry
from spotlights.datasets.sources import find_files
from spotlights.errors import DatasetError, UnknownNameError

SplitName = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test examples of a data set."""

    images: UInt8[Tensor, "n height width"]
    """From 0 (background) to 255."""
    labels: Int64[Tensor, "n"]
    """Positions in the classes of the data set."""
    ids: Int64[Tensor, "n"]
    """Permanent example ids, consecutive."""

    def __len__(self) -> int:
        return len(self.labels)

    def positions(self, ids: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Where in this split the examples with these ids are."""
        first, last = int(self.ids[0]), int(self.ids[-1])
        outside = ids[(ids < first) | (ids > last)]
        if len(outside):
            raise UnknownNameError(f"No example {int(outside[0])} in this split. It has: {first} to {last}.")
        return ids - first


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: what to train on, what to ask about, and what the labels mean."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split


def load_images(name: str, split: str | None = None) -> Dataset | Split:
    """An image data set: all of it, or one split."""
    wanted = ["train", "test"] if split is None else [split]
    if name == digits.NAME:
        classes = digits.CLASSES
        splits = {each: Split(*digits.read(each)) for each in wanted}
    else:
        classes = CATALOGUE[name].classes
        splits = _read_splits(CATALOGUE[name], wanted)
    if split is not None:
        return splits[split]
    return Dataset(name=name, classes=classes, train=splits["train"], test=splits["test"])


def _read_splits(entry: ImageEntry, wanted: list[str]) -> dict[str, Split]:
    contents = find_files(entry, wanted)
    splits: dict[str, Split] = {}
    first_id = entry.first_id
    for split, (images_file, labels_file) in entry.files.items():
        if split in wanted:
            images = idx.read_images(contents[images_file.name], images_file.name)
            labels = idx.read_labels(contents[labels_file.name], labels_file.name).long()
            if len(images) != len(labels) or int(labels.max()) >= len(entry.classes):
                raise DatasetError(
                    f"{len(images)} images in {images_file.name} do not go with {len(labels)} "
                    f"labels up to {int(labels.max())} in {labels_file.name}."
                )
            ids = torch.arange(first_id, first_id + len(labels))
            splits[split] = Split(images=images, labels=labels, ids=ids)
        first_id += labels_file.size - 8  # a label is a byte, after a header of 8
    return splits
