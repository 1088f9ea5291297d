"""`nn.LSTM` computed by Spotlights while it is recorded, on request: a backward pass that has the errors at hand.

torch's fused kernel keeps the gates' gradients to itself; beside it, they cost the gates and a way back through time
once more. The function here computes what the kernel does, equal to rounding but not to the bit, and tells its keys
and errors as it goes.

The user's module stays what it is. `nn.LSTM.forward` checks and sorts what it is given, then calls `torch._VF.lstm`; as
long as somebody records this way, that name leads here. Calls that were not announced just before, by the hook of a
module that is recorded, and those that the function does not do go on to torch's kernel, and are recorded beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spotlights.layers.adapter import Call
from spotlights.layers.recurrent import Direction, LstmAdapter, RecurrentCall, directions_of
from spotlights.layers.scratch import scratch
from spotlights.layers.through_time import Passed, States, Times, lstm_errors, lstm_forward

Tell = Callable[[Tensor, Tensor], None]
"""Is told the keys and errors of a direction."""


@dataclass
class _Told:
    """What the latest backward pass has told of a call."""

    layers: list[list[Direction]]
    random_state: Tensor | None
    computed_here: bool = False
    task: int = -1
    """Which pass that is."""
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and errors by the name of the map."""

    def tell(self, name: str, keys: Tensor, errors: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task, self.rows = task, {}
        self.rows[name] = keys, errors

    @property
    def whole(self) -> bool:
        """The pass that is under way, or ends, has been through all maps."""
        return self.task == torch._C._current_graph_task_id() and len(self.rows) == sum(map(len, self.layers))


class OwnLstmAdapter(LstmAdapter):
    """Has `nn.LSTM` computed here. Cells, single steps, are left to torch."""

    def begin(self) -> Sequence[Any]:
        return [*super().begin(), _Standing()]

    def before(self, module: nn.Module) -> Any:
        told = _Told(directions_of(module), super().before(module))
        if isinstance(module, nn.LSTM):
            _announced[id(told.layers[0][0].weight_ih)] = told
        return told

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        beside = super().call(module, args, kwargs, output, before.random_state)
        assert isinstance(beside, RecurrentCall)
        return _OwnCall(beside, before) if before.computed_here else beside


class _OwnCall(Call):
    """A call that was computed here. What a pass does not tell, or not in time, is computed beside it after all."""

    def __init__(self, beside: RecurrentCall, told: _Told) -> None:
        self._beside = beside
        self._told = told
        self.nbytes = beside.nbytes
        self.chosen = beside.chosen

    def leads(self) -> Mapping[str, Sequence[int]]:
        return self._beside.leads()

    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"]]:
        return self._shaped(0) if self._told.whole else self._beside.keys()

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        return self._shaped(1) if self._told.whole else self._beside.errors(gradients)

    def _shaped(self, which: int) -> Mapping[str, Float[Tensor, "*lead features"]]:
        return {name: self._beside.layout.shaped(rows[which]) for name, rows in self._told.rows.items()}


# -- in the place of torch's kernel ----------------------------------------------------------

_torch_lstm = torch._VF.lstm
_announced: dict[int, _Told] = {}
"""Calls that are about to come, by the `id` of the module's first weight."""


class _Standing:
    """As long as there is one, `torch._VF.lstm` leads here; removed like a hook."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        _Standing.count += 1
        torch._VF.lstm = _lstm

    def remove(self) -> None:
        _Standing.count -= 1
        if not _Standing.count:
            del torch._VF.lstm  # its own comes by `__getattr__`
            _announced.clear()


def _lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Takes and gives what `torch._VF.lstm` does, by its two signatures."""
    inputs, *sizes, starts, weights, _, _, dropout, training, _ = args[: 9 if isinstance(args[1], Tensor) else 8]
    told = _announced.pop(id(weights[0]), None)
    if told is None or not _can_do(inputs, starts, weights):
        return _torch_lstm(*args)
    told.computed_here = True
    dropout = dropout if training else 0.0
    if sizes:
        return _through_layers(told, inputs, sizes[0].tolist(), starts, dropout)
    batch_first = args[8]
    by_step = inputs.transpose(0, 1) if batch_first else inputs
    sizes = [by_step.shape[1]] * len(by_step)
    rows, last_states, last_cells = _through_layers(told, by_step.flatten(0, 1), sizes, starts, dropout)
    states = rows.unflatten(0, by_step.shape[:2])
    return states.transpose(0, 1) if batch_first else states, last_states, last_cells


def _can_do(inputs: Tensor, starts: tuple[Tensor, Tensor], weights: Sequence[Tensor]) -> bool:
    every = [inputs, *starts, *weights]
    return (
        inputs.dtype in (torch.float32, torch.float64)
        and inputs.numel() > 0
        and all(tensor.is_cpu and tensor.dtype == inputs.dtype for tensor in every)
        and all(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def _through_layers(
    told: _Told, rows: Float[Tensor, "rows inputs"], sizes: list[int], starts: tuple[Tensor, Tensor], dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """All states of the last layer, and the last state and cell of each."""
    given = iter(zip(starts[0].unbind(0), starts[1].unbind(0), strict=True))
    last_states, last_cells = [], []
    for layer, directions in enumerate(told.layers):
        if layer and dropout:
            rows = nn.functional.dropout(rows, dropout)
        found = []
        for d, direction in enumerate(directions):
            tell = partial(told.tell, direction.suffix.removeprefix("_"))
            made = _Through.apply(rows, *next(given), *direction[1:], Times(sizes, reverse=d == 1), tell)
            for each, held in zip(made, (found, last_states, last_cells), strict=True):
                held.append(each)
        rows = found[0] if len(found) == 1 else torch.cat(found, dim=1)
    return rows, torch.stack(last_states), torch.stack(last_cells)


class _Through(torch.autograd.Function):
    """One layer in one direction: all states, and the last state and cell of each sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Float[Tensor, "rows inputs"],
        state_start: Float[Tensor, "sequences hidden"],
        cell_start: Float[Tensor, "sequences hidden"],
        weight_ih: Float[Tensor, "gates inputs"],
        weight_hh: Float[Tensor, "gates hidden"],
        bias_ih: Float[Tensor, "gates"] | None,
        bias_hh: Float[Tensor, "gates"] | None,
        times: Times,
        tell: Tell,
    ) -> tuple[States, Float[Tensor, "sequences hidden"], Float[Tensor, "sequences hidden"]]:
        gates = scratch.empty(len(inputs), len(weight_ih), like=inputs)
        if bias_ih is None or bias_hh is None:
            torch.mm(inputs, weight_ih.T, out=gates)
        else:
            torch.addmm(bias_ih + bias_hh, inputs, weight_ih.T, out=gates)
        states, passed = lstm_forward(gates, weight_hh, times, state_start, cell_start)
        ctx.save_for_backward(inputs, state_start, cell_start, weight_ih, weight_hh, states, *passed)
        ctx.times, ctx.tell = times, tell
        ctx.set_materialize_grads(False)
        return states, states[times.last_rows], passed.cells[times.last_rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, state_start, cell_start, weight_ih, weight_hh, states, *saved = ctx.saved_tensors
        times, passed = ctx.times, Passed(*saved)
        of_states, of_last_states, of_last_cells = gradients
        of_states = times.from_the_end(of_states, of_last_states, states)
        of_cells = times.from_the_end(None, of_last_cells, states)
        errors = lstm_errors(passed, weight_hh, times, cell_start, of_states, of_cells)
        keys = times.beside_before(inputs, states, state_start)
        ctx.tell(keys, errors)
        hidden = states.shape[1]
        of_weights = (errors.T @ keys).split([inputs.shape[1], hidden], dim=1)
        to_input, to_state, to_cell, _, _, to_bias, _ = ctx.needs_input_grad[:7]
        first = times.first_rows if to_state or to_cell else None
        of_bias = errors.sum(dim=0) if to_bias else None
        return (
            errors @ weight_ih if to_input else None,
            errors[first] @ weight_hh if to_state else None,
            of_cells[first] * passed.gates[first, hidden : 2 * hidden] if to_cell else None,
            *of_weights,
            of_bias,
            None if of_bias is None else of_bias.clone(),
            None,
            None,
        )
