"""One call of a recurrent module: keys are in its inputs and outputs; errors come from a pass back in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from spotlights.layers.adapter import Call, own_parameters
from spotlights.layers.recurrent.rows import Layout, Starts, States, TimeSteps

if TYPE_CHECKING:
    from spotlights.layers.recurrent.adapter import RecurrentAdapter


ByMap = Mapping[str, Float[Tensor, "rows _features"]]
"""Rows of each linear map, by its name."""


class Direction(NamedTuple):
    """The parameters of one layer in one direction."""

    suffix: str
    """What torch adds to their names."""
    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None


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


class RecurrentCall(Call):
    """One call of a recurrent module."""

    def __init__(
        self,
        adapter: RecurrentAdapter,
        module: nn.Module,
        inputs: Tensor | PackedSequence,
        start: Tensor | tuple[Tensor, Tensor] | None,
        output: Any,
        random_state: Tensor | None,
    ) -> None:
        self._adapter = adapter
        self._module = module
        self._is_cell = isinstance(module, nn.RNNCellBase)
        self._directions = directions_of(module)
        self._layout = layout = Layout.of(module, inputs)
        outputs = layout.rows(output if isinstance(output, Tensor | PackedSequence) else output[0])
        self._computed, own = outputs.dtype, self._directions[0][0].weight_ih.dtype
        # Autocast computes in a coarser type than that of the weights; what we compute again is in theirs.
        self._inputs, self._outputs = layout.rows(inputs).to(own), outputs.to(own)
        if start is None:
            shape = sum(map(len, self._directions)), layout.batch_sizes[0], self._directions[0][0].weight_hh.shape[1]
            self._starts = [outputs.new_zeros(shape, dtype=own)] * adapter.state_count
        else:
            self._starts = [layout.states(s.to(own)) for s in ([start] if isinstance(start, Tensor) else start)]
        self._random_state = random_state
        self._cell_gradient_is_total = self._is_cell and isinstance(output, tuple) and _computes(output[1], output[0])
        self.lead, self.row_places = layout.lead, layout.row_places
        if not self._is_cell:
            self.axes = () if len(layout.lead) == 1 else (0, 1) if layout.batch_first or layout.packed else (1, 0)
        self.nbytes = self._inputs.nbytes + self._outputs.nbytes

    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"]]:
        by_direction = (keys for layer in self._keys for keys in layer)
        return {name: self._layout.shaped(rows) for keys in by_direction for name, rows in keys.items()}

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        layout, errors = self._layout, {}
        gradients = [None if gradient is None else gradient.to(self._outputs.dtype) for gradient in gradients]
        of_outputs = None if gradients[0] is None else layout.rows(gradients[0])
        # A layer returns its last state twice: in its output, and as the state that it ends with. A cell, once.
        of_last = [None if g is None else layout.states(g) for g in (gradients if self._is_cell else gradients[1:])]
        if self._is_cell:
            of_last[0] = None
        for layer in reversed(range(len(self._runs))):
            of_inputs = None
            for d, run in enumerate(self._runs[layer]):
                hidden, like = run.states.shape[1], self._outputs[:, : run.states.shape[1]]
                of_states = None if of_outputs is None else of_outputs[:, d * hidden : (d + 1) * hidden]
                last = [None if states is None else states[layer * len(self._runs[layer]) + d] for states in of_last]
                arriving = [run.times.state_gradients(None if n else of_states, g, like) for n, g in enumerate(last)]
                of_maps = self._adapter.errors(run, self._keys[layer][d], arriving)
                errors.update({name: layout.shaped(rows) for name, rows in of_maps.items()})
                if layer:
                    product = next(iter(of_maps.values())) @ run.direction.weight_ih.detach()
                    of_inputs = product if of_inputs is None else of_inputs.add_(product)
            if layer:
                assert of_inputs is not None
                mask = self._dropout_masks[layer - 1]
                of_outputs = of_inputs if mask is None else of_inputs.mul_(mask)
        return {name: rows.to(self._computed) for name, rows in errors.items()}

    # -- what the module computed inside -------------------------------------------------------

    @cached_property
    def _keys(self) -> list[list[ByMap]]:
        return [[self._adapter.keys(run) for run in layer] for layer in self._runs]

    @cached_property
    def _runs(self) -> list[list[DirectionRun]]:
        """What each layer computed in each direction. The outputs of all layers but the last are computed again."""
        runs, inputs = [], self._inputs
        for layer, directions in enumerate(self._directions):
            last = layer == len(self._directions) - 1
            outputs = self._outputs if last else self._run(layer, inputs)
            runs.append([])
            for d, (direction, states) in enumerate(zip(directions, outputs.chunk(len(directions), 1), strict=True)):
                times = TimeSteps(self._layout.batch_sizes, reverse=d == 1)
                starts = [tensor[layer * len(directions) + d] for tensor in self._starts]
                runs[-1].append(DirectionRun(direction, times, inputs, states, starts, self._cell_gradient_is_total))
            mask = None if last else self._dropout_masks[layer]
            inputs = outputs if mask is None else outputs * mask
        return runs

    @cached_property
    def _dropout_masks(self) -> list[Tensor | None]:
        """The dropout after each layer but the last, drawn again from the same random state."""
        lower = self._directions[:-1]
        if self._random_state is None:
            return [None for _ in lower]
        assert isinstance(self._module, nn.RNNBase)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random_state)
            return [nn.functional.dropout(torch.ones_like(self._outputs), self._module.dropout) for _ in lower]

    def _run(self, layer: int, inputs: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows features"]:
        """The outputs of one layer, by the kernel that the module uses."""
        module, sizes, directions = self._module, self._layout.batch_sizes, self._directions[layer]
        assert isinstance(module, nn.RNNBase)
        first = layer * len(directions)
        starts = [tensor[first : first + len(directions)] for tensor in self._starts]
        start = starts if len(starts) != 1 else starts[0]
        weights = [p.detach() for direction in directions for p in direction[1:] if isinstance(p, nn.Parameter)]
        options = weights, module.bias, 1, 0.0, module.training, module.bidirectional
        if self._layout.packed:
            return self._adapter.kernel(inputs, torch.tensor(sizes), start, *options)[0]
        by_step = inputs.unflatten(0, (len(sizes), sizes[0]))
        return self._adapter.kernel(by_step, start, *options, False)[0].flatten(0, 1)


def _computes(cell: Tensor, state: Tensor) -> bool:
    """Whether the graph computes the state from this very cell, as `h = o·tanh(c)` does outside a fused kernel.

    The gradient of the cell then includes what reaches it through the state.
    """
    nodes = [state.grad_fn]
    for _ in range(3):
        nodes = [before for node in nodes if node is not None for before, _ in node.next_functions]
        if cell.grad_fn is not None and cell.grad_fn in nodes:
            return True
    return False
