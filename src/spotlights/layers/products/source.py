"""Which parameters a class of modules multiplies with, read off its source."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap

from torch import nn

from spotlights.layers.products.equation import LINEAR, MATMUL, PRODUCTS


@functools.lru_cache
def multiplied(cls: type[nn.Module]) -> dict[str, bool]:
    """Parameters that a class multiplies with in its source, and whether as `x @ w`; others as `F.linear(x, w)`."""
    found: dict[str, bool] = {}
    for base in (c for c in cls.__mro__ if issubclass(c, nn.Module) and not c.__module__.startswith("torch.")):
        with contextlib.suppress(OSError, TypeError, SyntaxError):  # no source
            found = _multiplied_in(ast.parse(textwrap.dedent(inspect.getsource(base)))) | found
    return found


def _multiplied_in(tree: ast.AST) -> dict[str, bool]:
    held, found = _AttributesOfSelf(tree), dict[str, bool]()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            sides = [(node.left, False), (node.right, True)]
        elif isinstance(node, ast.Call) and (called := _called(node)) in PRODUCTS:
            sides = [(argument, called not in LINEAR) for argument in node.args[called == "einsum" :][:2]]
            if called in MATMUL and len(sides) == 2:
                sides[0] = node.args[0], False
        else:
            continue
        names = [held.by(side) for side, _ in sides]
        if sum(map(bool, names)) == 1:  # a product of parameters has no rows of its own
            found |= {
                name: right ^ turned for own, (_, right) in zip(names, sides, strict=True) for name, turned in own
            }
    return found


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


class _AttributesOfSelf:
    """Which attributes of `self` an expression is made of, through local names; and whether it is transposed."""

    def __init__(self, tree: ast.AST) -> None:
        self._local: dict[str, ast.AST] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                self._bind(node.targets[0], node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, node.iter)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._local.setdefault(target.id, value)
        elif isinstance(target, ast.Tuple):
            values = getattr(value, "elts", getattr(value, "args", []))  # a, b = self.a, self.b; zip(…)
            if isinstance(value, ast.Call) and _called(value) == "enumerate":
                values = [ast.Constant(0), *values]
            for one, own in zip(target.elts, values, strict=False):
                self._bind(one, own)

    def by(self, node: ast.AST, depth: int = 4) -> list[tuple[str, bool]]:
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return [(node.attr, False)]
            turned = node.attr in ("T", "mT")
            return [(name, own ^ turned) for name, own in self.by(node.value, depth)]
        if isinstance(node, ast.Subscript):
            return self.by(node.value, depth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            turned = node.func.attr in ("t", "transpose")
            return [(name, own ^ turned) for name, own in self.by(node.func.value, depth)]
        if isinstance(node, ast.Name) and depth and node.id in self._local:
            return self.by(self._local[node.id], depth - 1)
        return []
