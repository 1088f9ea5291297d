"""scikit-learn's embedded digits: 1,797 images of 8 × 8, for when nothing else is reachable.

The split is fixed: the first 1,500 are for training and the last 297, partly by other writers, for
testing. The original 17 grey values (0 to 16) are spread over 0 to 255.
"""

from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from spotlights.errors import DatasetError

NAME = "digits"
CLASSES = tuple("0123456789")
FIRST_ID = 2_000_000
RANGES = {"train": slice(0, 1500), "test": slice(1500, 1797)}


def read(
    split: str,
) -> tuple[UInt8[Tensor, "n 8 8"], Int64[Tensor, "n"], Int64[Tensor, "n"]]:
    """Images, labels and ids of one split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DatasetError(
            'The digits come with scikit-learn, which is not installed. Install it: pip install "spotlights[demo]".'
        ) from error
    bunch: Any = load_digits()
    rows = RANGES[split]
    images = torch.from_numpy(bunch.images[rows] * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(bunch.target[rows]).long()
    ids = torch.arange(FIRST_ID + rows.start, FIRST_ID + rows.stop)
    return images, labels, ids
