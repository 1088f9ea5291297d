"""One task after the other: what the network forgets, and the masks that the paper proposes but does not try.

A forgotten image was answered rightly when the second task began and is answered wrongly at the end. Its margin is the
logit of the wrong answer minus that of the true class, so slots with positive contributions to the margin made the
answer wrong. A mask leaves out one task's slots, in one layer or in all.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spotlights_paper.experiments.analyses.test_set import by_category
from spotlights_paper.experiments.training import Trained, answers


@dataclass(frozen=True, eq=False)
class Interference:
    """One layer: what each category of slots adds to the margins of forgotten images of each class."""

    layer: str
    adds_up: bool
    """In the last layer; in a hidden layer it is first order, through the gradient of the margin."""
    contributions: Float[np.ndarray, "classes sources classes"]
    """Mean over the forgotten images of a true class (rows); NaN where there is none."""


@dataclass(frozen=True, eq=False)
class ForgottenImages:
    """The forgotten test images of the first task."""

    source: str
    """The task that is forgotten."""
    answered: Int[np.ndarray, "classes classes"]
    """Those that were right at the switch and are wrong at the end, by true class (rows) and answer (columns)."""
    sampled: int
    """How many of the forgotten images were taken apart."""
    layers: list[Interference]


def forgetting(trained: Trained, *, switch: int, images: int) -> ForgottenImages:
    """Takes apart the margins of the first task's forgotten test images; evenly spaced ones, if many."""
    source = trained.sources[0]
    test = trained.data[source].test
    count = len(test.classes)
    before = answers(trained.memory.as_of(switch).primal(trained.model), test)
    after = answers(trained.model, test)
    lost = ((before == test.labels) & (after != test.labels)).nonzero().flatten()
    spread_out = lost[torch.linspace(0, len(lost) - 1, min(images, len(lost))).round().long()]
    true, said = test.labels[spread_out], after[spread_out]
    answered = torch.bincount(test.labels[lost] * count + after[lost], minlength=count * count)
    return ForgottenImages(
        source,
        answered.reshape(count, count).numpy(),
        len(spread_out),
        _layers(trained, test.inputs[spread_out], true, said) if len(spread_out) else [],
    )


def _layers(trained: Trained, inputs: Tensor, true: Tensor, said: Tensor) -> list[Interference]:
    def margin(logits: Tensor) -> Tensor:
        return (logits.gather(1, said[:, None]) - logits.gather(1, true[:, None]))[:, 0]

    layers = []
    for layer, attention in trained.attend(inputs).items():
        contributions = attention.contributions(margin)
        per_image = by_category(trained, contributions.totals("category"))
        means = np.full((per_image.shape[2], *per_image.shape[1:]), np.nan)
        for label in true.unique().tolist():
            means[label] = per_image[true.numpy() == label].mean(axis=0)
        layers.append(Interference(layer, contributions.adds_up, means))
    return layers


# -- masks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Masked:
    """The accuracy of a network some of whose slots are left out."""

    masked: str
    """The source whose slots are left out; "" for none."""
    layers: list[str]
    """The layers in which they are left out."""
    as_of: int
    """The optimizer step after which the network is looked at."""
    accuracy: dict[str, float]
    """By source."""


def masks(trained: Trained, *, switch: int) -> list[Masked]:
    """Every mask of one task: in all layers together, and in each layer alone.

    Args:
        switch: the step at which the second task began; the network is also looked at as it was then.
    """
    memory, end, layers = trained.memory, trained.memory.steps, trained.layers
    networks = [
        Masked("", [], switch, trained.accuracies(memory.as_of(switch).primal(trained.model))),
        Masked("", [], end, trained.accuracies(trained.model)),
    ]
    for source in trained.sources:
        without = memory.without(source=source).primal(trained.model)
        for some in (layers, *([layer] for layer in layers)):
            model = copy.deepcopy(trained.model)
            for layer in some:
                model.get_submodule(layer).load_state_dict(without.get_submodule(layer).state_dict())
            networks.append(Masked(source, list(some), end, trained.accuracies(model)))
    return networks
