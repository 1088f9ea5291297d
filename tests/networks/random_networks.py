"""Networks of any blocks, for `test_random_loops.py`: each block maps (B, L, D) to (B, L, D)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

if TYPE_CHECKING:
    from random_loops import Loop

D, L, B, CLASSES = 4, 3, 3, 3


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.first = kind(D, D, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0] if self.first else self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Attending(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attention, self.first = nn.MultiheadAttention(D, 2, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        x = self.attention(x, x, x, need_weights=False)[0]
        return x if self.first else x.transpose(0, 1)


class Channels(nn.Module):
    """A block that wants its features in the second dimension."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.inner(x)


class Experts(nn.Module):
    """Each token goes to the expert that the first feature chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, D, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        y = torch.zeros_like(rows)
        for expert in range(2):
            chosen = ((rows[:, 0] > 0).long() == expert).nonzero()[:, 0]
            y = y.index_add(0, chosen, (rows[chosen] @ self.experts[expert]).to(y.dtype))
        return y.view_as(x)


class Mixture(nn.Module):
    """The same with a module for each expert, whose rows are some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        y = torch.zeros_like(rows)
        for expert, module in enumerate(self.experts):
            chosen = ((rows[:, 0] > 0).long() == expert).nonzero()[:, 0]
            y = y.index_add(0, chosen, module(rows[chosen]).to(y.dtype))
        return y.view_as(x)


class Outside(nn.Module):
    """Uses a weight outside its module."""

    def __init__(self, *, transposed: bool, also_inside: bool) -> None:
        super().__init__()
        self.linear, self.transposed, self.also_inside = nn.Linear(D, D), transposed, also_inside

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) if self.also_inside else x
        return F.linear(x, self.linear.weight.t() if self.transposed else self.linear.weight, self.linear.bias)


class Twice(nn.Module):
    """The same module for the whole and for a part: rows of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.linear(x.reshape(-1, D)[: B + 1]).mean(dim=0)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, D, bias=False)),
    "layer norm": lambda: nn.LayerNorm(D),
    "RMS norm": lambda: nn.RMSNorm(D),
    "own norm": OwnNorm,
    "batch norm": lambda: Channels(nn.BatchNorm1d(D)),
    "before a batch norm": lambda: nn.Sequential(nn.Linear(D, D), Channels(nn.BatchNorm1d(D))),
    "group norm": lambda: Channels(nn.GroupNorm(2, D)),
    "convolution": lambda: Channels(nn.Conv1d(D, D, 3, padding=1, groups=2)),
    "transposed convolution": lambda: Channels(nn.ConvTranspose1d(D, D, 3, padding=1)),
    "LSTM": lambda: Recurrent(nn.LSTM, batch_first=True),
    "LSTM, sequence first": lambda: Recurrent(nn.LSTM, batch_first=False),
    "GRU": lambda: Recurrent(nn.GRU, batch_first=True),
    "RNN, sequence first": lambda: Recurrent(nn.RNN, batch_first=False),
    "attention": lambda: Attending(batch_first=True),
    "attention, sequence first": lambda: Attending(batch_first=False),
    "transformer": lambda: nn.TransformerEncoderLayer(D, 2, 5, dropout=0.1, batch_first=True),
    "experts": Experts,
    "mixture": Mixture,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
    "outside": lambda: Outside(transposed=False, also_inside=False),
    "inside and outside": lambda: Outside(transposed=False, also_inside=True),
    "transposed outside": lambda: Outside(transposed=True, also_inside=True),
    "twice": Twice,
    "LoRA": Lora,
    "dropout": lambda: nn.Dropout(0.2),
    "PReLU": lambda: nn.PReLU(),
}
AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda inner: inner,
    "residual": Residual,
    "checkpointed": Checkpointed,
}


class Network(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.tokens = nn.Embedding(7, D, padding_idx=0 if loop.padding else None)
        self.positions = nn.Parameter(torch.randn(L, D) / 9)
        self.blocks = nn.Sequential(*(AROUND[around](BLOCKS[block]()) for block, around in loop.blocks))
        if loop.tied:
            self.blocks.append(nn.Sequential(nn.Linear(D, D), nn.Tanh(), tied := nn.Linear(D, D)))
            tied.weight = self.blocks[-1][0].weight  # type: ignore[index, union-attr]
        self.head = nn.Linear(D, 7 if loop.every_token else CLASSES)
        if loop.every_token and loop.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.blocks(self.tokens(tokens) + self.positions)
        x = self.head(x if self.loop.every_token else x.mean(dim=1))
        return (x, {"tokens": tokens}) if self.loop.returns_a_tuple else x
