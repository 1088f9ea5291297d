"""Where the attention of all test images goes: to classes, to tasks and to ranges of steps; and Table 1's votes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spotlights.results import Totals
from spotlights_paper.experiments.training import Trained, answers

# -- totals by category -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CategoryTotals:
    """Total |score| of every test image, by the task and class of the slots."""

    layers: dict[str, Float[np.ndarray, "queries sources classes"]]
    slots: Int[np.ndarray, "sources classes"]
    """How many slots each category has."""
    sources: list[str]
    task: Int[np.ndarray, "queries"]
    """Which source each test image is from."""
    target: Int[np.ndarray, "queries"]
    output: Int[np.ndarray, "queries"]
    """The class that the network gave."""

    @property
    def right(self) -> np.ndarray:
        return self.target == self.output


def categories(trained: Trained) -> list[str]:
    """Every category (a task and a class), task by task."""
    train = [prepared.train for prepared in trained.data.values()]
    return [images.category(label) for images in train for label in range(len(images.classes))]


def by_category(
    trained: Trained, totals: Totals, values: Float[Tensor, "queries groups"] | None = None
) -> Float[np.ndarray, "queries sources classes"]:
    """Sorts what is by the column "category" into tasks and classes; 0 for a category without slots."""
    names, values = categories(trained), totals.values if values is None else values
    arranged = np.zeros((len(values), len(names)))
    arranged[:, [names.index(str(group)) for group in totals.groups]] = values.numpy()
    return arranged.reshape(len(values), len(trained.sources), -1)


def shares(totals: Float[np.ndarray, "queries groups"]) -> Float[np.ndarray, "queries groups"]:
    """Each row divided by its sum; a row of zeros (all units of a layer silent) stays as it is."""
    whole = totals.sum(axis=1, keepdims=True)
    return totals / np.where(whole > 0, whole, 1.0)


def total_scores(trained: Trained, *, images: int | None = None) -> CategoryTotals:
    """Totals for the first `images` test images of each task, or for all test images."""
    tests = [prepared.test.first(images) for prepared in trained.data.values()]
    spotlights = trained.attend(torch.cat([test.inputs for test in tests]))
    layers, slots = {}, np.zeros((len(tests), 0), dtype=np.int64)
    for layer in trained.layers:
        totals = spotlights[layer].totals("category", absolute=True)
        layers[layer] = by_category(trained, totals)
        slots = by_category(trained, totals, totals.counts[None])[0].astype(np.int64)
    return CategoryTotals(
        layers,
        slots,
        trained.sources,
        np.repeat(np.arange(len(tests)), [len(test) for test in tests]),
        torch.cat([test.labels for test in tests]).numpy(),
        torch.cat([answers(trained.model, test) for test in tests]).numpy(),
    )


# -- votes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vote:
    """Table 1, for one layer and the test images of one source: how often the class with the largest total |score| is
    the target, or the network's output. All numbers are numbers of images."""

    layer: str
    source: str
    right: int
    """Images that the network gets right: target and output are the same class."""
    right_target: int
    """... and the class with the largest total is that one."""
    wrong: int
    """Images that the network gets wrong."""
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


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def votes(totals: CategoryTotals) -> list[Vote]:
    """Each layer's vote on the test images of each source, over the slots of all sources."""
    result = []
    for layer, values in totals.layers.items():
        vote = values.sum(axis=1).argmax(axis=1)
        is_target, is_output = vote == totals.target, vote == totals.output
        for index, source in enumerate(totals.sources):
            right, wrong = (rows & (totals.task == index) for rows in (totals.right, ~totals.right))
            counted = right, right & is_target, wrong, wrong & is_target, wrong & is_output
            result.append(Vote(layer, source, *(int(rows.sum()) for rows in counted)))
    return result


@dataclass(frozen=True)
class OtherVotes:
    """One layer, over some test images that the network gets right: what else might have the vote (section 5.2)."""

    layer: str
    images: int
    totals: float
    """How often the class with the largest total |score| is the network's answer."""
    weighted: float
    """The same with every |score| multiplied by the norm of its slot's error."""
    nearest: float
    """How often the class of the one slot with the largest score is the network's answer."""


def other_votes(trained: Trained, *, images: int) -> list[OtherVotes]:
    """For the first images of the first source's test set."""
    test = trained.data[trained.sources[0]].test.first(images)
    said = answers(trained.model, test)
    right = said == test.labels
    if not right.any():
        return []
    expected, result = said[right].numpy(), []
    for layer, attention in trained.attend(test.inputs[right]).items():
        plain, weighted = (
            by_category(trained, measured.totals("category", absolute=True)).sum(axis=1).argmax(axis=1)
            for measured in (attention, attention.weighted())
        )
        nearest = np.array(attention.top(1).columns["label"])[:, 0, 0]
        shares = (float((vote == expected).mean()) for vote in (plain, weighted, nearest))
        result.append(OtherVotes(layer, len(expected), *shares))
    return result


# -- classes, tasks and steps -----------------------------------------------------------------


@dataclass(frozen=True)
class CrossTask:
    """One layer: how the attention of one task's test images is divided among the tasks."""

    layer: str
    test: str
    """The task of the test images."""
    train: str
    """The task of the training slots."""
    share: float
    """Of the total |score|, on average over the test images."""
    share_spread: float
    mean: float
    """Mean |score| of a slot of that task, on average over the test images."""
    mean_spread: float


@dataclass(frozen=True, eq=False)
class OverTime:
    """One layer, and the test images of one source."""

    layer: str
    source: str
    starts: Float[np.ndarray, "bins"]
    """The first step of each range of steps."""
    share: Float[np.ndarray, "bins"]
    """Of the total |score|, on average over the test images."""
    spread: Float[np.ndarray, "bins"]
    """Standard deviation over the test images."""


def cross_task(totals: CategoryTotals) -> list[CrossTask]:
    """For each layer, each task's test images and each task's slots."""
    result = []
    for layer, values in totals.layers.items():
        by_task = values.sum(axis=2)
        per_slot, divided = by_task / np.maximum(totals.slots.sum(axis=1), 1), shares(by_task)
        for test, name in enumerate(totals.sources):
            for train, other in enumerate(totals.sources):
                share, mean = (numbers[totals.task == test, train] for numbers in (divided, per_slot))
                spreads = float(share.mean()), float(share.std()), float(mean.mean()), float(mean.std())
                result.append(CrossTask(layer, name, other, *spreads))
    return result


def over_time(trained: Trained, *, images: int, bins: int) -> list[OverTime]:
    """Total |score| by step, averaged over the first images of each source's test set."""
    result = []
    for source, prepared in trained.data.items():
        spotlights = trained.attend(prepared.test.inputs[:images])
        for layer in trained.layers:
            totals = spotlights[layer].totals("step", absolute=True, bins=bins)
            divided = shares(totals.numpy())
            starts = np.array(totals.groups, dtype=float)
            result.append(OverTime(layer, source, starts, divided.mean(axis=0), divided.std(axis=0)))
    return result
