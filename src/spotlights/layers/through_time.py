"""Backward through time: the errors of the linear maps inside a recurrent layer.

A fused kernel gives back the gradients of weights, never those of the gates at single steps. They are computed here,
beside it: its outputs are all states, so the gates of all steps come from one product, and only two quick things are
left to do step by step, the cells upwards and the states' gradients downwards.

Rows are those of a packed sequence: all sequences at step 0, then all that have a step 1, and so on, the longest
sequence first. A batch of equal lengths is the plain case of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.layers.scratch import scratch

States = Float[Tensor, "rows hidden"]
Starts = Float[Tensor, "sequences hidden"]


class Step(NamedTuple):
    """One step of a direction."""

    at: int
    """Its number in time."""
    before: int
    """The number of the step that the direction took before it."""
    old: int
    """How many sequences had that one. The others, the last ones of this step, begin here."""


@dataclass(frozen=True)
class Times:
    """Which rows follow each other, in one direction."""

    sizes: Sequence[int]
    """How many sequences have that many steps; never rises."""
    reverse: bool = False

    @cached_property
    def steps(self) -> list[Step]:
        """In the order in which the layer takes them."""
        order = range(len(self.sizes) - 1, -1, -1) if self.reverse else range(len(self.sizes))
        found, before, count = [], order[0], 0
        for at in order:
            found.append(Step(at, before, min(count, self.sizes[at])))
            before, count = at, self.sizes[at]
        return found

    def split(self, rows: Float[Tensor, "rows features"]) -> list[Float[Tensor, "_ features"]]:
        """The rows of each step, as views: to cut them in the loop would cost as much as what it computes."""
        return list(rows.split(list(self.sizes)))

    def before(
        self, step: Step, states: list[Float[Tensor, "_ hidden"]], start: Starts
    ) -> Float[Tensor, "some hidden"]:
        """The states that a step begins with."""
        size = self.sizes[step.at]
        old = states[step.before][: step.old] if step.old != self.sizes[step.before] else states[step.before]
        if step.old == size:
            return old
        return start[:size] if step.old == 0 else torch.cat([old, start[step.old : size]])

    @cached_property
    def last_rows(self) -> Int64[Tensor, "sequences"]:
        """Where each sequence ends."""
        if self.reverse or self.sizes[0] == self.sizes[-1]:
            first = 0 if self.reverse else sum(self.sizes[:-1])
            return torch.arange(first, first + self.sizes[0])
        starts = list(accumulate(self.sizes, initial=0))
        found = torch.empty(self.sizes[0], dtype=torch.int64)
        for start, size in zip(starts, self.sizes, strict=False):
            found[:size] = torch.arange(start, start + size)
        return found

    def all_before(self, states: States, start: Starts) -> States:
        """The states that all steps begin with, in the order of the rows."""
        return torch.cat(self._each_before(states, start), out=scratch.empty(*states.shape, like=states))

    def beside_before(
        self, inputs: Float[Tensor, "rows inputs"], states: States, start: Starts
    ) -> Float[Tensor, "rows features"]:
        """What comes in at each step and, beside it, the state that the step begins with; in one copy of each."""
        width = inputs.shape[1]
        joint = scratch.empty(len(inputs), width + states.shape[1], like=inputs)
        joint[:, :width] = inputs
        at = 0
        for some in self._each_before(states, start):
            joint[at : at + len(some), width:] = some
            at += len(some)
        return joint

    def _each_before(self, states: States, start: Starts) -> list[Float[Tensor, "_ hidden"]]:
        if self.sizes[0] == self.sizes[-1]:
            return [states[self.sizes[0] :], start] if self.reverse else [start, states[: -self.sizes[0]]]
        steps = reversed(self.steps) if self.reverse else self.steps
        by_step = self.split(states)
        return [self.before(step, by_step, start) for step in steps]

    def from_the_end(self, states: States | None, last: Starts | None, like: States) -> States:
        """A gradient of all states, to which that of the last ones has been added; in memory of its own."""
        found = scratch.empty(*like.shape, like=like)
        found = found.zero_() if states is None else found.copy_(states)
        if last is not None:
            found[self.last_rows] += last
        return found


class Passed(NamedTuple):
    """What a pass through an LSTM leaves."""

    gates: Float[Tensor, "rows gates"]
    """Behind their nonlinearities, in torch's order: input, forget, cell, output."""
    cells: States
    squashed: States
    """tanh of the cells: what the output gate lets through."""


def lstm_passed(gates: Float[Tensor, "rows gates"], hidden: int, times: Times, cell_start: Starts) -> Passed:
    """From `W_ih x + b_ih + W_hh h + b_hh` of all rows, which is overwritten."""
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    i, f, g, _ = gates.split(hidden, dim=1)
    cells = torch.mul(i, g, out=scratch.empty(len(gates), hidden, like=gates))
    cell_steps, forget_steps = times.split(cells), times.split(f)
    for step in times.steps:
        cell_steps[step.at].addcmul_(forget_steps[step.at], times.before(step, cell_steps, cell_start))
    return Passed(gates, cells, torch.tanh(cells, out=scratch.empty(*cells.shape, like=cells)))


def lstm_errors(
    passed: Passed,
    weight_hh: Float[Tensor, "gates hidden"],
    times: Times,
    cell_start: Starts,
    state_gradient: States,
    cell_gradient: States,
    *,
    cells_are_whole: bool = False,
) -> Float[Tensor, "rows gates"]:
    """The gradients of an LSTM's gates before their nonlinearities.

    Args:
        passed: what the pass forwards left.
        weight_hh: how the next gates depend on a state.
        times: which rows follow each other.
        cell_start: the cells that the sequences begin with.
        state_gradient: what reaches each state from outside the layer; overwritten by all that reaches it.
        cell_gradient: the same for the cells;
        cells_are_whole: or else all that reaches the cells, also by way of the states.
    """
    hidden = weight_hh.shape[1]
    gates, cells, squashed = passed
    i, f, g, o = gates.split(hidden, dim=1)
    # What a gate's error is for a gradient of 1 at the cell (for the output gate: at the state).
    errors = scratch.empty(*gates.shape, like=gates)
    of_i, of_f, of_g, of_o = errors.split(hidden, dim=1)
    aten = torch.ops.aten
    aten.sigmoid_backward.grad_input(g, i, grad_input=of_i)
    aten.sigmoid_backward.grad_input(times.all_before(cells, cell_start), f, grad_input=of_f)
    aten.tanh_backward.grad_input(i, g, grad_input=of_g)
    aten.sigmoid_backward.grad_input(squashed, o, grad_input=of_o)
    to_cell = scratch.empty(*squashed.shape, like=squashed)
    aten.tanh_backward.grad_input(o, squashed, grad_input=to_cell)
    through_cell = [each.unflatten(1, (3, hidden)) for each in times.split(errors[:, : 3 * hidden])]
    error_steps, through_state, to_cell_steps = times.split(errors), times.split(of_o), times.split(to_cell)
    state_steps, cell_steps, forget_steps = times.split(state_gradient), times.split(cell_gradient), times.split(f)
    for at, before, old in reversed(times.steps):
        of_state, of_cell = state_steps[at], cell_steps[at]
        if not cells_are_whole:
            of_cell.addcmul_(of_state, to_cell_steps[at])
        through_cell[at].mul_(of_cell[:, None])
        through_state[at].mul_(of_state)
        if old:
            state_steps[before][:old].addmm_(error_steps[at][:old], weight_hh)
            cell_steps[before][:old].addcmul_(of_cell[:old], forget_steps[at][:old])
    return errors


def rnn_errors(
    slopes: Float[Tensor, "rows hidden"],
    weight_hh: Float[Tensor, "hidden hidden"],
    times: Times,
    state_gradient: States,
) -> Float[Tensor, "rows hidden"]:
    """The gradients of a plain recurrent layer's states before their nonlinearity. Overwrites slopes and gradient.

    Args:
        slopes: of the nonlinearity, at `W_ih x + b_ih + W_hh h + b_hh`.
        weight_hh: how the next state depends on a state.
        times: which rows follow each other.
        state_gradient: what reaches each state from outside the layer.
    """
    error_steps, state_steps = times.split(slopes), times.split(state_gradient)
    for at, before, old in reversed(times.steps):
        error_steps[at].mul_(state_steps[at])
        if old:
            state_steps[before][:old].addmm_(error_steps[at][:old], weight_hh)
    return slopes


def gru_errors(
    gates_ih: Float[Tensor, "rows gates"],
    gates_hh: Float[Tensor, "rows gates"],
    weight_hh: Float[Tensor, "gates hidden"],
    times: Times,
    before: States,
    state_gradient: States,
) -> tuple[Float[Tensor, "rows gates"], Float[Tensor, "rows gates"]]:
    """The gradients of both linear maps of a GRU: of the input, and of the state. Overwrites gates and gradient.

    Args:
        gates_ih: `W_ih x + b_ih`, in torch's order: reset, update, new.
        gates_hh: `W_hh h + b_hh`; its last part is multiplied by the reset gate before it is added.
        weight_hh: how the next gates depend on a state.
        times: which rows follow each other.
        before: the states that the steps begin with.
        state_gradient: what reaches each state from outside the layer.
    """
    hidden = weight_hh.shape[1]
    r, z = gates_ih[:, : 2 * hidden].add_(gates_hh[:, : 2 * hidden]).sigmoid_().split(hidden, dim=1)
    from_state = gates_hh[:, 2 * hidden :]
    n = gates_ih[:, 2 * hidden :].addcmul_(r, from_state).tanh_()
    # What a gate's error is for a gradient of 1 at the state.
    aten = torch.ops.aten
    of_n = aten.tanh_backward(1 - z, n)
    of_z = aten.sigmoid_backward(before - n, z)
    of_r = aten.sigmoid_backward(of_n * from_state, r)
    errors = torch.cat([of_r, of_z, of_n * r], dim=1)
    parts = [each.unflatten(1, (3, hidden)) for each in times.split(errors)]
    error_steps, state_steps, keep_steps = times.split(errors), times.split(state_gradient), times.split(z)
    for at, earlier, old in reversed(times.steps):
        of_state = state_steps[at]
        parts[at].mul_(of_state[:, None])
        if old:
            to_state = state_steps[earlier][:old].addmm_(error_steps[at][:old], weight_hh)
            to_state.addcmul_(of_state[:old], keep_steps[at][:old])
    return torch.cat([errors[:, : 2 * hidden], of_n.mul_(state_gradient)], dim=1), errors
