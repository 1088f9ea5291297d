"""Training a language model with recording: the loop that the language experiments share, and what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

import spotlights as sl
from spotlights.datasets import TextDataset
from spotlights.errors import SettingError
from spotlights.experiments.language.gpt import GPT
from spotlights.experiments.language.network import LAYER, LanguageModel, State, surprise
from spotlights.experiments.language.settings import LanguageSettings
from spotlights.experiments.progress import stage, track


@dataclass(frozen=True, eq=False)
class Window:
    """What one step reads: the next tokens of each stretch of the text."""

    tokens: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]
    """The token after each."""
    positions: Int64[Tensor, "batch length"]
    """Where in the text each token is: its example id."""
    first: bool
    """The stretches begin: there is no state yet."""


@dataclass(frozen=True, eq=False)
class TrainedLanguage:
    """A recorded run, ready for questions."""

    memory: sl.Memory
    model: LanguageModel | GPT
    data: TextDataset
    seed: int
    surprise: float
    """At the tokens of the training text, in nats, over the last epoch of training."""
    layer: str = LAYER
    """Whose keys are compared to find passages."""
    head: str = "decoder"
    """The layer that says what comes next."""


def windows(tokens: Int64[Tensor, "tokens"], *, batch: int, unroll: int) -> Iterator[Window]:
    """The text without end, in `batch` stretches side by side, `unroll` tokens at a time.

    The same windows come in every epoch. Of the last tokens, fewer than `batch` are never read.
    """
    length = (len(tokens) - 1) // batch
    if length < 1:
        raise SettingError(f"{len(tokens)} tokens cannot be read in {batch} stretches. Give a longer text.")
    used = batch * length
    inputs, targets = (tokens[shift : used + shift].view(batch, length) for shift in (0, 1))
    positions = torch.arange(used).view(batch, length)
    while True:
        for start in range(0, length, unroll):
            some = slice(start, start + unroll)
            yield Window(inputs[:, some], targets[:, some], positions[:, some], first=start == 0)


def steps_per_epoch(tokens: int, settings: LanguageSettings) -> int:
    return math.ceil((tokens - 1) // settings.batch / settings.unroll)


def train(settings: LanguageSettings, *, data: TextDataset, seed: int, path: Path) -> TrainedLanguage:
    """Trains a language model on the text and records it."""
    keep_freed_memory()
    torch.manual_seed(seed)
    tokens = data.train.numbers
    model = LanguageModel(len(data.vocabulary), settings)
    optimizer, *others = optimizers(model, settings)
    clipped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, _falling(settings)) for each in (optimizer, *others)]
    losses: list[float] = []
    state: State | None = None
    with recorded(model, optimizer, path, settings) as recorder:
        steps = islice(windows(tokens, batch=settings.batch, unroll=settings.unroll), settings.steps)
        for window in track(steps, settings.steps, "training"):
            recorder.batch(example=window.positions)
            loss, state = model.loss(window.tokens, window.targets, None if window.first else state)
            state = state[0].detach(), state[1].detach()
            for each in (optimizer, *others):
                each.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(clipped, settings.clip)
            for each in (optimizer, *others):
                each.step()
            for schedule in schedules:
                schedule.step()
            losses.append(loss.item())
    model.eval()
    last = losses[-steps_per_epoch(len(tokens), settings) :]
    return TrainedLanguage(sl.open(path), model, data, seed, sum(last) / len(last))


def facts(trained: TrainedLanguage) -> dict[str, Any]:
    """What a `LanguageRun` says beyond what every run says."""
    data = trained.data
    with stage("reading the test text"):
        model, text = trained.model, data.test.numbers
        on_test = model.surprise(text) if isinstance(model, GPT) else surprise(model, text)
    return {
        "unit": data.vocabulary.unit,
        "train_tokens": len(data.train),
        "test_tokens": len(data.test),
        "vocabulary": len(data.vocabulary),
        "text_sha256": digest(data),
        "surprise": {"train": trained.surprise, "test": on_test},
    }


def digest(data: TextDataset) -> str:
    """The checksum of a training text, by which a run knows it again."""
    return hashlib.sha256(data.train.numbers.numpy().tobytes()).hexdigest()


def recorded(
    model: LanguageModel, optimizer: torch.optim.Optimizer, path: Path, settings: LanguageSettings
) -> sl.Recorder:
    """The recorder that the settings describe."""
    return sl.record(
        model,
        optimizer,
        path,
        layers=settings.layers,
        dtype=settings.dtype,
        errors=settings.errors,
        fold="example" if settings.fold else None,
        fold_from=settings.fold_from,
        overwrite=True,
    )


def keep_freed_memory() -> None:
    """Tells glibc not to give large blocks back to the system, only to ask for them again in the next step.

    A tenth of the training time on two cores. Elsewhere than on glibc nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3  # as in malloc.h
        for option in (trim_threshold, mmap_threshold):
            mallopt(option, 1 << 30)


def optimizers(model: LanguageModel, settings: LanguageSettings) -> list[torch.optim.Optimizer]:
    """The one that is recorded first."""
    sparse = list(model.embedding.parameters()) if settings.sparse else []
    dense = [parameter for parameter in model.parameters() if not any(parameter is each for each in sparse)]
    if settings.optimizer == "sgd":
        return [torch.optim.SGD(dense, lr=settings.lr, momentum=settings.momentum)]
    if settings.optimizer != "adam":
        raise SettingError(f'No optimizer "{settings.optimizer}". There are: adam, sgd.')
    found: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=settings.lr)]
    return [*found, torch.optim.SparseAdam(sparse, lr=settings.lr)] if sparse else found


def _falling(settings: LanguageSettings) -> Callable[[int], float]:
    """The learning rate at a step, as a share of the first one."""
    if settings.falls_from is None:
        return lambda step: 1.0
    start = int(settings.falls_from * settings.steps)
    return lambda step: min(1.0, (settings.steps - step) / max(settings.steps - start, 1))
