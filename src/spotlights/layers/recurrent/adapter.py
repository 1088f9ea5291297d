"""What the adapters of all recurrent modules share; the kinds differ in their maps and in the errors of their gates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, WeightPart, computes_as
from spotlights.layers.recurrent.call import ByMap, Direction, DirectionRun, RecurrentCall, directions_of
from spotlights.layers.recurrent.rows import States
from spotlights.layers.recurrent.scratch import scratch

Gates = Float[Tensor, "rows gates"]


class RecurrentAdapter(ModuleAdapter):
    """One kind of recurrent module: by default, with one map of the input and the previous state side by side."""

    modules: ClassVar[tuple[type[nn.Module], ...]]
    state_count: ClassVar[int] = 1
    """How many tensors go from step to step: a state, or a state and a cell."""
    kernel: Callable[..., Any]
    """The function that torch runs layers with."""

    def handles(self, module: nn.Module) -> bool:
        if not computes_as(module, *self.modules):
            return False
        if not all(d.weight_ih is not None and d.weight_hh is not None for ds in directions_of(module) for d in ds):
            return False  # computed weights
        if isinstance(module, nn.RNNCellBase):
            return True
        assert isinstance(module, nn.RNNBase)
        on_cpu = next(module.parameters()).device.type == "cpu"
        # Other devices draw the random numbers of dropout in their own ways.
        return module.proj_size == 0 and (on_cpu or not _has_dropout(module))

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        every = (direction for layer in directions_of(module) for direction in layer)
        return {name: linear for direction in every for name, linear in self.maps_of(direction).items()}

    def begin(self) -> Sequence[Any]:
        return [scratch]

    def before(self, module: nn.Module) -> Any:
        return torch.get_rng_state() if module.training and _has_dropout(module) else None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        inputs = args[0] if args else kwargs["input"]
        start = args[1] if len(args) > 1 else kwargs.get("hx")
        return RecurrentCall(self, module, inputs, start, output, before)

    # -- one layer in one direction ------------------------------------------------------------

    def maps_of(self, direction: Direction) -> Mapping[str, LinearMap]:
        """The linear maps of one direction, that of the input first."""
        weights = {"weight_ih": WeightPart(direction.weight_ih), "weight_hh": WeightPart(direction.weight_hh)}
        biases = {"bias_ih": direction.bias_ih, "bias_hh": direction.bias_hh}
        present = {name: WeightPart(bias) for name, bias in biases.items() if bias is not None}
        key_parts = {"x": direction.weight_ih.shape[1], "h": direction.weight_hh.shape[1]}
        return {direction.suffix.removeprefix("_"): LinearMap(weights, present, key_parts=key_parts)}

    def keys(self, run: DirectionRun) -> ByMap:
        """The keys of each map."""
        width, hidden = run.inputs.shape[1], run.states.shape[1]
        joint = scratch.empty(len(run.inputs), width + hidden, like=run.inputs)
        joint[:, :width] = run.inputs
        run.times.previous(run.states, run.starts[0], out=joint[:, width:])
        return {run.direction.suffix.removeprefix("_"): joint}

    def errors(self, run: DirectionRun, keys: ByMap, gradients: Sequence[States]) -> ByMap:
        """The errors of each map.

        Args:
            run: what the layer computed.
            keys: of each map.
            gradients: what reaches each state and (LSTM) each cell from outside the layer; may be overwritten.
        """
        gates = [_outputs(linear, keys[name]) for name, linear in self.maps_of(run.direction).items()]
        return dict(zip(keys, self.gate_errors(run, gates, gradients), strict=True))

    @abstractmethod
    def gate_errors(self, run: DirectionRun, gates: Sequence[Gates], gradients: Sequence[States]) -> Sequence[Gates]:
        """The gradients of each map's gates before their nonlinearities. May overwrite gates and gradients."""


def _has_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.num_layers > 1 and module.dropout > 0


def _outputs(linear: LinearMap, keys: Float[Tensor, "rows features"]) -> Gates:
    weights, biases = ([part.value for part in parts.values()] for parts in (linear.weights, linear.biases))
    matrix = torch.cat(weights, dim=1) if len(weights) > 1 else weights[0]
    gates = scratch.empty(len(keys), len(matrix), like=keys)
    if not biases:
        return torch.mm(keys, matrix.T, out=gates)
    return torch.addmm(sum(biases[1:], biases[0]), keys, matrix.T, out=gates)
