"""The memories that the torture attacks, and what they answer: small runs that their step numbers determine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spotlights as sl
from training import CLASSES, FEATURES, chosen, examples, fill, network, sgd, state

STEPS = 12
X, Y = examples()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9, weight_decay=0.01)


def _tokens() -> nn.Module:
    return fill(nn.Sequential(nn.Embedding(24, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double())


def _convolution() -> nn.Module:
    layers = nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, CLASSES)
    return fill(nn.Sequential(*layers).double())


def _dropout() -> nn.Module:
    return network(dropout=0.3)


@dataclass(frozen=True)
class Kind:
    """A kind of memory."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = network
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _momentum
    numbers: bool = False
    """The inputs are the numbers of the examples."""
    size: int = 4
    """Examples in a batch."""

    @property
    def recipe(self) -> bool:
        return "keep" in self.options

    def inputs(self, ids: Tensor) -> Tensor:
        return ids if self.numbers else X[ids]

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(self.inputs(ids)), Y[ids])

    def open(self, path: Path, **options: Any) -> sl.Memory:
        """A memory with its slots: those of a recipe lie in a cache beside it, once they have been asked for."""
        again = {"model": self.model(), "recompute": self.loss, "cache": path.parent / "cache"} if self.recipe else {}
        return sl.open(path, **again, **options)

    def train(
        self,
        path: Path | None,
        start: int = 0,
        stop: int = STEPS,
        begun: Callable[[], object] = lambda: None,
        closing: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> list[Any]:
        """Trains, unrecorded up to `start`; returns the network, and its weights after each step.

        `begun` is called when the recorder has started, `closing` before it is closed.
        """
        model = self.model()
        optimizer, weights = self.optimizer(model), [state(model)]
        self.run(model, optimizer, range(start), None, weights)
        if path is None:
            self.run(model, optimizer, range(start, stop), None, weights)
        else:
            options = {"segment_bytes": 1200, "resume": True, **self.options, **options}
            with sl.record(model, optimizer, path, **options) as recorder:
                assert recorder.step == start, f"resumed at {recorder.step}, not at {start}"
                begun()
                self.run(model, optimizer, range(start, stop), recorder, weights)
                closing()
        return [model, *weights]

    def run(self, model: Any, optimizer: Any, steps: range, recorder: Any, weights: list[Any]) -> None:
        for step in steps:
            ids = chosen(step, self.size)
            torch.manual_seed(step)
            if recorder is not None:
                recorder.batch(example=ids, label=Y[ids], source=["even", "odd"][step % 2])
            optimizer.zero_grad()
            self.loss(model, ids).backward()
            optimizer.step()
            weights.append(state(model))
            if recorder is not None and "fold" in self.options and step % 3 == 2:
                recorder.flush()


RECIPE = {"keep": "recipe", "checkpoint_every": 4}
KINDS = {
    "float64": Kind(),
    "float16": Kind({"dtype": "float16"}),
    "int8": Kind({"dtype": "int8"}),
    "adam": Kind(optimizer=_adam, size=24),  # as many slots as a checkpoint of all weights takes
    "keys only": Kind({"errors": False}),
    "sampled": Kind({"sample": 0.5}),
    "folded": Kind({"fold": "example"}),
    "tokens": Kind(model=_tokens, numbers=True),
    "convolution": Kind(model=_convolution, optimizer=sgd),
    "recipe": Kind(RECIPE, model=_dropout),
    "recipe of adam": Kind(RECIPE, optimizer=_adam),
}


def calibrate(path: Path, kind: Kind, model: nn.Module) -> None:
    """Leaves a calibration beside a memory; "retrained" networks differ by what they were trained on."""

    def retrain(examples: list[int]) -> nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.001 * sum(examples)
        return other

    sl.open(path).calibrate(retrain, model, kind.inputs(torch.arange(3)), target=1, halves=2, seeds=1)


def observe(path: Path, kind: Kind, model: nn.Module) -> None:
    ids = chosen(0, 16)
    sl.observe(model, kind.loss, ids, path, columns={"label": Y[ids], "source": ["odd"] * 16}, batch=4, overwrite=True)


def ask(given: list[Any], question: Callable[[], Any]) -> Any:
    """Adds an answer as plain data; an error of ours in words."""
    try:
        answer = question()
    except sl.SpotlightsError as error:
        given.append(f"{type(error).__name__}: {error}")
        return None
    given.append(answer.numpy().tolist() if hasattr(answer, "numpy") else answer)
    return answer


def answers(memory: sl.Memory, kind: Kind, model: nn.Module) -> list[Any]:
    """What a memory answers to many questions; the last one is what `verify` says."""
    given: list[Any] = [memory.steps, len(memory), list(memory.layers), sorted(memory.columns)]
    asked = memory.attend(model, kind.inputs(torch.arange(2)))
    for name in memory.layers:
        ask(given, lambda name=name: asked[name].totals("example"))
        ask(given, lambda name=name: asked[name].totals("source"))
        ask(given, lambda name=name: [[row["slot"] for row in asked[name].top(3).rows(query)] for query in range(2)])
        ask(given, lambda name=name: asked[name].contributions(target=1).totals("step"))
        ask(given, lambda name=name: memory.weights(name))
    ask(given, lambda: asked[name].influence(target=1).totals("example"))
    ask(given, lambda: asked.history(target=1).totals("label"))
    ask(given, lambda: memory.as_of(memory.steps // 2).weights(name))
    ask(given, lambda: [row["example"] for row in memory.suspects(3).rows()])
    some = kind.inputs(torch.arange(1))
    ask(given, lambda: memory.where(source="odd").attend(model, some)[name].totals("label"))
    verified = ask(given, lambda: memory.verify())
    if verified is not None:
        given[-1] = verified.ok, [sentence.split()[0] for sentence in verified.damaged]
    return given
