"""What a memory keeps of the parameters and of the optimizer's state: as it starts, now and then, and as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from spotlights.memory.slots import LayerStep, plain, state_tensor
from spotlights.optimizers import WEIGHTS, UpdateRule
from spotlights.recording.layer import RecordedLayer


@dataclass(frozen=True)
class Checkpoints:
    """Copies the parameters of the recorded layers, and what the optimizer holds of them."""

    layers: Mapping[str, RecordedLayer]
    optimizer: torch.optim.Optimizer
    rule: UpdateRule

    def parameters(self) -> dict[str, Tensor]:
        """The parameters as they are now."""
        return {
            f"{layer.name}/{name}": _copy(layer.as_kept(name, parameter.detach()))
            for layer, name, parameter in self._named_parameters()
        }

    def initial(self) -> dict[str, Tensor]:
        """The parameters, and what the optimizer already holds of them."""
        initial = self.parameters()
        for state in self.rule.states:
            for layer, name, parameter in self._named_parameters():
                value = self.optimizer.state.get(parameter, {}).get(state)
                if value is not None:
                    initial[f"{layer.name}/{name}/{state}"] = _copy(layer.as_kept(name, value.detach()))
        return initial

    def before_step(self, staged: Mapping[str, LayerStep], wanted: Callable[[int], bool]) -> dict[str, Tensor]:
        """What the rule needs of the optimizer's state to begin with the staged step; nothing if not `wanted`.

        Args:
            staged: the step that the optimizer is about to take.
            wanted: whether so many bytes are.
        """
        held: dict[str, Tensor] = {}
        for name, step in staged.items():
            for parameter_name, logged in step.rule.items():
                layer = self.layers[name]
                parameter = layer.parameters[parameter_name]
                state = {**self.optimizer.state.get(parameter, {}), WEIGHTS: parameter.detach()}
                for needed in self.rule.needed(logged):
                    if state.get(needed) is not None:
                        kept = layer.as_kept(parameter_name, state[needed])
                        held[state_tensor(name, parameter_name, needed)] = kept
        if not wanted(sum(tensor.nbytes for tensor in held.values())):
            return {}
        return {name: plain(_copy(tensor)) for name, tensor in held.items()}

    def _named_parameters(self) -> Iterator[tuple[RecordedLayer, str, nn.Parameter]]:
        for layer in self.layers.values():
            for name, parameter in layer.parameters.items():
                yield layer, name, parameter


def _copy(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    return tensor.clone(memory_format=torch.contiguous_format)
