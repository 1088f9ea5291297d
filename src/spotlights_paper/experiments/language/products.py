"""The costliest products of the paper's language models, cheaper. Only they round to bfloat16.

- Characters: `W_ih x + b` is looked up in a table with a row for each token of the small vocabulary, and the products
  with `W_hh` round. The module `nn.LSTM` is called and recorded as ever; only the function that it calls is another.
- Words: the softmax over the large vocabulary goes from block to block, so no matrix of all logits is held.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_ROWS, _IN_CACHE = 512, 16
"""Tokens whose logits are held at a time, and tokens whose logits a processor's cache can hold."""


class TabledLSTM(TorchFunctionMode):
    """Within it, one layer of `nn.LSTM` (batch first) finds the products with its inputs in a table."""

    def __init__(
        self,
        tokens: Int64[Tensor, "batch length"],
        vectors: Float[Tensor, "vocabulary inputs"],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """
        Args:
            tokens: the number of the token that each input is.
            vectors: the input of each token, with its graph.
            dtype: what the products with `W_hh` round to.
        """
        super().__init__()
        self._tokens, self._vectors, self._dtype = tokens, vectors, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        (state, cell), (weight_ih, weight_hh, bias_ih, bias_hh) = args[1], args[2]
        table = F.linear(self._vectors, weight_ih, bias_ih + bias_hh)
        gates = F.embedding(self._tokens.T, table)
        states, cell = _Steps.apply(gates, weight_hh, state[0], cell[0], self._dtype)
        return states.transpose(0, 1), states[-1:], cell[None]


class _Steps(torch.autograd.Function):
    """From the gates' part that comes from the inputs (overwritten) to all states and the last cell."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, state: Tensor, cell: Tensor, dtype: torch.dtype) -> Any:
        hidden, first, product = weight.shape[1], (state, cell), weight.T.to(dtype)
        states, cells = (gates.new_empty(*gates.shape[:2], hidden) for _ in range(2))
        for step, opened in enumerate(gates):
            opened.add_(state.to(dtype) @ product)
            opened[:, : 2 * hidden].sigmoid_()
            opened[:, 2 * hidden : 3 * hidden].tanh_()
            opened[:, 3 * hidden :].sigmoid_()
            i, f, g, o = opened.split(hidden, dim=1)
            cell = torch.mul(f, cell, out=cells[step]).addcmul_(i, g)
            state = torch.mul(o, cell.tanh(), out=states[step])
        ctx.save_for_backward(gates, states, cells, weight, *first)
        ctx.dtype = dtype
        return states, cell.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_states, of_cell = gradients
        gates, states, cells, weight, state, cell = ctx.saved_tensors
        hidden, product = weight.shape[1], weight.to(ctx.dtype)
        errors, of_state = gates.to(ctx.dtype, copy=True), 0
        for step in reversed(range(len(gates))):
            i, f, g, o = gates[step].split(hidden, dim=1)
            of_state = of_states[step] + of_state
            squashed = cells[step].tanh()
            of_cell = of_cell + aten.tanh_backward(of_state * o, squashed)
            of_input, of_new = aten.sigmoid_backward(of_cell * g, i), aten.tanh_backward(of_cell * i, g)
            of_forget = aten.sigmoid_backward(of_cell * (cells[step - 1] if step else cell), f)
            of_output, of_cell = aten.sigmoid_backward(of_state * squashed, o), of_cell * f
            torch.cat([of_input, of_forget, of_new, of_output], dim=1, out=gates[step])
            errors[step] = gates[step]
            of_state = errors[step] @ product
        previous = torch.cat([state[None], states[:-1]]).flatten(0, 1).to(ctx.dtype)
        return gates, (errors.flatten(0, 1).T @ previous).to(weight.dtype), None, None, None


def cross_entropy(
    rows: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"],
    targets: Int64[Tensor, "rows"],
) -> Float[Tensor, ""]:
    """The mean cross-entropy of a linear layer's logits, block by block; its products round to bfloat16."""
    return _CrossEntropy.apply(rows, weight, bias, targets)


class _CrossEntropy(torch.autograd.Function):
    """Finds loss and gradients together: the logits of a block are gone when the next one comes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        loss, product = rows.new_zeros(()), weight.bfloat16()
        of_rows, of_weight, of_bias = torch.empty_like(rows), torch.zeros_like(weight), torch.zeros_like(bias)
        for some in torch.arange(len(rows)).split(_ROWS):
            part = rows[some].bfloat16()
            errors = part @ product.T  # the logits, until the inner loop overwrites them
            for block, wanted in zip(errors.split(_IN_CACHE), targets[some, None].split(_IN_CACHE), strict=True):
                values = block + bias
                own = values.sub_(values.amax(dim=1, keepdim=True)).gather(1, wanted)
                total = values.exp_().sum(dim=1, keepdim=True)
                loss += (total.log() - own).sum() / len(rows)
                values.div_(total).scatter_add_(1, wanted, torch.full_like(total, -1.0)).div_(len(rows))
                of_bias += values.sum(dim=0)
                block.copy_(values)
            of_rows[some] = (errors @ product).float()
            of_weight += errors.T @ part
        ctx.save_for_backward(of_rows, of_weight, of_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (of_loss,) = gradients
        return *(gradient.mul_(of_loss) for gradient in ctx.saved_tensors), None
