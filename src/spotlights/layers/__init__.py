"""Kinds of layers: one file each. Nothing else in the code knows kinds of layers.

To add a kind, write an adapter (see `adapter.py`) and put it in `ADAPTERS`; users do so with `register_layer`.
"""

from __future__ import annotations

from torch import nn

from spotlights.errors import SettingError
from spotlights.layers.adapter import Call, LayerAdapter, LinearMap, ModuleAdapter, Part
from spotlights.layers.attention import AttentionAdapter
from spotlights.layers.bilinear import BilinearAdapter
from spotlights.layers.convolution import ConvolutionAdapter
from spotlights.layers.embedding import EmbeddingAdapter
from spotlights.layers.embedding_bag import EmbeddingBagAdapter
from spotlights.layers.functional import FunctionalAdapter, FunctionalLinear
from spotlights.layers.linear import LinearAdapter, TransposedLinearAdapter
from spotlights.layers.normalisation import BatchNormAdapter, GroupNormAdapter, LayerNormAdapter, RmsNormAdapter
from spotlights.layers.recurrent import GruAdapter, LstmAdapter, RnnAdapter
from spotlights.layers.transposed_convolution import TransposedConvolutionAdapter

ADAPTERS: list[ModuleAdapter] = [
    LinearAdapter(),
    TransposedLinearAdapter(),
    ConvolutionAdapter(),
    EmbeddingAdapter(),
    LayerNormAdapter(),
    RmsNormAdapter(),
    BatchNormAdapter(),
    GroupNormAdapter(),
    AttentionAdapter(),
    TransposedConvolutionAdapter(),
    EmbeddingBagAdapter(),
    BilinearAdapter(),
    LstmAdapter(),
    GruAdapter(),
    RnnAdapter("tanh"),
    RnnAdapter("relu"),
]


def register_layer(adapter: ModuleAdapter) -> None:
    """Makes a kind of layer of your own known: before recording, and before such a memory is asked about."""
    held = adapter_named(adapter.kind)
    if held is not None and type(held) is not type(adapter):
        raise SettingError(f'There is a kind of layer "{adapter.kind}" already. Choose another name.')
    if held is None:
        ADAPTERS.insert(0, adapter)


def adapter_for(module: nn.Module) -> ModuleAdapter | None:
    """The adapter that can record this module, if there is one."""
    return next((adapter for adapter in ADAPTERS if adapter.handles(module)), None)


def adapter_named(kind: str) -> ModuleAdapter | None:
    """The adapter of a kind that a memory names."""
    return next((adapter for adapter in ADAPTERS if adapter.kind == kind), None)


__all__ = [
    "ADAPTERS",
    "Call",
    "FunctionalAdapter",
    "FunctionalLinear",
    "LayerAdapter",
    "LinearMap",
    "ModuleAdapter",
    "Part",
    "adapter_for",
    "adapter_named",
    "register_layer",
]
