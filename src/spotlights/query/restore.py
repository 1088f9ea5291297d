"""A network put back to a checkpoint of a memory of slots, and who was seen when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spotlights.errors import MemoryFormatError, SettingError, SpotlightsError, UnsupportedError
from spotlights.memory.blocks import Selection
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers import WEIGHTS, UpdateRule, rule_for, rule_named, rule_of_parameter
from spotlights.query.columns import cells
from spotlights.query.engine import View
from spotlights.query.forward import find_map

Visits = dict[int, set[int]]
"""By step: the numbers of some examples that it saw."""


def visits_of(view: View, selections: Sequence[Selection]) -> tuple[Visits, Visits]:
    """From slots: whom each step saw in any layer, and those among them that are selected."""
    view.reader.need_visits("whom each step saw", "Rewind a recipe")
    view.reader.need_all_slots("To rewind takes")
    return _seen(view, [view.selection]), _seen(view, [view.selection & selection for selection in selections])


def _seen(view: View, selections: Sequence[Selection]) -> Visits:
    visits: Visits = {}
    for layer in view.reader.layers.values():
        for selection in selections:
            for step, example in cells(view, layer, ["step", "example"], selection).values:
                if isinstance(step, int) and isinstance(example, int):  # None: of no example
                    visits.setdefault(step, set()).add(example)
    return visits


def start_before(reader: MemoryReader, first: int) -> int:
    """The last checkpoint of all layers that is not after a step."""
    steps = [
        {step for step, stored in reader.checkpoints(layer, name).items() if WEIGHTS in stored and step <= first}
        for layer, entry in reader.manifest.layers.items()
        for name in entry.trained
    ]
    return max(set.intersection(*steps)) if steps else 0


def put_back(reader: MemoryReader, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Weights, running statistics, the optimizer's state and its options, from a memory of slots."""
    manifest = reader.manifest
    rule = rule_named(manifest.rule)
    if manifest.uncovered or rule is None:
        missing = ", ".join(manifest.uncovered[:5]) or f"the state of {manifest.optimizer}"
        raise UnsupportedError(f'{reader.address} does not have {missing}. A recording with keep="recipe" has all.')
    if optimizer is None:
        raise SettingError(f"Give the optimizer, too: memory.rewind(model, optimizer, …). It was {manifest.optimizer}.")
    if rule_for(optimizer) is not rule:
        raise SettingError(f"{type(optimizer).__name__} was given; the run had {manifest.optimizer}.")
    try:
        weights, states, options = _read(reader, step, model, optimizer, rule)
        buffers = dict(model.named_buffers())
        kept = [(buffers[name], rows[step]) for name, rows in reader.statistics.items()]
        pairs = [(value, stored.reshape(value.shape)) for value, stored in [*weights, *kept]]
    except SpotlightsError:
        raise
    except Exception as error:
        raise MemoryFormatError(f"{reader.address} cannot be rewound to step {step}: {error!r}.") from error
    with torch.no_grad():  # nothing has changed before all of it was read
        for value, stored in pairs:
            value.copy_(stored)
    for group, changed in options:
        group.update(changed)
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state in states.items() if state})


def _read(
    reader: MemoryReader, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, rule: UpdateRule
) -> tuple[
    list[tuple[Tensor, Tensor]], dict[nn.Parameter, dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]
]:
    """The parameters with their values, the optimizer's state, and its groups with their options."""
    manifest = reader.manifest
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    changed = [dict(group) for group in optimizer.param_groups]
    states: dict[nn.Parameter, dict[str, Any]] = {}
    weights: list[tuple[Tensor, Tensor]] = []
    for layer, entry in manifest.layers.items():
        _, linear = find_map(model, entry.modules[0], entry)
        for name in entry.trained:
            part, own_rule = linear.parameters[name], rule_of_parameter(entry.rules, name, rule)
            number, state = groups.get(id(part.parameter)), states.setdefault(part.parameter, {})
            if number is None:
                raise SettingError(f'The optimizer does not hold "{layer}.{name}", which the recorded one trained.')
            group = changed[number]
            (row,) = own_rule.read(reader.log(layer).rule[name][step : step + 1])
            weights.append((part.value, entry.own(name, reader.state(layer, name, step, WEIGHTS))))
            for key in own_rule.states:
                if key in reader.checkpoints(layer, name)[step]:
                    whole = state.setdefault(key, torch.zeros_like(part.parameter.detach()))
                    stored = entry.own(name, reader.state(layer, name, step, key))
                    part.of(whole).copy_(stored.reshape(part.value.shape))
            if state and not own_rule.scalar:
                state["step"] = torch.tensor(getattr(row, "step", 1.0 + step) - 1.0)  # some rules do not look at it
            options = row._asdict() | ({"betas": (row.beta1, row.beta2)} if hasattr(row, "beta1") else {})
            for key in options.keys() & group.keys():
                alike = type(group[key])(options[key])  # but where the new optimizer has 0, the run may have had 0.001
                group[key] = alike if alike == options[key] else options[key]
            logged = reader.log(layer).rule[name][step].tolist()
            if own_rule.log(group, state, bool(row.active)) != logged[: len(own_rule.fields)]:
                raise UnsupportedError(
                    f"The memory does not have all of the state of {manifest.optimizer}, or another optimizer was "
                    'given. A recording with keep="recipe" has all.'
                )
    return weights, states, list(zip(optimizer.param_groups, changed, strict=True))
