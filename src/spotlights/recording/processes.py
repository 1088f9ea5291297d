"""One run in several processes: which one this is, and what they agree on as recording starts and ends.

In between they need nothing of each other (`memory/ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spotlights.layers.wrappers import wrappers

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes that train one model together."""

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> Processes:
        """Those of a model in DistributedDataParallel; any other is trained by this process alone."""
        for wrapper in wrappers(model):
            if isinstance(wrapper, DistributedDataParallel):
                group = wrapper.process_group
                return cls(dist.get_rank(group), dist.get_world_size(group), group)
        return cls()

    def agree(self, decide: Callable[[], T]) -> T:
        """What the first process decides, in all of them, once all of them have asked; its error is everybody's."""
        if self.count == 1:
            return decide()
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = decide()
            except Exception as error:
                told[1] = error
        dist.broadcast_object_list(told, src=dist.get_global_rank(self.group, 0), group=self.group)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def meet(self) -> None:
        """Waits for all processes."""
        if self.count > 1:
            dist.barrier(group=self.group)
