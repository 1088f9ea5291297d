"""Which linear maps of a network are recorded, which modules use them, and which trained parameters are not recorded.

Modules that share a weight share a layer of the memory. Some may use the transposed weight: an embedding looks up rows
of the weight that the output layer multiplies with. The layer then has the view of the kind whose weight is not
transposed. In the slots of the other kind, keys and errors swap roles.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from spotlights.errors import SettingError, UnknownNameError, warn
from spotlights.layers import ADAPTERS, FunctionalAdapter, LinearMap, ParameterAdapter, adapter_for
from spotlights.layers.adapter import class_of, own_parameters
from spotlights.memory.buffers import BufferPool
from spotlights.memory.format.manifest import LayerEntry, ParameterEntry
from spotlights.recording.hooks import ModuleHooks, RecordedMap
from spotlights.recording.layer import RecordedLayer, WeightUser
from spotlights.recording.optimizers import Optimizers
from spotlights.recording.reports import size_in_words
from spotlights.recording.settings import RecordingSettings

_NAMES_SHOWN = 8
_MOST_NUMBERS, _MOST_ROWS = 16_384, 64
"""A parameter that no adapter knows is recorded by its gradient, one slot per step, if it has at most so many numbers,
or as many as so many rows of all recorded layers: it is small beside the rows of a step then."""


@dataclass
class _SharedWeight:
    """A weight, or several that form one matrix, and the modules that use it."""

    users: list[WeightUser] = field(default_factory=list)

    @property
    def _first(self) -> WeightUser:
        """The user whose view of the weight the memory has: the first whose weight is not transposed."""
        return next((user for user in self.users if not user.linear.transposed), self.users[0])

    @property
    def same_view(self) -> list[WeightUser]:
        first = self._first
        return [user for user in self.users if (user.adapter, user.map_name) == (first.adapter, first.map_name)]

    @property
    def transposed_view(self) -> list[WeightUser]:
        """Users of the transposed weight. What further kinds add to the gradient, the probe reports as unexplained."""
        if not _is_one_matrix(self._first.linear):
            return []
        other = not self._first.linear.transposed
        return [user for user in self.users if _is_one_matrix(user.linear) and user.linear.transposed is other]

    @property
    def names(self) -> list[str]:
        return [user.name for user in (*self.same_view, *self.transposed_view)]


def _is_one_matrix(linear: LinearMap) -> bool:
    """Whether the transposed weight is a linear map too."""
    part = linear.weights.get("weight")
    return part is not None and linear.channel_groups == 1 and part.parameter.ndim == 2 and len(linear.weights) == 1


def find_layers(
    model: nn.Module, optimizer: Optimizers, settings: RecordingSettings, *, pool: BufferPool
) -> tuple[dict[str, RecordedLayer], list[ModuleHooks]]:
    """The layers to record by name, and the hooks that record them."""
    trained = optimizer.parameters.keys()
    patterns = settings.patterns
    weights = _find_weights(model, settings)
    known = {id(part.parameter) for w in weights for u in w.users for part in u.linear.parameters.values()}
    layers: dict[str, RecordedLayer] = {}
    hooks: dict[nn.Module, ModuleHooks] = {}
    axes = _axes_of_modules(model)
    for weight in weights:
        if patterns is not None and not _matches(patterns, weight.names):
            continue
        users = weight.same_view
        transposed = weight.transposed_view if settings.keeps_errors else []  # there, an error is a key
        layer = RecordedLayer(users, transposed, trained, settings, pool)
        layers[layer.name] = layer
        for user in (*users, *transposed):
            own = ModuleHooks(user.module, user.adapter, axes.get(user.module), in_eval=settings.observed > 0)
            hooks.setdefault(user.module, own).maps[user.map_name] = RecordedMap(layer, user.path, user in transposed)
    covered = {id(p) for layer in layers.values() for p in layer.parameters.values()} if patterns is None else known
    others = list(_unknown_parameters(model, covered, trained))
    names = [*(name for weight in weights for name in weight.names), *(user.name for user in others)]
    unknown = [p for p in patterns or () if not any(fnmatchcase(name, p) for name in names)]
    if unknown or (patterns is not None and not patterns):
        raise UnknownNameError(f"No layer matches {unknown}. The model has: {', '.join(names)}.")
    if settings.keeps_errors:  # first, so that the last layer of a memory is one that computes something
        limit = gradient_limit(layer.entry() for layer in layers.values())
        wanted = [u for u in others if (u.numbers <= limit if patterns is None else _matches(patterns, [u.name]))]
        layers = {user.name: RecordedLayer([user], [], trained, settings, pool) for user in wanted} | layers
    return layers, list(hooks.values())


def _matches(patterns: Sequence[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def gradient_limit(entries: Iterable[LayerEntry]) -> int:
    """How many numbers a parameter may have that is recorded by its gradient, unless `layers=` names it."""
    known = [entry for entry in entries if entry.kind != ParameterAdapter.kind]
    return max(_MOST_NUMBERS, _MOST_ROWS * sum(entry.in_features + entry.out_features for entry in known))


def _axes_of_modules(model: nn.Module) -> dict[nn.Module, tuple[int, ...]]:
    """Which axes of rows may count the examples (see `Call`), where the modules around a layer tell.

    A linear layer, an embedding or a layer norm works on any axis. Inside torch's transformer layers, `batch_first`
    decides. If all recurrent and attention modules of a network are batch first, the layers between them are too.
    """
    with_sequences = [m for m in model.modules() if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
    axes: dict[nn.Module, tuple[int, ...]] = {}
    if with_sequences and all(module.batch_first for module in with_sequences):
        axes = dict.fromkeys(model.modules(), (0, 1))
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            axes |= dict.fromkeys(layer.modules(), (0, 1) if layer.self_attn.batch_first else (1, 0))
    return axes


def _unknown_parameters(model: nn.Module, covered: set[int], trained: Collection[int]) -> Iterator[WeightUser]:
    """Parameters that the optimizer trains, and that no recorded layer has."""
    adapter, seen = ParameterAdapter(), set(covered)
    for path, module in model.named_modules():
        refused = any(other.refuses(module) for other in ADAPTERS)
        for name, linear in adapter.maps(module).items():
            parameter = linear.weights["weight"].parameter
            wanted = id(parameter) in trained and id(parameter) not in seen and not refused
            if wanted and parameter.requires_grad and parameter.numel():
                seen.add(id(parameter))
                yield WeightUser(path or class_of(module).__name__.lower(), module, adapter, name, linear)


def _find_weights(model: nn.Module, settings: RecordingSettings) -> list[_SharedWeight]:
    """The weights of all linear maps of the model."""
    weights: dict[tuple[object, ...], _SharedWeight] = {}
    for path, module in model.named_modules():
        adapter = adapter_for(module)
        if adapter is None:
            continue
        for name, linear in adapter.maps(module).items():
            users = weights.setdefault(linear.identity, _SharedWeight()).users
            watched = any(isinstance(user.adapter, FunctionalAdapter) for user in users)
            if watched and not linear.transposed:
                continue  # F.linear reports the uses by this module, too
            users.append(WeightUser(path or class_of(module).__name__.lower(), module, adapter, name, linear))
    last_resort = settings.keeps_errors and any(own_parameters(module) for module in model.modules())
    if not weights and not last_resort:
        raise SettingError(
            f"{class_of(model).__name__} has no layer that can be recorded. Spotlights records: "
            f"{', '.join(sorted(adapter.kind for adapter in ADAPTERS))}. For a layer of your own, see docs/layers.md."
        )
    return list(weights.values())


@dataclass(frozen=True)
class Coverage:
    """What becomes of each parameter: recorded, frozen, trained by another optimizer, or not recorded because …"""

    parameters: Mapping[str, ParameterEntry]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizers,
        layers: Mapping[str, RecordedLayer],
        settings: RecordingSettings,
    ) -> Coverage:
        trained = optimizer.parameters
        layer_of = {id(p): name for name, layer in layers.items() for p in layer.parameters.values()}
        limit = gradient_limit(layer.entry() for layer in layers.values())
        owners = {id(p): module for module in model.modules() for p in own_parameters(module).values()}
        entries: dict[str, ParameterEntry] = {}
        for name, parameter in model.named_parameters():
            layer, reason = layer_of.get(id(parameter), ""), ""
            if not parameter.requires_grad:
                layer, reason = "", FROZEN
            elif id(parameter) not in trained:
                layer, reason = "", ANOTHER_OPTIMIZER
            elif not layer:
                reason = "not recorded because " + _why(owners[id(parameter)], parameter, settings, limit)
            entries[name] = ParameterEntry(parameter.numel(), layer, reason)
        inside = {id(p) for p in model.parameters()}
        for number, parameter in enumerate(p for key, p in trained.items() if key not in inside):
            reason = "not recorded because it is outside the model"
            entries[f"a parameter outside the model ({number})"] = ParameterEntry(parameter.numel(), "", reason)
        return cls(entries)

    @property
    def covered(self) -> int:
        return sum(entry.numbers for entry in self.parameters.values() if entry.layer)

    @property
    def trained(self) -> int:
        return sum(entry.numbers for entry in self.parameters.values() if entry.reason != FROZEN)

    @property
    def uncovered(self) -> list[str]:
        """The names of trained parameters that belong to no recorded layer."""
        return [name for name, entry in self.parameters.items() if not entry.layer and entry.reason != FROZEN]

    def report(self, *, on_purpose: bool) -> None:
        """One table in the log; a warning about what is not recorded unless the user chose the layers."""
        share = 1000 * self.covered // max(self.trained, 1) / 10  # rounded down, so that 100 % means all
        text = f"{share:g} % of {self.trained:,} trained parameters are recorded"
        more = len(self.uncovered) - _NAMES_SHOWN
        names = ", ".join(self.uncovered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        text += f"; not recorded: {names}" if self.uncovered else ""
        wide = max(map(len, self.parameters), default=0)
        table = (f"  {n:<{wide}} {e.numbers:>13,}  {e.reason or 'recorded'}" for n, e in self.parameters.items())
        logging.getLogger("spotlights").info("%s.\n%s", text, "\n".join(table))
        left_out = [name for name in self.uncovered if self.parameters[name].reason != ANOTHER_OPTIMIZER]
        if on_purpose or not left_out:
            return
        reasons: dict[str, str] = {}
        for name in left_out:
            reasons.setdefault(self.parameters[name].reason.removeprefix("not recorded because "), name)
        because = "; ".join(f"{name} because {reason}" for reason, name in list(reasons.items())[:_NAMES_SHOWN])
        warn(
            f"{text}: {because}. No slot explains what these parameters learn. To leave them "
            "out on purpose, name the layers to record with layers=…; to record them, write an adapter "
            "(docs/layers.md)."
        )


FROZEN, ANOTHER_OPTIMIZER = "frozen", "trained by another optimizer, or by none"


def _why(module: nn.Module, parameter: nn.Parameter, settings: RecordingSettings, limit: int) -> str:
    """Why a trained parameter is not recorded, in words."""
    if settings.patterns is not None:
        return "layers= leaves it out"
    refused = next((reason for adapter in ADAPTERS if (reason := adapter.refuses(module))), None)
    if refused is not None:
        return refused
    unknown = f"no adapter knows how {class_of(module).__name__} uses it"
    if not settings.keeps_errors:
        return f"{unknown}, and there are no errors (errors=False, fold=) to record its gradient with"
    size = size_in_words(parameter.numel() * parameter.element_size())
    return (
        f"{unknown}, and {parameter.numel():,} numbers are more than the {limit:,} that a gradient may have unasked "
        f"(layers= records it by its gradient if it names it: {size} a step)"
    )
