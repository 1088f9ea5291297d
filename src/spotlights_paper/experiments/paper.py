"""The paper's numbers and queries, to be put beside ours.

K. Irie, R. Csordás, J. Schmidhuber: The Dual Form of Neural Networks Revisited: Connecting Test Time
Predictions to Training Patterns via Spotlights of Attention. ICML 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error (or, over seeds, its standard deviation)."""

    mean: float
    error: float
    """NaN where there is only one number."""

    @staticmethod
    def of(values: Sequence[float] | np.ndarray) -> Estimate:
        """The mean of some values, and its standard error."""
        spread = Estimate.over_seeds(values)
        return Estimate(spread.mean, spread.error / len(values) ** 0.5)

    @staticmethod
    def over_seeds(values: Sequence[float] | np.ndarray) -> Estimate:
        """The mean of some values, and their standard deviation."""
        if len(values) == 0:
            return Estimate(float("nan"), float("nan"))
        return Estimate(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan"))

    def text(self, digits: int, *, percent: bool = False, sign: str = "") -> str:
        """`12.3 ± 0.4`; without ± for a single number."""
        scale = 100 if percent else 1
        mean = f"{scale * self.mean:{sign}.{digits}f}"
        return mean if self.error != self.error else f"{mean} ± {scale * self.error:.{digits}f}"

    def __str__(self) -> str:
        return self.text(3)


TABLE_1 = {
    "layers.0": (Estimate(17.2, 2.7), Estimate(49.5, 1.5), Estimate(75.1, 0.0)),
    "layers.1": (Estimate(18.0, 2.9), Estimate(52.9, 2.9), Estimate(78.8, 0.8)),
    "layers.2": (Estimate(20.6, 2.6), Estimate(60.1, 4.5), Estimate(84.7, 1.1)),
}
"""In percent, over five seeds, by layer: the vote is the target, given a wrong answer; the output, given a wrong
answer; the target, given a right answer."""

TABLE_1_COLUMNS = {
    "target_given_wrong": "vote = target, given a wrong answer",
    "output_given_wrong": "vote = output, given a wrong answer",
    "target_given_right": "vote = target = output, given a right answer",
}
"""The same three, as `Vote` calls them, and in words."""


def holds(reported: Estimate, ours: float) -> bool:
    """Whether ours is within two of the paper's standard deviations, or within 1.5 points where that is 0.0."""
    return abs(ours - reported.mean) <= (2 * reported.error or 1.5)


ACCURACIES = {
    "mnist-single": {"mnist": 97.0},
    "mnist-joint": {"mnist": 97.0, "fashion-mnist": 87.0},
    "mnist-continual": {"mnist": 45.0, "fashion-mnist": 85.0},
}
"""Test accuracy in percent, rounded in the paper's text."""

BEFORE_SWITCH = 97.0
"""MNIST in percent, before Fashion-MNIST takes over."""


# -- test images ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperImage:
    """A test image that the paper looks at."""

    experiment: str
    what: str
    said: str
    """What the paper says of it, in our words."""
    figures: tuple[int, int, int]
    """Of its top scores, its totals and its top training images."""


PAPER_IMAGES = {
    "3a": PaperImage(
        "mnist-single",
        "a “6”",
        "MNIST test image 5938. Slots of class 6 score high in all layers, and some zeros as high; added up over all "
        "slots, class 6 is first.",
        (4, 5, 8),
    ),
    "3b": PaperImage(
        "mnist-joint",
        "an ankle boot, after joint training",
        "Fashion-MNIST test image 981. The input layer attends to boots, the later layers to both tasks: a “9” is "
        "among the top images of the last layer. Coats have the largest total in the input layer, boots gain later.",
        (6, 7, 9),
    ),
    "10a": PaperImage("mnist-single", "a “3”", "Another example of the single task, much like the “6”.", (12, 13, 11)),
    "10b": PaperImage(
        "mnist-joint", "a dress, after joint training", "No digit is among its top images.", (15, 16, 14)
    ),
    "10c": PaperImage(
        "mnist-joint",
        "a sandal, after joint training",
        "A “5” is among its top images. The class with the largest total is not the answer.",
        (18, 19, 17),
    ),
    "10d": PaperImage(
        "mnist-continual",
        "a “1” that is answered 3",
        "After the second task, a clear “1” is taken for class 3, which in that task is a dress. Ones and dresses "
        "score high in the input layer; in the last layer dresses have the largest total.",
        (21, 22, 20),
    ),
    "10e": PaperImage("mnist-continual", "a dress, after the second task", "It is answered rightly.", (24, 25, 23)),
    "10f": PaperImage("mnist-continual", "a “7”, after the second task", "It is still answered rightly.", (27, 28, 26)),
}
"""By the paper's figure."""


# -- appendix C -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperQuery:
    """A text whose last token is asked about."""

    table: int
    """The number of the paper's table."""
    words: str
    source: str = "test"
    """The text that it is from."""
    papers: tuple[int, ...] = ()
    """The paper's three passages: where the attended token of each is in our training text."""


AESOP = (
    PaperQuery(2, "glad to take himself off as fast as", papers=(49304, 8741, 67698)),
    PaperQuery(3, "the Lamb a little d", papers=(66978, 71255, 113324)),
    PaperQuery(4, "he can do no more. At ", source="train", papers=(97936, 66267, 7715)),
)
WIKITEXT_2 = (
    PaperQuery(5, "for his contribution", papers=(1212803, 1328897, 1402463)),
    PaperQuery(6, "Her principal", papers=(213038, 118879, 666988)),
    PaperQuery(7, ", describing it as", papers=(1989333, 1667618, 1109034)),
)
"""The queries and passages of appendix C."""
