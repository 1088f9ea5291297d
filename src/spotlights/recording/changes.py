"""Changes in the middle of a run that are not steps of the optimizers. They are noticed before the next step.

Examples are weights that the loop overwrites, an optimizer state that is loaded, and a module that is replaced. A
change is logged with its step and reason. The step log marks the layers whose weights no longer follow from their slots
alone (`names.MOVED`), so that `verify` and answers can say why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from spotlights.memory.format.names import MOVED
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.optimizers import Optimizers
from spotlights.recording.reports import some_of
from spotlights.torch_internals import Untraced

WEIGHTS, STATE, LEFT, ADDED, ELSEWHERE = MOVED


class Changes:
    """Compares what the optimizers hold with what they held before."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, layers: Mapping[str, RecordedLayer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._layers = layers
        self._held = {id(optimizer): set(_held_by(optimizer)) for optimizer in optimizers.all}
        self.loaded: set[int] = set()
        """The `id`s of optimizers whose state was loaded since their last step."""
        self._logged: set[int] = set()
        self._gone: set[str] = set()
        """Layers whose module the model no longer has."""
        self.known: dict[str, int] = {}
        """Layers whose weights will change without slots, with the reason."""

    def watch(self, guard: Callable[..., Callable[..., Any]], tell: Callable[[str, Sequence[str]], None]) -> list[Any]:
        """Registers hooks that notice a loaded state, and steps of other optimizers; returns their handles.

        Args:
            guard: keeps errors of the hooks away from training.
            tell: told of an optimizer that is not recorded, by name, and of the layers that it trains.
        """

        def note(optimizer: torch.optim.Optimizer) -> None:
            self.loaded.add(id(optimizer))

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if id(optimizer) in self._held:
                return
            layers = self._layers_of(set(_held_by(optimizer)))
            if not self.known.keys() >= set(layers):
                self.known |= dict.fromkeys(layers, ELSEWHERE)
                tell(type(optimizer).__name__, layers)

        loaded = [optimizer.register_load_state_dict_post_hook(guard(note)) for optimizer in self._optimizers.all]
        return [*loaded, register_optimizer_step_post_hook(Untraced(guard(stepped)))]

    def holds(self, layer: RecordedLayer) -> bool:
        """Whether any optimizer trains the layer."""
        return any(id(p) in held for held in self._held.values() for p in layer.parameters.values())

    def before_step(self, step: int, optimizer: torch.optim.Optimizer, groups: Collection[int]) -> dict[str, int]:
        """The layers that a change concerns, with the reasons; `groups` are the `id`s of what the optimizer holds."""
        key, reasons = id(optimizer), dict[str, int]()
        if key in self.loaded:
            self.loaded.discard(key)
            reasons = dict.fromkeys(self._layers_of(self._held[key]), STATE)
            self.log(step, STATE, f"the state of {type(optimizer).__name__} was loaded", reasons)
        if groups != self._held[key]:
            before, self._held[key] = self._held[key], set(groups)
            for name in self.replaced(step):  # its weight may stay, if it is shared
                reasons[name] = reasons.get(name, 0) | LEFT
            for name in self._layers_of(before - self._held[key]):
                if name not in self._gone:  # frozen from here on, which its log says
                    logging.getLogger("spotlights").info("At step %d layer %s left the optimizer.", step, name)
            untrained = {
                id(p) for layer in self._layers.values() for n, p in layer.parameters.items() if n not in layer.trained
            }
            for name in self._layers_of((self._held[key] - before) & untrained):
                reasons[name] = reasons.get(name, 0) | ADDED
                self.known[name] = ADDED
                self.log(step, ADDED, "the optimizer got parameters that it did not hold when recording began", [name])
        return reasons

    def replaced(self, step: int) -> list[str]:
        """The layers whose module the model has replaced since the last time; each is logged."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        new = [n for n, layer in self._layers.items() if n not in self._gone and not layer.is_in(modules)]
        self._gone.update(new)
        for name in new:
            self.log(step, LEFT, "the model has another module in place of a recorded layer", [name])
        return new

    def _layers_of(self, parameters: Collection[int]) -> list[str]:
        return [n for n, layer in self._layers.items() if any(id(p) in parameters for p in layer.parameters.values())]

    def log(self, step: int, reason: int, what: str, layers: Collection[str]) -> None:
        """Logs the first change of a kind as a warning, later ones as information."""
        level = logging.INFO if reason in self._logged else logging.WARNING
        self._logged.add(reason)
        text = "At step %d %s (%s). Slots do not explain that, and verify reports it."
        logging.getLogger("spotlights").log(level, text, step, what, some_of(layers))


def _held_by(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]
