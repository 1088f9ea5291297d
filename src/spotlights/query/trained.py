"""The weights that training left: of a model, of the closed recording, or some entries of them after any step.

The step log has some entries of every parameter after every step. They tell whether a model has the weights of the last
step, or of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import plain
from spotlights.query.forward import parameters_of, probed_after, same


@dataclass(frozen=True)
class TrainedParameters:
    """A layer's parameters as they were after a step, all of them or some entries."""

    source: str
    parameters: dict[str, Float[Tensor, "_"]]
    """By name, flat."""
    entries: Mapping[str, slice]
    """Which entries of a parameter these are; a parameter that is not named here is whole."""

    def like(self, parameters: Mapping[str, Tensor]) -> Float[Tensor, "_"]:
        """The same entries of other parameters, joined; in float64."""
        flat = {name: parameters[name].double().reshape(-1) for name in sorted(self.parameters)}
        return torch.cat([value[self.entries.get(name, slice(None))] for name, value in flat.items()])

    def joined(self) -> Float[Tensor, "_"]:
        return torch.cat([self.parameters[name].double() for name in sorted(self.parameters)])


def trained_parameters(
    reader: MemoryReader, layer: str, until: int, model: nn.Module | None = None, *, own_final: bool = True
) -> TrainedParameters:
    """The parameters of the model, else the recorded final ones, else the probed entries of the step log.

    `own_final`: take the final weights as they are, also if they were changed after the last step.
    """
    entry = reader.manifest.layers[layer]
    names = [*entry.weight_columns, *entry.bias_names]
    if model is not None:
        own = parameters_of(model, entry)
        return TrainedParameters("the model", {name: plain(own[name]).reshape(-1) for name in names}, {})
    at_the_end = reader.final is not None and until == reader.manifest.steps
    if at_the_end and (own_final or not moved_at_the_end(reader, layer)):
        assert reader.final is not None
        return TrainedParameters(
            "final weights", {name: reader.final[f"{layer}/{name}"].reshape(-1) for name in names}, {}
        )
    probed = probed_after(reader, layer, until)
    parameters = {name: reader.initial[f"{layer}/{name}"].reshape(-1) for name in names}
    parameters |= {name: entries for name, (_, entries) in probed.items()}
    return TrainedParameters(f"samples at step {until}", parameters, {name: at for name, (at, _) in probed.items()})


def moved_at_the_end(reader: MemoryReader, layer: str) -> bool:
    """Whether the final weights are not those of the last step: somebody changed them before the recording closed."""
    final = reader.final
    if final is None or not reader.steps or reader.steps != reader.manifest.steps:
        return False
    return not all(
        same(final[f"{layer}/{name}"].reshape(-1)[place], entries)
        for name, (place, entries) in probed_after(reader, layer, reader.steps).items()
    )
