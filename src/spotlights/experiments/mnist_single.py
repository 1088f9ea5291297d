"""One task: MNIST. Which digits does a digit's answer attend to?

`spotlights run mnist-single`; the paper's section 5.1 and, with `--preset table1`, its Table 1.
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
    """MNIST alone."""

    steps: int = 3000
    """The paper's text; its authors' code trains for 5,000 steps where Table 1 is made."""


PRESETS = {
    "paper": Settings(),
    "table1": Settings(steps=5000),
    "text": Settings(**VANILLA),
    "quick": Settings(steps=80, **QUICK),
}

CASES = (Wanted("mnist", 6, right=True), Wanted("mnist", 3, right=True))
"""The paper's figures 4 and 5: a "6"; in its appendix a "3"."""


def run(settings: Settings, *, seed: int, path: Path) -> Trained:
    mnist = prepare("mnist", settings.train_images, settings.test_images)
    batches = without_replacement([mnist.train], settings, seed)
    return train(settings, data={"mnist": mnist}, batches=batches, seed=seed, path=path)


def analyse(trained: Trained, settings: Settings, *, pictures: bool) -> Results:
    return ask_everything(trained, settings, CASES if pictures else ())
