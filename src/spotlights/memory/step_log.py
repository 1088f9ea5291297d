"""A layer's step log, read back: what the optimizer was told at each step, and how the gradients met the slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import MemoryFormatError
from spotlights.memory import slots as names
from spotlights.memory.gradient_block import compare
from spotlights.memory.manifest import LayerEntry, Manifest
from spotlights.memory.segment import Segment

UNEXPLAINED = 1e-3
"""A step whose gradient differs by more than this share from its slots is reported."""


@dataclass(frozen=True)
class StepLog:
    """A layer's step log."""

    factor: dict[str, Float[Tensor, "steps"]]
    """γ of each trained parameter."""
    residual: Float[Tensor, "steps"]
    """The share of the gradient that the slots do not explain."""
    moved: Float[Tensor, "steps"]
    """1 where somebody else than the optimizer had changed the weights before the step."""
    rule: dict[str, Float[Tensor, "steps fields"]]
    """What the optimizer was told about each trained parameter."""
    samples: dict[str, Float[Tensor, "steps sample"]]
    """Entries of each trained parameter after the step (see `sample_slice`)."""
    known: dict[object, Any] = field(default_factory=dict)
    """What one question has found out about these steps and another one may want too."""


def read_step_log(layer: str, segments: Sequence[Segment], manifest: Manifest, steps: int) -> StepLog:
    """The log of the first `steps` steps, which all processes of the run have written."""
    entry = manifest.layers[layer]

    def read(name: str, *width: int, rank: int = 0) -> Tensor:
        found = []
        for segment in (s for s in segments if s.rank == rank):
            tensor = segment.tensor(name)
            if tensor is None:
                raise MemoryFormatError(f"{segment.path} has no {name!r}.")
            found.append(tensor)
        return torch.cat(found)[:steps] if steps else torch.empty(0, *width, dtype=torch.float64)

    residual, moved = read(names.probe_tensor(layer), 2).unbind(1)
    if manifest.ranks > 1:
        ranks = range(manifest.ranks)
        seen = {p: read(names.gradient_tensor(layer, p), 0).numpy() for p in entry.trained}
        each = {p: [read(names.explained_tensor(layer, p), 0, rank=r) for r in ranks] for p in entry.trained}
        explained = {p: torch.stack(of_ranks).sum(dim=0).numpy() for p, of_ranks in each.items()}
        factors, share = compare(steps, seen, explained, entry.rounding)
        factor, residual = {p: torch.from_numpy(f) for p, f in factors.items()}, torch.from_numpy(share)
    else:
        factor = {p: read(names.factor_tensor(layer, p)) for p in entry.trained}
    fields = len(manifest.log_fields)
    ruled = entry.trained if manifest.rule is not None else []
    return StepLog(
        factor,
        residual,
        moved,
        rule={p: read(names.rule_tensor(layer, p), fields) for p in ruled},
        samples={p: read(names.sample_tensor(layer, p), 0) for p in entry.trained},
    )


def unexplained_steps(residual: Float[Tensor, "steps"], entry: LayerEntry) -> list[int]:
    """The steps at which more is unexplained than the rounding of the stored numbers can be."""
    threshold = max(UNEXPLAINED, 8 * entry.rounding)
    return (~(residual <= threshold)).nonzero().flatten().tolist()
