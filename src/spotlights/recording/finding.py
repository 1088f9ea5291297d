"""What of a network is recorded: its linear maps, and who uses them.

Modules that share a weight share a layer of the memory. Two kinds may share one, each seeing it the other way round:
an embedding looks rows of the weight up, the output layer multiplies with them. The layer is then that of the kind
that has the weight as it is, and the other's slots are *turned*: their error is the weight's key, their key its error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from spotlights.errors import SettingError, UnknownNameError
from spotlights.layers import ADAPTERS, FunctionalAdapter, LinearMap, ModuleAdapter, adapter_for
from spotlights.memory.storage import BufferPool, storage_named
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.listening import Heard, Listener
from spotlights.recording.settings import Settings


@dataclass(frozen=True)
class _User:
    """A module's use of a weight."""

    path: str
    module: nn.Module
    adapter: ModuleAdapter
    map_name: str
    linear: LinearMap

    @property
    def name(self) -> str:
        return f"{self.path}.{self.map_name}" if self.map_name else self.path

    @property
    def way(self) -> tuple[ModuleAdapter, str]:
        return self.adapter, self.map_name


@dataclass
class _Found:
    """A weight, or several that make one matrix, and who uses it."""

    users: list[_User] = field(default_factory=list)

    @property
    def _first(self) -> _User:
        """Whose view of the weight the memory has: the first that has it as it is."""
        return next((user for user in self.users if not user.linear.transposed), self.users[0])

    @property
    def straight(self) -> list[_User]:
        """Those with the same view."""
        return [user for user in self.users if user.way == self._first.way]

    @property
    def turned(self) -> list[_User]:
        """Those that see it the other way round. What any further kind adds to the gradient shows in the probe."""
        if not _is_plain(self._first.linear):
            return []
        other = not self._first.linear.transposed
        return [user for user in self.users if _is_plain(user.linear) and user.linear.transposed is other]

    @property
    def names(self) -> list[str]:
        return [user.name for user in (*self.straight, *self.turned)]


def _is_plain(linear: LinearMap) -> bool:
    """Whether the map is one matrix that may be seen from both sides."""
    part = linear.weights.get("weight")
    return part is not None and linear.groups == 1 and part.parameter.ndim == 2 and len(linear.weights) == 1


def find_layers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    *,
    pool: BufferPool,
) -> tuple[dict[str, RecordedLayer], list[Listener]]:
    """The layers to record by name, and what listens for them.

    Args:
        model: the network.
        optimizer: says which parameters are trained.
        settings: say which layers to record, and how.
        pool: where memory comes from.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    patterns = settings.patterns
    found = _find_maps(model)
    names = [name for each in found for name in each.names]
    unknown = [p for p in patterns or () if not any(fnmatchcase(name, p) for name in names)]
    if unknown or (patterns is not None and not patterns):
        raise UnknownNameError(f"No layer matches {unknown}. The model has: {', '.join(names)}.")
    layers: dict[str, RecordedLayer] = {}
    listeners: dict[nn.Module, Listener] = {}
    for each in found:
        if patterns is not None and not any(fnmatchcase(name, p) for name in each.names for p in patterns):
            continue
        first, others = each.straight[0], each.turned if settings.errors else []  # turned, an error is a key
        layer = RecordedLayer(
            first.name,
            first.adapter.kind,
            [user.path for user in each.straight],
            first.map_name,
            [user.linear for user in each.straight],
            trained,
            storage=storage_named(settings.encoded_as),
            pool=pool,
            errors=settings.errors,
            turned={user.path: user.adapter.kind for user in others},
        )
        layers[layer.name] = layer
        for user in (*each.straight, *others):
            listener = listeners.setdefault(user.module, Listener(user.module, user.adapter))
            listener.heard[user.map_name] = Heard(layer, user.path, turned=user in others)
    return layers, list(listeners.values())


def _find_maps(model: nn.Module) -> list[_Found]:
    """The linear maps of the model; modules that share a weight share a map."""
    found: dict[tuple[object, ...], _Found] = {}
    for path, module in model.named_modules():
        adapter = adapter_for(module)
        if adapter is None:
            continue
        for name, linear in adapter.maps(module).items():
            users = found.setdefault(linear.identity, _Found()).users
            told = any(isinstance(user.adapter, FunctionalAdapter) for user in users)
            if told and not linear.transposed:
                continue  # F.linear tells of what this module does, too
            users.append(_User(path or type(module).__name__.lower(), module, adapter, name, linear))
    if not found:
        raise SettingError(
            f"{type(model).__name__} has no layer that can be recorded. Spotlights records: "
            f"{', '.join(sorted(adapter.kind for adapter in ADAPTERS))}. For a layer of your own, see docs/layers.md."
        )
    return list(found.values())
