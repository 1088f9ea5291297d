"""What a recorded layer is made of, as numbers: one coefficient per step for weight and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import UnsupportedError
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers import exact_optimizers, rule_named


@dataclass(frozen=True)
class Unrolled:
    """`initial_weight + Σ_t weight[step_t] δ_t⊗k_t`, and the same for the bias."""

    weight: Float[Tensor, "steps"]
    bias: Float[Tensor, "steps"]
    initial_weight: Float[Tensor, "out_features in_features"]
    initial_bias: Float[Tensor, "out_features"]


def unroll(reader: MemoryReader, layer: str, until: int) -> Unrolled:
    """Unrolls the first `until` steps of a layer's log."""
    manifest = reader.manifest
    rule = rule_named(manifest.rule)
    if rule is None:
        raise UnsupportedError(
            f"{reader.directory} was trained with {manifest.optimizer}, which has no exact update rule yet. "
            f"Scores, top and totals work; contributions, weights, masks and verify need one of: "
            f"{exact_optimizers()}."
        )
    if not manifest.errors:
        raise UnsupportedError(
            f"{reader.directory} was recorded with errors=False: it has keys only. Scores, top and totals "
            "work; contributions, weights, masks and verify need a memory with errors."
        )
    entry, log = manifest.layers[layer], reader.log(layer)
    per_step, initial = {}, {}
    shapes = {"weight": (entry.out_features, entry.in_features), "bias": (entry.out_features,)}
    for name, shape in shapes.items():
        start = reader.initial.get(f"{layer}/{name}")
        value = torch.zeros(shape, dtype=torch.float64) if start is None else start.double()
        per_step[name] = torch.zeros(until, dtype=torch.float64)
        if name in entry.trained:
            coefficients = rule.coefficients(log.rule[name][:until])
            per_step[name] = coefficients.per_step * log.factor[:until]
            value = value * coefficients.initial
            for state, factor in coefficients.states.items():
                held = reader.initial.get(f"{layer}/{name}/{state}")
                if held is not None:
                    value = value + factor * held.double()
        initial[name] = value
    return Unrolled(per_step["weight"], per_step["bias"], initial["weight"], initial["bias"])
