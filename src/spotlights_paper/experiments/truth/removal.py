"""Removal curves: drop the examples that a method ranks first for a test image, retrain, and watch its margin fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights_paper.experiments.progress import track
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.recorded import METHODS, Recorded
from spotlights_paper.experiments.truth.retraining import Job, kept_margins
from spotlights_paper.experiments.truth.settings import Setting, epoch_orders

DROPPED = (20, 80, 320)
"""How many examples are left out."""
COMPARED = ("influence", "contribution", "score", "random")
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
    """Retrains once for each method, number and test image.

    The first `tests` test images that the recorded network answers rightly are used. Each has a fresh seed of its own
    for initial weights and order, the same throughout, so that a difference is one of the examples.
    """
    with torch.no_grad():
        right = recorded.model(data.test.inputs).argmax(dim=1) == data.test.labels
    tested = right.nonzero().flatten()[:tests]
    counts = [count for count in DROPPED if count < len(data.train) // 2]
    seeds = range(_SEED, _SEED + len(tested))
    orders = [epoch_orders(len(data.train), setting.epochs, seed) for seed in seeds]

    def without(name: str, members: Sequence[Tensor]) -> Float[Tensor, "chosen"]:
        """The margin of each chosen test image, of a network trained for it on some of the examples."""
        jobs = [Job(*job) for job in zip(members, seeds, orders, strict=True)]
        return kept_margins(folder / "removal" / name, setting, data, jobs, tested)

    nothing = without("nothing", [torch.arange(len(data.train))] * len(tested))
    curves = []
    for method in track(COMPARED, len(COMPARED), "retraining (removals)"):
        ranked = _ranking(method, data, recorded, tested)
        margin, error = [float(nothing.mean())], [0.0]
        for count in counts:
            members = [row.sort().values for row in ranked[:, count:]]
            now = without(f"{method}-{count}", members)
            margin.append(float(now.mean()))
            error.append(float((now - nothing).std() / len(tested) ** 0.5))
        curves.append(Removal(method, [0, *counts], margin, error))
    return curves


def _ranking(method: str, data: Data, recorded: Recorded, tests: Tensor) -> Int64[Tensor, "chosen train"]:
    """The training examples for each chosen test image, first those to drop."""
    if method == "random":
        scores = torch.rand(len(tests), len(data.train), generator=torch.Generator().manual_seed(_SEED))
    else:
        scores = METHODS[method](data, recorded)[tests]
    return scores.argsort(dim=1, descending=True, stable=True)
