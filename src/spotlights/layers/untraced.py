"""Hooks that torch.compile leaves alone.

A compiler that traced a hook would bake what it saw into its graph. A hook made here ends the graph instead: what
comes before and after it is compiled, the hook itself runs as plain Python, and the layers around it with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REASON = (
    "Spotlights records a layer outside of the compiled graph. While recording, compile without fullgraph=True, or "
    "leave the recorded layers out of what is compiled"
)


class Untraced:
    """A hook that torch.compile does not look into."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._outside = torch.compiler.disable(hook, reason=_REASON)

    def __call__(self, *args: Any) -> Any:
        # While it is traced, this asks for the graph to end here; without a compiler it costs next to nothing.
        return self._outside(*args) if torch.compiler.is_compiling() else self._hook(*args)


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
