"""Removal curves: drop the examples that a method ranks first for a test image, retrain, and watch its margin fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.experiments.progress import track
from spotlights.experiments.truth.methods import METHODS
from spotlights.experiments.truth.recorded import Recorded
from spotlights.experiments.truth.retraining import AT_ONCE, Job, retrain
from spotlights.experiments.truth.settings import Data, Setting, epoch_orders

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
    kept = folder / "removal"
    kept.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        right = recorded.model(data.test_inputs).argmax(dim=1) == data.test_labels
    chosen = right.nonzero().flatten()[:tests]
    everything = torch.arange(len(data))
    counts = [count for count in DROPPED if count < len(data) // 2]
    nothing = _margins(kept / "nothing", setting, data, [everything] * len(chosen), chosen)
    found = []
    for method in track(COMPARED, len(COMPARED), "retraining (removals)"):
        ranked = _ranking(method, data, recorded, chosen)
        margin, error = [float(nothing.mean())], [0.0]
        for count in counts:
            members = [row.sort().values for row in ranked[:, count:]]
            now = _margins(kept / f"{method}-{count}", setting, data, members, chosen)
            margin.append(float(now.mean()))
            error.append(float((now - nothing).std() / len(chosen) ** 0.5))
        found.append(Removal(method, [0, *counts], margin, error))
    return found


def draw(curves: Sequence[Removal], tests: int, path: Path) -> Path:
    """The curves as a picture."""
    from spotlights.figures import save
    from spotlights.figures.removal import Curve, plot_removal

    lines = [Curve(each.method, each.dropped, each.margin, each.error) for each in curves]
    title = f"{tests} test images, each with a network retrained for it"
    return save(plot_removal(lines, title=title, note="below 0: answered wrongly; ± standard error, paired"), path)


def _ranking(method: str, data: Data, recorded: Recorded, chosen: Tensor) -> Int64[Tensor, "chosen train"]:
    """The training examples for each chosen test image, first those to drop."""
    if method == "random":
        scores = torch.rand(len(chosen), len(data), generator=torch.Generator().manual_seed(_SEED))
    else:
        scores = METHODS[method](data, recorded)[chosen]
    return scores.argsort(dim=1, descending=True, stable=True)


def _margins(
    path: Path, setting: Setting, data: Data, members: list[Tensor], chosen: Tensor
) -> Float[Tensor, "chosen"]:
    """The margin of each chosen test image, of the network that was trained for it; kept some at a time."""
    found = []
    for start in range(0, len(chosen), AT_ONCE):
        some = chosen[start : start + AT_ONCE]
        part = path.with_name(f"{path.name}-{start:03d}-{start + len(some):03d}.npy")
        if not part.exists():
            jobs = []
            for index in range(start, start + len(some)):
                seed = _SEED + index
                jobs.append(Job(members[index], seed, epoch_orders(len(data), setting.epochs, seed)))
            np.save(part, retrain(setting, data, jobs)[torch.arange(len(some)), some].numpy())
        found.append(torch.from_numpy(np.load(part)))
    return torch.cat(found)
