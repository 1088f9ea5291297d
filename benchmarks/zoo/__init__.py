"""Architectures as users write them, each with its own training loop; `architectures.py` records them all.

A new architecture is one function that returns a `Setup`, marked with `@architecture`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """A network, its optimizer, one turn of its loop, and a question about it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]
    examples: int
    """How many training examples there are."""
    step: Callable[[Tensor], object]
    """One turn of the user's loop, on the examples of these numbers."""
    inputs: Any
    """One test input, as `Memory.attend` takes it."""
    target: Callable[[Any], Tensor]
    """The number of interest, for each input."""
    answers: str
    """The name of the module whose output is the model's."""
    columns: Callable[[Tensor], dict[str, Any]] = lambda ids: {"example": ids}
    """What the user tells the recorder about a batch."""
    batch_size: int = 8


ARCHITECTURES: dict[str, Callable[[], Setup]] = {}
"""Tiny ones, of every kind."""
FULL_SIZE: dict[str, Callable[[], Setup]] = {}


def architecture(name: str) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Registers an architecture under the name that the table shows."""

    def register(make: Callable[[], Setup]) -> Callable[[], Setup]:
        ARCHITECTURES[name] = make
        return make

    return register


def full_size(name: str) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """The same for an architecture of the size that people train."""

    def register(make: Callable[[], Setup]) -> Callable[[], Setup]:
        FULL_SIZE[name] = make
        return make

    return register


def supervised(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor], Tensor],
    *,
    clip: float | None = None,
) -> Callable[[Tensor], object]:
    """The usual turn: zero_grad, backward, perhaps clipping, step. `loss` is that of the examples of some numbers."""

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        loss(ids).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step
