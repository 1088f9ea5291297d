"""Sees the products with a module's parameters while the module is called, and whose rows went into them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spotlights.layers.adapter import OneMapCall, tensors_in
from spotlights.layers.functional import Guarded, Report
from spotlights.layers.products.equation import PRODUCTS, Product, UsedWeight, product_of

_MOVING = {  # rows, or dimensions
    *("__getitem__", "index_select", "repeat_interleave", "unsqueeze", "squeeze", "view", "reshape", "flatten"),
    *("unflatten", "transpose", "permute", "chunk", "split", "contiguous", "expand", "clone", "unbind", "t"),
}
_ENTRY_BY_ENTRY = {
    *("relu", "silu", "gelu", "tanh", "sigmoid", "softplus", "mish", "elu", "leaky_relu", "hardtanh", "square", "pow"),
    *("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "neg", "exp"),
    *("dropout", "clamp", "to", "float", "double", "type_as", "abs", "add_", "mul_"),
}


class ProductMode(TorchFunctionMode):
    """Reports the products with a module's parameters, while it is active."""

    def __init__(self, matrices: Mapping[str, tuple[nn.Parameter, bool]], report: Report, guard: Guarded) -> None:
        super().__init__()
        self._report, self._note = report, guard(self._noted)
        self._weights: dict[int, UsedWeight] = {}
        self._places: dict[int, tuple[Tensor, Tensor]] = {}
        """By the `id` of a tensor, which is held: the row of the module's input that each of its entries belongs to."""
        self._lead: tuple[int, ...] = ()
        for name, (parameter, transposed) in matrices.items():
            experts = torch.arange(len(parameter)) if parameter.ndim == 3 else torch.tensor(-1)
            self._weights[id(parameter)] = UsedWeight(parameter, name, experts, transposed)

    def begin(self, arguments: Iterable[Any]) -> None:
        """Notes the module's input: the first argument with features."""
        for given in arguments:
            if isinstance(given, Tensor) and given.is_floating_point() and given.ndim > 1:
                self._lead = tuple(given.shape[:-1])
                places = torch.arange(math.prod(self._lead), device=given.device)
                self._places[id(given)] = given, places.reshape(*self._lead, 1)
                return

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        instead = self._note(func, args, kwargs or {}, output)
        return output if instead is None else instead

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        name, given = getattr(func, "__name__", ""), list(tensors_in((*args, *kwargs.values())))
        weights = [self._weights[id(tensor)] for tensor in given if id(tensor) in self._weights]
        if weights:
            return self._with_weights(name, args, kwargs, list(tensors_in(output)), weights)
        places = [self._places[id(tensor)] for tensor in given if id(tensor) in self._places]
        if places:
            with torch.no_grad():
                self._follow(func, name, args, kwargs, output, places)
        return None

    def _follow(
        self, func: Any, name: str, args: Any, kwargs: Any, output: Any, places: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Follows rows through operations that move them, and through those that act on each entry alone."""
        if name in _MOVING and id(args[0]) in self._places:
            tensor, own = self._places[id(args[0])]
            moved = func(own.expand(tensor.shape), *args[1:], **kwargs)
            self._places.update((id(o), (o, m)) for o, m in zip(tensors_in(output), tensors_in(moved), strict=True))
        elif name in _ENTRY_BY_ENTRY and isinstance(output, Tensor):
            same = [at.expand(tensor.shape) for tensor, at in places if tensor.shape == output.shape]
            alike = sum(tensor.shape == output.shape for tensor in tensors_in((*args, *kwargs.values())))
            if same and len(same) == alike and all(torch.equal(same[0], other) for other in same[1:]):
                self._places[id(output)] = output, same[0]
        elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self._places.pop(id(args[0]), None)  # its rows are others now

    def _with_weights(
        self, name: str, args: Any, kwargs: Any, made: Sequence[Tensor], weights: Sequence[UsedWeight]
    ) -> Tensor | None:
        if len(weights) == 1 and name not in PRODUCTS:
            taken = weights[0].taken(name, args, made)
            self._weights.update((id(weight.tensor), weight) for weight in taken)
            if taken:
                return None
        product = None
        if len(weights) == 1 and len(made) == 1 and name in PRODUCTS:
            product = product_of(name, args, kwargs, weights[0], made[0])
        if product is not None:
            return self._multiplied(product, made[0])
        for weight in weights if any(tensor.requires_grad for tensor in made) else ():
            self._report(weight.name, None, made[0])
        return None

    def _multiplied(self, product: Product, output: Tensor) -> Tensor:
        x, known = product.x, self._places.get(id(product.x))
        places = None if known is None else known[1].expand(x.shape)
        instead = output
        for name, where in product.used.items():
            keys = partial(product.rows, name, product.x_letters, product.inner)
            errors = partial(product.rows, name, product.out_letters, product.outer)
            lead = keys(x.detach()).shape[:-1]
            if not math.prod(lead):
                continue
            call = OneMapCall(name, x, lead if places is None else self._lead, keys, errors)
            if places is not None:
                call.row_places = keys(places)[..., 0].reshape(-1).cpu()
            elif where is not None or "." in name:  # some rows, and nobody knows whose
                call.axes = ()
            made = self._report(name, call, output)
            instead = output if made is None else made
        of_output = None if places is None else product.places_of_output(places)
        if of_output is not None:
            self._places[id(instead)] = instead, of_output
        return instead
