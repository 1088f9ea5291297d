"""What a memory says of each training example for each test image: the answers that are compared with retraining."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from spotlights.attention.per_input import PerInput
from spotlights.experiments.truth.recorded import Recorded, ask_about, in_order, margin_of
from spotlights.experiments.truth.settings import Data


@dataclass(frozen=True, eq=False)
class Answer:
    """A method's number for each test image and training example."""

    method: str
    scores: Float[Tensor, "test train"]
    seconds: float
    """On top of training (and recording)."""


def influence(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    found = ask_about(data, recorded).influence(margin_of(data))
    return in_order(found.totals("example"), data)


def contributions(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """All layers added up: exact in the last one, first order in the others."""
    spot, target = ask_about(data, recorded), margin_of(data)
    owners = [attention.owners(target)[0] for attention in spot.values()]
    parts = [attention.contributions(target) for attention in spot.values()]
    return in_order(PerInput(parts, owners, inputs=len(data.test_labels)).totals("example"), data)


def scores(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """The last layer's attention."""
    spot = ask_about(data, recorded)
    return in_order(spot[list(spot)[-1]].totals("example"), data)


def same_label(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """Knows nothing but labels: what any method must beat."""
    return (data.test_labels[:, None] == data.labels[None]).double()


METHODS: dict[str, Callable[[Data, Recorded], Float[Tensor, "test train"]]] = {
    "influence": influence,
    "contribution": contributions,
    "score": scores,
    "same label": same_label,
}


def ask(method: str, data: Data, recorded: Recorded) -> Answer:
    started = time.perf_counter()
    found = METHODS[method](data, recorded)
    return Answer(method, found, time.perf_counter() - started)
