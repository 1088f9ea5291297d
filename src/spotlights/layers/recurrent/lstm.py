"""`nn.LSTM`, `nn.LSTMCell`: the key is `[x_t; h_{t-1}]`, the error the gradient of the four gates before their
nonlinearities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from spotlights.layers.recurrent.adapter import Gates, RecurrentAdapter
from spotlights.layers.recurrent.call import DirectionRun
from spotlights.layers.recurrent.rows import Starts, States, TimeSteps
from spotlights.layers.recurrent.scratch import scratch


class LstmAdapter(RecurrentAdapter):
    kind = "lstm"
    modules = (nn.LSTM, nn.LSTMCell)
    state_count = 2
    kernel = staticmethod(torch.lstm)

    def gate_errors(self, run: DirectionRun, gates: Sequence[Gates], gradients: Sequence[States]) -> Sequence[Gates]:
        (opened,) = gates
        weight_hh, times, cell_start = run.direction.weight_hh.detach(), run.times, run.starts[1]
        state_gradient, cell_gradient = gradients
        hidden = weight_hh.shape[1]
        cells = _forward(opened, hidden, times, cell_start)
        squashed = torch.tanh(cells, out=scratch.empty(*cells.shape, like=cells))
        i, f, g, o = opened.split(hidden, dim=1)
        # Each gate's error for a gradient of 1 at the cell (for the output gate: at the state).
        errors = scratch.empty(*opened.shape, like=opened)
        error_i, error_f, error_g, error_o = errors.split(hidden, dim=1)
        aten = torch.ops.aten
        aten.sigmoid_backward.grad_input(g, i, grad_input=error_i)
        aten.sigmoid_backward.grad_input(times.previous(cells, cell_start), f, grad_input=error_f)
        aten.tanh_backward.grad_input(i, g, grad_input=error_g)
        aten.sigmoid_backward.grad_input(squashed, o, grad_input=error_o)
        state_to_cell = scratch.empty(*squashed.shape, like=squashed)
        aten.tanh_backward.grad_input(o, squashed, grad_input=state_to_cell)
        # The rows of each step, as views: slicing inside the loop would cost as much as the loop computes.
        through_cell = [rows.unflatten(1, (3, hidden)) for rows in times.split(errors[:, : 3 * hidden])]
        error_steps, through_state, to_cell_steps = map(times.split, (errors, error_o, state_to_cell))
        state_steps, cell_steps, forget_steps = map(times.split, (state_gradient, cell_gradient, f))
        for step, previous, continuing in reversed(times.steps):
            of_state, of_cell = state_steps[step], cell_steps[step]
            if not run.cell_gradient_is_total:
                of_cell.addcmul_(of_state, to_cell_steps[step])
            through_cell[step].mul_(of_cell[:, None])
            through_state[step].mul_(of_state)
            if continuing:
                state_steps[previous][:continuing].addmm_(error_steps[step][:continuing], weight_hh)
                cell_steps[previous][:continuing].addcmul_(of_cell[:continuing], forget_steps[step][:continuing])
        return [errors]


def _forward(gates: Gates, hidden: int, times: TimeSteps, cell_start: Starts) -> States:
    """The cells, from `W_ih x + b_ih + W_hh h + b_hh` in torch's order: input, forget, cell, output.

    Overwrites the gates with what their nonlinearities return.
    """
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    i, f, g, _ = gates.split(hidden, dim=1)
    cells = torch.mul(i, g, out=scratch.empty(len(gates), hidden, like=gates))
    cell_steps, forget_steps = times.split(cells), times.split(f)
    for step in times.steps:
        cell_steps[step.time].addcmul_(forget_steps[step.time], times.previous_of(step, cell_steps, cell_start))
    return cells
