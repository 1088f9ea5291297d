"""Stored rows as rows to compute with: some thousand at a time, a view of the file where that is possible."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

ROWS = 4096
"""Rows worked on at once: few enough for a float32 copy of them to stay in the cache."""


@dataclass(frozen=True)
class StoredRows:
    """Some decoded rows. They are valid until the next ones are asked for."""

    place: slice
    """Where they belong among the rows that were asked for."""
    rows: Float[Tensor, "rows features"]
    scale: Float[Tensor, "rows"] | None
    """What each row is still to be multiplied by."""
    norms: Float[Tensor, "rows stretches"] | None = None
    """The length of each stretch of a row, so multiplied, where the memory keeps it."""

    def moved(self, by: int) -> StoredRows:
        return replace(self, place=slice(self.place.start + by, self.place.stop + by))


def decoded(
    what: str,
    stored: Shaped[Tensor, "rows features"],
    scale: Float[Tensor, "rows"] | None,
    dtype: torch.dtype,
) -> Iterator[StoredRows]:
    """Stored rows in a type to compute in.

    Rows of one `what` ("keys", "errors") share a buffer, those of another have their own.
    """
    for start in range(0, len(stored), ROWS):
        some = stored[start : start + ROWS]
        if some.dtype != dtype:
            some = _buffer(what, *some.shape).copy_(some)
        factors = None if scale is None else scale[start : start + ROWS]
        yield StoredRows(slice(start, start + len(some)), some, factors)


_buffers = threading.local()


def _buffer(what: str, rows: int, features: int) -> Float[Tensor, "rows features"]:
    """This thread's reusable room for decoded rows: allocating it anew would cost more than decoding."""
    size = ROWS * features
    held = getattr(_buffers, what, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, dtype=torch.float32)
        setattr(_buffers, what, held)
    return held[: rows * features].view(rows, features)
