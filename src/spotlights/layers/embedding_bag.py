"""`nn.EmbeddingBag` that adds up or averages: a linear map of how often each token is in a bag, which is its key.

The limits are those of `nn.Embedding` (`embedding.py`); a bag that takes the largest entries is no linear map.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, computes_as
from spotlights.layers.embedding import MAX_TOKENS


class EmbeddingBagAdapter(LayerAdapter):
    kind = "embedding-bag"
    transposed = True

    def handles(self, module: nn.Module) -> bool:
        return (
            computes_as(module, nn.EmbeddingBag)
            and isinstance(module, nn.EmbeddingBag)
            and module.mode in ("sum", "mean")
            and module.num_embeddings <= MAX_TOKENS
            and module.max_norm is None
            and not (module.scale_grad_by_freq or module.sparse)
        )

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        return None

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shaped[Tensor, "..."]:
        assert isinstance(module, nn.EmbeddingBag)
        names = ("input", "offsets", "per_sample_weights")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, offsets, weights = (given.get(name) for name in names)
        assert tokens is not None
        with torch.no_grad():
            counts = _counts(module, tokens, offsets, weights)
        return counts.requires_grad_(weights is not None and weights.requires_grad)

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return inputs


def _counts(
    module: nn.EmbeddingBag, tokens: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> Float[Tensor, "bags tokens"]:
    """How often each token is in each bag: weighted, or as a share of the bag."""
    if offsets is None:
        bags = len(tokens)
        bag = torch.arange(bags, device=tokens.device).repeat_interleave(tokens.shape[1])
    else:
        bags = len(offsets) - module.include_last_offset
        places = torch.arange(len(tokens), device=tokens.device)
        bag = torch.searchsorted(offsets[:bags].contiguous(), places, right=True) - 1
    tokens = tokens.reshape(-1).long()
    held = module.weight
    ones = torch.ones(len(tokens), dtype=held.dtype, device=held.device)
    ones = ones if weights is None else weights.reshape(-1).to(held.dtype)
    if module.padding_idx is not None:
        ones = ones * (tokens != module.padding_idx)
    counts = torch.zeros(bags, module.num_embeddings, dtype=held.dtype, device=held.device)
    counts.index_put_((bag, tokens), ones, accumulate=True)
    return counts / counts.sum(dim=1, keepdim=True).clamp_min(1) if module.mode == "mean" else counts
