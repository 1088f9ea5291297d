"""`nn.Embedding`: a linear map of one-hot keys. Each is kept once; the score is 1 for the same token, else 0.

Rows are as wide as the vocabulary while they are computed with, so vocabularies are limited; a larger one is listed as
not recorded. So is an embedding whose rows something else than the optimizer changes (`max_norm`), or whose gradient
is not a plain sum over tokens (`padding_idx`, `scale_grad_by_freq`, `sparse`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LayerAdapter, computes_as

MAX_TOKENS = 4096


class EmbeddingAdapter(LayerAdapter):
    kind = "embedding"
    transposed = True

    def handles(self, module: nn.Module) -> bool:
        return (
            computes_as(module, nn.Embedding)
            and isinstance(module, nn.Embedding)
            and module.num_embeddings <= MAX_TOKENS
            and module.max_norm is None
            and module.padding_idx is None
            and not (module.scale_grad_by_freq or module.sparse)
        )

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        return None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        call = super().call(module, args, kwargs, output, before)
        call.shared = _counts_up(self.inputs(module, args, kwargs)) or None
        return call

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return F.one_hot(inputs.long(), self.weight(module).shape[0]).to(self.weight(module).dtype)


def _counts_up(tokens: Shaped[Tensor, "..."]) -> bool:
    """Whether these are positions, one after the other, for all examples alike: `arange(length)`, or one row of it."""
    if tokens.numel() < 2 or tokens.numel() != tokens.shape[-1]:
        return False
    return bool((tokens.flatten().diff() == 1).all())
