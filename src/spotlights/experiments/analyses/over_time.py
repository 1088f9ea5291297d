"""Where in training the attention goes: total |score| by step, for all layers, averaged over test images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from spotlights.experiments.analyses.categories import shares
from spotlights.experiments.training import Trained


@dataclass(frozen=True, eq=False)
class OverTime:
    """One layer, and the test images of one source."""

    layer: str
    source: str
    starts: Float[np.ndarray, "bins"]
    """The first step of each stretch of training."""
    share: Float[np.ndarray, "bins"]
    """Of the total |score|, on average over the test images."""
    spread: Float[np.ndarray, "bins"]
    """Standard deviation over the test images."""


def over_time(trained: Trained, *, images: int, bins: int) -> list[OverTime]:
    """Averages over the first images of each source's test set."""
    found = []
    for source, prepared in trained.data.items():
        spotlights = trained.attend(prepared.test.inputs[:images])
        for layer in trained.layers:
            totals = spotlights[layer].totals("step", absolute=True, bins=bins)
            divided = shares(totals.numpy())
            starts = np.array(totals.groups, dtype=float)
            found.append(OverTime(layer, source, starts, divided.mean(axis=0), divided.std(axis=0)))
    return found
