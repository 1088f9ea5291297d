"""Image data sets as tensors, each example with a permanent id.

The ids of a data set are one range: its training examples in their original order, then its test examples. The ranges
of different data sets do not overlap. In MNIST the id of a training example is its position.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from spotlights.errors import UnknownNameError
from spotlights_paper.datasets.catalogue import DIGITS, IMAGES, ImageEntry
from spotlights_paper.datasets.files import DatasetError, find_files


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


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: what to train on, what to ask about, and what the labels mean."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split


def load(name: str) -> Dataset:
    """Loads "mnist", "fashion-mnist" or "digits", scikit-learn's 8 × 8 digits."""
    if name not in IMAGES:
        raise UnknownNameError(f'No data set "{name}" of images. There are: {", ".join(IMAGES)}.')
    entry = IMAGES[name]
    train, test = _read_digits() if name == DIGITS.name else _read_splits(entry)
    return Dataset(name, entry.classes, train, test)


def _read_splits(entry: ImageEntry) -> list[Split]:
    contents = find_files(entry)
    splits: list[Split] = []
    first_id = entry.first_id
    for images_file, labels_file in entry.files.values():
        images = read_idx(contents[images_file.name], images_file.name, dimensions=3)
        labels = read_idx(contents[labels_file.name], labels_file.name, dimensions=1).long()
        if len(images) != len(labels) or int(labels.max()) >= len(entry.classes):
            raise DatasetError(
                f"{len(images)} images in {images_file.name} do not go with {len(labels)} "
                f"labels up to {int(labels.max())} in {labels_file.name}."
            )
        splits.append(Split(images, labels, torch.arange(first_id, first_id + len(labels))))
        first_id += len(labels)
    return splits


def read_idx(content: bytes, name: str, *, dimensions: int) -> UInt8[Tensor, "..."]:
    """The bytes of an idx file: `00 00 08 d`, then d big-endian 32-bit sizes, then the data."""
    magic = bytes([0, 0, 8, dimensions])
    start = len(magic) + 4 * dimensions
    if content[:4] != magic:
        raise DatasetError(
            f"{name} is not an idx file of bytes in {dimensions} dimension(s): "
            f"it begins with {content[:4].hex(' ') or 'nothing'}, not with {magic.hex(' ')}."
        )
    if len(content) < start:
        raise DatasetError(f"{name} ends inside its header, after {len(content)} bytes.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = math.prod(shape)
    if expected == 0 or len(content) - start != expected:
        raise DatasetError(
            f"{name} announces {' × '.join(map(str, shape))} = {expected} bytes and holds {len(content) - start}."
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def _read_digits() -> list[Split]:
    """scikit-learn's 8 × 8 digits, with their 17 grey values spread over 0 to 255.

    The first 1,500 are for training and the last 297, partly by other writers, for testing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DatasetError(
            'The digits come with scikit-learn, which is not installed. Install it: pip install "spotlights[demo]".'
        ) from error
    bunch: Any = load_digits()
    images = torch.from_numpy(bunch.images * (255 / 16)).round().to(torch.uint8)
    labels, ids = torch.from_numpy(bunch.target).long(), torch.arange(len(images)) + DIGITS.first_id
    return [Split(images[rows], labels[rows], ids[rows]) for rows in (slice(1500), slice(1500, None))]
