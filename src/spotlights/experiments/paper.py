"""The paper's numbers, to be put beside ours.

K. Irie, R. Csordás, J. Schmidhuber: The Dual Form of Neural Networks Revisited: Connecting Test Time
Predictions to Training Patterns via Spotlights of Attention. ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """A mean and a standard deviation over five seeds, in percent."""

    mean: float
    deviation: float

    def holds(self, ours: float) -> bool:
        """Whether ours is within two standard deviations, or within 1.5 points where theirs is 0.0."""
        return abs(ours - self.mean) <= (2 * self.deviation or 1.5)


TABLE_1 = {
    "layers.0": (Reported(17.2, 2.7), Reported(49.5, 1.5), Reported(75.1, 0.0)),
    "layers.1": (Reported(18.0, 2.9), Reported(52.9, 2.9), Reported(78.8, 0.8)),
    "layers.2": (Reported(20.6, 2.6), Reported(60.1, 4.5), Reported(84.7, 1.1)),
}
"""By layer: the vote is the target, given a wrong answer; the output, given a wrong answer; the target,
given a right answer."""

TABLE_1_COLUMNS = ("target_given_wrong", "output_given_wrong", "target_given_right")
"""The same three, as `Vote` calls them."""

ACCURACIES = {
    "mnist-single": {"mnist": 97.0},
    "mnist-joint": {"mnist": 97.0, "fashion-mnist": 87.0},
    "mnist-continual": {"mnist": 45.0, "fashion-mnist": 85.0},
}
"""Test accuracy in percent, rounded in the paper's text."""

BEFORE_SWITCH = 97.0
"""MNIST in percent, before Fashion-MNIST takes over."""
