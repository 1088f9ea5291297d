"""One recorded layer: from the keys and errors of a backward pass to the slots of a step.

Slots go through three stages. *In flight*: a backward pass has reached the output of a call. *Pending*: the pass has
added to the gradient of the weight. *Taken*: the optimizer steps with this gradient. So nothing is recorded of a pass
that raises an error, of a gradient that is discarded (`zero_grad`, a skipped step), or of `torch.autograd.grad`.

A step also keeps some numbers of each gradient (`probe.py`), for comparison with what its slots explain, and some
entries of each parameter. The comparison is `memory.slots.compare`, in the writer's thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from spotlights.layers import LinearMap, ModuleAdapter
from spotlights.memory.buffers import BufferPool
from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.format.names import ERRORS, KEYS, probed_entries
from spotlights.memory.slots import GradientBlock, Rows, plain
from spotlights.recording.probe import Probe, ShardProbe
from spotlights.recording.settings import RecordingSettings
from spotlights.recording.shards import local, local_version, shards_of, without_numbers
from spotlights.sparse_rows import SparseRows
from spotlights.torch_internals import version

_NUMPY = (torch.float32, torch.float64, torch.float16)


GradientState = tuple[Tensor | None, int | None]
"""The gradient of a layer's weight when a backward pass began, and its version."""


@dataclass(frozen=True)
class WeightUser:
    """A module that uses a weight."""

    path: str
    module: nn.Module
    adapter: ModuleAdapter
    map_name: str
    linear: LinearMap

    @property
    def name(self) -> str:
        return f"{self.path}.{self.map_name}" if self.map_name else self.path

    @property
    def numbers(self) -> int:
        return sum(part.value.numel() for part in self.linear.weights.values())


class RecordedLayer:
    """Collects the slots of one linear map, for all modules that use its weight."""

    def __init__(
        self,
        users: Sequence[WeightUser],
        transposed_users: Sequence[WeightUser],
        trained: Collection[int],
        settings: RecordingSettings,
        pool: BufferPool,
    ) -> None:
        """
        Args:
            users: the modules that use the weight in the same way.
            transposed_users: the modules that use the transposed weight.
            trained: the `id`s of the optimizer's parameters.
            settings: how rows are stored.
            pool: where memory for rows comes from.
        """
        self.name = users[0].name
        self._users = users
        self._transposed_users = transposed_users
        self._pool = pool
        self._map = users[0].linear
        self._dtype = next(iter(self._map.weights.values())).parameter.dtype
        self._encoding = settings.encoding_of(self._dtype)
        self._storage = settings.storage_of(self._dtype)
        uses = {KEYS: users, ERRORS: transposed_users}  # a folded memory adds up keys as they are
        self._tokens = [
            what for what, some in uses.items() if settings.fold is None and any(u.adapter.sparse_keys for u in some)
        ]
        # A bias that only some users of the weight have would need slots of its own; it is listed as not recorded.
        biases = {tuple(part.identity for part in user.linear.biases.values()) for user in users}
        if transposed_users or len(biases) > 1:
            self._map = replace(self._map, biases={})
        self.parameters = {name: part.parameter for name, part in self._map.parameters.items()}
        self.shards = shards_of(self._map, self.name)
        """By parameter, under `fully_shard`: what this process holds of it."""
        if self.shards:
            self._map = without_numbers(self._map)
        self._as_is = {
            n
            for n, p in self.parameters.items()
            if n not in self.shards and _same_view(self._map.kept(n, p.detach()), p)
        }
        """Parameters that the memory stores in their own shape."""
        self.trained = [n for n, p in self.parameters.items() if id(p) in trained]
        self._entries = {name: _ProbedEntries(self, name) for name in self.trained}
        self._keeps_errors = settings.keeps_errors
        self.by_gradient = False
        """Whether the parameter was used in a way that nobody understands: the step's gradient is recorded as it is."""
        self.called = 0
        """The number of the last call that trained the layer, counted over all layers."""
        self._pending: list[Rows] = []
        self._not_reduced: list[Rows] = []
        """Under `fully_shard`: slots whose gradients are not yet added up over the processes."""
        self.trained_by_pass = False
        """Under `fully_shard`: whether the running pass has added to the whole weight's gradient."""
        self._probe = ShardProbe(self.shards) if self.is_sharded else Probe(self._map)
        self._scales: dict[str, float] = {}
        """The last scales of keys and errors."""
        self._gradient_version: int | None = None
        self._versions = self._parameter_versions()
        self._entries_after_step = self.samples()
        self._unfrozen: list[str] = []
        """The trained parameters that require a gradient at the moment."""
        self.witness = next(iter(self.parameters.values()))
        """The parameter whose gradient shows whether a backward pass has trained this layer."""
        self._check_frozen()

    def entry(self) -> LayerEntry:
        linear, first = self._map, self._users[0]
        out_features, in_group = linear.matrix_shape
        return LayerEntry(
            kind=first.adapter.kind,
            modules=[user.path for user in self._users],
            in_features=in_group * linear.channel_groups,
            out_features=out_features,
            bias=bool(linear.biases),
            dtype=str(self._dtype).removeprefix("torch."),
            storage=self._storage.name,
            trained=self.trained,
            groups=linear.channel_groups,
            weight_shape=[] if linear.own_shape == linear.matrix_shape else list(linear.own_shape),
            transposed=linear.transposed,
            map=first.map_name,
            weights={} if list(linear.weights) == ["weight"] else linear.columns,
            biases=[] if list(linear.biases) == ["bias"] else list(linear.biases),
            parts=dict(linear.key_parts),
            turned={user.path: user.adapter.kind for user in self._transposed_users},
            tokens=self._tokens,
            shards={name: shard.written for name, shard in self.shards.items()} if self.is_sharded else {},
        )

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds all of the parameters."""
        return any(not shard.whole for shard in self.shards.values())

    def writes(self, parameter: str, rank: int) -> bool:
        """Whether this process writes (its part of) a parameter; the first one does if all have the same."""
        return self.shards[parameter].first if self.is_sharded else rank == 0

    def is_in(self, modules: Mapping[str, nn.Module]) -> bool:
        """Whether a network, given by its modules' names, still has the modules that use the weight."""
        users = (*self._users, *self._transposed_users)
        return all(modules.get(user.path, user.module) is user.module for user in users)

    @property
    def several_kinds(self) -> bool:
        """Whether modules of several kinds share the weight."""
        return bool(self._transposed_users)

    def as_kept(self, name: str, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A parameter, or a tensor of its shape, as the memory stores it: a matrix, or (a bias) a vector."""
        if name in self._as_is or tensor.shape != self.parameters[name].shape:
            return tensor
        if name in self.shards:
            return self.shards[name].of(tensor)
        return self._map.kept(name, tensor)

    # -- a backward pass -------------------------------------------------------------------

    def before_pass(self) -> GradientState:
        self._check_frozen()
        if self.gradient_is_empty():  # the gradient of pending slots has been discarded
            self._pending = []
        self.trained_by_pass = False
        gradient = self.witness.grad
        return gradient, None if gradient is None else self._version(gradient)

    def _version(self, tensor: Shaped[Tensor, "..."]) -> int:
        return local_version(tensor) if self.shards else version(tensor)

    def encode(
        self,
        keys: Float[Tensor, "*lead _keys"] | SparseRows,
        errors: Float[Tensor, "*lead _errors"] | SparseRows | None,
        columns: Mapping[str, np.ndarray],
        *,
        may_repeat: bool,
        transposed: bool,
    ) -> Rows:
        """The slots of one call, encoded. With the transposed weight, keys and errors swap roles."""
        stored_errors = error_scale = computed = None
        if errors is not None and _coarser(errors.dtype, self.witness.dtype):
            computed, keys = errors.dtype, keys.to(errors.dtype)  # as autocast did
        prefix = "transposed " if transposed else ""
        if transposed:
            assert errors is not None, "slots of a transposed weight need errors"
            keys, errors, may_repeat = errors, keys, False
        if errors is not None:
            stored_errors, error_scale = self._encode(f"{prefix}errors", errors)
        may_repeat &= isinstance(keys, Tensor)
        stored_keys, key_scale = self._encode(f"{prefix}keys", keys)
        return Rows(stored_keys, key_scale, stored_errors, error_scale, columns, may_repeat, computed)

    def _encode(
        self, what: str, rows: Float[Tensor, "*lead features"] | SparseRows
    ) -> tuple[Shaped[Tensor, "rows features"] | SparseRows, Float[Tensor, "rows"] | None]:
        """Tries the last scale first, which usually fits again."""
        if isinstance(rows, SparseRows):
            if self._tokens:
                return rows.reshape(-1, rows.width).cpu().to(self._storage.compute_dtype), None
            rows = rows.dense()
        stored, scale = self._encoding.encode(rows, self._pool, (self.name, what), like=self._scales.get(what))
        if scale is not None and len(scale):
            self._scales[what] = float(scale[0])
        return stored, scale

    def forget(self) -> None:
        """Drops the pending slots."""
        self._pending = []

    def after_pass(self, before: GradientState, rows: list[Rows]) -> bool:
        """Whether the pass has added to the gradient of the weight. The slots are pending then."""
        gradient = self.witness.grad
        if self.shards:
            if not self.trained_by_pass:
                return False
            self._not_reduced += rows
            rows = self._not_reduced
        # `torch.autograd.grad`, or a pass for other parameters, leaves the gradient as it was; so does a pass under
        # `set_requires_gradient_sync(False)`, whose gradient torch keeps elsewhere.
        if gradient is None or (gradient is before[0] and self._version(gradient) == before[1]):
            return bool(self.shards)
        self._pending += rows
        self._not_reduced = []
        self._gradient_version = self._version(gradient)
        return True

    def _check_frozen(self) -> None:
        """Parameters may be frozen and unfrozen during training."""
        unfrozen = [name for name in self.trained if self.parameters[name].requires_grad]
        if unfrozen != self._unfrozen:
            self._unfrozen = unfrozen
            self.witness = self.parameters[unfrozen[0]] if unfrozen else next(iter(self.parameters.values()))

    def gradient_is_empty(self) -> bool:
        gradient = self.witness.grad
        if gradient is None:
            return True
        return self._version(gradient) != self._gradient_version and not any_nonzero(local(gradient))

    # -- the step --------------------------------------------------------------------------

    def take(self, loss_scale: float) -> tuple[list[Rows], dict[str, GradientBlock] | None]:
        """The pending slots, and blocks of the gradients that the optimizer is about to use.

        Without gradients, or if all are zero, there are no slots: the optimizer uses nothing of them.
        """
        self._check_frozen()
        pending, self._pending = self._pending, []
        gradients = ((name, self.parameters[name].grad) for name in self.trained)
        given = {name: gradient for name, gradient in gradients if gradient is not None}
        if not given:
            return [], None
        unknown, self.by_gradient = self.by_gradient, False
        adapter = self._users[0].adapter
        if adapter.last_resort or (adapter.products and self._keeps_errors and (unknown or not pending)):
            pending = [self._of_gradient(*next(iter(given.items())), loss_scale)]
        kept = {name: g if g.is_sparse else self.as_kept(name, g) for name, g in given.items()}
        blocks = self._probe.cut(kept, loss_scale, _some_tokens(pending))
        return ([] if blocks is None else pending), blocks

    def _of_gradient(self, name: str, gradient: Float[Tensor, "..."], loss_scale: float) -> Rows:
        """A weight's gradient as slots that belong to no example: each input feature's key is one-hot.

        What the gradient is divided by is part of the optimizer. Under `fully_shard`, each process has its part of the
        gradient, and zeros.
        """
        matrix = (gradient.to_dense() if gradient.is_sparse else gradient).detach()
        matrix = self.as_kept(name, matrix)
        if self.is_sharded:
            shard, own = self.shards[name], matrix
            matrix = own.new_zeros(shard.matrix_shape)
            matrix[shard.box] = own * float(shard.first)
        errors = matrix.T if loss_scale == 1.0 else matrix.T / loss_scale
        keys = torch.eye(len(errors), dtype=errors.dtype, device=errors.device)
        return self.encode(keys, errors, {}, may_repeat=False, transposed=False)

    # -- the parameters ----------------------------------------------------------------------

    def moved(self) -> bool:
        """Whether anything but the optimizer changed the parameters since the last step."""
        written = self._versions != self._parameter_versions()
        # Changes through `.data` leave the version as it is.
        entries = [(name, then, self._entries[name].now()) for name, then in self._entries_after_step.items()]
        changed = [(name, then, now) for name, then, now in entries if then.tobytes() != now.tobytes()]
        if not changed:
            return written
        # What was added and taken away again, as SAM does, has changed by rounding.
        rounding = {name: 4 * torch.finfo(self.parameters[name].dtype).eps for name, _, _ in changed}
        return not all(np.abs(now - then).max() <= rounding[n] * np.abs(then).max() for n, then, now in changed)

    def settle(self) -> dict[str, np.ndarray]:
        """After a step: the probed entries for the step log."""
        self._versions = self._parameter_versions()
        self._entries_after_step = self.samples()
        return self._entries_after_step

    def samples(self) -> dict[str, np.ndarray]:
        """The probed entries of each trained parameter, as they are now."""
        return {name: entries.now() for name, entries in self._entries.items()}

    def _parameter_versions(self) -> list[tuple[int, int]]:
        return [(local(p).data_ptr(), self._version(p)) for p in self.parameters.values()]


def any_nonzero(gradient: Shaped[Tensor, "..."]) -> bool:
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def _same_view(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _coarser(a: torch.dtype, b: torch.dtype) -> bool:
    return a != b and torch.finfo(a).eps > torch.finfo(b).eps


class _ProbedEntries:
    """Some entries of a parameter as the memory stores it, read after every step."""

    def __init__(self, layer: RecordedLayer, name: str) -> None:
        self._layer, self._name = layer, name
        self._parameter = layer.parameters[name]
        shard = layer.shards.get(name)
        shape = tuple(layer.as_kept(name, self._parameter).shape) if shard is None else shard.matrix_shape
        places = np.arange(*probed_entries(math.prod(shape)).indices(math.prod(shape)))
        self._index = np.unravel_index(places, shape)
        self._own: np.ndarray | None = None
        """Of a shard: whether this process writes an entry."""
        if shard is not None:
            inside = [(part.start <= i) & (i < part.stop) for i, part in zip(self._index, shard.box, strict=True)]
            self._own = np.logical_and.reduce([*inside, np.full(len(places), shard.first)])
            self._index = tuple(i[self._own] - part.start for i, part in zip(self._index, shard.box, strict=True))
        self._view: np.ndarray | None = None
        self._pointer = 0

    def now(self) -> Shaped[np.ndarray, "sample"]:
        """The entries. Those that other processes write are 0, so that all processes' add up."""
        held = local(self._parameter)
        if held.data_ptr() != self._pointer:
            # Reading a view takes a microsecond. A parameter whose `.data` was replaced gets a new view.
            self._pointer, self._view = held.data_ptr(), self._new_view()
        entries = plain(self._kept()[self._index]).numpy() if self._view is None else self._view[self._index]
        if self._own is None:
            return entries
        whole = np.zeros(len(self._own), entries.dtype)
        whole[self._own] = entries
        return whole

    def _kept(self) -> Shaped[Tensor, "..."]:
        return self._layer.as_kept(self._name, self._parameter.detach())

    def _new_view(self) -> np.ndarray | None:
        held, kept = local(self._parameter), self._kept()
        shares = kept.untyped_storage().data_ptr() == held.untyped_storage().data_ptr() and kept.numel() > 0
        return kept.numpy() if shares and held.device.type == "cpu" and held.dtype in _NUMPY else None


def _some_tokens(pending: Sequence[Rows]) -> list[tuple[int, int]]:
    """A few tokens that slots have used, each with its axis of the weight: 1 for keys, 0 for errors."""
    tokens = []
    for rows in pending[:2]:
        for axis, numbers in ((1, rows.keys), (0, rows.errors)):
            if isinstance(numbers, SparseRows) and len(numbers):
                spread = numbers.places[:: max(1, len(numbers) // 4)][:4]
                tokens += [(axis, int(token)) for token in spread.max(dim=1).values if token >= 0]
    return tokens
