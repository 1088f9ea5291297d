"""Weights that a module uses by `F.linear` itself: those of `nn.MultiheadAttention`, and those of modules of one's own.

No module's output is then that of the linear map, so a hook on a module sees too little. Instead, as long as somebody
watches a weight, `torch.nn.functional.linear` tells of its uses; what it computes stays what it is.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, Part
from spotlights.layers.untraced import Untraced

Use = Callable[[Tensor, Tensor, slice], Tensor]
"""Told of a use: the input, the output, and which rows of the weight it was; gives the output to go on with."""


class _Watched(NamedTuple):
    weight: nn.Parameter
    use: Use


_plain_linear = F.linear
_watched: dict[int, list[_Watched]] = {}
"""By the `id` of the weight, which is held here too."""


def _telling_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _teller(input, weight, _plain_linear(input, weight, bias))


def _tell(input: Tensor, weight: Tensor, output: Tensor) -> Tensor:
    whole = weight if isinstance(weight, nn.Parameter) or weight._base is None else weight._base
    for watched in _watched.get(id(whole), ()):
        rows = _rows(whole, weight)
        if rows is not None:
            output = watched.use(input, output, rows)
    return output


_teller: Callable[[Tensor, Tensor, Tensor], Tensor] = _tell


def _rows(whole: Tensor, part: Tensor) -> slice | None:
    """Which rows of a matrix a view of it is; None for any other view."""
    if part.shape[1:] != whole.shape[1:] or part.stride() != whole.stride():
        return None
    first, rest = divmod(int(part.storage_offset()) - int(whole.storage_offset()), whole.stride(0))
    return None if rest else slice(first, first + part.shape[0])


class WatchHandle:
    """Ends the watching, like the handle of a hook."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched

    def remove(self) -> None:
        weight = id(self._watched.weight)
        _watched[weight] = [each for each in _watched[weight] if each is not self._watched]
        if not _watched[weight]:
            del _watched[weight]
        if not _watched:
            F.linear = _plain_linear


def watch(weight: nn.Parameter, use: Use) -> WatchHandle:
    """Tells of every `F.linear` with this weight or with some of its rows, until the handle is removed."""
    global _teller
    if "torch._dynamo" in sys.modules:  # else there is nothing compiled, and loading it takes its time
        _teller = Untraced(_tell)
    watched = _Watched(weight, use)
    _watched.setdefault(id(weight), []).append(watched)
    F.linear = _telling_linear
    return WatchHandle(watched)


Arrange = Callable[[Tensor], Tensor]
"""Puts the batch first: from the leading shape of an input to that of its rows."""


class FunctionalCall(Call):
    """One use of a weight, or of some of its rows: the other rows have no error then."""

    def __init__(self, name: str, out_features: int, input: Tensor, rows: slice, arrange: Arrange) -> None:
        self._name = name
        self._out_features = out_features
        self._input = arrange(input.detach())
        self._rows = rows
        self._arrange = arrange
        self.may_repeat = not input.requires_grad
        self.nbytes = input.nbytes

    def leads(self) -> Mapping[str, Sequence[int]]:
        return {self._name: self._input.shape[:-1]}

    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"]]:
        return {self._name: self._input}

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        (gradient,) = gradients
        assert gradient is not None
        gradient = self._arrange(gradient)
        if gradient.shape[-1] < self._out_features:
            part, gradient = gradient, gradient.new_zeros(*gradient.shape[:-1], self._out_features)
            gradient[..., self._rows] = part
        return {self._name: gradient}

    def returns(self, name: str) -> bool:
        return True


class FunctionalAdapter(ModuleAdapter):
    """For modules that use weights by `F.linear(input, weight, bias)`: all it has to say is which."""

    @abstractmethod
    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, Part | None]]:
        """Weights of shape `(out_features, in_features)`, each with its bias, by the name that the layer shall have."""

    def use(self, module: nn.Module, name: str, input: Tensor, rows: slice) -> FunctionalCall:
        """What a use of a weight of the module was."""
        weight, _ = self.weights(module)[name]
        return FunctionalCall(name, weight.shape[0], input, rows, lambda of_input: of_input)

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        return {
            name: LinearMap({"weight": Part(weight)}, {} if bias is None else {"bias": bias})
            for name, (weight, bias) in self.weights(module).items()
        }

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        raise NotImplementedError("uses of its weights are told of by F.linear, not by its forward")


class FunctionalLinear(FunctionalAdapter):
    """A module of one's own that calls `F.linear(x, self.weight, self.bias)` on parameters of any name.

    `sl.register_layer(sl.FunctionalLinear(MyModule, {"weight": "bias", "heads.weight": None}))`: the names of the
    weights, as the module has them, with those of their biases.
    """

    def __init__(self, module: type[nn.Module], weights: Mapping[str, str | None]) -> None:
        self.kind = f"functional-{module.__name__.lower()}"  # type: ignore[misc]
        self._class = module
        self._names = dict(weights)

    def handles(self, module: nn.Module) -> bool:
        return type(module) is self._class

    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, Part | None]]:
        return {
            weight: (_parameter(module, weight), None if bias is None else Part(_parameter(module, bias)))
            for weight, bias in self._names.items()
        }


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)
