"""What an LSTM, a GRU and an RNN differ in: their linear maps, and how gradients of states become errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.layers.adapter import LinearMap, WeightPart, own_parameters
from spotlights.layers.recurrent.rows import Starts, States, TimeSteps
from spotlights.layers.recurrent.scratch import scratch

ByMap = Mapping[str, Float[Tensor, "rows _features"]]
"""Rows of each linear map, by its name."""
Gates = Float[Tensor, "rows gates"]


class Direction(NamedTuple):
    """The parameters of one layer in one direction."""

    suffix: str
    """What torch adds to their names."""
    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self[1:] if isinstance(parameter, nn.Parameter)]


def directions_of(module: nn.Module) -> list[list[Direction]]:
    """The forward and (if there is one) the backward direction of each layer."""
    parameters = own_parameters(module)

    def direction(suffix: str) -> Direction:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return Direction(suffix, *(parameters.get(name + suffix) for name in names))  # type: ignore[arg-type]

    if isinstance(module, nn.RNNCellBase):
        return [[direction("")]]
    assert isinstance(module, nn.RNNBase)
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    return [[direction(f"_l{layer}{suffix}") for suffix in suffixes] for layer in range(module.num_layers)]


@dataclass(frozen=True)
class DirectionRun:
    """What one layer computed in one direction, in one call."""

    direction: Direction
    times: TimeSteps
    inputs: Float[Tensor, "rows inputs"]
    states: States
    starts: Sequence[Starts]
    """What the sequences begin with: the state and (LSTM) the cell."""
    cell_gradient_is_total: bool
    """The gradient of the cells will include what reaches them through the states."""

    @cached_property
    def previous_states(self) -> States:
        """The states that all steps begin with."""
        return self.times.previous(self.states, self.starts[0])


class Recurrence(ABC):
    """One kind of recurrent layer: by default, with one map of the input and the previous state side by side."""

    kind: ClassVar[str]
    modules: ClassVar[tuple[type[nn.Module], ...]]
    state_count: ClassVar[int] = 1
    """How many tensors go from step to step: a state, or a state and a cell."""
    kernel: Callable[..., Any]
    """The function that torch runs layers with."""

    def handles(self, module: nn.Module) -> bool:
        """Whether a module of one of the classes is of this kind."""
        return True

    def maps(self, direction: Direction) -> Mapping[str, LinearMap]:
        """The linear maps of one direction, that of the input first."""
        weights = {"weight_ih": WeightPart(direction.weight_ih), "weight_hh": WeightPart(direction.weight_hh)}
        biases = {"bias_ih": direction.bias_ih, "bias_hh": direction.bias_hh}
        present = {name: WeightPart(bias) for name, bias in biases.items() if bias is not None}
        key_parts = {"x": direction.weight_ih.shape[1], "h": direction.weight_hh.shape[1]}
        return {direction.suffix.removeprefix("_"): LinearMap(weights, present, key_parts=key_parts)}

    def keys(self, run: DirectionRun) -> ByMap:
        """The keys of each map."""
        joint = run.times.inputs_and_previous(run.inputs, run.states, run.starts[0])
        return {run.direction.suffix.removeprefix("_"): joint}

    def errors(self, run: DirectionRun, keys: ByMap, gradients: Sequence[States]) -> ByMap:
        """The errors of each map.

        Args:
            run: what the layer computed.
            keys: of each map.
            gradients: what reaches each state and (LSTM) each cell from outside the layer; may be overwritten.
        """
        gates = [_outputs(linear, keys[name]) for name, linear in self.maps(run.direction).items()]
        return dict(zip(keys, self.gate_errors(run, gates, gradients), strict=True))

    @abstractmethod
    def gate_errors(self, run: DirectionRun, gates: Sequence[Gates], gradients: Sequence[States]) -> Sequence[Gates]:
        """The gradients of each map's gates before their nonlinearities. May overwrite gates and gradients."""


def _outputs(linear: LinearMap, keys: Float[Tensor, "rows features"]) -> Gates:
    weights, biases = ([part.value for part in parts.values()] for parts in (linear.weights, linear.biases))
    matrix = torch.cat(weights, dim=1) if len(weights) > 1 else weights[0]
    gates = scratch.empty(len(keys), len(matrix), like=keys)
    if not biases:
        return torch.mm(keys, matrix.T, out=gates)
    return torch.addmm(sum(biases[1:], biases[0]), keys, matrix.T, out=gates)


class Rnn(Recurrence):
    """`nn.RNN`, `nn.RNNCell`: the key is `[x_t; h_{t-1}]`, the error the gradient before the nonlinearity."""

    modules = (nn.RNN, nn.RNNCell)

    def __init__(self, nonlinearity: str) -> None:
        self.kind = f"rnn-{nonlinearity}"  # type: ignore[misc]
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[nonlinearity]
        self._nonlinearity = nonlinearity

    def handles(self, module: nn.Module) -> bool:
        return module.nonlinearity == self._nonlinearity

    def gate_errors(self, run: DirectionRun, gates: Sequence[Gates], gradients: Sequence[States]) -> Sequence[Gates]:
        weight_hh, times, before = run.direction.weight_hh.detach(), run.times, gates[0]
        # The errors for a gradient of 1 at the state: the slopes of the nonlinearity.
        errors = before.tanh_().square_().neg_().add_(1) if self._nonlinearity == "tanh" else (before > 0).to(before)
        error_steps, state_steps = times.split(errors), times.split(gradients[0])
        for step, previous, continuing in reversed(times.steps):
            error_steps[step].mul_(state_steps[step])
            if continuing:
                state_steps[previous][:continuing].addmm_(error_steps[step][:continuing], weight_hh)
        return [errors]
