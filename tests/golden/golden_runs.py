"""Tiny networks, their data and their recorded training; see `answers.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl


def uniform(*shape: int, seed: int = 11) -> Tensor:
    """Between -1 and 1, in float64: the same on every processor, which numbers drawn from a normal need not be."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def fill(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """Gives every parameter its numbers, as large as usual for its shape."""
    model.to(dtype)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            size = math.sqrt(3 / parameter.shape[-1]) if parameter.ndim > 1 else 0.2
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0  # a norm multiplies by it
            parameter.copy_(centre + size * uniform(*parameter.shape, seed=seed))
    return model


def mlp(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> nn.Sequential:
    layers = (nn.Linear(5, 8, bias=bias), nn.Tanh(), nn.Linear(8, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))
    return fill(nn.Sequential(*layers), dtype)


EXAMPLES = 20
INPUTS = uniform(EXAMPLES, 5)
LABELS = torch.randint(4, (EXAMPLES,), generator=torch.Generator().manual_seed(5))
QUERIES = uniform(3, 5, seed=77)
TARGET = 2

Batch = tuple[Any, Tensor, dict[str, Any]]


def drawn(step: int, size: int = 6, examples: int = EXAMPLES) -> Tensor:
    """The numbers of the examples in the batch of this step."""
    return torch.randperm(examples, generator=torch.Generator().manual_seed(step))[:size]


def batches(steps: int = 18, dtype: torch.dtype = torch.float64) -> Iterator[Batch]:
    """A column of each kind; some steps say little of their examples, one step nothing."""
    ratings = uniform(EXAMPLES, seed=3)
    for step in range(steps):
        ids = drawn(step)
        columns: dict[str, Any] = {"example": ids * 10 + 3, "label": LABELS[ids]}
        if step % 3:
            columns["source"] = ("mnist", "fashion", "kanji")[step % 4 % 3]
            columns["rating"] = ratings[ids]
        if step % 5 == 2:
            columns["name"] = [f"name {number % 3}" for number in ids.tolist()]
        yield INPUTS[ids].to(dtype), LABELS[ids], {} if step == 7 else columns


def record(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Batch],
    *,
    clip: float | None = None,
    schedule: Callable[[int], float] = lambda step: 1.0,
    dtype: str = "float64",
    segment_bytes: int = 6000,
    **settings: Any,
) -> sl.Memory:
    """An ordinary loop with cross entropy, recorded in several segments."""
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.manual_seed(1)  # a sample is drawn by it
    with sl.record(model, optimizer, path, dtype=dtype, segment_bytes=segment_bytes, **settings) as recorder:
        for step, (inputs, targets, columns) in enumerate(data):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
            if columns:
                recorder.batch(**columns)
            optimizer.zero_grad()
            output = model(inputs)
            F.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    model.eval()
    return sl.open(path)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, **options})


def sgd_run(folder: Path, trained_in: torch.dtype = torch.float64, **settings: Any) -> tuple[sl.Memory, nn.Module]:
    """Momentum, weight decay, clipping and a schedule."""
    model = mlp(trained_in)
    data, schedule = batches(dtype=trained_in), lambda step: 1.0 - step / 40
    options = {"clip": 0.5, "schedule": schedule, **settings}
    return record(folder / "sgd.memory", model, sgd(model), data, **options), model


# -- other networks ----------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Says a class after reading a sequence of shape (batch, length, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, sequences: Tensor) -> Tensor:
        states, _ = self.rnn(sequences)
        return self.head(states[:, -1])


class Picture(nn.Module):
    """Convolutions, one of them grouped, over an image of 8 × 8, with norms between."""

    def __init__(self) -> None:
        super().__init__()
        self.strokes = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.shapes = nn.Conv2d(4, 4, 3, stride=3, groups=2, bias=False)
        self.classes = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.shapes(self.norm(self.strokes(images)).tanh()).tanh().flatten(1))


TEXT = (
    "The hen sat. A fox saw the hen! Come down, said he. The hen laughed. A fox is a fox; the hen knew. "
    "The end of the hen came late, in the end. No fox saw it. The hen sat in the sun and laughed at him."
)
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH = 12, 8


class Block(nn.Module):
    """Self-attention of two heads, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_query, self.to_key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_value, self.mix = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        seen = self.attention_norm(hidden)
        heads = (each(seen).unflatten(2, (2, -1)).transpose(1, 2) for each in (self.to_query, self.to_key))
        queries, keys = heads
        later = torch.ones(seen.shape[1], seen.shape[1], dtype=torch.bool).triu(1)
        looks = (queries @ keys.mT / 2).masked_fill(later, -math.inf).softmax(dim=-1)
        values = self.to_value(seen).unflatten(2, (2, -1)).transpose(1, 2)
        hidden = hidden + self.mix((looks @ values).transpose(1, 2).flatten(2))
        return hidden + self.shrink(F.gelu(self.grow(self.norm(hidden))))


class Gpt(nn.Module):
    """Letters in, a logit for each possible next letter out; embedding and output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        return self.head(self.norm(self.block(self.embedding(tokens) + self.places(places))))


def letters(text: str) -> Tensor:
    return torch.tensor([LETTERS.index(letter) for letter in text])


def windows(epochs: int, size: int = 4) -> Iterator[Batch]:
    """The text in windows that begin elsewhere in every epoch; the positions of the text are the examples."""
    text = letters(TEXT)
    for epoch in range(epochs):
        starts = torch.arange(3 * epoch, len(TEXT) - CONTEXT - 1, CONTEXT)
        for some in starts[drawn(epoch, len(starts), len(starts))].split(size):
            positions = some[:, None] + torch.arange(CONTEXT)
            parity = [["even", "odd"][number % 2] for number in some.tolist()]
            yield text[positions], text[positions + 1], {"example": positions, "start": some, "parity": parity}


PROMPT = "The fox sat"


def last_letter(output: Tensor) -> Tensor:
    """How much more an "h" is expected at the end than an "e"."""
    return output[:, -1, LETTERS.index("h")] - output[:, -1, LETTERS.index("e")]
