"""Removal curves: drop the examples that a method ranks first for a test image, retrain, and watch its margin fall."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.experiments.truth.methods import METHODS
from spotlights.experiments.truth.recorded import Recorded
from spotlights.experiments.truth.retraining import Job, retrain
from spotlights.experiments.truth.settings import Data, Setting

DROPPED = (20, 100, 500)
"""How many examples are left out."""
COMPARED = ("influence", "contribution", "score", "same label")
_SEED = 20_000


@dataclass(frozen=True)
class Removal:
    """What became of some test images' margins when a method's first examples were dropped."""

    method: str
    dropped: list[int]
    """How many."""
    margin: list[float]
    """Mean over test images, by how many were dropped."""
    error: list[float]
    """Standard error over test images of the difference from dropping nothing."""

    def __str__(self) -> str:
        steps = ", ".join(
            f"{k}: {m:.2f} ± {e:.2f}" for k, m, e in zip(self.dropped, self.margin, self.error, strict=True)
        )
        return f"margin after dropping the first examples by {self.method}: {steps}"


def removal_curve(setting: Setting, data: Data, folder: Path, *, tests: int, recorded: Recorded) -> list[Removal]:
    """Retrains once for each method, number and test image, with the same fresh seed for a test image throughout.

    The first `tests` test images that the recorded network answers rightly are used.
    """
    kept = folder / "removal"
    kept.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        right = recorded.model(data.test_inputs).argmax(dim=1) == data.test_labels
    chosen = right.nonzero().flatten()[:tests]
    everything = torch.arange(len(data))
    nothing = _margins(kept / f"nothing-{tests}.npy", setting, data, [everything] * len(chosen), chosen)
    found = []
    for method in COMPARED:
        scores = METHODS[method](data, recorded)[chosen]
        margin, error = [float(nothing.mean())], [0.0]
        for count in DROPPED:
            order = scores.argsort(dim=1, descending=True, stable=True)[:, count:]
            members = [row.sort().values for row in order]
            path = kept / f"{method.replace(' ', '-')}-{count}-{tests}.npy"
            now = _margins(path, setting, data, members, chosen)
            margin.append(float(now.mean()))
            error.append(float((now - nothing).std() / len(chosen) ** 0.5))
        found.append(Removal(method, [0, *DROPPED], margin, error))
    return found


def _margins(
    path: Path, setting: Setting, data: Data, members: list[Tensor], chosen: Tensor
) -> Float[Tensor, "chosen"]:
    """The margin of each chosen test image, of the network that was trained for it."""
    if not path.exists():
        jobs = [Job(mine, _SEED + index) for index, mine in enumerate(members)]
        np.save(path, retrain(setting, data, jobs)[torch.arange(len(chosen)), chosen].numpy())
    return torch.from_numpy(np.load(path))
