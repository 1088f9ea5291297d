"""Table 1: how often the class with the largest total |score| is the target, or the network's output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spotlights.experiments.analyses.categories import CategoryTotals


@dataclass(frozen=True)
class Vote:
    """How one layer votes on the test images of one source; all numbers are numbers of images."""

    layer: str
    source: str
    right: int
    """Images that the network gets right: target and output are the same class."""
    right_target: int
    """... and the class with the largest total is that one."""
    wrong: int
    """Images that it gets wrong."""
    wrong_target: int
    """... and the vote is the target, though the network says something else."""
    wrong_output: int
    """... and the vote is what the network says."""

    @property
    def target_given_wrong(self) -> float:
        return _share(self.wrong_target, self.wrong)

    @property
    def output_given_wrong(self) -> float:
        return _share(self.wrong_output, self.wrong)

    @property
    def target_given_right(self) -> float:
        return _share(self.right_target, self.right)

    @property
    def vote_against_network(self) -> list[list[int]]:
        """A 2×2 table: rows, the network is right, wrong; columns, the vote is right, wrong."""
        return [
            [self.right_target, self.right - self.right_target],
            [self.wrong_target, self.wrong - self.wrong_target],
        ]

    @property
    def vote_with_network(self) -> list[list[int]]:
        """A 2×2 table: rows, the network is right, wrong; columns, the vote is the output, another class."""
        return [
            [self.right_target, self.right - self.right_target],
            [self.wrong_output, self.wrong - self.wrong_output],
        ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def votes(totals: CategoryTotals) -> list[Vote]:
    """Each layer's vote on the test images of each source, over the slots of all sources."""
    found = []
    for layer, values in totals.layers.items():
        vote = values.sum(axis=1).argmax(axis=1)
        for index, source in enumerate(totals.sources):
            right = totals.right & (totals.task == index)
            wrong = ~totals.right & (totals.task == index)
            found.append(
                Vote(
                    layer,
                    source,
                    right=int(right.sum()),
                    right_target=int(np.sum(vote[right] == totals.target[right])),
                    wrong=int(wrong.sum()),
                    wrong_target=int(np.sum(vote[wrong] == totals.target[wrong])),
                    wrong_output=int(np.sum(vote[wrong] == totals.output[wrong])),
                )
            )
    return found
