"""`nn.Embedding` and `nn.EmbeddingBag`: linear maps of one-hot keys, and of the counts of each token in a bag.

The score of two tokens is 1 for the same token, else 0. Keys are token numbers (`SparseRows`), so their cost does not
depend on the vocabulary. In training, the key of padding is zero, because padding has no gradient. Under
`scale_grad_by_freq`, errors are divided by the count of their token, as torch does. Two kinds are not recorded: those
that change their weights in `forward` (`max_norm`), and those that are no linear map (mode "max" of a bag).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, OneMapCall, computes_as
from spotlights.sparse_rows import SparseRows


class EmbeddingAdapter(LayerAdapter):
    kind = "embedding"
    modules = (nn.Embedding,)
    transposed = True
    sparse_keys = True

    def refuses(self, module: nn.Module) -> str | None:
        return _MAX_NORM if computes_as(module, *self.modules) and module.max_norm is not None else None

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any
    ) -> OneMapCall:
        assert isinstance(module, nn.Embedding)
        call, tokens = super().call(module, args, kwargs, output, before), self.inputs(module, args, kwargs)

        def keys(tokens: Tensor) -> SparseRows:
            one_hot = self.keys(module, tokens)
            if module.padding_idx is None or not module.training:
                return one_hot
            return replace(one_hot, amounts=one_hot.amounts * (one_hot.places != module.padding_idx))

        def errors(gradient: Tensor) -> Tensor:
            if not (module.scale_grad_by_freq and module.training):
                return gradient
            _, of_row, counts = tokens.unique(return_inverse=True, return_counts=True)
            return gradient / counts[of_row].unsqueeze(-1)

        call.to_keys, call.to_errors = keys, errors
        call.shared = _counts_up(tokens) or None
        return call

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> SparseRows:
        tokens = inputs.detach().long().unsqueeze(-1).clone()
        weight = self.weight(module)
        return SparseRows(tokens, torch.ones_like(tokens, dtype=weight.dtype), len(weight))


class EmbeddingBagAdapter(LayerAdapter):
    kind = "embedding-bag"
    modules = (nn.EmbeddingBag,)
    transposed = True
    sparse_keys = True

    def refuses(self, module: nn.Module) -> str | None:
        if not computes_as(module, *self.modules):
            return None
        if module.max_norm is not None:
            return _MAX_NORM
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides what a bag teaches by the counts of its tokens"
        return None if module.mode in ("sum", "mean") else f'a bag of mode="{module.mode}" is no linear map'

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SparseRows:
        assert isinstance(module, nn.EmbeddingBag)
        names = ("input", "offsets", "per_sample_weights")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, offsets, weights = (given.get(name) for name in names)
        assert tokens is not None
        with torch.no_grad():
            return _counts(module, tokens, offsets, weights)


_MAX_NORM = "max_norm changes its weights in the forward pass, outside the optimizer"


def _counts_up(tokens: Shaped[Tensor, "..."]) -> bool:
    """Whether these are consecutive positions that all examples share: `arange(length)`, perhaps as one row."""
    if tokens.numel() < 2 or tokens.numel() != tokens.shape[-1]:
        return False
    return bool((tokens.flatten().diff() == 1).all())


def _counts(module: nn.EmbeddingBag, tokens: Tensor, offsets: Tensor | None, weights: Tensor | None) -> SparseRows:
    """How often each token is in each bag: weighted, or as a fraction of the bag."""
    if offsets is None:
        bags = len(tokens)
        bag = torch.arange(bags, device=tokens.device).repeat_interleave(tokens.shape[1])
    else:
        bags = len(offsets) - module.include_last_offset
        places = torch.arange(len(tokens), device=tokens.device)
        bag = torch.searchsorted(offsets[:bags].contiguous(), places, right=True) - 1
    tokens = tokens.reshape(-1).long()
    like = module.weight.detach()
    amounts = like.new_ones(len(tokens)) if weights is None else weights.detach().reshape(-1).to(like.dtype)
    if module.padding_idx is not None:
        real = (tokens != module.padding_idx).nonzero().flatten()
        tokens, bag, amounts = tokens[real], bag[real], amounts[real]
    pairs, of_token = (bag * module.num_embeddings + tokens).unique(return_inverse=True)  # ordered by bag
    summed = like.new_zeros(len(pairs)).index_add_(0, of_token, amounts)
    bag = pairs // module.num_embeddings
    count = torch.bincount(bag, minlength=bags)
    column = torch.arange(len(pairs), device=bag.device) - (count.cumsum(0) - count)[bag]
    shape = bags, max(1, int(count.max()) if bags else 1)
    filled = pairs.new_zeros(shape), like.new_zeros(shape)
    filled[0][bag, column], filled[1][bag, column] = pairs % module.num_embeddings, summed
    if module.mode == "mean":
        filled[1].div_(filled[1].sum(dim=1, keepdim=True).clamp_min(1))
    return SparseRows(*filled, module.num_embeddings)
