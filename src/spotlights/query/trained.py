"""The weights that training left: of a model, of the closed recording, or some entries of them after any step.

The step log has some entries of every parameter after every step. They tell whether a model has the weights of the last
step, or of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.format.names import probed_entries
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import plain
from spotlights.query.engine import View
from spotlights.query.forward import parameters_of


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
    entry, names = reader.manifest.layers[layer], _names(reader.manifest.layers[layer])
    if model is not None:
        own = parameters_of(model, entry)
        return TrainedParameters("the model", {name: plain(own[name]).reshape(-1) for name in names}, {})
    at_the_end = reader.final is not None and until == reader.manifest.steps
    if at_the_end and (own_final or not moved_at_the_end(reader, layer)):
        assert reader.final is not None
        return TrainedParameters(
            "final weights", {name: reader.final[f"{layer}/{name}"].reshape(-1) for name in names}, {}
        )
    kept = {name: probed_entries(reader.initial[f"{layer}/{name}"].numel()) for name in entry.trained}
    parameters = {name: reader.initial[f"{layer}/{name}"].reshape(-1) for name in names}
    for name, entries in kept.items():
        logged = reader.log(layer).probed[name][until - 1 : until]
        parameters[name] = logged[0] if until else parameters[name][entries]
    return TrainedParameters(f"samples at step {until}", parameters, kept)


def _names(entry: LayerEntry) -> list[str]:
    return [*entry.weight_columns, *entry.bias_names]


def moved_at_the_end(reader: MemoryReader, layer: str) -> bool:
    """Whether the final weights are not those of the last step: somebody changed them before the recording closed."""
    final, log = reader.final, reader.log(layer)
    if final is None or not reader.steps or reader.steps != reader.manifest.steps:
        return False
    return not all(
        same(final[f"{layer}/{name}"].reshape(-1)[probed_entries(final[f"{layer}/{name}"].numel())], probed[-1])
        for name, probed in log.probed.items()
    )


def same(a: Float[Tensor, "entries"], b: Float[Tensor, "entries"]) -> bool:
    """Equal, up to the rounding of the coarser of two types."""
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return torch.allclose(a.double(), b.double(), rtol=2 * eps, atol=0.0, equal_nan=True)


def what_differs(
    view: View, of_model: Callable[[str], Mapping[str, Float[Tensor, "..."]]], layers: Sequence[str]
) -> str | None:
    """Whether a model has other weights than the memory after the view's last step; of which step, if it has.

    Compares the probed entries alone; `of_model` gives the model's parameters of a layer.
    """
    reader, until = view.reader, view.until
    if reader.manifest.fold is not None:
        return None
    own, recorded = {}, {}
    for layer in layers:
        entry, known = reader.layers[layer].entry, reader.layers[layer].known
        if known.get("entries", (None,))[0] != until:  # the last ones are kept with the layer
            known["entries"] = until, {name: _entries(reader, layer, name, until) for name in entry.trained}
        parameters = of_model(layer)
        for name, (place, entries) in known["entries"][1].items():
            own[layer, name] = parameters[name].reshape(-1)[place].to(entries)
            recorded[layer, name] = entries
    different = [key for key, entries in own.items() if not same(entries, recorded[key])]
    if not different:
        return None
    for step in range(reader.steps, -1, -1):
        if all(same(entries, _entries(reader, layer, name, step)[1]) for (layer, name), entries in own.items()):
            return f"the model differs from the memory: it has the weights of step {step}: use memory.as_of({step})"
    far = max(float((own[key].double() - recorded[key].double()).norm() / own[key].double().norm()) for key in own)
    named = ", ".join(dict.fromkeys(layer for layer, _ in different))
    return (
        f"the model differs from the memory, whose weights are those after step {until}: by up to {far:.1%} in {named}"
    )


def _entries(reader: MemoryReader, layer: str, name: str, step: int) -> tuple[slice, Float[Tensor, "entries"]]:
    """Which entries of a parameter were probed, and what they were after a step."""
    flat = reader.initial[f"{layer}/{name}"].reshape(-1)
    place = probed_entries(flat.numel())
    return place, reader.log(layer).probed[name][step - 1] if step else flat[place]
