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
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, OneMapCall, class_of
from spotlights.torch_internals import COMPILER, Untraced, base_of

Use = Callable[[Tensor, Tensor, slice], Tensor]
"""Called with the input, the output, and which rows of the weight were used; returns the output to continue with."""


_torch_linear = F.linear
_watches: dict[int, list[Watch]] = {}
"""By the `id` of the weight. A watch holds the weight, so the id stays valid."""
_outside: dict[int, list[Watch]] = {}
"""Those of uses outside the module of the weight."""
_FRAMES = 6
"""Where to look for `nn.Linear.forward`, which calls nothing but `F.linear`: checkers of types add frames."""


def _reporting_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output = _torch_linear(input, weight, bias)
    if _watches:
        output = _reporter(input, weight, output)
    # Compiled code has no such frames: uses outside the module are then seen as gradients without slots.
    if _outside and not torch.compiler.is_compiling() and not _called_by_linear():
        for watch in _outside.get(id(weight), ()):
            if watch.bias is bias:
                return watch.use(input, output, slice(None))
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


class Watch:
    """Calls a function when a weight is used, until it is removed like the handle of a hook."""

    def __init__(self, among: dict[int, list[Watch]], weight: Tensor, use: Use, bias: Tensor | None = None) -> None:
        self._among, self._weight, self.use, self.bias = among, weight, use, bias
        among.setdefault(id(weight), []).append(self)
        F.linear = _reporting_linear

    def remove(self) -> None:
        of_weight = self._among[id(self._weight)]
        of_weight.remove(self)
        if not of_weight:
            del self._among[id(self._weight)]
        if not _watches and not _outside:
            F.linear = _torch_linear


def watch(weight: nn.Parameter, use: Use) -> Watch:
    """Reports every `F.linear` with this weight, or with some of its rows."""
    global _reporter
    if COMPILER in sys.modules:
        _reporter = Untraced(_report)
    return Watch(_watches, weight, use)


def watch_outside(module: nn.Module, use: Use) -> Watch:
    """Reports every `F.linear` with the weight and the bias of an `nn.Linear` outside its own forward."""
    assert isinstance(module, nn.Linear)
    return Watch(_outside, module.weight, use, module.bias)


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


class FunctionalAdapter(WatchingAdapter):
    """For modules that use weights by `F.linear(input, weight, bias)`."""

    axes: ClassVar[tuple[int, ...] | None] = None
    """Which axes of rows, as `arrange` has them, may count the examples (see `Call`)."""

    def use(self, module: nn.Module, name: str, input: Tensor, rows: slice) -> Call:
        """Describes a use of one of the weights, or of some of its rows. The errors of the other rows are then zero."""
        out_features, arrange = self._weight(module, name).shape[0], self.arrange(module, name, input)

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

    def _weight(self, module: nn.Module, name: str) -> nn.Parameter:
        return self.maps(module)[name].weights["weight"].parameter

    def watched(
        self, module: nn.Module, names: Iterable[str], report: Report, guard: Guarded, attached: Guarded
    ) -> list[Any]:
        def note(name: str, input: Tensor, output: Tensor, rows: slice) -> Tensor | None:
            return report(name, self.use(module, name, input, rows), output)

        noted = guard(note)

        def use(name: str, input: Tensor, output: Tensor, rows: slice) -> Tensor:
            instead = noted(name, input, output, rows)
            return output if instead is None else instead

        return [watch(self._weight(module, name), partial(use, name)) for name in names]


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

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        get = module.get_parameter
        return {
            weight: LinearMap.of(get(weight), None if bias is None else get(bias))
            for weight, bias in self._names.items()
        }
