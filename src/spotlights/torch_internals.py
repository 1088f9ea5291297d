"""The names of torch that Spotlights uses although torch does not document them. No other file uses such names.

Each entry says which versions of torch it was tried with and what happens where torch does not have the name.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

_autograd = getattr(torch._C, "_autograd", None)
_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)

# -- backward passes -------------------------------------------------------------------------

current_pass: Any = getattr(torch._C, "_current_graph_task_id", None)
"""Returns the number of the backward pass that is running. Needs `passes_are_known`, like the next two."""
at_end_of_pass: Any = getattr(_engine, "queue_callback", None)
"""Takes a function that is called when the running backward pass ends, if it succeeds."""
graph_is_kept: Any = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
"""Returns whether the running backward pass was started with `retain_graph=True`."""


def passes_are_known() -> bool:
    """Whether torch tells which backward pass is running, and when it ends.

    Tried with torch 2.6 to 2.15. Without: `sl.record` raises `UnsupportedError`.
    """
    return None not in (current_pass, at_end_of_pass, graph_is_kept)


# -- tensors ---------------------------------------------------------------------------------


def version(tensor: Shaped[Tensor, "..."]) -> int:
    """How often a tensor was changed in place. Tried with torch 2.6 to 2.15."""
    return tensor._version


def base_of(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."] | None:
    """The tensor that another one is a view of, if it is a view.

    Tried with torch 2.6 to 2.15. Without: None. A use of some rows of a weight (the projections of an attention over
    different inputs) is then not recorded, and the step log says that slots do not explain the gradient.
    """
    return getattr(tensor, "_base", None)


def storage_references(tensor: Shaped[Tensor, "..."]) -> int | None:
    """How many tensors and graph nodes share the memory of a tensor.

    Tried with torch 2.6 to 2.15. Without: None. `layers/recurrent/scratch.py` then allocates anew at every step.
    """
    if _storage_use_count is None:
        return None
    return _storage_use_count(tensor.untyped_storage()._cdata)


_functorch_depth = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def in_functorch() -> bool:
    """Whether the code runs inside `torch.func.grad`, `vmap` or another transform, whose tensors take no hooks.

    Tried with torch 2.13. Without: False. Recording then stops with a warning at the first such call.
    """
    return _functorch_depth is not None and _functorch_depth() is not None


# -- optimizers ------------------------------------------------------------------------------


_OPTIMIZER_FILE = inspect.getfile(torch.optim.Optimizer)


def step_function(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The `step` that a class of optimizers defines or inherits, without what torch wraps around it."""
    return inspect.unwrap(optimizer.step)


def step_may_nest(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether a step of this class may call that of a class it is derived from, which has hooks too."""
    defined = {
        step_function(c) for c in optimizer.__mro__ if issubclass(c, torch.optim.Optimizer) and "step" in vars(c)
    }
    return len(defined - {step_function(torch.optim.Optimizer)}) > 1


def running_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of an optimizer's step are running, one inside the other.

    torch's wrapper of `step` is found by its name among the callers. Tried with torch 2.13. Without: 0, and what a
    nested step does is taken for a step of its own.
    """
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _OPTIMIZER_FILE:
            args = frame.f_locals.get("args", ())
            count += bool(args) and args[0] is optimizer
        frame = frame.f_back
    return count


# -- torch.compile ---------------------------------------------------------------------------


COMPILER = "torch._dynamo"
"""The module that is loaded if anything can be compiled in this process; loading it to ask takes a second.

Tried with torch 2.6 to 2.15. Without: modules that were compiled run compiled, so their hooks may not run.
"""
COMPILED_FROM = "_orig_mod"
"""What `torch.compile` returns has the module that was given to it as a child of this name.

Tried with torch 2.6 to 2.15. Without: layer names begin with what the wrapper is called.
"""


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process.

    Tried with torch 2.6 to 2.15. Without: 0. A model that was compiled before recording began is then reported by the
    general warning about layers without slots.
    """
    if COMPILER not in sys.modules:
        return 0
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return 0
    return counters["stats"]["unique_graphs"]


def in_compiled_code() -> bool:
    """Whether the code was called by something that torch.compile has made, whose frames it may compile.

    Callers are searched for a function of torch's compiler. Tried with torch 2.13. Without: False; to compile a module
    that multiplies with parameters of its own, `layers=` then has to leave it out.
    """
    file, frame = getattr(sys.modules.get(f"{COMPILER}.eval_frame"), "__file__", None), sys._getframe(1)
    while file is not None and frame is not None:
        if frame.f_code.co_filename == file and frame.f_code.co_name == "compile_wrapper":
            return True
        frame = frame.f_back
    return False


_REASON = (
    "Spotlights records layers outside of compiled graphs. While recording, compile without fullgraph=True, or do not "
    "compile the recorded layers"
)


class Untraced:
    """A hook that torch.compile does not trace, because it would bake what the hook did once into its graph.

    The hook ends the graph instead: the code before and after is compiled, and the hook runs as plain Python. Tried
    with torch 2.6 to 2.15.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        try:
            self._hook, self._disabled = hook, torch.compiler.disable(hook, reason=_REASON)
        except TypeError:  # torch 2.6 takes no reason, and traces a hook that runs between two compiled graphs
            self._hook = self._disabled = torch.compiler.disable(hook)

    def __call__(self, *args: Any) -> Any:
        # While the compiler traces this call, the disabled hook ends the graph. Otherwise the check costs nothing.
        return self._disabled(*args) if torch.compiler.is_compiling() else self._hook(*args)


def with_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module that shares everything with it but some parameters; the module stays as it is.

    Tried with torch 2.13: a module keeps its parameters in a dict of its own. Without: norms of the user's own are
    recorded by their gradients.
    """
    copied = copy.copy(module)
    new = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    copied.__dict__["_parameters"] = {**module._parameters, **new}
    return copied
