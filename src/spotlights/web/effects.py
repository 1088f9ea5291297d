"""What a mask does to all test inputs: how many are still right, and which change most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import UnsupportedError
from spotlights.web.data import BATCH, input_row, predictions
from spotlights.web.explorer import Explorer
from spotlights.web.masks import Mask

SHOWN_INPUTS = 6
LEAST_CHANGE = 0.01
"""A smaller change of the right answer's share is not worth a look."""


def accuracy(explorer: Explorer, mask: Mask) -> dict[str, Any]:
    """The share of test inputs that are right, with and without what the mask leaves out, and who changes most."""
    masks, inputs = explorer.masks(), explorer.subject.inputs
    if predictions(explorer) is None or inputs.labels is None:
        raise UnsupportedError("The test inputs have no labels: there is no accuracy.")
    labels = torch.tensor(inputs.labels)

    def answers(of: Mask) -> dict[str, Any]:
        said, share = _answers(masks.network(of), inputs.tensors, labels)
        return {"said": said, "share": share}

    before = explorer.kept(("answers", Mask()), lambda: answers(Mask()), labels.nbytes * 2)
    after = answers(mask) if mask else before
    change = after["share"] - before["share"]
    return {
        "with": _shares(before["said"], labels),
        "without": _shares(after["said"], labels),
        "worse": _changed(explorer, -change, before, after),
        "better": _changed(explorer, change, before, after),
    }


@torch.no_grad()
def _answers(
    network: Callable[[Tensor], Any], tensors: Tensor, labels: Int64[Tensor, "inputs"]
) -> tuple[Int64[Tensor, "inputs"], Float[Tensor, "inputs"]]:
    """What the network says to every input, and how likely it finds the right answer."""
    chances = torch.cat([network(some).double().softmax(dim=1).cpu() for some in tensors.split(BATCH)])
    return chances.argmax(dim=1), chances.gather(1, labels[:, None])[:, 0]


def _shares(said: Tensor, labels: Tensor) -> dict[str, Any]:
    right = (said == labels).double()
    by_label = {int(label): float(right[labels == label].mean()) for label in labels.unique()}
    return {"all": float(right.mean()), "by_label": by_label}


def _changed(explorer: Explorer, by: Tensor, before: dict[str, Tensor], after: dict[str, Tensor]) -> list[Any]:
    """The inputs that change most in one direction."""
    places = by.topk(min(SHOWN_INPUTS, len(by))).indices
    return [
        {
            **input_row(explorer, place),
            "now": int(after["said"][place]),
            "right": float(before["share"][place]),
            "right_now": float(after["share"][place]),
        }
        for place in places[by[places] >= LEAST_CHANGE].tolist()
    ]
