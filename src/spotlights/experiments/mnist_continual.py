"""One task after the other: MNIST, then Fashion-MNIST, with the same ten outputs.

`spotlights run mnist-continual`; the paper's sections 5.3 and 5.4, and the masks that it only imagines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from spotlights.experiments.analyses.cases import Wanted
from spotlights.experiments.analyses.everything import ask_everything
from spotlights.experiments.analyses.interference import forgetting
from spotlights.experiments.analyses.masks import masks
from spotlights.experiments.images import prepare
from spotlights.experiments.progress import stage
from spotlights.experiments.results import Results
from spotlights.experiments.settings import QUICK, VANILLA, PaperSettings
from spotlights.experiments.training import Trained, train, without_replacement


@dataclass(frozen=True, kw_only=True)
class Settings(PaperSettings):
    """First one data set, then the other; the optimizer goes on as it is."""

    steps: int = 6000
    """3,000 of each."""
    switch: int = 3000
    """The step at which Fashion-MNIST takes over."""


PRESETS = {
    "paper": Settings(),
    "long": Settings(steps=10_000),
    "text": Settings(**VANILLA),
    "quick": Settings(steps=160, switch=80, **QUICK),
}

CASES = (
    Wanted("mnist", 1, right=False),
    Wanted("mnist", 7, right=True),
    Wanted("fashion-mnist", 3, right=True),
)
"""The paper's: a "1" that is misclassified after the second task, a "7" that is still right, a dress."""


def run(settings: Settings, *, seed: int, path: Path) -> Trained:
    mnist = prepare("mnist", settings.train_images, settings.test_images)
    fashion = prepare("fashion-mnist", settings.train_images, settings.test_images)
    first = without_replacement([mnist.train], settings, seed)
    second = without_replacement([fashion.train], settings, seed)
    batches = chain(islice(first, settings.switch), second)
    data = {"mnist": mnist, "fashion-mnist": fashion}
    return train(settings, data=data, batches=batches, seed=seed, path=path)


def analyse(trained: Trained, settings: Settings, *, pictures: bool) -> Results:
    results = ask_everything(trained, settings, CASES if pictures else ())
    with stage("one task masked"):
        masked = masks(trained, switch=settings.switch)
    with stage("what was forgotten, and why"):
        lost = forgetting(trained, switch=settings.switch, images=settings.lost_images)
    return replace(results, masks=masked, forgetting=lost)
