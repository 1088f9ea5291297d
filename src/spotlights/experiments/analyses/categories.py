"""Totals of all test images by category (a task and a class): what votes are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from spotlights.attention.results import Label
from spotlights.experiments.training import Trained, answers


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
    """Every category, task by task."""
    return [images.train.category(label) for images in trained.data.values() for label in range(len(images.classes))]


def by_category(
    trained: Trained, values: Float[np.ndarray, "queries groups"], groups: Sequence[Label]
) -> Float[np.ndarray, "queries sources classes"]:
    """Sorts what was asked by the column "category" into tasks and classes; nothing seen is 0."""
    names = categories(trained)
    arranged = np.zeros((len(values), len(names)))
    for position, group in enumerate(groups):
        arranged[:, names.index(str(group))] = values[:, position]
    return arranged.reshape(len(values), len(trained.sources), -1)


def shares(totals: Float[np.ndarray, "queries groups"]) -> Float[np.ndarray, "queries groups"]:
    """Each row divided by its sum; a row of zeros (all units of a layer silent) stays as it is."""
    whole = totals.sum(axis=1, keepdims=True)
    return totals / np.where(whole > 0, whole, 1.0)


def total_scores(trained: Trained, *, images: int | None = None) -> CategoryTotals:
    """One call for each layer, for the first so many test images of all tasks, or all of them."""
    tests = [prepared.test.first(images) for prepared in trained.data.values()]
    inputs = torch.cat([test.inputs for test in tests])
    spotlights = trained.attend(inputs)
    layers, slots = {}, np.zeros((len(tests), 0), dtype=np.int64)
    for layer in trained.layers:
        totals = spotlights[layer].totals("category", absolute=True)
        layers[layer] = by_category(trained, totals.numpy(), totals.groups)
        slots = by_category(trained, totals.counts[None].double().numpy(), totals.groups)[0].astype(np.int64)
    return CategoryTotals(
        layers,
        slots,
        trained.sources,
        np.repeat(np.arange(len(tests)), [len(test) for test in tests]),
        torch.cat([test.labels for test in tests]).numpy(),
        torch.cat([answers(trained.model, test) for test in tests]).numpy(),
    )
