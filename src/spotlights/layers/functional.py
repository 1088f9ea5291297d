"""Weights that are used by `F.linear`: those of `nn.MultiheadAttention`, of the user's own modules, and those of an
`nn.Linear` that another module uses (`F.linear(x, self.qkv.weight, self.qkv.bias)`, as Swin does).

No module returns the output of such a linear map, so a forward hook cannot see it. Instead, while a weight is watched,
`torch.nn.functional.linear` reports its uses. What it computes does not change.
"""

from __future__ import annotations

import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, OneMapCall, WeightPart, class_of
from spotlights.torch_internals import COMPILER, Untraced, base_of

Use = Callable[[Tensor, Tensor, slice], Tensor]
"""Called with the input, the output, and which rows of the weight were used; returns the output to continue with."""


_torch_linear = F.linear
_watches: dict[int, list[Watch]] = {}
"""By the `id` of the weight. A watch holds the weight, so the id stays valid."""
_outside: dict[int, list[OutsideWatch]] = {}
_FRAMES = 6
"""Where to look for `nn.Linear.forward`, which calls nothing but `F.linear`: checkers of types add frames."""


def _reporting_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output = _torch_linear(input, weight, bias)
    if _watches:
        output = _reporter(input, weight, output)
    # Compiled code has no such frames: uses outside the module are then seen as gradients without slots.
    if _outside and not torch.compiler.is_compiling() and not _called_by_linear():
        for watch in _outside.get(id(weight), ()):
            if watch.module.bias is bias:
                return watch.use(input, output)
    return output


def _called_by_linear() -> bool:
    """Whether the running `F.linear` is that of `nn.Linear.forward`, whose module reports it."""
    frame, code = inspect.currentframe(), nn.Linear.forward.__code__
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is code:
            return True
    return False


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
        _remove(_watches, self.weight, self)


@dataclass(frozen=True, eq=False)
class OutsideWatch:
    """What is called when the weight and the bias of an `nn.Linear` are used outside its forward."""

    module: nn.Linear
    use: Callable[[Tensor, Tensor], Tensor]
    """Called with the input and the output; returns the output to continue with."""

    def remove(self) -> None:
        _remove(_outside, self.module.weight, self)


def _remove(watches: dict[int, list[Any]], weight: Tensor, watch: Watch | OutsideWatch) -> None:
    watches[id(weight)].remove(watch)
    if not watches[id(weight)]:
        del watches[id(weight)]
    if not _watches and not _outside:
        F.linear = _torch_linear


def watch(weight: nn.Parameter, use: Use) -> Watch:
    """Reports every `F.linear` with this weight, or with some of its rows, until the watch is removed."""
    global _reporter
    if COMPILER in sys.modules:
        _reporter = Untraced(_report)
    _watches.setdefault(id(weight), []).append(watch := Watch(weight, use))
    F.linear = _reporting_linear
    return watch


def watch_outside(module: nn.Linear, use: Callable[[Tensor, Tensor], Tensor]) -> OutsideWatch:
    """Reports every `F.linear` with the module's weight and bias outside its own forward, until it is removed."""
    _outside.setdefault(id(module.weight), []).append(watch := OutsideWatch(module, use))
    F.linear = _reporting_linear
    return watch


Report = Callable[[str, Call | None, Tensor], Tensor | None]
"""Told of a use of a map: its name, the call, and the output; returns the output to continue with, None for the same.

Without a call, it is a use of the parameter of this name that nobody understands."""
Guarded = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to one that may be a hook."""


class WatchingAdapter(ModuleAdapter):
    """For modules whose uses of their weights are seen where they happen, and not in what the module returns."""

    @abstractmethod
    def watched(
        self, module: nn.Module, names: Iterable[str], report: Report, guard: Guarded, attached: Guarded
    ) -> list[Any]:
        """Reports the uses of these maps of a module; returns handles.

        Args:
            module: that uses them.
            names: of the maps.
            report: told of each use.
            guard: keeps errors of hooks away from training.
            attached: makes a hook that copies of the module do not have.
        """

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        raise NotImplementedError("the uses of these weights are reported, not the forward of their module")


class FunctionalAdapter(WatchingAdapter):
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

    def watched(
        self, module: nn.Module, names: Iterable[str], report: Report, guard: Guarded, attached: Guarded
    ) -> list[Any]:
        def note(name: str, input: Tensor, output: Tensor, rows: slice) -> Tensor | None:
            return report(name, self.use(module, name, input, rows), output)

        noted, weights = guard(note), self.weights(module)

        def use(name: str, input: Tensor, output: Tensor, rows: slice) -> Tensor:
            instead = noted(name, input, output, rows)
            return output if instead is None else instead

        return [watch(weights[name][0], partial(use, name)) for name in names]


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
        return class_of(module) is self._class

    def weights(self, module: nn.Module) -> Mapping[str, tuple[nn.Parameter, WeightPart | None]]:
        get = module.get_parameter
        return {
            weight: (get(weight), None if bias is None else WeightPart(get(bias)))
            for weight, bias in self._names.items()
        }
