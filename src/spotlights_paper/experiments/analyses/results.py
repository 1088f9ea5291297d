"""All analyses of an image experiment, from the whole test set to single images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spotlights_paper.experiments.analyses.cases import Case, WantedImage, cases
from spotlights_paper.experiments.analyses.forgetting import ForgottenImages, Masked, forgetting, masks
from spotlights_paper.experiments.analyses.glances import Glance, right_and_wrong
from spotlights_paper.experiments.analyses.test_set import (
    CrossTask,
    OtherVotes,
    OverTime,
    Vote,
    cross_task,
    other_votes,
    over_time,
    total_scores,
    votes,
)
from spotlights_paper.experiments.progress import stage
from spotlights_paper.experiments.training import ImageSettings, PaperSettings, Trained

SAMPLES = 10
"""Right answers, and as many wrong ones, that are glanced at."""
COMPARED = 200
"""Test images on which other ways to vote are compared."""


@dataclass(frozen=True, eq=False)
class ImageResults:
    """Every analysis of one run; what an experiment does not ask for is empty."""

    sources: list[str]
    classes: dict[str, list[str]]
    layers: list[str]
    votes: list[Vote] = field(default_factory=list)
    cross_task: list[CrossTask] = field(default_factory=list)
    over_time: list[OverTime] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    masks: list[Masked] = field(default_factory=list)
    forgetting: ForgottenImages | None = None
    other_votes: list[OtherVotes] = field(default_factory=list)
    samples: list[Glance] = field(default_factory=list)
    """Some test images that the network gets right, then some that it gets wrong."""


def ask_everything(trained: Trained, settings: ImageSettings, wanted: Sequence[WantedImage]) -> ImageResults:
    """Asks all questions; `wanted` are the test images that are looked at closely."""
    with stage("all test images over all slots"):
        totals = total_scores(trained, images=settings.voting_images)
    with stage("attention over training time"):
        timeline = over_time(trained, images=settings.timeline_images, bins=settings.bins)
    with stage("single test images"):
        shown = cases(trained, wanted, top=settings.top)
    masked, lost = [], None
    if isinstance(settings, PaperSettings) and settings.switch is not None:
        with stage("masking one task"):
            masked = masks(trained, switch=settings.switch)
        with stage("what was forgotten, and why"):
            lost = forgetting(trained, switch=settings.switch, images=settings.lost_images)
    return ImageResults(
        trained.sources,
        {source: list(prepared.test.classes) for source, prepared in trained.data.items()},
        trained.layers,
        votes(totals),
        cross_task(totals),
        timeline,
        shown,
        masked,
        lost,
        other_votes(trained, images=COMPARED),
        right_and_wrong(trained, SAMPLES),
    )
