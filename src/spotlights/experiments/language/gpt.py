"""A small GPT: self-attention over the tokens before, as two-level retrieval looks into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from spotlights.errors import SettingError
from spotlights.experiments.language.settings import TextSettings

Hidden = Float[Tensor, "batch length width"]
Looks = Float[Tensor, "batch heads length length"]


@dataclass(frozen=True, kw_only=True)
class GPTSettings(TextSettings):
    """Small enough that every slot of every layer is kept."""

    blocks: int = 2
    width: int = 96
    heads: int = 4
    tied: bool = True
    """The weights that read a token also say it: embedding and output layer are one."""
    dropout: float = 0.1
    """After the embedding, after each self-attention and after each feed-forward part, in training."""
    weight_decay: float = 0.1
    """Of AdamW, for matrices alone."""
    warm_up: int = 50
    """Steps in which the learning rate rises; then it falls to zero along half a cosine."""
    dtype: str = "float16"
    context: int = 64
    """Tokens that it can see, itself included."""
    kernels: tuple[str, ...] = ("cosine", "dot")


class Block(nn.Module):
    """Self-attention, then two linear layers, each added to what there was."""

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(width)
        # Three layers rather than one of three times the size: each has slots, and so contributions, of its own. No
        # biases: a softmax takes a key's away, so its gradient is rounding alone, which AdamW would blow up.
        self.to_query = nn.Linear(width, width, bias=False)
        self.to_key = nn.Linear(width, width, bias=False)
        self.to_value = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(settings.dropout)

    def looks(self, hidden: Hidden) -> Looks:
        """Before the softmax: how much each token is inclined to look at each token; −∞ for those after it."""
        return self._looks(self.attention_norm(hidden))

    def forward(self, hidden: Hidden) -> Hidden:
        seen = self.attention_norm(hidden)
        values = self._heads(self.to_value(seen))
        looked = (self._looks(seen).softmax(dim=-1) @ values).transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.mix(looked))
        return hidden + self.dropout(self.shrink(F.gelu(self.grow(self.norm(hidden)))))

    def _looks(self, seen: Hidden) -> Looks:
        queries, keys = self._heads(self.to_query(seen)), self._heads(self.to_key(seen))
        length = seen.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=seen.device).triu(1)
        return (queries @ keys.mT / math.sqrt(queries.shape[-1])).masked_fill(later, -math.inf)

    def _heads(self, rows: Hidden) -> Float[Tensor, "batch heads length part"]:
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)


class GPT(nn.Module):
    """Tokens in, a logit for each possible next token out."""

    def __init__(self, tokens: int, settings: GPTSettings) -> None:
        super().__init__()
        if settings.width % settings.heads:
            raise SettingError(f"width={settings.width} cannot be divided among {settings.heads} heads.")
        self.context = settings.context
        self.embedding = nn.Embedding(tokens, settings.width)
        self.places = nn.Embedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.blocks))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What a block adds is smaller the more blocks add to it.
                added = name.endswith(("mix.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * settings.blocks) if added else 0.02)
        if settings.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Int64[Tensor, "batch length"], *, last: bool = False, looks_in: int | None = None
    ) -> Float[Tensor, "batch ..."]:
        """Logits of the token that follows each one, or only the last one.

        Args:
            tokens: at most as many as the context; of more, the last ones count.
            last: only what follows the last token.
            looks_in: a block; gives what its self-attention is inclined to look at instead, `(batch, heads, token,
                looked at)`, before the softmax.
        """
        tokens = tokens[:, -self.context :]
        # A row for each token, so that what a place learns from it is told apart.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.dropout(self.embedding(tokens) + self.places(places))
        for number, block in enumerate(self.blocks):
            if number == looks_in:
                assert isinstance(block, Block)
                return block.looks(hidden)
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, -1:] if last else hidden))

    @torch.no_grad()
    def surprise(self, tokens: Int64[Tensor, "tokens"], *, batch: int = 64) -> float:
        """The mean surprise at the tokens of a text, in nats: each has at least half a context before it."""
        half = self.context // 2
        starts = torch.arange(0, len(tokens) - self.context, half)
        total, count = 0.0, 0
        for some in starts.split(batch):
            windows = some[:, None] + torch.arange(self.context)
            logits = self(tokens[windows])[:, half - 1 :]
            expected = tokens[windows + 1][:, half - 1 :]
            total += float(F.cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="sum"))
            count += expected.numel()
        return total / count
