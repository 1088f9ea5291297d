"""A small GPT, as two-level retrieval looks into it, and how it is trained: AdamW, a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import spotlights as sl
from spotlights.errors import SettingError
from spotlights_paper.datasets import TextDataset
from spotlights_paper.experiments.language.trained import TextSettings, TrainedLanguage, Window
from spotlights_paper.experiments.training import fit

Hidden = Float[Tensor, "batch length width"]
Looks = Float[Tensor, "batch heads length length"]


@dataclass(frozen=True, kw_only=True)
class GPTSettings(TextSettings):
    """Small enough that every slot of every layer is kept."""

    blocks: int = 2
    width: int = 96
    heads: int = 4
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


class TransformerBlock(nn.Module):
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
        """The attention logits of each token over all tokens, before the softmax; −∞ for later tokens."""
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
        self.passage_layer, self.output_layer = f"blocks.{settings.blocks - 1}.grow", "head"
        self.embedding = nn.Embedding(tokens, settings.width)
        self.places = nn.Embedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(settings) for _ in range(settings.blocks))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What a block adds is smaller the more blocks add to it.
                added = name.endswith(("mix.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * settings.blocks) if added else 0.02)
        self.head.weight = self.embedding.weight  # the weights that read a token also say it

    def forward(
        self, tokens: Int64[Tensor, "batch length"], *, last: bool = False, looks_in: int | None = None
    ) -> Float[Tensor, "batch ..."]:
        """Logits of the token that follows each one, or only the last one.

        Args:
            tokens: at most as many as the context; of more, the last ones count.
            last: only what follows the last token.
            looks_in: a block whose attention logits are returned instead: `(batch, heads, token, looked at)`.
        """
        tokens = tokens[:, -self.context :]
        # A row for each token, so that what a place learns from it is told apart.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.dropout(self.embedding(tokens) + self.places(places))
        for number, block in enumerate(self.blocks):
            if number == looks_in:
                assert isinstance(block, TransformerBlock)
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


# -- training ---------------------------------------------------------------------------------


def shuffled_windows(tokens: Int64[Tensor, "tokens"], *, batch: int, length: int, seed: int) -> Iterator[Window]:
    """Batches without end: each epoch cuts the text into windows at a different offset and shuffles them.

    A few tokens at both ends of the text, and the windows that fill no batch, are left out of an epoch.
    """
    if len(tokens) < batch * length + length:
        raise SettingError(f"{len(tokens)} tokens have no {batch} windows of {length}. Give a longer text.")
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(first, len(tokens) - length, length)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for some in starts[: len(starts) // batch * batch].split(batch):
            positions = some[:, None] + torch.arange(length)
            yield Window(tokens[positions], tokens[positions + 1], positions, first=True)


def train_gpt(settings: GPTSettings, *, data: TextDataset, seed: int, path: Path) -> TrainedLanguage:
    """Trains a GPT on the text and records every slot with its error."""
    torch.manual_seed(seed)
    tokens = data.train.numbers
    model = GPT(len(data.vocabulary), settings)
    optimizer = adamw(model, settings)

    def loss(window: Window) -> Float[Tensor, ""]:
        return F.cross_entropy(model(window.tokens).flatten(0, 1), window.targets.flatten())

    losses = fit(
        sl.record(model, optimizer, path, dtype=settings.dtype, overwrite=True),
        [optimizer],
        settings,
        batches=shuffled_windows(tokens, batch=settings.batch, length=settings.context, seed=seed),
        loss=loss,
        schedules=[LambdaLR(optimizer, cosine(settings))],
    )
    last = losses[-max(1, len(tokens) // (settings.batch * settings.context)) :]
    return TrainedLanguage(sl.open(path), model.eval(), data, seed, sum(last) / len(last))


def adamw(model: nn.Module, settings: GPTSettings) -> torch.optim.AdamW:
    """Matrices decay; biases and normalisations do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay)


def cosine(settings: GPTSettings) -> Callable[[int], float]:
    """The learning rate at a step, as a share of the largest."""
    rise, fall = min(settings.warm_up, settings.steps // 2), settings.steps

    def share(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(fall - rise, 1)))

    return share
