"""Which labels of the training images look wrong? Kept with the results, so that the memory may be thrown away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from spotlights.experiments.training import Trained

SUSPECTS = 30


@dataclass(frozen=True, eq=False)
class Suspect:
    """A training image that the network kept disagreeing with."""

    pixels: UInt8[np.ndarray, "height width"]
    source: str
    label: int
    example: int
    says: int | None
    """The class that the network said instead, over all visits."""
    suspicion: float
    """The sum over visits of the norm of the last layer's error."""
    visits: int


def audit(trained: Trained, count: int = SUSPECTS) -> list[Suspect]:
    """The training images with the most suspicious labels, the most suspicious first."""
    found = []
    for row in trained.memory.suspects(count).rows():
        train = trained.data[row["source"]].train
        place = int((train.ids == row["example"]).nonzero()[0])
        found.append(
            Suspect(
                train.pixels[place].numpy(),
                row["source"],
                row["label"],
                row["example"],
                row["network says"],
                row["suspicion"],
                row["visits"],
            )
        )
    return found
