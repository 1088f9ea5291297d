"""`spotlights retrain-check`: what would have happened without a group? The estimate, the mask, and the truth.

A finished run of an image experiment is trained again, with the same seed, on the same batches without the
group's examples. Beside what really became of the test images' logits stand what the memory estimates (influence) and
what the network computes with the group's slots masked, which is something else: a mask takes out what the group
taught, and leaves what the others taught because the group was there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.attention.tables import Printable, build
from spotlights.errors import SettingError, UnsupportedError
from spotlights.experiments.images import Prepared, prepare
from spotlights.experiments.network import mlp
from spotlights.experiments.progress import stage, track
from spotlights.experiments.registry import experiment_named
from spotlights.experiments.results import from_plain
from spotlights.experiments.running import MEMORY, MODEL, load_run
from spotlights.experiments.settings import PaperSettings
from spotlights.experiments.training import Batch, without_replacement
from spotlights.experiments.truth.scoring import spearman
from spotlights.experiments.truth.settings import margins

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
    settings = from_plain(experiment_named(run.experiment).Settings, run.settings)
    if not isinstance(settings, PaperSettings):
        raise SettingError(
            f"{run.experiment} cannot be trained again from its batches. Give a run of the paper's network."
        )
    data = {source: prepare(source, settings.train_images, settings.test_images) for source in run.train_images}
    model = _network(settings, data)
    model.load_state_dict(load_file(folder / MODEL))

    tests = [prepared.test.first(TESTS) for prepared in data.values()]
    inputs, labels = torch.cat([each.inputs for each in tests]), torch.cat([each.labels for each in tests])
    with stage("estimating"):
        estimate = view.attend(model, inputs).influence(lambda output: margins(output, labels)).total()
    with stage("masking"):
        masked = memory.without(**group).primal(model)
    left_out = _left_out(data, group)
    count = sum(int(gone.sum()) for gone in left_out.values())
    if count == 0:
        raise SettingError("No training example is in this group: there is nothing to leave out.")
    retrained = _retrain(settings, data, left_out, seed=run.seed)

    with torch.no_grad():
        before, after, without = (margins(net(inputs), labels) for net in (model, retrained, masked))
    loss, mask_loss = before - after, before - without
    lines = [_line("all", torch.ones(len(labels), dtype=torch.bool), before, after, without, estimate)]
    names = [images.category(label) for images in tests for label in images.labels.tolist()]
    for name in dict.fromkeys(sorted(names)):
        chosen = torch.tensor([each == name for each in names])
        lines.append(_line(name, chosen, before, after, without, estimate))
    shown = ", ".join(f"{column}={_short(value)}" for column, value in group.items())
    return RetrainCheck(
        folder.name,
        shown,
        count,
        lines,
        float(spearman(estimate[:, None], loss.double()[:, None])[0]),
        float(spearman(mask_loss.double()[:, None], loss.double()[:, None])[0]),
    )


def _line(
    name: str, chosen: Bool[Tensor, "tests"], before: Tensor, after: Tensor, masked: Tensor, estimate: Tensor
) -> Line:
    means = [float(each[chosen].double().mean()) for each in (before, after, masked, estimate)]
    return Line(name, int(chosen.sum()), *means)


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list | tuple) and len(value) > 4 else str(value)


def _network(settings: PaperSettings, data: dict[str, Prepared]) -> nn.Module:
    first = next(iter(data.values()))
    return mlp((first.train.inputs.shape[1], *settings.hidden, len(first.classes)))


def _left_out(data: dict[str, Prepared], group: dict[str, Any]) -> dict[str, Bool[Tensor, "examples"]]:
    """Which training examples of each source meet all conditions."""
    found = {}
    for source, prepared in data.items():
        train = prepared.train
        gone = torch.ones(len(train), dtype=torch.bool)
        for column, wanted in group.items():
            several = wanted if isinstance(wanted, list | tuple) else [wanted]
            if column == "source":
                gone &= source in several
            elif column == "category":
                gone &= torch.tensor([train.category(label) in several for label in train.labels.tolist()])
            elif column in ("label", "example"):
                values = train.labels if column == "label" else train.ids
                gone &= torch.isin(values, torch.tensor([int(each) for each in several]))
            else:
                raise SettingError(f"Cannot retrain without a {column}. Give label=, example=, source= or category=.")
        found[source] = gone
    return found


def _retrain(
    settings: PaperSettings,
    data: dict[str, Prepared],
    left_out: dict[str, Bool[Tensor, "examples"]],
    *,
    seed: int,
) -> nn.Module:
    """The run's own training, without recording, on its own batches without the examples that are left out."""
    torch.manual_seed(seed)
    model = _network(settings, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    gone = torch.cat([prepared.train.ids[left_out[source]] for source, prepared in data.items()])
    batches = itertools.islice(_batches(settings, data, seed), settings.steps)
    for batch in track(batches, settings.steps, "retraining"):
        stays = ~torch.isin(batch.ids, gone)
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


def _batches(settings: PaperSettings, data: dict[str, Prepared], seed: int) -> Iterator[Batch]:
    trains = [prepared.train for prepared in data.values()]
    switch = getattr(settings, "switch", None)
    if switch is None:
        return without_replacement(trains, settings, seed)
    first, second = (without_replacement([images], settings, seed) for images in trains)
    return itertools.chain(itertools.islice(first, switch), second)


def parse_group(words: list[str]) -> dict[str, Any]:
    """`["label=3", "example=17,42"]` as conditions; numbers where they are numbers."""
    found: dict[str, Any] = {}
    for word in words:
        column, equals, values = word.partition("=")
        if not equals or not column or not values:
            raise SettingError(f"{word!r}: say what to leave out as COLUMN=VALUE, such as label=3 or example=17,42.")
        items = [int(each) if each.lstrip("-").isdigit() else each for each in values.split(",")]
        found[column] = items if len(items) > 1 else items[0]
    return found
