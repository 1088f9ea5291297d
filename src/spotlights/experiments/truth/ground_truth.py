"""The truth, kept: margins of networks retrained on random halves of the training examples.

Three kinds: `fresh` (initial weights and order of each network's own: what a user who retrains would see),
`again` (the same halves with other seeds: how much of the truth is noise), and `same` (initial weights and order
of the recorded run). What has been trained is on disk, twenty networks at a time, and is not trained again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.experiments.progress import track
from spotlights.experiments.truth.retraining import AT_ONCE, Job, retrain
from spotlights.experiments.truth.settings import Data, Setting, epoch_orders

KINDS = ("fresh", "again", "same")
_FIRST_SEED = {"fresh": 1000, "again": 5000}


def halves(count: int, examples: int, seed: int = 0) -> Bool[Tensor, "subsets examples"]:
    """Random halves of the training examples; the first ones are the same however many are asked for."""
    generator = torch.Generator().manual_seed(seed)
    members = torch.zeros(count, examples, dtype=torch.bool)
    for row in members:
        row[torch.randperm(examples, generator=generator)[: examples // 2]] = True
    return members


def retrained(
    folder: Path, setting: Setting, data: Data, *, kind: str, count: int, recorded_seed: int = 0
) -> Float[Tensor, "subsets test"]:
    """Margins on the test images, for networks trained on `count` halves."""
    if kind not in KINDS:
        raise SettingError(f'No kind of retraining "{kind}". There are: {", ".join(KINDS)}.')
    kept = folder / "retrained"
    kept.mkdir(parents=True, exist_ok=True)
    members = halves(count, len(data))
    found = []
    for start in track(range(0, count, AT_ONCE), -(-count // AT_ONCE), f"retraining ({kind})"):
        stop = min(start + AT_ONCE, count)
        path = kept / f"{kind}-{start:03d}-{stop:03d}.npy"
        if not path.exists():
            chosen = [row.nonzero().flatten() for row in members[start:stop]]
            if kind == "same":
                order = epoch_orders(len(data), setting.epochs, recorded_seed)
                jobs = [Job(row, recorded_seed, order) for row in chosen]
            else:
                jobs = [Job(row, _FIRST_SEED[kind] + start + index) for index, row in enumerate(chosen)]
            np.save(path, retrain(setting, data, jobs).numpy())
        found.append(torch.from_numpy(np.load(path)))
    return torch.cat(found)
