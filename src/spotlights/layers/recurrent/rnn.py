"""`nn.RNN`, `nn.RNNCell`: the key is `[x_t; h_{t-1}]`, the error the gradient before the nonlinearity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from spotlights.layers.recurrent.adapter import Gates, RecurrentAdapter
from spotlights.layers.recurrent.call import DirectionRun
from spotlights.layers.recurrent.rows import States


class RnnAdapter(RecurrentAdapter):
    modules = (nn.RNN, nn.RNNCell)

    def __init__(self, nonlinearity: str) -> None:
        self.kind = f"rnn-{nonlinearity}"  # type: ignore[misc]
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[nonlinearity]
        self._nonlinearity = nonlinearity

    def handles(self, module: nn.Module) -> bool:
        return super().handles(module) and module.nonlinearity == self._nonlinearity

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
