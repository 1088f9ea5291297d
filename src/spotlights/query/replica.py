"""A replica: a copy of the user's network whose recorded parameters can be set to those of any step.

It answers, in eval mode, with some numbers of interest, and with their gradients by the recorded parameters, in the
shapes of the memory.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spotlights.dual_form import OuterSum
from spotlights.errors import SettingError, UnsupportedError
from spotlights.layers import WeightPart
from spotlights.layers.adapter import plainly, unwrapped
from spotlights.memory.format.manifest import LayerEntry
from spotlights.query.forward import Target, call_model, find_map, numbers_of_interest

FEW_ROWS = 32
"""A gradient of so many outer products is not multiplied out: adding them up takes less time than adding a matrix."""
_AT_ONCE_BYTES = 64 << 20
"""Derivatives of all numbers are computed in one pass up to this size."""
_SAME = 1e-3
"""What the calls of a linear layer say of its gradient may differ by so much from what autograd says."""

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
        """`places`: the recorded parameters that can be set. The model itself is left as it is."""
        self._model = copy.deepcopy(unwrapped(model)).eval()
        self._inputs = inputs
        self._targets = targets
        self._places = [RecordedParameter(self._model, layers[layer], layer, name) for layer, name in places]
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
        self._linear: dict[str, _LinearLayer] = {}
        self._at_once = True
        self._watch_linear_layers()
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

    def gradients(self) -> Iterator[list[Float[Tensor, "..."] | OuterSum | None]]:
        """Of each number, its gradient by each recorded parameter; None where the number does not depend on it."""
        numbers, calls = self._numbers_with_graph()
        others = [p for p in self._parameters if p.requires_grad]
        outputs = [added for own in calls.values() for _, added in own]
        for own in self._derivatives(numbers, [*others, *outputs]):
            by_parameter = dict(zip(map(id, others), own, strict=False))
            errors = iter(own[len(others) :])
            by_layer = {name: _rows(used, [next(errors) for _ in used]) for name, used in calls.items()}
            del own
            yield [self._gradient_of(place, by_parameter, by_layer) for place in self._places]

    def _derivatives(
        self, numbers: Float[Tensor, "numbers"], by: Sequence[Tensor]
    ) -> Iterator[Sequence[Tensor | None]]:
        """Of each number, its derivatives by some tensors; of all at once where they are small and torch can."""
        if self._at_once and 1 < len(numbers) <= _AT_ONCE_BYTES // max(1, sum(tensor.nbytes for tensor in by)):
            one_each = torch.eye(len(numbers), dtype=numbers.dtype, device=numbers.device)
            options: dict[str, Any] = {"is_grads_batched": True, "retain_graph": True, "allow_unused": True}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # an operation without a rule for batches
                    every = torch.autograd.grad(numbers, by, one_each, **options)
            except (RuntimeError, Warning):
                self._at_once = False
            else:
                for i in range(len(numbers)):
                    yield [None if own is None else own[i] for own in every]
                return
        for place, number in enumerate(numbers):
            last = place == len(numbers) - 1
            yield torch.autograd.grad(number, by, retain_graph=not last, allow_unused=True)

    def _numbers_with_graph(self) -> tuple[Float[Tensor, "numbers"], dict[str, list[_LinearCall]]]:
        """The numbers of interest, and the calls of linear layers that they were computed by."""
        for linear in self._linear.values():
            linear.calls.clear()
        with torch.enable_grad(), plainly():
            numbers = self._of(call_model(self._model, self._inputs))
        return numbers, {name: list(linear.calls) for name, linear in self._linear.items()}

    def _gradient_of(
        self,
        place: RecordedParameter,
        by_parameter: Mapping[int, Tensor | None],
        by_layer: Mapping[str, OuterSum | None],
    ) -> Float[Tensor, "..."] | OuterSum | None:
        if place.layer not in by_layer:
            gradient = by_parameter[id(place.parameter)]
            return None if gradient is None else place.kept(gradient).cpu()
        rows = by_layer[place.layer]
        if rows is None:
            return None
        if place.name == "bias":
            return rows.errors.sum(dim=0)
        return rows if len(rows.keys) <= FEW_ROWS else rows.value

    def _watch_linear_layers(self) -> None:
        """Gradients of linear layers follow from inputs and errors of their calls, unless autograd says otherwise."""
        self._linear = {
            place.layer: _LinearLayer(place.module)
            for place in self._places
            if isinstance(place.module, nn.Linear) and place.is_only_use
        }
        numbers, calls = self._numbers_with_graph()
        outputs = [added for own in calls.values() for _, added in own]
        own = torch.autograd.grad(numbers.sum(), [*self._parameters, *outputs], allow_unused=True)
        by_parameter = dict(zip(map(id, self._parameters), own, strict=False))
        errors = iter(own[len(self._parameters) :])
        by_layer = {name: _rows(used, [next(errors) for _ in used]) for name, used in calls.items()}
        for place in self._places:
            from_calls, gradient = self._gradient_of(place, by_parameter, by_layer), by_parameter[id(place.parameter)]
            if place.layer in self._linear and not _is_same(from_calls, gradient):
                self._linear.pop(place.layer).remove()
        for place in self._places:
            place.parameter.requires_grad_(place.layer not in self._linear)

    def _of(self, output: Any) -> Float[Tensor, "numbers"]:
        answers = [numbers_of_interest(output, target) for target in self._targets.values()]
        if len({len(numbers) for numbers in answers}) > 1:
            raise SettingError("Every target must give one number for each input, the same count for all targets.")
        return torch.cat(answers)


class RecordedParameter:
    """A recorded parameter in the replica."""

    def __init__(self, model: nn.Module, entry: LayerEntry, layer: str, name: str) -> None:
        self.layer, self.name = layer, name
        self._entry = entry
        self.module, self._linear = find_map(model, entry.modules[0], entry)
        self.is_only_use = len(entry.modules) == 1 and not entry.turned
        self.part: WeightPart = self._linear.parameters[name]
        self.parameter = self.part.parameter

    def kept(self, own: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self._linear.kept(self.name, own)

    def set(self, kept: Float[Tensor, "..."]) -> None:
        own = self.part.value
        new = self._entry.own(self.name, kept).reshape(own.shape).to(own)
        if self.part.rows is None:
            self.parameter.data = new
        else:
            own.copy_(new)


_LinearCall = tuple[Float[Tensor, "*lead in_features"], Float[Tensor, "*lead out_features"]]
"""A call's input, and zeros that were added to its output, so that their gradient is the output's."""


class _LinearLayer:
    """A linear layer, and its calls in a pass that keeps a graph."""

    def __init__(self, module: nn.Linear) -> None:
        self.calls: list[_LinearCall] = []
        self.remove = module.register_forward_hook(self._hook, with_kwargs=True).remove

    def _hook(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        added = torch.zeros_like(output, requires_grad=True)
        self.calls.append(((args[0] if args else kwargs["input"]).detach(), added))
        return output + added


def _rows(calls: Sequence[_LinearCall], errors: Sequence[Tensor | None]) -> OuterSum | None:
    """The rows of some calls that have an error; None if there are none."""
    pairs = [(e, x) for (x, _), e in zip(calls, errors, strict=True) if e is not None]
    if not pairs:
        return None
    e, x = (torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in parts]) for parts in zip(*pairs, strict=True))
    used = (e != 0).any(dim=1).nonzero().flatten()
    return OuterSum(e[used].cpu(), x[used].cpu()) if len(used) else None


def _is_same(from_calls: Tensor | OuterSum | None, gradient: Tensor | None) -> bool:
    """Up to rounding; a gradient that is not there tells nothing."""
    if from_calls is None or gradient is None:
        return False
    full = from_calls.value if isinstance(from_calls, OuterSum) else from_calls
    gradient = gradient.cpu()
    return full.shape == gradient.shape and bool((full - gradient).norm() <= _SAME * gradient.norm())
