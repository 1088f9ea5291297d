"""Contributions added up over the rows of an input and the slots of a group, without a number for each pair of them.

A contribution is linear in `δ⊗k` and in `g⊗q`, so what a group adds to an input is a product of two matrices: what its
slots make up of the weights, and `Σ g⊗q` over the input's rows. A convolution has hundreds of rows for each input and
hundreds of slots for each example, but a small matrix. Which order is the cheaper one is a matter of counting.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.pairs import Directed
from spotlights.attention.unrolled import GroupParts, Unrolled, UnrolledMatrices
from spotlights.dual_form import outer_sum
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.stored_rows import ROWS

PARTS_BYTES = 1 << 30
"""What the matrices of all groups may take."""
_INPUTS_BYTES = 64 << 20
_SUM = 1_000_000
"""What it takes to begin adding up the slots of one group, in multiplications."""


def by_matrix(layer: LayerReader, unrolled: Unrolled, *, queries: int, inputs: int, groups: int) -> bool:
    """Whether multiplying matrices is cheaper than one number for each query and slot, and fits in memory."""
    entry = layer.entry
    size = math.prod(entry.matrix_shape) + entry.out_features
    if groups * size * 8 > PARTS_BYTES:
        return False
    if isinstance(unrolled, UnrolledMatrices):
        stretches, pairs = unrolled.steps, layer.slots * size
    else:
        stretches, pairs = (
            -(-layer.slots // ROWS),
            layer.slots * entry.out_features + layer.distinct_keys * entry.in_features,
        )
    sums = min(layer.slots * inputs / max(queries, 1), stretches * groups)  # of some rows of an example, or of a group
    return (layer.slots + inputs * groups + queries) * size + sums * _SUM < queries * pairs


def group_products(
    parts: GroupParts, asked: Directed, owners: Int64[Tensor, "queries"], *, inputs: int
) -> Float[Tensor, "inputs groups"]:
    """What each group adds to each input, in float64."""
    queries, directions, ones = asked.queries, asked.directions, asked.ones
    groups = queries.shape[1] // parts.weights.shape[2]
    weights, biases = parts.weights.flatten(1), parts.biases
    order = owners.argsort(stable=True)
    rows = order.split(torch.bincount(owners, minlength=inputs).tolist())
    found = torch.empty(inputs, len(biases), dtype=torch.float64)
    at_once = max(1, _INPUTS_BYTES // (8 * weights.shape[1]))
    for start in range(0, inputs, at_once):
        some = rows[start : start + at_once]
        of_weight = torch.stack([outer_sum(directions[r].double(), queries[r].double(), groups) for r in some])
        of_bias = torch.stack([ones[r].double() @ directions[r].double() for r in some])
        found[start : start + len(some)] = of_weight.flatten(1) @ weights.T + of_bias @ biases.T
    return found
