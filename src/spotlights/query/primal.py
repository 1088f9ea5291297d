"""The network with weights that a memory gives: those of a view, of masked slots, or of an earlier step."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from spotlights.errors import warn
from spotlights.layers.adapter import unwrapped
from spotlights.query.engine import View
from spotlights.query.forward import find_map

_FAR = 30.0
"""So many times as large as in the trained network: far outside what it ever computed. `benchmarks/masks.py` measures
what masks do: answers may be out of range from 4 times on, without a warning (docs/questions.md)."""


class Far:
    """Warns once of a mask that leaves one side of a sum which cancels: such answers say nothing about training."""

    def __init__(self, view: View) -> None:
        self.looks = not view.is_whole

    def check(self, layer: str, masked: Tensor, trained: Tensor) -> None:
        """Compares what a mask makes with what the trained network has."""
        largest, usual = float(masked.abs().max()), float(trained.abs().max())
        if not self.looks or largest <= _FAR * usual:
            return
        self.looks = False
        warn(
            f'Without the masked slots, layer "{layer}" reaches {largest:.3g}; in the trained network {usual:.3g}. '
            "What is left is one side of a sum that cancels (κ): the answer says nothing about training without them."
        )


def primal_model(view: View, model: nn.Module, parameters: dict[str, dict[str, Tensor]]) -> nn.Module:
    """A copy of the model with the given weights in some of its recorded layers."""
    replaced = copy.deepcopy(unwrapped(model)).eval()
    far = Far(view)
    with torch.no_grad():
        for name, values in parameters.items():
            entry = view.reader.manifest.layers[name]
            _, linear = find_map(replaced, entry.modules[0], entry)
            for parameter, value in values.items():
                own = linear.parameters[parameter].value
                far.check(name, value, own)
                own.copy_(entry.own(parameter, value).reshape(own.shape))
    return replaced
