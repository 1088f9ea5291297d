"""A replica: a copy of the user's network whose recorded parameters can be set to those of any step.

It answers, in eval mode, with some numbers of interest, and with their gradients by the recorded parameters, in the
shapes of the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spotlights.errors import SettingError, UnsupportedError
from spotlights.layers import WeightPart
from spotlights.layers.adapter import plainly, unwrapped
from spotlights.memory.format.manifest import LayerEntry
from spotlights.query.forward import Target, call_model, find_map, numbers_of_interest

Place = tuple[str, str]
"""A recorded parameter: the name of the layer, and that of the parameter in it."""


class Replica:
    """The network at any weights."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        layers: Mapping[str, LayerEntry],
        places: Sequence[Place],
        targets: Mapping[str, Target],
    ) -> None:
        """
        Args:
            model: the trained network, which is left as it is.
            inputs: what it is asked about.
            layers: the recorded layers.
            places: the recorded parameters that can be set.
            targets: the numbers of interest, by name; each has one for each input.
        """
        self._model = copy.deepcopy(unwrapped(model)).eval()
        self._inputs = inputs
        self._targets = targets
        self._places = [_Place(self._model, layers[layer], layer, name) for layer, name in places]
        self._buffers = dict(self._model.named_buffers())
        self.statistics = {n for n in self._buffers if n.rsplit(".", 1)[-1] in ("running_mean", "running_var")}
        """The names of the running statistics that the network has."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        self._parameters = list({id(place.parameter): place.parameter for place in self._places}.values())
        for parameter in self._parameters:
            parameter.requires_grad_()
        users: dict[tuple[int, int | None], str] = {}
        for place in self._places:
            other = users.setdefault(place.part.identity, place.layer)
            if other != place.layer:
                raise UnsupportedError(
                    f'The layers "{other}" and "{place.layer}" share the parameter "{place.name}" but not their '
                    "weights: neither of them has all of its gradient, so there is no history through it."
                )
        self.said: Int64[Tensor, "inputs"] | None = None
        """The largest output at the last weights, for each input, if the output has classes."""
        self.count = len(self.numbers())
        """How many numbers of interest there are: one for each target and input."""

    def weights(self) -> list[Float[Tensor, "..."]]:
        """The recorded parameters as they are now, copied."""
        return [place.kept(place.parameter.detach()).cpu().clone() for place in self._places]

    def set(self, weights: Sequence[Float[Tensor, "..."]], statistics: Mapping[str, Tensor]) -> None:
        """Sets all recorded parameters, and the running statistics that are given. Changes no given tensor."""
        with torch.no_grad():
            for place, kept in zip(self._places, weights, strict=True):
                place.set(kept)
            for name, value in statistics.items():
                self._buffers[name].copy_(value)

    def numbers(self) -> Float[Tensor, "numbers"]:
        """The numbers of interest, in float64: those of the first target for all inputs, then of the second."""
        with torch.no_grad(), plainly():
            output = call_model(self._model, self._inputs)
            self.said = output.argmax(dim=1).cpu() if isinstance(output, Tensor) and output.ndim == 2 else None
            return self._of(output).double().cpu()

    def gradients(self) -> Iterator[list[Float[Tensor, "..."] | None]]:
        """Of each number, its gradient by each recorded parameter; None where the number does not depend on it."""
        with torch.enable_grad(), plainly():
            numbers = self._of(call_model(self._model, self._inputs))
        for place, number in enumerate(numbers):
            last = place == len(numbers) - 1
            own = torch.autograd.grad(number, self._parameters, retain_graph=not last, allow_unused=True)
            by_parameter = dict(zip(map(id, self._parameters), own, strict=True))
            in_order = [by_parameter[id(place.parameter)] for place in self._places]
            del own, by_parameter  # so that the next number's gradients take their place
            yield [None if g is None else p.kept(g).cpu() for p, g in zip(self._places, in_order, strict=True)]

    def _of(self, output: Any) -> Float[Tensor, "numbers"]:
        answers = [numbers_of_interest(output, target) for target in self._targets.values()]
        if len({len(numbers) for numbers in answers}) > 1:
            raise SettingError("Every target must give one number for each input, the same count for all targets.")
        return torch.cat(answers)


class _Place:
    """A recorded parameter in the replica."""

    def __init__(self, model: nn.Module, entry: LayerEntry, layer: str, name: str) -> None:
        self.layer, self.name = layer, name
        self._entry = entry
        _, self._linear = find_map(model, entry.modules[0], entry)
        self.part: WeightPart = self._linear.parameters[name]
        self.parameter = self.part.parameter

    def kept(self, own: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self._linear.kept(self.name, own)

    def set(self, kept: Float[Tensor, "..."]) -> None:
        own = self.part.value
        new = self._entry.own(kept) if self.name in self._entry.weight_columns else kept
        new = new.reshape(own.shape).to(own)
        if self.part.rows is None:
            self.parameter.data = new
        else:
            own.copy_(new)
