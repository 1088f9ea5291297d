"""What is asked of every image experiment, from all test images to single ones."""

from __future__ import annotations

from collections.abc import Sequence

from spotlights.experiments.analyses.audit import audit
from spotlights.experiments.analyses.cases import Wanted, cases
from spotlights.experiments.analyses.categories import total_scores
from spotlights.experiments.analyses.class_attention import class_attention, cross_task
from spotlights.experiments.analyses.over_time import over_time
from spotlights.experiments.analyses.votes import votes
from spotlights.experiments.progress import stage
from spotlights.experiments.results import Results
from spotlights.experiments.settings import ImageSettings
from spotlights.experiments.training import Trained


def ask_everything(trained: Trained, settings: ImageSettings, wanted: Sequence[Wanted]) -> Results:
    with stage("all test images over all slots"):
        totals = total_scores(trained, images=settings.voting_images)
    with stage("attention over training time"):
        timeline = over_time(trained, images=settings.timeline_images, bins=settings.bins)
    with stage("single test images"):
        shown = cases(trained, wanted, top=settings.top, bins=settings.bins)
    return Results(
        trained.sources,
        {source: list(prepared.classes) for source, prepared in trained.data.items()},
        trained.layers,
        votes=votes(totals),
        class_attention=class_attention(totals),
        cross_task=cross_task(totals),
        over_time=timeline,
        cases=shown,
        suspects=audit(trained),
    )
