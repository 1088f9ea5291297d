"""The mask experiment that the paper only imagines: one task's slots left out, in one layer or in all."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spotlights.experiments.training import Trained, accuracy


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
    end, layers = trained.memory.steps, trained.layers
    before = trained.memory.as_of(switch).primal(trained.model)
    found = [
        Masked("", [], switch, _accuracies(trained, before)),
        Masked("", [], end, _accuracies(trained, trained.model)),
    ]
    for source in trained.sources:
        view = trained.memory.without(source=source)
        parameters = {layer: view.parameters(layer) for layer in layers}
        for chosen in (layers, *([layer] for layer in layers)):
            model = with_parameters(trained.model, parameters, chosen)
            found.append(Masked(source, list(chosen), end, _accuracies(trained, model)))
    return found


def with_parameters(
    model: nn.Module, parameters: Mapping[str, Mapping[str, Tensor]], layers: Iterable[str]
) -> nn.Module:
    """A copy of the model with other parameters in some of its layers."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for layer in layers:
            for name, value in parameters[layer].items():
                changed.get_submodule(layer).get_parameter(name).copy_(value)
    return changed


def _accuracies(trained: Trained, model: nn.Module) -> dict[str, float]:
    return {source: accuracy(model, prepared.test) for source, prepared in trained.data.items()}
