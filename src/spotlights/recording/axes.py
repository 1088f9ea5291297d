"""Which axis of a layer's rows counts the examples, where the modules around the layer determine it.

A linear layer, an embedding or a layer norm works on any axis. Inside torch's transformer layers, `batch_first`
decides. If all recurrent and attention modules of a network are batch first, the layers between them are too.
"""

from __future__ import annotations

from torch import nn

_TRANSFORMERS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
BATCH_FIRST, SEQUENCE_FIRST = (0, 1), (1, 0)


def axes_of_modules(model: nn.Module) -> dict[nn.Module, tuple[int, ...]]:
    """As in `Call`, for modules whose own kind does not tell."""
    with_sequences = [m for m in model.modules() if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
    axes: dict[nn.Module, tuple[int, ...]] = {}
    if with_sequences and all(module.batch_first for module in with_sequences):
        axes = dict.fromkeys(model.modules(), BATCH_FIRST)
    for layer in model.modules():
        if isinstance(layer, _TRANSFORMERS):
            own = BATCH_FIRST if layer.self_attn.batch_first else SEQUENCE_FIRST
            axes |= dict.fromkeys(layer.modules(), own)
    return axes
