"""How the rows of a recurrent layer's call lie in what the user gave it: padded, packed, batch first or steps first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Layout:
    """How the rows of a call, step by step with the longest sequence first, lie in the user's tensors."""

    sizes: list[int]
    """How many sequences have that many steps."""
    lead: tuple[int, ...]
    """The leading shape of the user's tensors; (sequences, steps) where they are packed."""
    batch_first: bool = False
    packed: bool = False
    order: Int64[Tensor, "sequences"] | None = None
    """Which of the user's sequences comes when, if they were sorted by length."""

    @classmethod
    def of(cls, module: nn.Module, inputs: Tensor | PackedSequence) -> Layout:
        if isinstance(inputs, PackedSequence):
            sizes = inputs.batch_sizes.tolist()
            return cls(sizes, (sizes[0], len(sizes)), packed=True, order=inputs.sorted_indices)
        lead = tuple(inputs.shape[:-1])
        if isinstance(module, nn.RNNCellBase):
            return cls([inputs.numel() // inputs.shape[-1]], lead)
        if len(lead) == 1:
            return cls([1] * lead[0], lead)
        steps, sequences = lead[::-1] if module.batch_first else lead
        return cls([sequences] * steps, lead, batch_first=bool(module.batch_first))

    @property
    def chosen(self) -> Int64[Tensor, "rows"] | None:
        """Where the rows of a packed sequence are in `lead`."""
        if not self.packed:
            return None
        order = torch.arange(self.sizes[0]) if self.order is None else self.order.cpu()
        return torch.cat([order[:size] * len(self.sizes) + step for step, size in enumerate(self.sizes)])

    def rows(self, tensor: Tensor | PackedSequence) -> Float[Tensor, "rows features"]:
        """What the module was given or returned, as rows."""
        if isinstance(tensor, PackedSequence):
            return tensor.data.detach()
        tensor = tensor.detach()
        return (tensor.transpose(0, 1) if self.batch_first else tensor).reshape(-1, tensor.shape[-1])

    def shaped(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "... features"]:
        """Rows as the user's tensors have them."""
        if self.packed:
            return rows
        if self.batch_first:
            return rows.unflatten(0, self.lead[::-1]).transpose(0, 1)
        return rows.reshape(*self.lead, rows.shape[-1])

    def states(self, tensor: Tensor) -> list[Float[Tensor, "sequences hidden"]]:
        """The states, or gradients of them, of each layer in each direction."""
        tensor = tensor.detach().reshape(-1, self.sizes[0], tensor.shape[-1])
        return list((tensor if self.order is None else tensor[:, self.order]).unbind(0))
