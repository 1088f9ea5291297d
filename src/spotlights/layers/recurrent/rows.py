"""Where the rows of a recurrent call are: in time, and in the user's tensors.

Rows are in the order of a `PackedSequence`: all sequences at step 0, then all that have a step 1, and so on, the
longest sequence first. A padded batch is the case in which all sequences have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from spotlights.layers.recurrent.scratch import scratch

States = Float[Tensor, "rows hidden"]
Starts = Float[Tensor, "sequences hidden"]


class TimeStep(NamedTuple):
    """One time step of a direction."""

    time: int
    previous: int
    """The step that the direction takes before this one."""
    continuing: int
    """How many sequences took that step too. The others, the last ones of this step, start here."""


@dataclass(frozen=True)
class TimeSteps:
    """The time steps of one direction."""

    batch_sizes: Sequence[int]
    """How many sequences have each step; never increases."""
    reverse: bool = False

    @cached_property
    def steps(self) -> list[TimeStep]:
        """In the order in which the layer takes them."""
        order = range(len(self.batch_sizes) - 1, -1, -1) if self.reverse else range(len(self.batch_sizes))
        steps, previous, count = [], order[0], 0
        for time in order:
            steps.append(TimeStep(time, previous, min(count, self.batch_sizes[time])))
            previous, count = time, self.batch_sizes[time]
        return steps

    def split(self, rows: Float[Tensor, "rows features"]) -> list[Float[Tensor, "_ features"]]:
        """The rows of each step, as views."""
        return list(rows.split(list(self.batch_sizes)))

    def previous_of(
        self, step: TimeStep, by_step: list[Float[Tensor, "_ hidden"]], start: Starts
    ) -> Float[Tensor, "some hidden"]:
        """The states that one step begins with."""
        size, states = self.batch_sizes[step.time], by_step[step.previous][: step.continuing]
        return states if step.continuing == size else torch.cat([states, start[step.continuing : size]])

    def previous(self, states: States, start: Starts, *, out: States | None = None) -> States:
        """The states that all steps begin with."""
        first, last = self.batch_sizes[0], self.batch_sizes[-1]
        if first == last:
            blocks = [states[first:], start] if self.reverse else [start, states[:-first]]
        else:
            by_step = self.split(states)
            blocks = [self.previous_of(step, by_step, start) for step in sorted(self.steps)]
        return torch.cat(blocks, out=scratch.empty(*states.shape, like=states) if out is None else out)

    @cached_property
    def last_rows(self) -> Int64[Tensor, "sequences"]:
        """The row with which each sequence ends."""
        last = torch.arange(self.batch_sizes[0])
        if self.reverse:
            return last
        for first, size in zip(accumulate(self.batch_sizes, initial=0), self.batch_sizes, strict=False):
            last[:size] = torch.arange(first, first + size)
        return last

    def state_gradients(self, of_states: States | None, of_last: Starts | None, like: States) -> States:
        """The gradient of all states plus that of the last ones, in memory that may be overwritten."""
        total = scratch.empty(*like.shape, like=like)
        total = total.zero_() if of_states is None else total.copy_(of_states)
        if of_last is not None:
            total[self.last_rows] += of_last
        return total


@dataclass(frozen=True)
class Layout:
    """From the user's tensors to rows in the order of `TimeSteps`, and back."""

    batch_sizes: list[int]
    """How many sequences have each step."""
    lead: tuple[int, ...]
    """The leading shape of the user's tensors; (sequences, steps) where they are packed."""
    batch_first: bool = False
    packed: bool = False
    order: Int64[Tensor, "sequences"] | None = None
    """The user's sequences sorted by length, if a packed sequence sorted them."""

    @classmethod
    def of(cls, module: nn.Module, inputs: Tensor | PackedSequence) -> Layout:
        if isinstance(inputs, PackedSequence):
            sizes = inputs.batch_sizes.tolist()
            return cls(sizes, (sizes[0], len(sizes)), packed=True, order=inputs.sorted_indices)
        lead = tuple(inputs.shape[:-1])
        if isinstance(module, nn.RNNCellBase):
            return cls([inputs.numel() // inputs.shape[-1]], lead)
        if len(lead) == 1:
            return cls([1] * lead[0], lead)
        steps, sequences = lead[::-1] if module.batch_first else lead
        return cls([sequences] * steps, lead, batch_first=bool(module.batch_first))

    @property
    def row_places(self) -> Int64[Tensor, "rows"] | None:
        """The places of the rows of a packed sequence in `lead`, flattened."""
        if not self.packed:
            return None
        order = torch.arange(self.batch_sizes[0]) if self.order is None else self.order.cpu()
        return torch.cat([order[:size] * len(self.batch_sizes) + step for step, size in enumerate(self.batch_sizes)])

    def rows(self, tensor: Tensor | PackedSequence) -> Float[Tensor, "rows features"]:
        """An input or output of the module as rows."""
        if isinstance(tensor, PackedSequence):
            return tensor.data.detach()
        tensor = tensor.detach()
        return (tensor.transpose(0, 1) if self.batch_first else tensor).reshape(-1, tensor.shape[-1])

    def shaped(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "... features"]:
        """Rows in the leading shape of the user's tensors."""
        if self.packed:
            return rows
        if self.batch_first:
            return rows.unflatten(0, self.lead[::-1]).transpose(0, 1)
        return rows.reshape(*self.lead, rows.shape[-1])

    def states(self, tensor: Tensor) -> Float[Tensor, "directions sequences hidden"]:
        """The first or last states, or their gradients, of each layer in each direction."""
        tensor = tensor.detach().reshape(-1, self.batch_sizes[0], tensor.shape[-1])
        return tensor if self.order is None else tensor[:, self.order]
