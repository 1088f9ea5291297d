"""Products as `einsum` writes them: which dimension of what is the input of a matrix, its output, or counts rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from string import ascii_uppercase
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

LINEAR, _GROUPED = {"linear"}, {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
MATMUL = {"matmul", "mm", "bmm", "__matmul__", "__rmatmul__"}
PRODUCTS = LINEAR | _GROUPED | MATMUL | {"einsum"}
_VIEWS = {"transpose", "t", "__get__", "to", "float", "contiguous", "clone", "type_as"}


@dataclass(frozen=True)
class UsedWeight:
    """A recorded parameter, or what was taken from it."""

    tensor: Tensor
    """Held, so that its `id` stays valid."""
    name: str
    experts: Int64[Tensor, "*matrices"]
    """Which matrix of the stack this is, or each of these is; -1 for a parameter that is one matrix."""
    transposed: bool
    """The last two dimensions are `(in, out)`."""

    def taken(self, name: str, args: tuple[Any, ...], made: Sequence[Tensor]) -> list[UsedWeight]:
        """What an operation made of it: some of its matrices, the transposed ones, or a copy; none if it is unknown."""
        whole, experts = self.tensor, self.experts
        if name == "__getitem__" and experts.ndim and not isinstance(args[1], tuple):
            chosen = experts[args[1].cpu() if isinstance(args[1], Tensor) else args[1]]
            return [replace(self, tensor=made[0], experts=chosen)] if chosen.ndim + 2 == made[0].ndim else []
        if name == "unbind" and experts.ndim and len(made) == len(experts):
            return [replace(self, tensor=made, experts=one) for made, one in zip(made, experts, strict=True)]
        if len(made) != 1 or name not in _VIEWS:
            return []
        turned = made[0].shape == whole.mT.shape and made[0].stride() == whole.mT.stride()
        same = made[0].shape == whole.shape and (not turned or made[0].stride() == whole.stride())
        return [replace(self, tensor=made[0], transposed=self.transposed ^ (not same))] if same or turned else []


@dataclass(frozen=True)
class Product:
    """`out = x · weight`, as an `einsum` with a letter for each dimension."""

    x: Tensor
    x_letters: str
    out_letters: str
    inner: str
    outer: str
    sizes: Mapping[str, int]
    used: Mapping[str, tuple[str, Int64[Tensor, "places"]] | None]
    """By map: the places along a dimension where it was used; None for all."""

    def rows(self, name: str, of: str, feature: str, tensor: Tensor) -> Tensor:
        """The rows of a map, of a tensor with these dimensions: of `x`, or of the output."""
        sizes, where = dict(self.sizes), self.used[name]
        if where is not None:
            letter, places = where
            sizes[letter] = len(places)
            tensor = tensor.index_select(of.index(letter), places.to(tensor.device)) if letter in of else tensor
        lead = [c for c in dict.fromkeys(self.out_letters + self.x_letters) if c not in (self.inner, self.outer)]
        return _arranged(tensor, of, "".join(lead) + feature, sizes)

    def places_of_output(self, places: Int64[Tensor, "..."]) -> Int64[Tensor, "..."] | None:
        """Whose row each entry of the output is, given the same for `x`; None if a row is made of several."""
        rest = self.x_letters.replace(self.inner, "")
        if not set(rest) <= set(self.out_letters):
            return None
        return _arranged(places.select(self.x_letters.index(self.inner), 0), rest, self.out_letters, self.sizes)


def _arranged(tensor: Tensor, letters: str, order: str, sizes: Mapping[str, int]) -> Tensor:
    """A tensor with its dimensions in another order, spread over those that it does not have."""
    tensor = tensor.permute([letters.index(c) for c in order if c in letters])
    for at, letter in enumerate(order):
        tensor = tensor if letter in letters else tensor.unsqueeze(at)
    return tensor.expand([sizes[c] for c in order])


def product_of(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], weight: UsedWeight, out: Tensor
) -> Product | None:
    """The product that was computed; None if it is none that is understood."""
    operands, offsets = [a for a in args if isinstance(a, Tensor)][:2], None
    if name == "einsum":
        operands = list(args[1] if isinstance(args[1], tuple | list) else args[1:])
    if len(operands) != 2 or sum(o is weight.tensor for o in operands) != 1:
        return None
    if name == "__rmatmul__":
        operands.reverse()
    if name == "einsum":
        equation = str(args[0]).replace(" ", "")
    elif name in LINEAR:
        equation = "...i,oi->...o"
    elif name in _GROUPED:
        equation, offsets = "ni,eio->no", kwargs.get("offs", args[2] if len(args) > 2 else None)
    else:
        n, o = ("" if operand.ndim == 1 else letter for operand, letter in zip(operands, "no", strict=True))
        equation = f"...{n}i,...i{o}->...{n}{o}"
    x = operands[operands[0] is weight.tensor]
    left, arrow, out_letters = equation.partition("->")
    subscripts = [*left.split(","), out_letters]
    if not arrow or len(subscripts) != 3:
        return None
    tensors = [*operands, out]
    letters = [_named(s, t.ndim, equation) for s, t in zip(subscripts, tensors, strict=True)]
    sizes = {c: size for own, t in zip(letters, tensors, strict=True) for c, size in zip(own, t.shape, strict=False)}
    fits = all(tuple(sizes.get(c) for c in own) == tuple(t.shape) for own, t in zip(letters, tensors, strict=True))
    if not fits or any(len(set(own)) < len(own) for own in letters):
        return None
    x_letters, w_letters, out_letters = letters[operands[0] is not x], letters[operands[0] is x], letters[2]
    first, second = w_letters[-2:]
    inner, outer = (first, second) if weight.transposed else (second, first)
    if inner not in x_letters or outer not in out_letters or inner in out_letters or outer in x_letters:
        return None
    return Product(x, x_letters, out_letters, inner, outer, sizes, _used(weight, w_letters[:-2], x_letters, offsets))


def _named(subscripts: str, dimensions: int, equation: str) -> str:
    """The letters of a tensor's dimensions, those of `...` too."""
    own = subscripts.replace("...", "")
    free = [c for c in ascii_uppercase if c not in equation]
    return subscripts.replace("...", "".join(free[len(free) - max(0, dimensions - len(own)) :]))


def _used(
    weight: UsedWeight, stack: str, x_letters: str, offsets: Tensor | None
) -> dict[str, tuple[str, Int64[Tensor, "places"]] | None]:
    """The maps that a product used, each with the places where it did."""
    if not weight.experts.ndim:
        expert = int(weight.experts)
        return {weight.name if expert < 0 else f"{weight.name}.{expert}": None}
    if offsets is not None:
        ends = [0, *offsets.tolist()]
        places = [torch.arange(start, end) for start, end in pairwise(ends)]
        return {f"{weight.name}.{e}": (x_letters[0], at) for e, at in zip(weight.experts.tolist(), places, strict=True)}
    experts = {int(e): (weight.experts == e).nonzero()[:, 0] for e in weight.experts.unique()}
    return {f"{weight.name}.{e}": (stack, at) for e, at in experts.items()}
