"""Many test images at once: the top training images, the totals and the vote of each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

import spotlights as sl
from spotlights.results import Top
from spotlights_paper.experiments.analyses.test_set import by_category
from spotlights_paper.experiments.images import Images
from spotlights_paper.experiments.training import Trained, answers

_PICTURES, _SLOTS = 3, 100
"""Images of each layer, and the slots among which they are looked for: an image has a slot for each visit."""


@dataclass(frozen=True)
class TopImage:
    """A training image."""

    source: str
    label: int
    example: int


@dataclass(frozen=True, eq=False)
class LayerGlance:
    """One layer."""

    layer: str
    top: list[TopImage]
    """The training images with the largest scores, each once."""
    totals: Float[np.ndarray, "sources classes"]
    """|score| added up, as in the paper's footnote 8."""

    @property
    def vote(self) -> int:
        """The class with the largest total over all sources."""
        return int(self.totals.sum(axis=0).argmax())


@dataclass(frozen=True, eq=False)
class Glance:
    """One test image."""

    pixels: UInt8[np.ndarray, "height width"]
    source: str
    label: int
    output: int
    example: int
    layers: list[LayerGlance]

    @property
    def right(self) -> bool:
        return self.label == self.output


Rule = Callable[[Glance], bool]
"""Whether the paper's words about its own test image are true of this one."""


def glances(trained: Trained, test: Images, places: Int64[Tensor, "images"]) -> list[Glance]:
    """Glances at the test images at these places."""
    if not len(places):
        return []
    spotlights = trained.attend(test.inputs[places])
    said = spotlights.output.argmax(dim=1).tolist()
    asked = spotlights.ask(sl.AskTop(_SLOTS), sl.AskTotals("category", absolute=True))
    arranged = {name: (top, by_category(trained, totals)) for name, (top, totals) in asked.items()}
    return [
        Glance(
            test.pixels[place].numpy(),
            test.source,
            int(test.labels[place]),
            said[row],
            int(test.ids[place]),
            [
                LayerGlance(
                    name,
                    [TopImage(r["source"], r["label"], r["example"]) for r in distinct(top, row, _PICTURES)],
                    totals[row],
                )
                for name, (top, totals) in arranged.items()
            ],
        )
        for row, place in enumerate(places.tolist())
    ]


def right_and_wrong(trained: Trained, count: int) -> list[Glance]:
    """The first test images of the last source that the network gets right, and the first that it gets wrong."""
    test = trained.data[trained.sources[-1]].test
    right = answers(trained.model, test) == test.labels
    places = torch.cat([some.nonzero()[:count, 0] for some in (right, ~right)])
    return glances(trained, test, places)


def distinct(top: Top, query: int, count: int) -> list[dict[str, Any]]:
    """The first rows of an answer, each example once."""
    rows: dict[int, dict[str, Any]] = {}
    for row in top.rows(query):
        rows.setdefault(row["example"], row)
    return list(rows.values())[:count]


# -- rules ------------------------------------------------------------------------------------


def vote_is_the_class_everywhere(glance: Glance) -> bool:
    """The class has the largest total in all layers."""
    return all(layer.vote == glance.label for layer in glance.layers)


def no_other_task_on_top(glance: Glance) -> bool:
    """No training image of the other task is among the top images of any layer."""
    return all(image.source == glance.source for layer in glance.layers for image in layer.top)


def class_of_the_other_task_on_top(glance: Glance) -> bool:
    """Some layer has a training image of the other task with the same class among its top images."""
    images = [image for layer in glance.layers for image in layer.top]
    return any(image.source != glance.source and image.label == glance.label for image in images)


def vote_of_the_last_layer_disagrees(glance: Glance) -> bool:
    """The class with the largest total in the last layer is not the network's answer."""
    return glance.layers[-1].vote != glance.output


def other_task_has_the_largest_total(glance: Glance) -> bool:
    """In the last layer, the answered class of the other task has the largest total of all classes of both tasks."""
    totals = glance.layers[-1].totals
    task, label = np.unravel_index(int(totals.argmax()), totals.shape)
    return int(label) == glance.output and int(task) == len(totals) - 1
