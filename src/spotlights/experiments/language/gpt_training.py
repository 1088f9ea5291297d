"""Training a GPT with recording: AdamW, a cosine, every slot with its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.datasets import TextDataset
from spotlights.errors import SettingError
from spotlights.experiments.language.gpt import GPT, GPTSettings
from spotlights.experiments.language.training import TrainedLanguage, Window
from spotlights.experiments.progress import track


def shuffled_windows(tokens: Int64[Tensor, "tokens"], *, batch: int, length: int, seed: int) -> Iterator[Window]:
    """The text without end: in each epoch cut into windows at another place, which come in random order.

    A few tokens at its ends, and the windows that fill no batch, are left out of an epoch.
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
    """Trains a GPT on the text and records it."""
    torch.manual_seed(seed)
    tokens = data.train.numbers
    model = GPT(len(data.vocabulary), settings)
    optimizer = adamw(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(settings))
    losses: list[float] = []
    with sl.record(model, optimizer, path, dtype=settings.dtype, overwrite=True) as recorder:
        windows = shuffled_windows(tokens, batch=settings.batch, length=settings.context, seed=seed)
        for window in track(islice(windows, settings.steps), settings.steps, "training"):
            recorder.batch(example=window.positions)
            loss = F.cross_entropy(model(window.tokens).flatten(0, 1), window.targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    model.eval()
    last = losses[-max(1, len(tokens) // (settings.batch * settings.context)) :]
    return trained_gpt(sl.open(path), model, data, seed, sum(last) / len(last))


def trained_gpt(memory: sl.Memory, model: GPT, data: TextDataset, seed: int, surprise: float) -> TrainedLanguage:
    """What is asked: passages by score of what the last block's feed-forward part sees, contributions of the head."""
    return TrainedLanguage(
        memory, model, data, seed, surprise, layer=f"blocks.{len(model.blocks) - 1}.grow", head="head"
    )


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
