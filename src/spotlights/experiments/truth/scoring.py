"""How well scores foretell retraining: the linear datamodeling score, mislabel detection, and their errors.

A method gives a number for each test image and training example. For a half of the training examples, the sum of the
numbers of its members should go up and down with the margin of a network trained on that half. The *linear
datamodeling score* (LDS) of a test image is the Spearman correlation of the two over many halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

DRAWS = 100


@dataclass(frozen=True)
class Score:
    """A mean over test images, with its standard error."""

    mean: float
    error: float
    """By drawing the subsets anew, with replacement: they are what all test images share."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


def ranks(values: Float[Tensor, "subsets test"]) -> Float[Tensor, "subsets test"]:
    """Ranks in each column; equal values share their mean rank."""
    rows = values.T.contiguous()
    ordered = rows.sort(dim=1).values
    below, upto = (torch.searchsorted(ordered, rows, side=side) for side in ("left", "right"))
    return ((below + upto).double() / 2).T


def spearman(first: Float[Tensor, "subsets test"], second: Float[Tensor, "subsets test"]) -> Float[Tensor, "test"]:
    """The rank correlation of each column; 0 where one of the two is constant."""
    a, b = (ranked - ranked.mean(dim=0) for ranked in (ranks(first), ranks(second)))
    size = (a.square().sum(dim=0) * b.square().sum(dim=0)).sqrt()
    return torch.where(size > 0, (a * b).sum(dim=0) / size.clamp_min(1e-30), 0.0)


def predictions(
    scores: Float[Tensor, "test train"], members: Bool[Tensor, "subsets train"]
) -> Float[Tensor, "subsets test"]:
    """The sum of the scores of each subset's members."""
    return members.double() @ scores.double().T


def lds(
    scores: Float[Tensor, "test train"],
    members: Bool[Tensor, "subsets train"],
    truth: Float[Tensor, "subsets test"],
    *,
    draws: int = DRAWS,
) -> Score:
    """The linear datamodeling score: its mean over test images."""
    return correlation(predictions(scores, members), truth, draws=draws)


def correlation(
    first: Float[Tensor, "subsets test"], second: Float[Tensor, "subsets test"], *, draws: int = DRAWS
) -> Score:
    """The mean rank correlation over test images."""
    return score_of(redrawn(first, second, draws=draws))


def redrawn(
    first: Float[Tensor, "subsets test"], second: Float[Tensor, "subsets test"], *, draws: int = DRAWS
) -> Float[Tensor, "drawn"]:
    """The mean rank correlation, followed by the same for subsets drawn anew, with replacement.

    The draws are the same for whatever is compared: differences of two such rows are paired.
    """
    generator = torch.Generator().manual_seed(0)
    found = [spearman(first, second).mean()]
    for _ in range(draws):
        chosen = torch.randint(len(first), (len(first),), generator=generator)
        found.append(spearman(first[chosen], second[chosen]).mean())
    return torch.stack(found)


def score_of(drawn: Float[Tensor, "drawn"]) -> Score:
    """A score, or a paired difference of two, from what `redrawn` gives."""
    return Score(float(drawn[0]), float(drawn[1:].std()) if len(drawn) > 2 else float("nan"))


def ceiling(first: Float[Tensor, "subsets test"], again: Float[Tensor, "subsets test"]) -> Score:
    """About the best score possible: retraining on the same halves with other seeds does not agree with itself fully.

    If both are one signal with noise of their own, their correlation is the square of either's with the signal.
    """
    both = correlation(first, again)
    root = max(both.mean, 0.0) ** 0.5
    return Score(root, both.error / (2 * root) if root else float("nan"))


def auc(scores: Float[Tensor, "train"], positive: Bool[Tensor, "train"]) -> float:
    """How often a positive one ranks before a negative one."""
    place = ranks(scores.double()[:, None])[:, 0] + 0.5
    count = int(positive.sum())
    others = len(scores) - count
    return float((place[positive].sum() - count * (count + 1) / 2) / (count * others))


def precision_at(scores: Float[Tensor, "train"], positive: Bool[Tensor, "train"], k: int) -> float:
    """The share of positive ones among the first k."""
    return float(positive[scores.argsort(descending=True)[:k]].double().mean())


def flipped(labels: Int64[Tensor, "train"], share: float, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Labels of which a share has been replaced by another class, and which ones."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]] = True
    shift = torch.randint(1, classes, (len(labels),), generator=generator)
    return torch.where(chosen, (labels + shift) % classes, labels), chosen
