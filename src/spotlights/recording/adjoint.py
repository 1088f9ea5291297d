"""The derivative of an answer with respect to each example's weight, through every step of a recorded training.

First, the network is trained again between checkpoints, and the weights and the optimizer's state before each step are
kept. Then the adjoint `∂answer/∂(weights and state)` goes back from the last step to the first: through the optimizer's
update, and through the gradient. The second part gives two products. The product with the Hessian of the batch's loss
belongs to the adjoint of the weights. The product with an example's own gradient is the effect of that example at this
step. The derivative itself is exact. Leaving an example out is a finite change, of which a derivative is the first
order: how much that matters is checked by two more trainings, each without a random tenth of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import SettingError, TooLargeError, UnsupportedError
from spotlights.recording.rerun import Rerun, Source

Named = dict[str, Tensor]
State = dict[str, Named]
"""By parameter, then by the name of the state."""
CHECKS = 2
"""How often a random tenth of the examples is left out."""
MOST_BYTES = 4 << 30
"""What the weights and states of one stretch may take."""
_PASSED_ON = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq")}
"""What each optimizer keeps from step to step and the gradient changes."""


@dataclass(frozen=True, eq=False)
class ExampleDerivatives:
    """What the sweep back found."""

    values: dict[int, Float[Tensor, "numbers"]]
    """For each example's number: the derivative with respect to its weight, added up over its visits."""
    growth: Float[Tensor, "numbers"]
    """How many times as large the adjoint of the weights has become on its way to the first step."""
    explained: float
    """The share of the squared changes of two trainings without a random tenth that the derivative foretells."""


@dataclass(eq=False)
class _Step:
    """The network just before the optimizer's step."""

    weights: Named
    state: State
    gradients: Named
    options: dict[str, dict[str, Any]]
    factors: dict[str, float]
    """What each parameter's gradient was multiplied by, as clipping does, before the optimizer saw it."""


def sweep_back(
    source: Source, answer: Callable[[Any], Float[Tensor, "numbers"]], told: Callable[[float], object]
) -> ExampleDerivatives:
    """Goes back over all steps of a recipe; `answer` gives the numbers of interest of a model."""
    values: dict[int, Tensor] = {}
    bounds = source.bounds
    adjoint: _Sweep | None = None
    for first, end in reversed(list(pairwise(bounds))):
        run = Rerun(source, first)
        steps = _steps(run, range(first, end))
        if adjoint is None:
            adjoint = _Sweep(run, answer(run.model))
        for step in reversed(range(first, end)):
            adjoint.back(run, step, source.step(step).batches, steps.pop(), values)
            told((bounds[-1] - step) / bounds[-1])
    assert adjoint is not None
    explained = _explained(source, answer, adjoint, values)
    return ExampleDerivatives(values, adjoint.size() / adjoint.started, explained)


def _explained(
    source: Source, answer: Callable[[Any], Float[Tensor, "numbers"]], sweep: _Sweep, values: dict[int, Tensor]
) -> float:
    """Trains again without a random tenth of the examples, and compares what changed with what the derivative says."""
    generator, examples = torch.Generator().manual_seed(0), sorted(values)
    said, seen = [], []
    for _ in range(CHECKS):
        order = torch.randperm(len(examples), generator=generator)[: max(1, len(examples) // 10)]
        left_out = [examples[place] for place in order.tolist()]
        run = Rerun(source, source.bounds[0])
        for step in range(source.bounds[0], source.bounds[-1]):
            run.take_without_weight(step, left_out, sweep.factors[step])
        said.append(-torch.stack([values[example] for example in left_out]).sum(dim=0))
        seen.append(answer(run.model).detach().double() - sweep.numbers)
    changes = torch.stack(seen)
    missed = float((torch.stack(said) - changes).square().sum())
    return 1 - missed / max(float(changes.square().sum()), torch.finfo(torch.float64).tiny)


def _steps(run: Rerun, steps: range) -> list[_Step]:
    """Trains again from a checkpoint, and keeps what the network was before each step of the optimizer."""
    optimizer, kept = run.optimizer, []
    name = type(optimizer).__name__
    if name not in _PASSED_ON:
        raise UnsupportedError(
            f"There is no exact replay of influence through {name}. There is for {', '.join(_PASSED_ON)}."
        )
    named = {n: p for n, p in run.model.named_parameters() if p.requires_grad}
    size = sum(p.nbytes for p in named.values()) * (2 + len(_PASSED_ON[name])) * len(steps)
    if size > MOST_BYTES:
        raise TooLargeError(
            f"The weights of {len(steps):,} steps between two checkpoints take {size / 2**30:.1f} GB. Record with a "
            "smaller checkpoint_every."
        )

    def keep(*_: Any) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        active = {n: p for n, p in named.items() if p.grad is not None and id(p) in groups}
        options = {n: {k: v for k, v in groups[id(p)].items() if k != "params"} for n, p in active.items()}
        step = _Step(
            {n: p.detach().clone() for n, p in named.items()},
            {
                n: {k: v.clone() for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
                for n, p in active.items()
            },
            {n: p.grad.clone() for n, p in active.items() if p.grad is not None},
            options,
            dict(run.factors),
        )
        kept.append(step)

    hook = optimizer.register_step_pre_hook(keep)
    try:
        for step in steps:
            run.take(step)
        run.compare(steps.stop)
    finally:
        hook.remove()
    return kept


class _Sweep:
    """The adjoint of the weights and of the optimizer's state, for all numbers of interest at once."""

    def __init__(self, run: Rerun, numbers: Float[Tensor, "numbers"]) -> None:
        named = {n: p for n, p in run.model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(
            numbers,
            list(named.values()),
            torch.eye(len(numbers), dtype=numbers.dtype),
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
        self.weights: Named = dict(zip(named, grads, strict=True))
        self.state: State = {n: {} for n in named}
        self.numbers = numbers.detach().double()
        self.factors: dict[int, dict[str, float]] = {}
        """Those of the steps."""
        self.started = self.size().clamp_min(torch.finfo(torch.float64).tiny)

    def size(self) -> Float[Tensor, "numbers"]:
        squares = [a.double().flatten(1).square().sum(dim=1) for a in self.weights.values()]
        return torch.stack(squares).sum(dim=0).sqrt()

    def back(self, run: Rerun, number: int, batches: Sequence[Any], step: _Step, values: dict[int, Tensor]) -> None:
        """From after a step to before it."""
        of_gradient = {name: self._through_update(name, type(run.optimizer).__name__, step) for name in step.gradients}
        parameters = dict(run.model.named_parameters())
        with torch.no_grad():
            for name, weight in step.weights.items():
                parameters[name].copy_(weight)
        names = list(step.gradients)
        asked = [parameters[name] for name in names]
        self.factors[number] = step.factors
        for batch in batches:
            ids = batch.columns["example"]
            losses = run.losses_of(number, batch, ids)
            if losses.ndim != 1 or len(losses) != len(ids):
                raise SettingError(
                    f"Exact replay needs one loss for each example: recompute= returned shape {tuple(losses.shape)} "
                    f'for {len(ids)} examples. Give reduction="none"; the mean is taken.'
                )
            shares = torch.full_like(losses, 1 / len(losses), requires_grad=True)
            gradients = torch.autograd.grad(
                (shares * losses).sum(), asked, create_graph=True, allow_unused=True, materialize_grads=True
            )
            used = [i for i, gradient in enumerate(gradients) if gradient.requires_grad]
            outward = [of_gradient[names[i]] * step.factors[names[i]] for i in used]
            to_shares, *to_weights = torch.autograd.grad(
                [gradients[i] for i in used],
                [shares, *asked],
                outward,
                is_grads_batched=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, more in zip(names, to_weights, strict=True):
                self.weights[name] = self.weights[name] + more
            for place, example in enumerate(np.asarray(ids).tolist()):
                own = to_shares[:, place].double() / len(losses)
                values[example] = values[example] + own if example in values else own

    def _through_update(self, name: str, optimizer: str, step: _Step) -> Tensor:
        """Takes one parameter's adjoint back through the optimizer's update; returns that of the gradient."""
        inputs = [step.weights[name], step.gradients[name]]
        kept = [step.state[name].get(key, torch.zeros_like(inputs[0])) for key in _PASSED_ON[optimizer]]
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (*inputs, *kept)]
        first = _PASSED_ON[optimizer][0] not in step.state[name]
        update = _sgd if optimizer == "SGD" else _adam
        count = float(step.state[name]["step"]) + 1 if "step" in step.state[name] else 1.0
        after = update(*leaves, options=step.options[name], count=count, first=first, decoupled=optimizer == "AdamW")
        outward = [self.weights[name]]
        for key in _PASSED_ON[optimizer]:
            outward.append(self.state[name].get(key, torch.zeros_like(self.weights[name])))
        pairs = [(m, o) for m, o in zip(after, outward, strict=True) if m.requires_grad]
        to_weight, to_gradient, *to_state = torch.autograd.grad(
            [m for m, _ in pairs],
            leaves,
            [o for _, o in pairs],
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
        self.weights[name] = to_weight
        self.state[name] = dict(zip(_PASSED_ON[optimizer], to_state, strict=True))
        return to_gradient


# -- the optimizers' updates, as functions --------------------------------------------------------


def _sgd(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, options: dict[str, Any], first: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    if options.get("maximize"):
        gradient = -gradient
    gradient = gradient + options["weight_decay"] * weight
    momentum = options["momentum"]
    if momentum:
        buffer = gradient if first else momentum * buffer + (1 - options["dampening"]) * gradient
        gradient = gradient + momentum * buffer if options["nesterov"] else buffer
    return weight - float(options["lr"]) * gradient, buffer


def _adam(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    options: dict[str, Any],
    count: float,
    decoupled: bool,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if options.get("amsgrad"):
        raise UnsupportedError("There is no exact replay of influence through Adam with amsgrad.")
    if options.get("maximize"):
        gradient = -gradient
    lr, (beta1, beta2) = float(options["lr"]), options["betas"]
    if decoupled or options.get("decoupled_weight_decay"):
        weight = weight * (1 - lr * options["weight_decay"])
    else:
        gradient = gradient + options["weight_decay"] * weight
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient * gradient
    some = square > 0  # the root has no derivative at 0, where a parameter has never had a gradient
    root = torch.where(some, torch.where(some, square, 1.0).sqrt(), 0.0)
    size = root / (1 - beta2**count) ** 0.5 + options["eps"]
    return weight - lr / (1 - beta1**count) * mean / size, mean, square
