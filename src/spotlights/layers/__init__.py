"""Kinds of layers, one file each. No other package knows kinds of layers.

To add a kind, write an adapter (`adapter.py`) and add it to `ADAPTERS`; users call `register_layer`.
"""

from __future__ import annotations

from spotlights.layers.adapter import (
    ADAPTERS,
    Call,
    LayerAdapter,
    LinearMap,
    ModuleAdapter,
    WeightPart,
    adapter_for,
    adapter_named,
    register_layer,
)
from spotlights.layers.attention import AttentionAdapter
from spotlights.layers.convolution import ConvolutionAdapter, TransposedConvolutionAdapter
from spotlights.layers.embedding import EmbeddingAdapter, EmbeddingBagAdapter
from spotlights.layers.functional import FunctionalAdapter, FunctionalLinear, Report, WatchingAdapter
from spotlights.layers.linear import BilinearAdapter, LinearAdapter, TransposedLinearAdapter
from spotlights.layers.normalisation import NORMS
from spotlights.layers.parameter import ParameterAdapter, parameter_call
from spotlights.layers.products import ProductAdapter
from spotlights.layers.recurrent import RECURRENT

ADAPTERS += [
    LinearAdapter(),
    TransposedLinearAdapter(),
    ConvolutionAdapter(),
    EmbeddingAdapter(),
    *NORMS,
    AttentionAdapter(),
    TransposedConvolutionAdapter(),
    EmbeddingBagAdapter(),
    BilinearAdapter(),
    *RECURRENT,
    ProductAdapter(),
    ParameterAdapter(),
]

__all__ = [
    "ADAPTERS",
    "Call",
    "FunctionalAdapter",
    "FunctionalLinear",
    "LayerAdapter",
    "LinearMap",
    "ModuleAdapter",
    "ParameterAdapter",
    "Report",
    "WatchingAdapter",
    "WeightPart",
    "adapter_for",
    "adapter_named",
    "parameter_call",
    "register_layer",
]
