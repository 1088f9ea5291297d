"""One layer under recording: from what a backward pass met of it to the slots of a step.

Slots pass three stages. *In flight*: a backward pass has reached the layer's output. *Pending*: that pass
has added to the weight's gradient. *Taken*: the optimizer steps with this gradient. A pass that dies, a
gradient that is thrown away (`zero_grad`, a skipped step) and `torch.autograd.grad` thus leave nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spotlights.layers import LinearMap
from spotlights.memory.gradient_block import GradientBlock
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.slots import Rows, plain, sample_slice
from spotlights.memory.storage import BufferPool, Storage
from spotlights.recording.passes import Met, Part, Standing
from spotlights.recording.probe import Probe

_LOOKED_AT = 8
"""Before a step, every so many of the sampled entries are compared with what they were after the last one."""
_NUMPY = (torch.float32, torch.float64, torch.float16)


class RecordedLayer:
    """Collects the slots of one linear map, whatever modules use its weight."""

    def __init__(
        self,
        name: str,
        kind: str,
        modules: list[str],
        map_name: str,
        maps: Sequence[LinearMap],
        trained: set[int],
        *,
        storage: Storage,
        pool: BufferPool,
        errors: bool,
        turned: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            name: of the layer.
            kind: of the modules.
            modules: who uses the weight, by path.
            map_name: of the map in each of them.
            maps: the map as each of the modules has it; they share the weight, not always the bias.
            trained: the `id`s of the parameters that the optimizer holds.
            storage: how rows are kept.
            pool: where memory comes from.
            errors: whether errors are kept.
            turned: modules that use the weight the other way round, with their kinds.
        """
        self.name = name
        self._kind = kind
        self._modules = modules
        self._map_name = map_name
        self._pool = pool
        self._storage = storage
        self._errors = errors
        self._map = maps[0]
        self._turned = dict(turned or {})
        # A bias that not all uses of the weight have would need slots of its own; it is listed as not recorded.
        if self._turned or len({tuple(part.identity for part in each.biases.values()) for each in maps}) > 1:
            self._map = replace(self._map, biases={})
        self.parameters = {name: part.parameter for name, part in self._map.parameters.items()}
        self._as_is = {n for n, p in self.parameters.items() if _same_view(self._map.kept(n, p.detach()), p)}
        """Parameters that the memory keeps the way they are."""
        self.trained = [n for n, p in self.parameters.items() if id(p) in trained]
        self._sampled = {name: _Sampled(self, name) for name in self.trained}
        self._pending: list[Rows] = []
        self._probe = Probe(self._map)
        self._scales: dict[str, tuple[Tensor, float]] = {}
        """Of keys and errors, plain and turned, as they were last stored."""
        self._gradient_version: int | None = None
        self._versions = self._parameter_versions()
        self._settled = self.samples()
        self._learning: list[str] = []
        """Which parameters the optimizer holds that are not frozen at the moment."""
        self.witness = next(iter(self.parameters.values()))
        """The parameter whose gradient tells when a backward pass is done with this layer."""
        self._notice_frozen()

    def entry(self) -> LayerEntry:
        linear, first = self._map, self.parameters[next(iter(self._map.weights))]
        out_features, in_group = linear.matrix_shape
        return LayerEntry(
            kind=self._kind,
            modules=self._modules,
            in_features=in_group * linear.groups,
            out_features=out_features,
            bias=bool(linear.biases),
            dtype=str(first.dtype).removeprefix("torch."),
            storage=self._storage.name,
            trained=self.trained,
            groups=linear.groups,
            weight_shape=[] if linear.own_shape == linear.matrix_shape else list(linear.own_shape),
            transposed=linear.transposed,
            map=self._map_name,
            weights={} if list(linear.weights) == ["weight"] else linear.columns,
            biases=[] if list(linear.biases) == ["bias"] else list(linear.biases),
            parts=dict(linear.parts),
            turned=self._turned,
        )

    @property
    def several_kinds(self) -> bool:
        """Whether modules of several kinds share the weight."""
        return bool(self._turned)

    def as_kept(self, name: str, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A parameter, or what has its shape, as the memory keeps it: a matrix, or (a bias) a row."""
        if name in self._as_is or tensor.shape != self.parameters[name].shape:
            return tensor
        return self._map.kept(name, tensor)

    # -- a backward pass -------------------------------------------------------------------

    def before_pass(self) -> Standing:
        self._notice_frozen()
        if self.gradient_is_empty():  # what was pending has been thrown away
            self.forget()
        gradient = self.witness.grad
        return Standing(gradient, None if gradient is None else gradient._version)

    def copy(self, met: Met, part: Part) -> Rows:
        """The slots of one call, encoded."""
        name, turned, columns = part
        keys, may_repeat = met.keys[name], met.may_repeat
        errors = met.errors[name] if self._errors else None
        if turned:
            assert errors is not None, "turned slots need errors"
            keys, errors, may_repeat = errors, keys, False
        stored_errors = error_scale = computed = None
        way = "turned " if turned else ""
        if errors is not None:
            stored_errors, error_scale = self._encode(f"{way}errors", errors)
            if _coarser(errors.dtype, self.witness.dtype):
                computed, keys = errors.dtype, keys.to(errors.dtype)  # as autocast did
        stored_keys, key_scale = self._encode(f"{way}keys", keys)
        return Rows(stored_keys, key_scale, stored_errors, error_scale, columns, may_repeat, computed)

    def _encode(
        self, what: str, rows: Float[Tensor, "*lead features"]
    ) -> tuple[Shaped[Tensor, "rows features"], Float[Tensor, "rows"] | None]:
        """Starts from the scale that such rows had last: it most often fits again."""
        last, like = self._scales.get(what, (None, None))
        stored, scale = self._storage.encode(rows, self._pool, (self.name, what), like=like)
        if scale is not None and scale is not last and len(scale):
            self._scales[what] = scale, float(scale[0])
        return stored, scale

    def after_pass(self, before: Standing, rows: list[Rows]) -> bool:
        gradient = self.witness.grad
        # `torch.autograd.grad`, or a pass for other parameters, leaves the gradient as it was.
        if gradient is None or (gradient is before.gradient and gradient._version == before.version):
            return False
        self._pending += rows
        self._gradient_version = gradient._version
        return True

    def _notice_frozen(self) -> None:
        """Parameters may be frozen and unfrozen while training goes on."""
        learning = [name for name in self.trained if self.parameters[name].requires_grad]
        if learning != self._learning:
            self._learning = learning
            self.witness = self.parameters[learning[0]] if learning else next(iter(self.parameters.values()))

    def gradient_is_empty(self) -> bool:
        gradient = self.witness.grad
        if gradient is None:
            return True
        return gradient._version != self._gradient_version and not bool(gradient.any())

    # -- the step --------------------------------------------------------------------------

    def take(self, loss_scale: float) -> tuple[list[Rows], dict[str, GradientBlock] | None]:
        """The pending slots, and parts of the gradients that the optimizer is about to use.

        If there are no gradients, or all are zero, there are no slots either: nothing of them is used.
        """
        self._notice_frozen()
        pending = self._pending
        self.forget()
        if self.witness.grad is None:
            return [], None
        gradients = ((name, self.parameters[name].grad) for name in self.trained)
        kept = {name: self.as_kept(name, gradient) for name, gradient in gradients if gradient is not None}
        found = self._probe.cut(kept, loss_scale)
        return ([] if found is None else pending), found

    def forget(self) -> None:
        self._pending = []

    # -- the parameters ----------------------------------------------------------------------

    def moved(self) -> bool:
        """Whether somebody else than the optimizer changed the parameters since the last step."""
        if self._versions != self._parameter_versions():
            return True
        # Changes through `.data` leave the version as it is. Each entry is a cache miss: a few tell as well as all.
        return any(
            then[::_LOOKED_AT].tobytes() != self._sampled[name].now(_LOOKED_AT).tobytes()
            for name, then in self._settled.items()
        )

    def settle(self) -> dict[str, np.ndarray]:
        """After a step: the new entries of the samples in the step log."""
        self._versions = self._parameter_versions()
        self._settled = self.samples()
        return self._settled

    def samples(self) -> dict[str, np.ndarray]:
        """Some entries of each trained parameter, as they are now."""
        return {name: sampled.now() for name, sampled in self._sampled.items()}

    def _parameter_versions(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self.parameters.values()]


def _same_view(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _coarser(a: torch.dtype, b: torch.dtype) -> bool:
    return a != b and torch.finfo(a).eps > torch.finfo(b).eps


class _Sampled:
    """Some entries of a parameter, as the memory keeps it, to be read after every step."""

    def __init__(self, layer: RecordedLayer, name: str) -> None:
        self._layer = layer
        self._name = name
        self._parameter = layer.parameters[name]
        self._at = sample_slice(layer.as_kept(name, self._parameter).numel())
        self._view: np.ndarray | None = None
        self._index: tuple[np.ndarray, ...] | None = None
        self._pointer = 0

    def now(self, every: int = 1) -> Shaped[np.ndarray, "sample"]:
        """The entries, or every so many of them."""
        parameter = self._parameter
        if parameter.data_ptr() != self._pointer:
            # A view is read in a microsecond; a parameter that moves (`.data = …`) gets a new one.
            self._pointer = parameter.data_ptr()
            self._view = self._look()
        if self._view is None:
            return plain(self._layer.as_kept(self._name, parameter.detach()).reshape(-1)[self._at]).numpy()[::every]
        if self._index is None:
            return self._view[::every].copy()
        return self._view[tuple(places[::every] for places in self._index)]

    def _look(self) -> np.ndarray | None:
        parameter = self._parameter.detach()
        kept = self._layer.as_kept(self._name, parameter)
        shares = kept.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() and kept.numel() > 0
        if not (shares and parameter.device.type == "cpu" and parameter.dtype in _NUMPY):
            return None
        if kept.is_contiguous():
            self._index = None
            return kept.view(-1)[self._at].numpy()
        places = np.arange(kept.numel())[self._at]
        self._index = np.unravel_index(places, tuple(kept.shape))
        return kept.numpy()
