"""Do suspects find wrong labels? Some labels are flipped, a run is recorded, and the flipped ones are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.attention import Suspects
from spotlights.experiments.truth.recorded import record
from spotlights.experiments.truth.scoring import auc, flipped, precision_at
from spotlights.experiments.truth.settings import Data, Setting

SHARE = 0.1
FOLDER = "mislabelled"


@dataclass(frozen=True)
class Mislabelled:
    """How well flipped labels were found."""

    share: float
    """Of the labels that were flipped."""
    auc: float
    """How often a flipped example ranks before one that is not."""
    precision_at_100: float
    corrected: float
    """Among the flipped ones: how often what the network says is the true label."""

    def __str__(self) -> str:
        return (
            f"suspects with {self.share:.0%} of the labels flipped: AUC {self.auc:.4f}, precision at 100 "
            f"{self.precision_at_100:.2f}; the network names the true label of {self.corrected:.1%} of the flipped"
        )


def find_mislabelled(setting: Setting, data: Data, folder: Path) -> Mislabelled:
    """Flips labels, records a run on them, and ranks the training examples by suspicion."""
    labels, wrong = flipped(data.labels, SHARE, len(data.classes))
    recorded = record(setting, data.relabelled(labels), folder / FOLDER)
    suspects = recorded.memory.suspects(len(data))
    scores, answers = _in_order(suspects, data)
    return Mislabelled(
        SHARE,
        auc(scores, wrong),
        precision_at(scores, wrong, min(100, len(data))),
        float((answers[wrong] == data.labels[wrong]).double().mean()),
    )


def _in_order(suspects: Suspects, data: Data) -> tuple[Float[Tensor, "train"], Tensor]:
    where = {example: index for index, example in enumerate(suspects.examples)}
    order = [where[example] for example in data.ids.tolist()]
    said = [-1 if answer is None else answer for answer in suspects.answers]
    return suspects.scores[order], torch.tensor(said)[order]
