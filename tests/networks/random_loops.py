"""Training loops of any kind, for `test_random_loops.py`: an optimizer, and what happens around its steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from random_networks import AROUND, BLOCKS, CLASSES, B, D, L, Network
from torch import Tensor, nn

EXAMPLES = 9

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Derived(torch.optim.AdamW):
    """Changes nothing about the step."""


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "derived": lambda p: Derived(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
EVENTS = (
    "clip the norm",
    "clip values",
    "accumulate",
    "micro-batches",
    "L1",
    "L2",
    "gradient penalty",
    "noise on gradients",
    "clamp weights",
    "scale weights by .data",
    "zeros instead of None",
    "schedule",
    "monitoring pass",
    "monitoring pass with gradients",
    "evaluation",
    "a pass that is thrown away",
    "a pass that fails",
    "a step without a gradient",
    "a skipped step",
    "retained graph",
    "gradients by autograd.grad",
    "gradients by torch.func",
    "a copy of the model",
    "load weights",
    "load the optimizer's state",
    "freeze a layer",
    "thaw a layer",
    "replace the head",
    "add a group",
    "paused",
    "loss of NaN",
    "autocast",
    "there and back",
)
DESCRIBED = ("examples", "positions", "list", "nothing", "wrong shape", "late", "one id", "strings")


@dataclass(frozen=True)
class Loop:
    """Everything that was drawn."""

    blocks: list[tuple[str, str]]
    events: dict[str, int]
    """By event: the step from which on it happens, or at which."""
    optimizer: str = "SGD"
    second_optimizer: str | None = None
    described: str = "examples"
    steps: int = 4
    tied: bool = False
    padding: bool = False
    every_token: bool = False
    returns_a_tuple: bool = False
    float64: bool = False
    dtype: str | None = None
    segment_bytes: int = 1 << 20
    seed: int = 0

    def has(self, event: str, step: int) -> bool:
        return event in self.events and step >= self.events[event]

    def any_of(self, *names: str) -> bool:
        """Whether some block has one of these words in its name."""
        return any(name in f"{block} {around}" for name in names for block, around in self.blocks)

    def at(self, event: str, step: int) -> bool:
        return self.events.get(event) == step


LOOPS = st.builds(
    Loop,
    blocks=st.lists(st.tuples(st.sampled_from(list(BLOCKS)), st.sampled_from(["", "", *AROUND])), max_size=3),
    events=st.dictionaries(st.sampled_from(EVENTS), st.integers(0, 3), max_size=3),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    second_optimizer=st.none() | st.none() | st.sampled_from(list(OPTIMIZERS)),
    described=st.sampled_from(["examples", "examples", "examples", *DESCRIBED]),
    steps=st.integers(1, 5),
    tied=st.booleans(),
    padding=st.booleans(),
    every_token=st.booleans(),
    returns_a_tuple=st.booleans(),
    float64=st.booleans(),
    dtype=st.sampled_from([None, None, None, "float16"]),
    segment_bytes=st.sampled_from([1 << 20, 2000]),
    seed=st.integers(0, 99),
)


class Training:
    """The user's loop, with a recorder or without one."""

    def __init__(self, loop: Loop, model: Network) -> None:
        self.loop, self.model = loop, model
        generator = torch.Generator().manual_seed(loop.seed)
        self.texts = torch.randint(7, (EXAMPLES, L), generator=generator)
        self.labels = torch.randint(7 if loop.every_token else CLASSES, (EXAMPLES,), generator=generator)
        held = list(model.parameters())
        if "add a group" in loop.events:
            held = [p for p in held if p is not model.positions and p is not model.head.bias]
        trained = [p for p in held if p.requires_grad]
        if "thaw a layer" in loop.events:
            model.head.bias.requires_grad_(False)
        half = len(trained) // 2
        self.optimizers = [OPTIMIZERS[loop.optimizer](trained)]
        if loop.second_optimizer is not None and half:
            self.optimizers = [
                OPTIMIZERS[loop.optimizer](trained[:half]),
                OPTIMIZERS[loop.second_optimizer](trained[half:]),
            ]
        self.kept = copy.deepcopy(model.state_dict())

    @property
    def recorded(self) -> Any:
        return self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]

    def run(self, recorder: Any) -> None:
        torch.manual_seed(self.loop.seed)
        for step in range(self.loop.steps):
            self.step(step, recorder)

    def describe(self, recorder: Any, ids: Tensor) -> None:
        columns: dict[str, Any] = {
            "examples": {"example": ids, "label": self.labels[ids]},
            "positions": {"example": ids[:, None].expand(-1, L)},
            "list": {"example": ids.tolist()},
            "nothing": None,
            "wrong shape": {"example": torch.arange(B + 2)},
            "late": {"example": ids},
            "one id": {"example": 5},
            "strings": {"example": ids, "source": [f"file {i}" for i in ids.tolist()]},
        }[self.loop.described]
        if columns is not None:
            recorder.batch(**columns)

    def loss(self, ids: Tensor) -> Tensor:
        output = self.model(self.texts[ids])
        output = output[0] if self.loop.returns_a_tuple else output
        labels = self.labels[ids]
        if self.loop.every_token:
            output, labels = output.flatten(0, 1), labels.repeat_interleave(L)
        return F.cross_entropy(output.double() if self.loop.float64 else output.float(), labels)

    def step(self, step: int, recorder: Any) -> None:
        loop, model, happens = self.loop, self.model, lambda event: self.loop.has(event, step)
        self.between_steps(step)
        ids = torch.randperm(EXAMPLES)[:B]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not happens("zeros instead of None"))
        if happens("a pass that is thrown away"):
            self.describe(recorder, ids + 0)
            self.loss(ids).backward()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        if happens("a pass that fails"):
            self.describe(recorder, ids)
            failing = self.loss(ids)
            failing.register_hook(_fail)
            with contextlib.suppress(RuntimeError):
                failing.backward()
        if loop.described != "late":
            self.describe(recorder, ids)
        self.looks(step, recorder)
        with torch.autocast("cpu", torch.bfloat16, enabled=happens("autocast") and not loop.float64):
            if happens("paused"):
                with recorder.paused():
                    loss = self.loss(ids)
            elif happens("micro-batches"):
                loss = self.loss(ids[:1]) + self.loss(ids[1:])
            else:
                loss = self.loss(ids)
        loss = loss + self.penalty(step)
        if loop.at("loss of NaN", step):
            loss = loss * float("nan")
        loss.backward(retain_graph=happens("retained graph"))
        if happens("retained graph"):
            loss.backward()
        if happens("there and back"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1).sub_(0.1)
        if happens("accumulate"):
            other = (ids + 1) % EXAMPLES
            if loop.described != "late":
                self.describe(recorder, other)
            self.loss(other).backward()
        if loop.described == "late":
            self.describe(recorder, ids)
        self.change_gradients(step)
        if loop.at("a skipped step", step):
            return
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                if happens("clamp weights"):
                    parameter.clamp_(-0.4, 0.4)
                if loop.at("scale weights by .data", step):
                    parameter.data.mul_(0.5)

    def between_steps(self, step: int) -> None:
        loop, model, at = self.loop, self.model, lambda event: self.loop.at(event, step)
        if at("load weights") and "replace the head" not in loop.events:
            model.load_state_dict(self.kept)
        if at("load the optimizer's state"):
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if at("freeze a layer"):
            model.tokens.weight.requires_grad_(False)
        if at("thaw a layer"):
            model.head.bias.requires_grad_(True)
        if at("replace the head"):
            old = {id(p) for p in model.head.parameters()} - {id(model.tokens.weight)}
            model.head = nn.Linear(D, model.head.out_features).to(model.positions.dtype)
            optimizer = self.optimizers[-1]
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in old]
            optimizer.param_groups[0]["params"] += list(model.head.parameters())
        if at("add a group") and step:
            held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
            new = [p for p in (model.positions, model.head.bias) if id(p) not in held]
            self.optimizers[0].add_param_group({"params": new, "lr": 0.02})
        if self.loop.has("schedule", step):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8

    def looks(self, step: int, recorder: Any) -> None:
        """What does not train."""
        model, texts, has = self.model, self.texts, lambda event: self.loop.has(event, step)
        if has("monitoring pass"):
            with torch.no_grad():
                model(texts[:5])
        if has("monitoring pass with gradients"):
            model(texts[:5])
        if has("evaluation"):
            model.eval()
            with torch.no_grad():
                model(texts[:4])
            model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        if has("gradients by autograd.grad"):
            torch.autograd.grad(self.loss(torch.arange(4)), trained, allow_unused=True)
        if has("gradients by torch.func"):
            values = {name: p.detach() for name, p in model.named_parameters()}

            def of(values: dict[str, Tensor]) -> Tensor:
                output = torch.func.functional_call(model, values, (texts[:2],))
                return (output[0] if self.loop.returns_a_tuple else output).sum()

            if not self.loop.any_of("LSTM", "GRU", "RNN", "batch norm", "spectral", "checkpointed"):
                torch.func.grad(of)(values)
        if has("a copy of the model"):
            copied = copy.deepcopy(model)
            output = copied(texts[:2])
            (output[0] if self.loop.returns_a_tuple else output).sum().backward()

    def penalty(self, step: int) -> Tensor:
        has, trained = lambda event: self.loop.has(event, step), [p for p in self.model.parameters() if p.requires_grad]
        penalty = self.model.head.weight.new_zeros(())
        if has("L1"):
            penalty = penalty + 0.05 * torch.stack([p.abs().sum() for p in trained]).sum()
        if has("L2"):
            penalty = penalty + 0.05 * torch.stack([p.square().sum() for p in trained]).sum()
        unknown = ("LSTM", "GRU", "RNN", "attention", "transformer", "checkpointed")  # where torch cannot derive twice
        if has("gradient penalty") and not self.loop.any_of(*unknown):
            loss = self.loss(torch.arange(2))
            (slope,) = torch.autograd.grad(loss, self.model.head.weight, create_graph=True)
            penalty = penalty + slope.square().sum()
        return penalty

    def change_gradients(self, step: int) -> None:
        has, parameters = lambda event: self.loop.has(event, step), list(self.model.parameters())
        if has("clip the norm"):
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if has("clip values"):
            nn.utils.clip_grad_value_(parameters, 0.02)
        if has("noise on gradients"):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad += 0.01 * torch.randn_like(parameter.grad)
        if self.loop.at("a step without a gradient", step):
            self.model.head.weight.grad = None


def _fail(gradient: Tensor) -> Tensor:
    raise RuntimeError("as a user's own hook might")
