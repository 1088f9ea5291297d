"""How well scores predict retraining: the linear datamodeling score, and its error.

A method gives a number for each test image and training example. For a half of the training examples, the sum of the
numbers of its members should go up and down with the margin of a network trained on that half. The *linear
datamodeling score* (LDS) of a test image is the Spearman correlation of the two over many halves.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from spotlights_paper.experiments.paper import Estimate

DRAWS = 100
"""How often the subsets are drawn anew, with replacement, for standard errors: all test images share the subsets."""


def spearman(first: Float[Tensor, "subsets test"], second: Float[Tensor, "subsets test"]) -> Float[Tensor, "test"]:
    """The rank correlation of each column; 0 where one of the two is constant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        ranks = (stats.rankdata(values.double().numpy(), axis=0) for values in (first, second))
        correlations = np.asarray(stats.pearsonr(*ranks, axis=0)[0])
    return torch.from_numpy(np.nan_to_num(correlations))


def predictions(
    scores: Float[Tensor, "test train"], members: Bool[Tensor, "subsets train"]
) -> Float[Tensor, "subsets test"]:
    """The sum of the scores of each subset's members."""
    return members.double() @ scores.double().T


def lds(
    scores: Float[Tensor, "test train"], members: Bool[Tensor, "subsets train"], truth: Float[Tensor, "subsets test"]
) -> Estimate:
    """The linear datamodeling score: its mean over test images."""
    return correlation(predictions(scores, members), truth)


def correlation(first: Float[Tensor, "subsets test"], second: Float[Tensor, "subsets test"]) -> Estimate:
    """The mean rank correlation over test images."""
    return score_of(redrawn(first, second))


def redrawn(first: Float[Tensor, "subsets test"], second: Float[Tensor, "subsets test"]) -> Float[Tensor, "drawn"]:
    """The mean rank correlation, followed by the same for subsets drawn anew, with replacement.

    The draws are the same for whatever is compared: differences of two such rows are paired.
    """
    generator = torch.Generator().manual_seed(0)
    means = [spearman(first, second).mean()]
    for _ in range(DRAWS):
        drawn = torch.randint(len(first), (len(first),), generator=generator)
        means.append(spearman(first[drawn], second[drawn]).mean())
    return torch.stack(means)


def score_of(drawn: Float[Tensor, "drawn"]) -> Estimate:
    """A score, or a paired difference of two, from what `redrawn` gives."""
    return Estimate(float(drawn[0]), float(drawn[1:].std()) if len(drawn) > 2 else float("nan"))


def ceiling(first: Float[Tensor, "subsets test"], again: Float[Tensor, "subsets test"]) -> Estimate:
    """About the best score possible: retraining on the same halves with other seeds does not agree with itself fully.

    If both are one signal with noise of their own, their correlation is the square of either's with the signal.
    """
    both = correlation(first, again)
    root = max(both.mean, 0.0) ** 0.5
    return Estimate(root, both.error / (2 * root) if root else float("nan"))
