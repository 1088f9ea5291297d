"""The scale and shift of `nn.LayerNorm`, `nn.RMSNorm`, `nn.BatchNorm1d/2d/3d` and `nn.GroupNorm`, and of other
modules that compute the same (`LlamaRMSNorm`, `LayerNorm2d`, a layer scale).

They multiply each feature of the normalised input by a number and add another: a linear map with a diagonal matrix. The
key is the normalised input. The normalisation itself has no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter, OneMapCall, own_parameters
from spotlights.torch_internals import with_parameters


class NormAdapter(LayerAdapter):
    """A scale for each feature of a normalised input.

    The features are the last dimensions, as many as the weight has, or (`channels`) the second dimension: each position
    of an input is then a row.
    """

    def __init__(
        self, kind: str, *modules: type[nn.Module], channels: bool, normalise: Callable[[Any, Tensor], Tensor]
    ) -> None:
        self.kind, self.modules = kind, modules  # type: ignore[misc]
        self._channels = channels
        self._normalise = normalise

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        return weight.reshape(-1, 1)

    def channel_groups(self, module: nn.Module) -> int:
        return self.weight(module).numel()

    def axes(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> tuple[int, ...] | None:
        return (0,) if self._channels else None

    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        return self.errors(module, self._normalise(module, inputs))

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return gradient.movedim(1, -1) if self._channels else gradient.flatten(-self.weight(module).ndim)

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        return rows.movedim(-1, 1) if self._channels else rows.unflatten(-1, self.weight(module).shape)


class OwnNormAdapter(NormAdapter):
    """A module that multiplies what it computes by one vector of its own, and may add another.

    The key is what the module's forward returns for a scale of 1 and a shift of 0. Whether the output is the scale
    times that, plus the shift, is tried on random numbers.
    """

    def __init__(self, kind: str, *, channels: bool) -> None:
        super().__init__(kind, channels=channels, normalise=_with_unit_scale)
        self._handled: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def handles(self, module: nn.Module) -> bool:
        own = own_parameters(module)
        if not (0 < len(own) <= 2) or next(module.children(), None) or next(module.buffers(), None) is not None:
            return False
        scale, *shift = _scale_and_shift(module)
        if any(p.ndim != 1 or p.shape != own[scale].shape for p in own.values()) or len(own[scale]) < 2:
            return False
        if module not in self._handled:
            self._handled[module] = self._is_scaled(module, len(own[scale]), len(shift))
        return self._handled[module]

    def _is_scaled(self, module: nn.Module, size: int, shifts: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn((2, size, 3, 2) if self._channels else (2, size + 1, size), generator=generator)
        like = (-1, 1, 1) if self._channels else (-1,)
        vectors = list(torch.rand(1 + shifts, size, generator=generator).add_(0.5))
        try:
            with torch.random.fork_rng(devices=[]):  # training draws the same numbers with and without recording
                output = _forward(module, vectors, inputs)
                plain = _forward(module, _unit(vectors), inputs)
        except Exception:  # a forward of the user's own, with numbers that it did not expect
            return False
        if not (
            isinstance(output, Tensor) and isinstance(plain, Tensor) and output.shape == plain.shape == inputs.shape
        ):
            return False
        wanted = plain * vectors[0].view(like) + sum(shift.view(like) for shift in vectors[1:])
        return torch.allclose(output.float(), wanted.float(), rtol=1e-4, atol=1e-5)

    def weight(self, module: nn.Module) -> nn.Parameter:
        return own_parameters(module)[_scale_and_shift(module)[0]]

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        _, *shift = _scale_and_shift(module)
        return own_parameters(module)[shift[0]] if shift else None

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any
    ) -> OneMapCall:
        call = super().call(module, args, kwargs, output, before)
        if len(args) + len(kwargs) > 1:
            call.to_keys = lambda inputs: self.errors(module, _with_unit_scale(module, *args, **kwargs))
        return call


def _scale_and_shift(module: nn.Module) -> list[str]:
    """The names of a module's one or two parameters, the scale first."""
    return sorted(own_parameters(module), key=lambda name: name.startswith(("b", "shift")))


def _unit(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(vectors[0]), *(torch.zeros_like(vector) for vector in vectors[1:])]


def _with_unit_scale(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    own = own_parameters(module)
    return _forward(module, _unit([own[name].detach() for name in _scale_and_shift(module)]), *args, **kwargs)


def _forward(module: nn.Module, vectors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """What a copy of the module returns, with other parameters and without hooks."""
    copied = with_parameters(module, dict(zip(_scale_and_shift(module), vectors, strict=True)))
    with torch.no_grad():
        return type(module).forward(copied, *args, **kwargs)


def _layer_norm(module: nn.LayerNorm, inputs: Tensor) -> Tensor:
    return F.layer_norm(inputs, list(module.normalized_shape), eps=module.eps)


def _rms_norm(module: nn.RMSNorm, inputs: Tensor) -> Tensor:
    return F.rms_norm(inputs, list(module.normalized_shape), eps=module.eps)


def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, inputs: Tensor) -> Tensor:
    if module.training or module.running_mean is None:
        return F.batch_norm(inputs, None, None, training=True, eps=module.eps)
    return F.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)


def _group_norm(module: nn.GroupNorm, inputs: Tensor) -> Tensor:
    return F.group_norm(inputs, module.num_groups, eps=module.eps)


NORMS = (
    NormAdapter("layer-norm", nn.LayerNorm, channels=False, normalise=_layer_norm),
    NormAdapter("rms-norm", nn.RMSNorm, channels=False, normalise=_rms_norm),
    NormAdapter("batch-norm", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, channels=True, normalise=_batch_norm),
    NormAdapter("group-norm", nn.GroupNorm, channels=True, normalise=_group_norm),
    OwnNormAdapter("own-norm", channels=False),
    OwnNormAdapter("own-norm-of-channels", channels=True),
)
