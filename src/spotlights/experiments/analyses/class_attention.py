"""Where each class looks, over the whole test set: means and spread per class and per task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from spotlights.experiments.analyses.categories import CategoryTotals, shares


@dataclass(frozen=True, eq=False)
class ClassAttention:
    """One layer: |score| of test classes (rows) over training classes (columns), task by task."""

    layer: str
    mean: Float[np.ndarray, "test_classes train_classes"]
    """Mean |score| of a slot, over the slots of a category and the test images of a class."""
    spread: Float[np.ndarray, "test_classes train_classes"]
    """Standard deviation over the test images of the class."""
    share: Float[np.ndarray, "test_classes train_classes"]
    """Of the total |score|, on average; each row adds up to 1."""


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


def class_attention(totals: CategoryTotals) -> list[ClassAttention]:
    """For each layer."""
    found = []
    classes = totals.slots.shape[1]
    for layer, values in totals.layers.items():
        flat = values.reshape(len(values), -1)
        per_slot = flat / np.maximum(totals.slots.reshape(-1), 1)
        divided = shares(flat)
        members = [
            (totals.task == task) & (totals.target == label)
            for task in range(len(totals.sources))
            for label in range(classes)
        ]
        found.append(
            ClassAttention(
                layer,
                np.array([_mean(per_slot[chosen]) for chosen in members]),
                np.array([_spread(per_slot[chosen]) for chosen in members]),
                np.array([_mean(divided[chosen]) for chosen in members]),
            )
        )
    return found


def cross_task(totals: CategoryTotals) -> list[CrossTask]:
    """For each layer, each task's test images and each task's slots."""
    found = []
    for layer, values in totals.layers.items():
        by_task = values.sum(axis=2)
        per_slot = by_task / np.maximum(totals.slots.sum(axis=1), 1)
        divided = shares(by_task)
        for test, name in enumerate(totals.sources):
            mine = totals.task == test
            for train, other in enumerate(totals.sources):
                share, mean = divided[mine, train], per_slot[mine, train]
                found.append(
                    CrossTask(
                        layer,
                        name,
                        other,
                        share=float(share.mean()),
                        share_spread=float(share.std()),
                        mean=float(mean.mean()),
                        mean_spread=float(mean.std()),
                    )
                )
    return found


def _mean(rows: Float[np.ndarray, "queries groups"]) -> Float[np.ndarray, "groups"]:
    return rows.mean(axis=0) if len(rows) else np.full(rows.shape[1], np.nan)


def _spread(rows: Float[np.ndarray, "queries groups"]) -> Float[np.ndarray, "groups"]:
    return rows.std(axis=0) if len(rows) else np.full(rows.shape[1], np.nan)
