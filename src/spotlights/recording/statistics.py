"""Running statistics of normalisations. They change in forward passes, and the network's answers depend on them."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from spotlights.memory.format.names import STATISTICS
from spotlights.memory.slots import plain

_NAMES = ("running_mean", "running_var")


class RunningStatistics:
    """The running means and variances of a network's batch and instance norms."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name in _NAMES
            if isinstance(getattr(module, name, None), Tensor)
        ]

    def initial(self) -> dict[str, Tensor]:
        """As they are when recording starts, under their names in the file of initial weights."""
        return {STATISTICS + name: getattr(module, own).detach().clone() for name, module, own in self._owners}

    def now(self) -> dict[str, np.ndarray]:
        """As they are after a step, for the step log."""
        return {name: plain(getattr(module, own)).numpy().copy() for name, module, own in self._owners}
