"""One layer under recording: from the hooks of its modules to the slots of a step.

Slots pass three stages. *In flight*: a backward pass has reached the layer's output. *Pending*: that pass
has added to the weight's gradient. *Taken*: the optimizer steps with this gradient. A pass that dies, a
gradient that is thrown away (`zero_grad`, a skipped step) and `torch.autograd.grad` thus leave nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.dual_form import GradientProbe, probe_gradient
from spotlights.layers import LayerAdapter
from spotlights.memory.columns import Batch
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.slots import Rows, plain, sample_positions
from spotlights.memory.storage import BufferPool, Storage

_PROBED_UNITS = 64
"""Output units that the probe looks at in one step: others at each step, all of them in turn."""


@dataclass
class _Pass:
    """What one backward pass has brought so far."""

    fresh: bool
    """The gradient was empty before it: what was pending has been thrown away."""
    rows: list[Rows] = field(default_factory=list)
    product: Tensor | None = None


class RecordedLayer:
    """Collects the slots of one weight, whatever modules use it."""

    def __init__(
        self,
        name: str,
        modules: dict[str, nn.Module],
        adapter: LayerAdapter,
        trained: set[int],
        *,
        storage: Storage,
        pool: BufferPool,
        errors: bool,
        generator: torch.Generator,
    ) -> None:
        self.name = name
        self._pool = pool
        self._modules = modules
        self._adapter = adapter
        self._storage = storage
        self._errors = errors
        first = next(iter(modules.values()))
        self.weight = adapter.weight(first)
        biases = {id(b): b for m in modules.values() if (b := adapter.bias(m)) is not None}
        self.bias = adapter.bias(first) if len(biases) == 1 else None
        self.parameters = {"weight": self.weight}
        if self.bias is not None:
            self.parameters["bias"] = self.bias
        self.trained = [n for n, p in self.parameters.items() if id(p) in trained]
        self._samples = {n: sample_positions(p.numel()).to(p.device) for n, p in self.parameters.items()}
        self._passes: dict[int, _Pass] = {}
        self._pending: list[Rows] = []
        self._product: Tensor | None = None
        self._units = slice(0, min(_PROBED_UNITS, self.weight.shape[0]))
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        *direction, self._bias_direction = torch.randn(
            self.weight.shape[1] + 1, generator=generator, dtype=dtype
        ).tolist()
        self._direction = torch.tensor(direction, dtype=dtype, device=self.weight.device)
        self._usual_scale: float | None = None
        self._gradient_version: int | None = None
        self._versions = self._parameter_versions()
        self._settled = self.samples(self.trained)
        self._learning: list[str] = []
        """Which parameters the optimizer holds that are not frozen at the moment."""
        self._witness = self.weight
        """The parameter whose gradient tells when a backward pass is done with this layer."""
        self._watched: dict[int, torch.utils.hooks.RemovableHandle] = {}

    def entry(self) -> LayerEntry:
        out_features, in_features = self.weight.shape
        return LayerEntry(
            kind=self._adapter.kind,
            modules=list(self._modules),
            in_features=in_features,
            out_features=out_features,
            bias=self.bias is not None,
            dtype=str(self.weight.dtype).removeprefix("torch."),
            storage=self._storage.name,
            trained=self.trained,
        )

    def hook(self, current_batch: Callable[[], Batch | None]) -> list[torch.utils.hooks.RemovableHandle]:
        """Starts listening. `current_batch` gives the columns of the current batch, or None while paused."""
        return [
            module.register_forward_hook(_Listener(partial(self._forward, current_batch)), with_kwargs=True)
            for module in self._modules.values()
        ]

    def unhook(self) -> None:
        """Stops listening to the gradients; the hooks of `hook` are the caller's to remove."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    # -- hooks -----------------------------------------------------------------------------

    def _forward(
        self,
        current_batch: Callable[[], Batch | None],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        if not (module.training and torch.is_grad_enabled() and output.requires_grad):
            return
        batch = current_batch()
        self._notice_frozen()
        if batch is None or not self._learning:
            return
        keys = self._adapter.keys(module, args, kwargs)
        columns = batch.rows(keys.shape[:-1], self.name)
        self._watch(self._witness)
        output.register_hook(partial(self._backward, module, keys.detach(), columns, not keys.requires_grad))

    def _backward(
        self,
        module: nn.Module,
        keys: Float[Tensor, "*lead in_features"],
        columns: Mapping[str, np.ndarray],
        may_repeat: bool,
        gradient: Tensor,
    ) -> None:
        # Now, not at the step: until this very moment autograd itself needs the keys unchanged.
        key_rows = keys.reshape(-1, keys.shape[-1])
        like = self._usual_scale if may_repeat else None
        stored_keys, key_scale = self._storage.encode(key_rows, self._pool, like=like)
        if may_repeat and key_scale is not None and like is None:
            self._usual_scale = float(key_scale[0])
        task = torch._C._current_graph_task_id()
        current = self._passes.get(task)
        if current is None:
            current = self._passes[task] = _Pass(fresh=self._gradient_is_empty())
        stored_errors = error_scale = None
        if self._errors:
            errors = self._adapter.errors(module, gradient.detach())
            error_rows = errors.reshape(-1, errors.shape[-1])
            stored_errors, error_scale = self._storage.encode(error_rows, self._pool)
            current.product = _sum(current.product, self._probe(key_rows, error_rows))
        current.rows.append(Rows(stored_keys, key_scale, stored_errors, error_scale, columns, may_repeat))

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter is not self._witness:
            return
        finished = self._passes.pop(torch._C._current_graph_task_id(), None)
        if finished is not None:
            if finished.fresh:
                self.forget()
            self._pending += finished.rows
            self._product = _sum(self._product, finished.product)
        self._gradient_version = None if parameter.grad is None else parameter.grad._version

    def _watch(self, parameter: nn.Parameter) -> None:
        # Here and not at the start: a parameter may be unfrozen while training goes on.
        if id(parameter) not in self._watched:
            self._watched[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _notice_frozen(self) -> None:
        """Parameters may be frozen and unfrozen while training goes on."""
        learning = [name for name in self.trained if self.parameters[name].requires_grad]
        if learning != self._learning:
            self._learning = learning
            self._witness = self.parameters[learning[0]] if learning else self.weight

    def _gradient_is_empty(self) -> bool:
        gradient = self._witness.grad
        if gradient is None:
            return True
        return gradient._version != self._gradient_version and not bool(gradient.any())

    # -- the step --------------------------------------------------------------------------

    def _probe(self, keys: Tensor, errors: Tensor) -> Float[Tensor, "units"]:
        """`Σ δ (k·u)` for the probed output units, with 1 as the key of the bias."""
        dtype = self._direction.dtype
        if "weight" in self._learning:
            scores = keys.to(dtype) @ self._direction
        else:
            scores = torch.zeros(len(keys), dtype=dtype, device=keys.device)
        if "bias" in self._learning:
            scores += self._bias_direction
        return scores @ errors[:, self._units].to(dtype)

    def probe(self, loss_scale: float) -> GradientProbe:
        """Compares the pending slots with the gradient that the optimizer is about to use."""
        self._notice_frozen()
        if not self._errors or self._witness.grad is None:
            return GradientProbe(factor=1.0, residual=0.0)
        product = self._product
        if product is not None and not product.any():
            product = self._product_of_live_units()
        seen = self._gradient_product()
        found = torch.zeros_like(seen) if product is None else product
        return probe_gradient(seen if loss_scale == 1.0 else seen / loss_scale, found)

    def _gradient_product(self) -> Float[Tensor, "units"]:
        """`G u` for the probed output units."""
        units, dtype = self._units, self._direction.dtype
        if self.weight.grad is not None and "weight" in self._learning:
            seen = self.weight.grad[units].to(dtype) @ self._direction
        else:
            seen = torch.zeros(units.stop - units.start, dtype=dtype, device=self.weight.device)
        if self.bias is not None and self.bias.grad is not None and "bias" in self._learning:
            seen.add_(self.bias.grad[units], alpha=self._bias_direction)
        return seen

    def _product_of_live_units(self) -> Float[Tensor, "units"] | None:
        """The probed units were dead at this step and cannot tell γ: looks for others, in the stored rows."""
        for _ in range(0, self.weight.shape[0], _PROBED_UNITS):
            self._next_units()
            product = None
            for rows in self._pending:
                keys, errors = rows.decoded(self._direction.dtype)
                device = self._direction.device
                product = _sum(product, self._probe(keys.to(device), errors.to(device)))
            if product is not None and product.any():
                return product
        return None

    def _next_units(self) -> None:
        start = self._units.stop % self.weight.shape[0]
        self._units = slice(start, min(start + _PROBED_UNITS, self.weight.shape[0]))

    def take(self) -> list[Rows]:
        """The pending slots, if the optimizer is going to use their gradient."""
        rows = [] if self._witness.grad is None else self._pending
        self.forget()
        self._passes.clear()
        self._next_units()
        return rows

    def forget(self) -> None:
        self._pending, self._product = [], None

    # -- the parameters ----------------------------------------------------------------------

    def moved(self) -> bool:
        """Whether somebody else than the optimizer changed the parameters since the last step."""
        if self._versions != self._parameter_versions():
            return True
        # Changes through `.data` leave the version as it is. One parameter is enough to tell.
        now, then = self.samples(self.trained[:1]), self._settled
        return any(not torch.equal(value, then[name]) for name, value in now.items())

    def settle(self) -> dict[str, Tensor]:
        """After a step: the new entries of the samples in the step log."""
        self._versions = self._parameter_versions()
        self._settled = self.samples(self.trained)
        return self._settled

    def samples(self, parameters: Sequence[str]) -> dict[str, Tensor]:
        return {name: plain(torch.take(self.parameters[name].detach(), self._samples[name])) for name in parameters}

    def _parameter_versions(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self.parameters.values()]


class _Listener:
    """A hook that belongs to one model: copies of that model, deep or pickled, are not recorded."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[type[NotRecorded], tuple[()]]:
        return NotRecorded, ()


class NotRecorded:
    """What a copy of a recorded model has in place of its listener."""

    def __call__(self, *args: Any) -> None:
        pass


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
