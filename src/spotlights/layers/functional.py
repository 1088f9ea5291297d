"""Weights that a module uses by `F.linear`: those of `nn.MultiheadAttention`, and of the user's own modules.

No module returns the output of such a linear map, so a forward hook cannot see it. Instead, while a weight is watched,
`torch.nn.functional.linear` reports its uses. What it computes does not change.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, OneMapCall, WeightPart
from spotlights.torch_internals import COMPILER, Untraced, base_of

Use = Callable[[Tensor, Tensor, slice], Tensor]
"""Called with the input, the output, and which rows of the weight were used; returns the output to continue with."""


_torch_linear = F.linear
_watches: dict[int, list[Watch]] = {}
"""By the `id` of the weight. A watch holds the weight, so the id stays valid."""


def _reporting_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _reporter(input, weight, _torch_linear(input, weight, bias))


def _report(input: Tensor, weight: Tensor, output: Tensor) -> Tensor:
    whole = weight
    if not isinstance(weight, nn.Parameter) and (base := base_of(weight)) is not None:
        whole = base
    for watch in _watches.get(id(whole), ()):
        rows = _rows(whole, weight)
        if rows is not None:
            output = watch.use(input, output, rows)
    return output


_reporter: Callable[[Tensor, Tensor, Tensor], Tensor] = _report


def _rows(whole: Tensor, part: Tensor) -> slice | None:
    """Which rows of a matrix a view of it is; None for any other view."""
    if part.shape[1:] != whole.shape[1:] or part.stride() != whole.stride():
        return None
    first, rest = divmod(int(part.storage_offset()) - int(whole.storage_offset()), whole.stride(0))
    return None if rest else slice(first, first + part.shape[0])


@dataclass(frozen=True, eq=False)
class Watch:
    """What is called when a weight is used. Removed like the handle of a hook."""

    weight: nn.Parameter
    use: Use

    def remove(self) -> None:
        _watches[id(self.weight)].remove(self)
        if not _watches[id(self.weight)]:
            del _watches[id(self.weight)]
        if not _watches:
            F.linear = _torch_linear


def watch(weight: nn.Parameter, use: Use) -> Watch:
    """Reports every `F.linear` with this weight, or with some of its rows, until the watch is removed."""
    global _reporter
    if COMPILER in sys.modules:
        _reporter = Untraced(_report)
    _watches.setdefault(id(weight), []).append(watch := Watch(weight, use))
    F.linear = _reporting_linear
    return watch


class FunctionalAdapter(ModuleAdapter):
    """For modules that use weights by `F.linear(input, weight, bias)`."""

    axes: ClassVar[tuple[int, ...] | None] = None
    """Which axes of rows, as `arrange` has them, may count the examples (see `Call`)."""

    @abstractmethod
    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, WeightPart | None]]:
        """Weights of shape `(out_features, in_features)`, each with its bias, by the name of the layer."""

    def use(self, module: nn.Module, name: str, input: Tensor, rows: slice) -> Call:
        """Describes a use of one of the weights, or of some of its rows. The errors of the other rows are then zero."""
        out_features, arrange = self.weights(module)[name][0].shape[0], self.arrange(module, name, input)

        def errors(gradient: Tensor) -> Tensor:
            gradient = arrange(gradient)
            if gradient.shape[-1] == out_features:
                return gradient
            every = gradient.new_zeros(*gradient.shape[:-1], out_features)
            every[..., rows] = gradient
            return every

        call = OneMapCall(name, input, arrange(input.detach()).shape[:-1], arrange, errors)
        call.axes = self.axes
        return call

    def arrange(self, module: nn.Module, name: str, input: Tensor) -> Callable[[Tensor], Tensor]:
        """Puts the batch first: from the leading shape of the input to that of its rows."""
        return lambda tensor: tensor

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        return {
            name: LinearMap({"weight": WeightPart(weight)}, {} if bias is None else {"bias": bias})
            for name, (weight, bias) in self.weights(module).items()
        }

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        raise NotImplementedError("F.linear reports the uses of these weights, not the forward of their module")


class FunctionalLinear(FunctionalAdapter):
    """Records a module of your own that calls `F.linear(x, self.weight, self.bias)` on parameters of any name.

    `sl.register_layer(sl.FunctionalLinear(MyModule, {"weight": "bias", "heads.weight": None}))`: the names of the
    weights in the module, with the names of their biases.
    """

    def __init__(self, module: type[nn.Module], weights: Mapping[str, str | None]) -> None:
        self.kind = f"functional-{module.__name__.lower()}"  # type: ignore[misc]
        self._class = module
        self._names = dict(weights)

    def handles(self, module: nn.Module) -> bool:
        return type(module) is self._class

    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, WeightPart | None]]:
        get = module.get_parameter
        return {
            weight: (get(weight), None if bias is None else WeightPart(get(bias)))
            for weight, bias in self._names.items()
        }
