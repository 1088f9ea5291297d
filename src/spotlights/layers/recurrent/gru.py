"""`nn.GRU`, `nn.GRUCell`: two linear maps, of `x_t` and of `h_{t-1}`, because the reset gate is between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from spotlights.layers.adapter import LinearMap
from spotlights.layers.recurrent.adapter import Gates, RecurrentAdapter
from spotlights.layers.recurrent.call import ByMap, Direction, DirectionRun
from spotlights.layers.recurrent.rows import States


class GruAdapter(RecurrentAdapter):
    kind = "gru"
    modules = (nn.GRU, nn.GRUCell)
    kernel = staticmethod(torch.gru)

    def maps_of(self, direction: Direction) -> Mapping[str, LinearMap]:
        suffix, weight_ih, weight_hh, bias_ih, bias_hh = direction
        return {
            name + suffix: LinearMap.of(weight, bias)
            for name, weight, bias in (("ih", weight_ih, bias_ih), ("hh", weight_hh, bias_hh))
        }

    def keys(self, run: DirectionRun) -> ByMap:
        suffix = run.direction.suffix
        return {"ih" + suffix: run.inputs, "hh" + suffix: run.previous_states}

    def gate_errors(self, run: DirectionRun, gates: Sequence[Gates], gradients: Sequence[States]) -> Sequence[Gates]:
        gates_ih, gates_hh = gates  # in torch's order: reset, update, new
        weight_hh, state_gradient = run.direction.weight_hh, gradients[0]
        hidden, previous_states = weight_hh.shape[1], run.previous_states
        r, z = gates_ih[:, : 2 * hidden].add_(gates_hh[:, : 2 * hidden]).sigmoid_().split(hidden, dim=1)
        new_hh = gates_hh[:, 2 * hidden :]  # multiplied by the reset gate before it is added
        n = gates_ih[:, 2 * hidden :].addcmul_(r, new_hh).tanh_()
        # Each gate's error for a gradient of 1 at the state.
        aten = torch.ops.aten
        error_n = aten.tanh_backward(1 - z, n)
        error_z = aten.sigmoid_backward(previous_states - n, z)
        error_r = aten.sigmoid_backward(error_n * new_hh, r)
        errors_hh = torch.cat([error_r, error_z, error_n * r], dim=1)
        gate_steps = [rows.unflatten(1, (3, hidden)) for rows in run.times.split(errors_hh)]
        error_steps, state_steps = run.times.split(errors_hh), run.times.split(state_gradient)
        keep_steps = run.times.split(z)
        for step, previous, continuing in reversed(run.times.steps):
            of_state = state_steps[step]
            gate_steps[step].mul_(of_state[:, None])
            if continuing:
                to_state = state_steps[previous][:continuing]
                to_state.addmm_(error_steps[step][:continuing], weight_hh.detach())
                to_state.addcmul_(of_state[:continuing], keep_steps[step][:continuing])
        errors_ih = torch.cat([errors_hh[:, : 2 * hidden], error_n.mul_(state_gradient)], dim=1)
        return [errors_ih, errors_hh]
