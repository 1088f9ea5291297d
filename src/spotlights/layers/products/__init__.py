"""Matrices that a module of the user's own multiplies with: stacks of experts (`bmm`, `grouped_mm`, `einsum`,
`x @ self.w[e]`, `F.linear(x, self.w[e])`), and single ones.

Which parameters these are, and which way round they are, is read off the source of the module's class. While a module
is called, each product with such a parameter is reported: a stack of E matrices has E maps, `w.0`, `w.1`, …, whose rows
are the ones that went through this expert. Whose rows they are is known where the module gathers them by operations
that move rows or act on each row alone. A use of any other kind is reported too: the step's gradient is then recorded
as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spotlights.layers.adapter import LinearMap, WeightPart, own_parameters
from spotlights.layers.functional import Guarded, Report, WatchingAdapter
from spotlights.layers.products.calls import ProductMode
from spotlights.layers.products.source import multiplied
from spotlights.torch_internals import in_compiled_code, in_functorch


class ProductAdapter(WatchingAdapter):
    kind = "product"
    products = True

    def handles(self, module: nn.Module) -> bool:
        return bool(_matrices(module))

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        maps = {}
        for name, (parameter, transposed) in _matrices(module).items():
            stack = {name: None} if parameter.ndim == 2 else {f"{name}.{e}": e for e in range(len(parameter))}
            as_matrix = (lambda weight: weight.T) if transposed else (lambda weight: weight)
            for own, rows in stack.items():
                part = WeightPart(parameter, rows)
                maps[own] = LinearMap({"weight": part}, transposed=transposed, as_matrix=as_matrix)
        return maps

    def watched(
        self, module: nn.Module, names: Iterable[str], report: Report, guard: Guarded, attached: Guarded
    ) -> list[Any]:
        watch = _Watch(lambda: ProductMode(_matrices(module), report, guard))
        watch.handles += [
            module.register_forward_pre_hook(attached(guard(watch.begin)), with_kwargs=True),
            module.register_forward_hook(attached(watch.end), always_call=True),
        ]
        return [watch]


class _Watch:
    """Enters a mode for each call of a module, and leaves it whatever happens, also if it is removed meanwhile."""

    def __init__(self, mode: Callable[[], ProductMode]) -> None:
        self._mode, self._of_thread, self._removed = mode, threading.local(), False
        self.handles: list[Any] = []

    @property
    def _running(self) -> list[ProductMode | None]:
        """For each running call in this thread."""
        return self._of_thread.__dict__.setdefault("running", [])

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(None)
        if torch.is_grad_enabled() and not in_functorch() and not in_compiled_code():
            mode = self._mode()
            mode.begin([*args, *kwargs.values()])
            mode.__enter__()
            self._running[-1] = mode

    def end(self, *args: Any) -> None:
        mode = self._running.pop() if self._running else None
        if mode is not None:
            mode.__exit__(None, None, None)
        if self._removed:
            self.remove()

    def remove(self) -> None:
        self._removed = True
        while self.handles and not self._running:
            self.handles.pop().remove()


def _matrices(module: nn.Module) -> dict[str, tuple[nn.Parameter, bool]]:
    """The parameters of a module that it multiplies with, and whether they have the shape `(…, in, out)`."""
    own = own_parameters(module)
    known = multiplied(type(module)) if any(p.ndim in (2, 3) for p in own.values()) else {}
    told = getattr(module, "is_transposed", None)  # transformers
    return {
        name: (parameter, known[name] if told is None or parameter.ndim == 2 else bool(told))
        for name, parameter in own.items()
        if name in known and parameter.ndim in (2, 3) and type(parameter.data) is Tensor
    }
