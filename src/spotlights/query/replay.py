"""Replay: the user's own optimizer, run again on the recorded gradients and on copies of the recorded parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spotlights.errors import UnsupportedError
from spotlights.memory.blocks import Everything, StepBlocks
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers.replayed import MakeOptimizer, ReplayedRule, options_of
from spotlights.query.contraction import gradient_of
from spotlights.query.plan import LayerValue

Parameters = dict[str, dict[str, Tensor]]


def is_replayed(reader: MemoryReader) -> bool:
    """Whether the optimizer has no rule, but a log of its options."""
    return reader.manifest.rule == ReplayedRule.name and reader.manifest.errors


@dataclass(frozen=True)
class Replay(LayerValue):
    """The parameters of all layers after `until` steps of an optimizer that gets the gradients of the slots.

    Goes over all steps of all layers together, forwards in time, whatever the layer that is asked about.
    """

    until: int
    make: MakeOptimizer | None
    """The optimizer's class; None for the one of `torch.optim` that has the recorded name."""

    def value(self, reader: MemoryReader, layer: str) -> Parameters:
        name = reader.manifest.optimizer
        make = self.make or getattr(torch.optim, name, None)
        if make is None:
            raise UnsupportedError(
                f"{reader.address} was trained with {name}, for which there is no rule. To check the memory by "
                f"running {name} again on the recorded gradients, give its class: "
                f"memory.verify(model, optimizer={name})."
            )
        if name == torch.optim.LBFGS.__name__:
            raise UnsupportedError(f"{name} computes several gradients in one step: it cannot be run again to verify.")
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return _Replay(reader).run(self.until, make)
        except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError, AttributeError) as error:
            raise UnsupportedError(f"{name} cannot be run again on recorded gradients: {error}") from error


class _Replay:
    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._shadows = {
            (layer, parameter): nn.Parameter(entry.own(parameter, reader.initial[f"{layer}/{parameter}"]).clone())
            for layer, entry in reader.manifest.layers.items()
            for parameter in entry.trained
        }

    def _logged(self, layer: str, parameter: str, step: int) -> dict[str, float]:
        row = self._reader.log(layer).rule[parameter][step].tolist()
        return dict(zip(self._reader.manifest.log_fields, row, strict=True))

    def run(self, until: int, make: MakeOptimizer) -> Parameters:
        if until:
            optimizer, group_of = self._make(make)
            blocks = {name: StepBlocks(layer, Everything()) for name, layer in self._reader.layers.items()}
            for step in range(until):
                for layer in blocks:
                    self._hand_over(layer, step, blocks[layer])
                for key, group in group_of.items():
                    logged = self._logged(*key, step)
                    if logged["active"]:  # else the optimizer may not hold the parameter, and the log has no options
                        group.update(options_of(logged, optimizer.defaults))
                optimizer.step()
        trained: Parameters = {}
        for layer, entry in self._reader.manifest.layers.items():
            names = (*entry.weight_columns, *entry.bias_names)
            trained[layer] = {p: self._reader.initial[f"{layer}/{p}"].double() for p in names}
            for p in entry.trained:
                shadow = self._shadows[layer, p].detach().double()
                trained[layer][p] = entry.kept(shadow) if p == "weight" else shadow.reshape(trained[layer][p].shape)
        return trained

    def _make(self, make: MakeOptimizer) -> tuple[torch.optim.Optimizer, dict[tuple[str, str], dict]]:
        groups: dict[float, dict] = {}
        owner: dict[tuple[str, str], float] = {}
        for key, shadow in self._shadows.items():
            logged = self._logged(*key, 0)
            if not logged["fresh"]:
                raise UnsupportedError(
                    f"{self._reader.manifest.optimizer} had taken steps before recording began, and there is "
                    "no rule for it: its state at that time is not known."
                )
            owner[key] = logged["group"]
            groups.setdefault(owner[key], {"params": [], **options_of(logged)})["params"].append(shadow)
        order = sorted(groups)
        optimizer = make([groups[index] for index in order])
        return optimizer, {key: optimizer.param_groups[order.index(index)] for key, index in owner.items()}

    def _hand_over(self, layer: str, step: int, blocks: StepBlocks) -> None:
        """Gives the shadows the gradients that the optimizer saw."""
        with torch.no_grad():
            weight, bias = gradient_of(blocks.block(step, step + 1))
        entry = self._reader.manifest.layers[layer]
        for parameter, gradient in entry.split(weight, bias.expand(len(entry.bias_names), -1)).items():
            shadow = self._shadows.get((layer, parameter))
            if shadow is not None:
                active = self._logged(layer, parameter, step)["active"]
                seen = gradient * float(self._reader.log(layer).factor[parameter][step])
                shadow.grad = entry.own(parameter, seen).to(shadow.dtype) if active else None
