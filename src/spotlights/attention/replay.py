"""Replays the user's own optimizer on the recorded gradients, on copies of the recorded parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spotlights.attention.sweep import block_gradients
from spotlights.errors import UnsupportedError
from spotlights.memory.blocks import StepBlocks
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Everything
from spotlights.optimizers.replayed import MakeOptimizer, ReplayedRule, options_of

Parameters = dict[str, dict[str, Tensor]]


def is_replayed(reader: MemoryReader) -> bool:
    """Whether there is no rule for the optimizer, but a log of what it was told."""
    return reader.manifest.rule == ReplayedRule.name and reader.manifest.errors


def replay(reader: MemoryReader, until: int, make: MakeOptimizer | None) -> Parameters:
    """The recorded layers after `until` steps of an optimizer that gets the gradients of the slots."""
    name = reader.manifest.optimizer
    make = make or getattr(torch.optim, name, None)
    if make is None:
        raise UnsupportedError(
            f"{reader.directory} was trained with {name}, for which there is no rule. To check the memory by running "
            f"{name} again on the recorded gradients, give its class: memory.verify(model, optimizer={name})."
        )
    try:
        with torch.enable_grad():
            return _Replay(reader).run(until, make)
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(f"{name} cannot be run again on recorded gradients: {error}") from error


class _Replay:
    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._shadows = {
            (layer, parameter): nn.Parameter(_own(entry, parameter, reader.initial[f"{layer}/{parameter}"]).clone())
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
                    group.update(options_of(self._logged(*key, step), optimizer.defaults))
                optimizer.step()
        made: Parameters = {}
        for layer, entry in self._reader.manifest.layers.items():
            names = (*entry.weight_columns, *entry.bias_names)
            made[layer] = {p: self._reader.initial[f"{layer}/{p}"].double() for p in names}
            for p in entry.trained:
                shadow = self._shadows[layer, p].detach().double()
                made[layer][p] = entry.kept(shadow) if p == "weight" else shadow.reshape(made[layer][p].shape)
        return made

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
            weight, bias = block_gradients(blocks.block(step, step + 1))
        entry = self._reader.manifest.layers[layer]
        for parameter, gradient in entry.split(weight, bias.expand(len(entry.bias_names), -1)).items():
            shadow = self._shadows.get((layer, parameter))
            if shadow is not None:
                active = self._logged(layer, parameter, step)["active"]
                seen = gradient * float(self._reader.log(layer).factor[parameter][step])
                shadow.grad = _own(entry, parameter, seen).to(shadow.dtype) if active else None


def _own(entry: LayerEntry, parameter: str, kept: Tensor) -> Tensor:
    """A parameter in its own shape: an optimizer may treat matrices and stacks of kernels differently."""
    return entry.own(kept) if parameter == "weight" else kept
