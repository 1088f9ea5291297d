"""The paper's language model (an embedding, one LSTM, and a softmax over the vocabulary), and how it is trained."""

from __future__ import annotations

import contextlib
import ctypes
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
from spotlights_paper.experiments.language.products import TabledLSTM, cross_entropy
from spotlights_paper.experiments.language.trained import TextSettings, TrainedLanguage, Window
from spotlights_paper.experiments.training import fit

State = tuple[Float[Tensor, "layers batch hidden"], Float[Tensor, "layers batch hidden"]]

CHECKPOINT = "checkpoint.pt"
"""Beside the memory of a run that is not finished."""
LAYER = "rnn.l0"
"""The layer that is asked about. Its key is the LSTM's input at a token, `[x; h of the token before]`."""


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(TextSettings):
    """The paper's network, how it is trained and recorded, and how closely one looks afterwards."""

    embedding: int
    """Size of the embedding."""
    projection: int | None = None
    """Units of a linear layer after the embedding; None for no such layer."""
    hidden: int
    """Of the one LSTM layer."""
    dropout: float = 0.0
    """Of the embeddings, in training."""
    output_dropout: float = 0.0
    """Of the LSTM's output, before the softmax."""
    cutoffs: tuple[int, ...] = ()
    """An adaptive softmax: frequent words have more weights than rare ones. Empty for a plain one."""
    sparse: bool = False
    """Update only the embeddings of the words in the batch, with an optimizer of their own."""
    bfloat16: str | None = None
    """What trains with products that round to bfloat16, if anything: "states" (see `TabledLSTM`; without dropout of
    the embeddings) or "softmax"."""
    optimizer: str = "adam"
    """"adam" as the paper has it; "sgd" (momentum 0.9) for contributions, which then are one number for each step."""
    weight_decay: float = 0.0
    """Of Adam, coupled."""
    state_drop: float = 0.0
    """The chance that a step starts from an empty state."""
    checkpoint_every: int | None = None
    """Steps after which network, optimizers and memory are saved: an interrupted run goes on from there."""
    falls_from: float | None = None
    """The share of the steps after which the learning rate falls linearly to zero; None for never."""
    clip: float
    """Of all but sparse gradients: Adam undoes a common factor."""
    unroll: int
    """Tokens of each sequence in a step; the LSTM's state is carried to the next step."""
    layers: tuple[str, ...] | None = ("rnn*",)
    """What is recorded; None for every layer."""
    errors: bool = False
    """Also record errors: contributions become possible, and the memory three times as large."""
    fold: bool = True
    """Add up the keys of all visits to a token: the totals of scores stay the same."""
    asked: int = 1000
    """Test positions over which passages are evaluated."""


class LanguageModel(nn.Module):
    """Tokens in, the log-probabilities of each next token out; starts from an empty state."""

    passage_layer, output_layer = LAYER, "decoder"

    def __init__(self, tokens: int, settings: LanguageSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, settings.embedding, sparse=settings.sparse)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # as in the authors' code
        self.rounds = settings.bfloat16
        inputs = settings.embedding
        self.projection: nn.Module = nn.Identity()
        if settings.projection is not None:
            self.projection, inputs = nn.Linear(inputs, settings.projection), settings.projection
        self.dropout = nn.Dropout(settings.dropout)
        self.output_dropout = nn.Dropout(settings.output_dropout)
        self.rnn = nn.LSTM(inputs, settings.hidden, batch_first=True)
        cutoffs = [cutoff for cutoff in settings.cutoffs if cutoff < tokens - 1]
        self.decoder: nn.Module = (
            nn.AdaptiveLogSoftmaxWithLoss(settings.hidden, tokens, cutoffs)
            if cutoffs
            else nn.Linear(settings.hidden, tokens)
        )

    def read(
        self, tokens: Int64[Tensor, "batch length"], state: State | None = None
    ) -> tuple[Float[Tensor, "batch length hidden"], State]:
        """The LSTM's outputs for the tokens, and its state afterwards."""
        if self.rounds == "states" and self.training:
            vectors = self.projection(self.embedding.weight)
            inputs = vectors.detach()[tokens]
            start = inputs.new_zeros(1, len(tokens), self.rnn.hidden_size)
            with TabledLSTM(tokens, vectors):
                return self.rnn(inputs, (start, start) if state is None else state)
        return self.rnn(self.dropout(self.projection(self.embedding(tokens))), state)

    def forward(
        self, tokens: Int64[Tensor, "batch length"], *, last: bool = False
    ) -> Float[Tensor, "batch places tokens"]:
        """The log-probabilities of the token after each token, or only after the last one."""
        hidden = self.read(tokens)[0]
        hidden = hidden[:, -1:] if last else hidden
        if isinstance(self.decoder, nn.AdaptiveLogSoftmaxWithLoss):
            return self.decoder.log_prob(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return self.decoder(hidden).log_softmax(dim=-1)

    def loss(
        self, tokens: Int64[Tensor, "batch length"], targets: Int64[Tensor, "batch length"], state: State | None
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean cross-entropy of the targets, in nats, and the LSTM's state afterwards."""
        hidden, state = self.read(tokens, state)
        rows = self.output_dropout(hidden).flatten(0, 1)
        if isinstance(self.decoder, nn.AdaptiveLogSoftmaxWithLoss):
            return self.decoder(rows, targets.flatten()).loss, state
        if self.rounds == "softmax" and self.training:
            assert isinstance(self.decoder, nn.Linear)
            return cross_entropy(rows, self.decoder.weight, self.decoder.bias, targets.flatten()), state
        return F.cross_entropy(self.decoder(rows), targets.flatten()), state

    @torch.no_grad()
    def surprise(self, tokens: Int64[Tensor, "tokens"], *, block: int = 2000) -> float:
        """The mean surprise at each token of a text after its first one, in nats, read in one go."""
        training = self.training
        self.eval()
        state: State | None = None
        total = 0.0
        for start in range(0, len(tokens) - 1, block):
            stop = min(start + block, len(tokens) - 1)
            loss, state = self.loss(tokens[None, start:stop], tokens[None, start + 1 : stop + 1], state)
            total += float(loss) * (stop - start)
        self.train(training)
        return total / (len(tokens) - 1)


# -- training ---------------------------------------------------------------------------------


def windows(tokens: Int64[Tensor, "tokens"], *, batch: int, unroll: int) -> Iterator[Window]:
    """Batches without end: the text cut into `batch` sequences, `unroll` tokens of each at a time.

    The same windows come in every epoch. Of the last tokens, fewer than `batch` are never read.
    """
    length = (len(tokens) - 1) // batch
    if length < 1:
        raise SettingError(f"{len(tokens)} tokens cannot be cut into {batch} sequences. Give a longer text.")
    used = batch * length
    inputs, targets = (tokens[shift : used + shift].view(batch, length) for shift in (0, 1))
    positions = torch.arange(used).view(batch, length)
    while True:
        for start in range(0, length, unroll):
            some = slice(start, start + unroll)
            yield Window(inputs[:, some], targets[:, some], positions[:, some], first=start == 0)


def steps_per_epoch(tokens: int, settings: LanguageSettings) -> int:
    return math.ceil((tokens - 1) // settings.batch / settings.unroll)


def train_lstm(settings: LanguageSettings, *, data: TextDataset, seed: int, path: Path) -> TrainedLanguage:
    """Trains a language model on the text and records it; goes on where an interrupted run saved a checkpoint."""
    keep_freed_memory()
    torch.manual_seed(seed)
    tokens = data.train.numbers
    model = LanguageModel(len(data.vocabulary), settings)
    steppers = optimizers(model, settings)
    schedules = [LambdaLR(stepper, _falling(settings)) for stepper in steppers]
    state: State | None = None
    file, done = path.with_name(CHECKPOINT), 0
    losses: list[float] = []
    if settings.checkpoint_every is not None and file.exists():
        saved = torch.load(file, weights_only=True)
        done, state, losses = saved["step"], saved["state"], saved["losses"]
        for part, held in zip((model, *steppers, *schedules), saved["parts"], strict=True):
            part.load_state_dict(held)
        torch.set_rng_state(saved["random"])
    recorder = recorded(model, steppers[0], path, settings, resume=done > 0)

    def loss(window: Window) -> Float[Tensor, ""]:
        nonlocal state
        dropped = settings.state_drop > 0 and float(torch.rand(())) < settings.state_drop
        surprise, state = model.loss(window.tokens, window.targets, None if window.first or dropped else state)
        state = state[0].detach(), state[1].detach()
        losses.append(surprise.item())
        return surprise

    def save(step: int) -> None:
        if settings.checkpoint_every is not None and step % settings.checkpoint_every == 0 and step < settings.steps:
            recorder.flush()
            parts = [part.state_dict() for part in (model, *steppers, *schedules)]
            held = {
                "step": step,
                "state": state,
                "losses": losses,
                "parts": parts,
                "random": torch.get_rng_state(),
            }
            torch.save(held, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)

    fit(
        recorder,
        steppers,
        settings,
        batches=windows(tokens, batch=settings.batch, unroll=settings.unroll),
        loss=loss,
        schedules=schedules,
        done=done,
        after=save,
    )
    file.unlink(missing_ok=True)
    last = losses[-steps_per_epoch(len(tokens), settings) :]
    return TrainedLanguage(sl.open(path), model.eval(), data, seed, sum(last) / len(last))


def recorded(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    path: Path,
    settings: LanguageSettings,
    *,
    resume: bool = False,
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
        overwrite=not resume,
        resume=resume,
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
    dense = [parameter for parameter in model.parameters() if not any(parameter is other for other in sparse)]
    if settings.optimizer == "sgd":
        return [torch.optim.SGD(dense, lr=settings.lr, momentum=0.9)]
    if settings.optimizer != "adam":
        raise SettingError(f'No optimizer "{settings.optimizer}". There are: adam, sgd.')
    adam = torch.optim.Adam(dense, lr=settings.lr, weight_decay=settings.weight_decay)
    return [adam, torch.optim.SparseAdam(sparse, lr=settings.lr)] if sparse else [adam]


def _falling(settings: LanguageSettings) -> Callable[[int], float]:
    """The learning rate at a step, as a share of the first one."""
    if settings.falls_from is None:
        return lambda step: 1.0
    start = int(settings.falls_from * settings.steps)
    return lambda step: min(1.0, (settings.steps - step) / max(settings.steps - start, 1))
