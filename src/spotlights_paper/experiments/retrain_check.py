"""`spotlights retrain-check`: what would have happened without a group? The estimate, the mask, and the truth.

A finished run of an image experiment is trained again, with the same seed, on the same batches without the group's
examples. The margins of the retrained network are compared with the memory's estimate (influence) and with the margins
of the network with the group's slots masked. A mask is no forecast: it takes out what the group taught, and leaves what
the others taught because the group was there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.errors import SettingError, UnsupportedError
from spotlights.results import Printable, build
from spotlights.selections import parse_selections
from spotlights_paper.experiments.images import Images, Prepared, prepare
from spotlights_paper.experiments.mnist import batches
from spotlights_paper.experiments.progress import stage, track
from spotlights_paper.experiments.running import MEMORY, MODEL, load_run, started
from spotlights_paper.experiments.training import PaperSettings, paper_network
from spotlights_paper.experiments.truth.scoring import spearman
from spotlights_paper.experiments.truth.settings import margins

TESTS = 500
"""Test images of each source that are asked about."""


@dataclass(frozen=True)
class Line:
    """One group of test images."""

    tests: str
    """A source and class, or all."""
    images: int
    before: float
    """Mean margin of the recorded network."""
    retrained: float
    """The same, of the network that was really trained without the group: the truth."""
    masked: float
    """The same, of the network without the group's slots."""
    estimate: float
    """Mean influence of the group, in units of its own: how much of the margin would go."""


@dataclass(frozen=True, repr=False)
class RetrainCheck(Printable):
    """Estimate, mask and truth side by side."""

    run: str
    without: str
    examples: int
    """Training examples that were left out."""
    lines: list[Line]
    influence_agreement: float
    """Rank correlation, over test images, of the estimated with the true loss of margin."""
    mask_agreement: float

    def table(self) -> Any:
        names = ["test images", "number", "margin before", "truth: retrained", "masked", "estimated loss"]
        rows = [[x.tests, x.images, x.before, x.retrained, x.masked, x.estimate] for x in self.lines]
        note = (
            f"{self.examples:,} training examples left out. Rank correlation with the true loss of margin over all "
            f"test images: influence {self.influence_agreement:.2f}, mask {self.mask_agreement:.2f}. The estimate has "
            "no unit: compare its order and sign."
        )
        return build(f"{self.run} without {self.without}", names, rows, note)


def retrain_check(folder: Path, **group: Any) -> RetrainCheck:
    """Retrains a run without a group, and compares.

    Args:
        folder: a finished run of `spotlights run` that kept its memory.
        group: as for `memory.where`: `label=3`, `source="fashion-mnist"`, `example=[17, 42]`.
    """
    run = load_run(folder)
    if not (folder / MEMORY).exists():
        raise UnsupportedError(f"{folder} has no memory: it was thrown away. Run it again without --discard-memory.")
    if not group:
        raise SettingError("Say what to leave out: label=3, source=fashion-mnist or example=17,42.")
    memory = sl.open(folder / MEMORY)
    view = memory.where(**group)
    _, settings = started(folder)
    if not isinstance(settings, PaperSettings):
        raise SettingError(
            f"{run.experiment} cannot be trained again from its batches. Give a run of the paper's network."
        )
    data = {source: prepare(source, settings.train_images, settings.test_images) for source in run.train_images}
    left_out = torch.cat([_examples(prepared.train, group) for prepared in data.values()])
    if len(left_out) == 0:
        raise SettingError("No training example is in this group: there is nothing to leave out.")
    model, _ = paper_network(settings, data, run.seed)
    model.load_state_dict(load_file(folder / MODEL))

    tests = [prepared.test.first(TESTS) for prepared in data.values()]
    inputs, labels = torch.cat([test.inputs for test in tests]), torch.cat([test.labels for test in tests])
    with stage("estimating"):
        estimate = view.attend(model, inputs).influence(lambda output: margins(output, labels)).total()
    with stage("masking"):
        masked = memory.without(**group).primal(model)
    retrained = _retrain(settings, data, left_out, seed=run.seed)
    with torch.no_grad():
        networks = [margins(network(inputs), labels).double() for network in (model, retrained, masked)]
    before, after, without = networks
    categories = [test.category(label) for test in tests for label in test.labels.tolist()]
    lines = []
    for name in ("all", *sorted(set(categories))):
        rows = torch.tensor([name in ("all", category) for category in categories])
        lines.append(Line(name, int(rows.sum()), *(float(x[rows].double().mean()) for x in (*networks, estimate))))
    losses = torch.stack([estimate.double(), before - without], dim=1)
    agreement = spearman(losses, (before - after)[:, None].expand_as(losses))
    words = ", ".join(f"{column}={_short(value)}" for column, value in group.items())
    return RetrainCheck(folder.name, words, len(left_out), lines, float(agreement[0]), float(agreement[1]))


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list | tuple) and len(value) > 4 else str(value)


def _examples(train: Images, group: dict[str, Any]) -> Int64[Tensor, "examples"]:
    """The ids of the training examples that meet all conditions."""
    known = {"label": train.labels.tolist(), "example": train.ids.tolist()}
    known |= {"source": [train.source] * len(train), "category": [train.category(label) for label in known["label"]]}
    meets = torch.ones(len(train), dtype=torch.bool)
    for column, wanted in group.items():
        if column not in known:
            raise SettingError(f"Cannot retrain without a {column}. Give label=, example=, source= or category=.")
        values = wanted if isinstance(wanted, list | tuple | range) else [wanted]
        meets &= torch.tensor([value in values for value in known[column]])
    return train.ids[meets]


def _retrain(
    settings: PaperSettings, data: dict[str, Prepared], left_out: Int64[Tensor, "examples"], *, seed: int
) -> nn.Module:
    """The run's own training, without recording, on its own batches without the examples that are left out."""
    model, optimizer = paper_network(settings, data, seed)
    own = itertools.islice(batches(settings, data, seed), settings.steps)
    for batch in track(own, settings.steps, "retraining"):
        stays = ~torch.isin(batch.ids, left_out)
        if not stays.any():
            continue
        # The mean over those that stay would give each of them more weight than it had.
        losses = F.cross_entropy(model(batch.inputs[stays]), batch.labels[stays], reduction="sum")
        optimizer.zero_grad()
        (losses / len(stays)).backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    return model


def parse_group(words: list[str]) -> dict[str, Any]:
    """A selection such as `label=3 example=17,42` as conditions; several words must all hold."""
    selections = parse_selections(" ".join(words))
    if len(selections) != 1:
        raise SettingError(f"{' '.join(words)!r}: give one selection, such as label=3 or source=mnist label=3,5.")
    return selections[0]
