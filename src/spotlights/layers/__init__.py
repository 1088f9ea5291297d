"""Kinds of layers: one file each. Nothing else in the code knows kinds of layers.

To add a kind, write an adapter (see `adapter.py`) and put it in `ADAPTERS`.
"""

from __future__ import annotations

from torch import nn

from spotlights.layers.adapter import LayerAdapter
from spotlights.layers.linear import LinearAdapter

ADAPTERS: tuple[LayerAdapter, ...] = (LinearAdapter(),)


def adapter_for(module: nn.Module) -> LayerAdapter | None:
    """The adapter that can record this module, if there is one."""
    return next((adapter for adapter in ADAPTERS if adapter.handles(module)), None)


def adapter_named(kind: str) -> LayerAdapter | None:
    """The adapter of a kind that a memory names."""
    return next((adapter for adapter in ADAPTERS if adapter.kind == kind), None)


__all__ = ["ADAPTERS", "LayerAdapter", "adapter_for", "adapter_named"]
