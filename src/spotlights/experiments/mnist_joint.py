"""Two tasks at once: MNIST and Fashion-MNIST mixed, with the same ten outputs.

`spotlights run mnist-joint`; the paper's section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotlights.experiments.analyses.cases import Wanted
from spotlights.experiments.analyses.everything import ask_everything
from spotlights.experiments.images import prepare
from spotlights.experiments.results import Results
from spotlights.experiments.settings import QUICK, VANILLA, PaperSettings
from spotlights.experiments.training import Trained, train, without_replacement


@dataclass(frozen=True, kw_only=True)
class Settings(PaperSettings):
    """Both data sets in every batch, by chance."""

    steps: int = 5000
    """Of batches drawn from the 80,106 images of both."""


PRESETS = {
    "paper": Settings(),
    "text": Settings(**VANILLA),
    "quick": Settings(steps=120, **QUICK),
}

CASES = (
    Wanted("fashion-mnist", 9, right=True),
    Wanted("fashion-mnist", 3, right=True),
    Wanted("fashion-mnist", 5, right=True),
)
"""The paper's: an ankle boot, a dress, a sandal."""


def run(settings: Settings, *, seed: int, path: Path) -> Trained:
    mnist = prepare("mnist", settings.train_images, settings.test_images)
    fashion = prepare("fashion-mnist", settings.train_images, settings.test_images)
    batches = without_replacement([mnist.train, fashion.train], settings, seed)
    data = {"mnist": mnist, "fashion-mnist": fashion}
    return train(settings, data=data, batches=batches, seed=seed, path=path)


def analyse(trained: Trained, settings: Settings, *, pictures: bool) -> Results:
    return ask_everything(trained, settings, CASES if pictures else ())
