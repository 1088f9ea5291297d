"""Do suspects find wrong labels? A share of the labels is flipped, a run is recorded, and suspects are asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int64
from scipy import stats
from torch import Tensor

from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.recorded import order_of, record
from spotlights_paper.experiments.truth.settings import Setting

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
    train = data.train
    labels, wrong = flipped(train.labels, SHARE, len(data.classes))
    recorded = record(setting, replace(data, train=replace(train, labels=labels)), folder / FOLDER)
    suspects = recorded.memory.suspects(len(train))
    order = order_of(suspects.examples, data)
    scores, wrongly = suspects.scores[order], wrong.nonzero().flatten().tolist()
    corrected = [suspects.answers[order[position]] == int(train.labels[position]) for position in wrongly]
    return Mislabelled(
        SHARE, auc(scores, wrong), precision_at(scores, wrong, min(100, len(train))), sum(corrected) / len(corrected)
    )


def auc(scores: Float[Tensor, "train"], positive: Bool[Tensor, "train"]) -> float:
    """How often a positive example ranks before a negative one."""
    yes, no = scores[positive].double().numpy(), scores[~positive].double().numpy()
    return float(stats.mannwhitneyu(yes, no).statistic) / (len(yes) * len(no))


def precision_at(scores: Float[Tensor, "train"], positive: Bool[Tensor, "train"], k: int) -> float:
    """The share of positive ones among the first k."""
    return float(positive[scores.argsort(descending=True)[:k]].double().mean())


def flipped(labels: Int64[Tensor, "train"], share: float, classes: int) -> tuple[Tensor, Tensor]:
    """Labels of which a share has been replaced by another class, and which ones."""
    generator = torch.Generator().manual_seed(0)
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]] = True
    shift = torch.randint(1, classes, (len(labels),), generator=generator)
    return torch.where(wrong, (labels + shift) % classes, labels), wrong
