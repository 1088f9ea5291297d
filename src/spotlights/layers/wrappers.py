"""What people put around a network: `torch.compile`, `DistributedDataParallel`. Layers are named without it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model, what it wraps, what that wraps, and last the network itself."""
    yield model
    if isinstance(model, DataParallel | DistributedDataParallel):
        yield from wrappers(model.module)
    elif (inner := model._modules.get("_orig_mod")) is not None:  # what torch.compile(model) gives
        yield from wrappers(inner)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself."""
    *_, network = wrappers(model)
    return network


def unfuse(model: nn.Module) -> None:
    """Has torch's transformer layers call their modules: fused, they would take weights past whatever stands there."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # one of the conditions of the fused path, and nothing else


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Inside, networks run module by module: compiled code, and torch's fused transformer layers, know no hooks."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # Whoever has not loaded the compiler has nothing compiled, and need not wait for it to load.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        with eager:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
