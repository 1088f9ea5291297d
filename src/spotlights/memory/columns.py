"""Columns: what a user says of the examples in a batch, matched to the rows of a layer.

Numbers are kept as int64 or float64, strings as numbers into a list of strings in the manifest. A slot
for which a column was not given holds the missing value of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from spotlights.errors import SettingError, ShapeMismatchError
from spotlights.memory.manifest import ColumnEntry

MISSING_INT = torch.iinfo(torch.int64).min
MISSING_STRING = -1
VISITS, FIRST_STEP, LAST_STEP = "visits", "first_step", "last_step"
"""What a folded memory knows of a slot's visits."""
RESERVED = (
    *("step", "position", "module", "slot", "score", "contribution", "influence", "rank", "query", "total"),
    *(VISITS, FIRST_STEP, LAST_STEP),
)
MAX_POSITIONS, MAX_EXAMPLE = 1 << 20, 1 << 42
"""In a folded memory, where a slot is an example *and* a position, the two are put together to one number."""

_MISSING: dict[str, np.generic] = {
    "int": np.int64(MISSING_INT),
    "float": np.float64("nan"),
    "string": np.int64(MISSING_STRING),
}


def missing(kind: str, rows: int) -> Shaped[Tensor, "rows"]:
    """Rows for which a column of this kind was not given."""
    return torch.from_numpy(np.full(rows, _MISSING[kind]))


def is_missing(kind: str, values: Shaped[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows"]:
    """Where a column of this kind was not given."""
    return np.isnan(values) if kind == "float" else values == _MISSING[kind]


class ColumnTable:
    """The columns a run has used so far; turns a user's values into numbers."""

    def __init__(self, entries: Mapping[str, ColumnEntry] | None = None) -> None:
        self._kinds: dict[str, str] = {}
        self._codes: dict[str, dict[str, int]] = {}
        for name, entry in (entries or {}).items():
            self._kinds[name] = entry.kind
            self._codes[name] = {text: code for code, text in enumerate(entry.strings)}

    def entries(self) -> dict[str, ColumnEntry]:
        # list() of a dict is atomic: the training thread may add a string while the writer asks.
        return {name: ColumnEntry(kind, list(self._codes.get(name, {}))) for name, kind in list(self._kinds.items())}

    def kind(self, name: str) -> str:
        return self._kinds[name]

    def declare(self, name: str, kind: str) -> None:
        """Notes a column that Spotlights itself writes."""
        self._kinds.setdefault(name, kind)

    def code(self, name: str, text: str) -> int:
        """The number of a string in a column that Spotlights itself writes."""
        self.declare(name, "string")
        codes = self._codes.setdefault(name, {})
        return codes.setdefault(text, len(codes))

    def encode(self, name: str, values: Any) -> Shaped[np.ndarray, "..."]:
        """A user's values as an array of numbers, of shape (), (B,) or (B, L)."""
        if name in RESERVED:
            raise SettingError(
                f'A column cannot be called "{name}": Spotlights writes that one itself. Choose another name.'
            )
        if not name.isidentifier():
            raise SettingError(f"A column needs a name like a Python variable, not {name!r}.")
        known = self._kinds.get(name)
        if known == "int" and isinstance(values, Tensor) and values.dtype == torch.int64 and values.dim() <= 2:
            return values.numpy().copy() if values.is_cpu else values.cpu().numpy()  # as nearly always
        if isinstance(values, str) and known == "string":
            codes = self._codes[name]
            return np.array(codes.setdefault(values, len(codes)), dtype=np.int64)
        array = _as_array(name, values)
        kind = {"i": "int", "u": "int", "b": "int", "f": "float"}.get(array.dtype.kind, "string")
        known = self._kinds.setdefault(name, kind)
        if known == "float" and kind == "int":
            kind = "float"
        if known != kind:
            raise SettingError(
                f'The column "{name}" has held {known} values so far and is now given {kind} values. '
                "Use one type per column."
            )
        if kind != "string":
            return array.astype(np.int64 if kind == "int" else np.float64)
        codes = self._codes.setdefault(name, {})
        flat = [codes.setdefault(str(text), len(codes)) for text in array.reshape(-1).tolist()]
        return np.array(flat, dtype=np.int64).reshape(array.shape)


def _as_array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        array = values.double().numpy() if values.is_floating_point() else values.numpy()
    else:
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise SettingError(f'The column "{name}" is ragged: {error}.') from error
    if array.dtype.kind not in "iubfUSO" or array.ndim > 2:
        raise SettingError(
            f'The column "{name}" has type {array.dtype} and shape {array.shape}. A column holds numbers or '
            "strings, one for the whole batch, one per example (B,), or one per position (B, L)."
        )
    if array.dtype.kind == "O" and not all(isinstance(item, str) for item in array.reshape(-1)):
        raise SettingError(f'The column "{name}" mixes types. A column holds numbers or strings.')
    return array


def spread(
    name: str, values: Shaped[np.ndarray, "..."], lead: Sequence[int], layer: str
) -> Shaped[np.ndarray, "rows"] | None:
    """One value for each row of a layer whose input has the leading shape `lead`.

    A value of shape (B,) holds for all positions of its example, one of shape (B, L) for its position.
    Returns None where the layer has one row per example and the column is about positions: it does not
    apply there.
    """
    rows = math.prod(lead)
    shape, lead = values.shape, tuple(lead)
    if not shape:
        return np.full(rows, values)
    if lead == shape:
        return values.reshape(-1)
    if lead[: len(shape)] == shape:
        return values.reshape(-1).repeat(rows // max(values.size, 1))
    if lead[:2] == shape[::-1] and len(shape) == 2:  # sequence first: (L, B, …)
        return values.T.reshape(-1).repeat(rows // max(values.size, 1))
    if len(lead) > 1 and (lead[1],) == shape:
        return np.tile(values.repeat(rows // (lead[0] * lead[1])), lead[0])
    if len(shape) == 2 and lead == shape[:1]:
        return None
    raise ShapeMismatchError(
        f'The column "{name}" has shape {shape}, but layer "{layer}" has rows of shape {lead}. '
        "Give one value per example (B,), one per position (B, L), or a single one for the batch."
    )


class Batch:
    """The columns of one batch, spread over the rows of any layer when asked."""

    def __init__(self, columns: Mapping[str, Shaped[np.ndarray, "..."]] | None = None, *, fold: bool = False) -> None:
        self._columns = columns or {}
        self._fold = fold
        self._spread: dict[tuple[int, ...], dict[str, np.ndarray]] = {}

    def rows(
        self, lead: Sequence[int], layer: str, *, shared: bool | None = False
    ) -> Mapping[str, Shaped[np.ndarray, "rows"]]:
        """The columns for a layer whose input has the leading shape `lead`; `shared` is as in `Call`."""
        lead = tuple(lead)
        if shared and self._fit_by_chance(lead):
            return self._of_all(lead, layer)
        try:
            return self._fitted(lead, layer)
        except ShapeMismatchError:
            if shared is False:
                raise
            return self._of_all(lead, layer)

    def _fitted(self, lead: tuple[int, ...], layer: str) -> Mapping[str, Shaped[np.ndarray, "rows"]]:
        if lead not in self._spread:
            shaped = self._unflattened(lead)
            found = {
                name: spread(name, c, lead if c.shape == lead else shaped, layer) for name, c in self._columns.items()
            }
            matched = {name: rows for name, rows in found.items() if rows is not None}
            at = positions(self._columns, shaped)
            if at is not None:
                matched["position"] = at
            self._spread[lead] = self._identified(matched, layer) if self._fold else matched
        return self._spread[lead]

    def _fit_by_chance(self, lead: tuple[int, ...]) -> bool:
        """Whether rows that count up are positions even if there are as many of them as there are examples."""
        given = [column.shape for column in self._columns.values() if column.ndim]
        if any(shape[0] == 1 for shape in given):
            return False  # of one example, which they are of then
        return any(lead[0] == 1 or shape[1:] == lead for shape in given)

    def _of_all(self, lead: tuple[int, ...], layer: str) -> Mapping[str, Shaped[np.ndarray, "rows"]]:
        """Rows of no single example have a position, and what is said of the whole batch."""
        if self._fold:
            raise SettingError(
                f'Layer "{layer}" is called on what is the same for all examples, such as their positions: it has no '
                "visits of an example to add up. Leave it out (layers=…)."
            )
        rows = math.prod(lead)
        whole = {name: np.full(rows, column) for name, column in self._columns.items() if not column.ndim}
        return {**whole, "position": np.arange(rows)}

    def _identified(self, columns: dict[str, np.ndarray], layer: str) -> dict[str, np.ndarray]:
        """Columns whose `example`, with `position` if it is there, say which slot of a folded memory a row is of."""
        ids = self._columns.get("example")
        if ids is None or ids.dtype.kind == "f":
            raise SettingError(
                'fold="example" adds up the visits of each example. Call recorder.batch(example=ids) before the '
                "forward pass, with whole numbers or strings."
            )
        if "example" not in columns:
            raise SettingError(
                f'Layer "{layer}" has one row for each sequence, but examples were given for each position, with shape '
                f"{ids.shape}: its visits cannot be told apart. Give one example for each sequence, or leave the layer "
                "out (layers=…)."
            )
        rows = columns["example"]
        if ids.ndim == 2:  # each position is an example of its own; it may have several rows in turn
            inner = len(rows) // max(ids.size, 1)
            columns.pop("position", None)
            if inner > 1:
                columns["position"] = np.tile(np.arange(inner), ids.size)
        at = columns.get("position")
        if at is not None and len(at) and (at.max() >= MAX_POSITIONS or np.abs(rows).max() >= MAX_EXAMPLE):
            raise SettingError(
                f'Layer "{layer}" has several rows for each example. Folding them needs examples below {MAX_EXAMPLE:,} '
                f"and at most {MAX_POSITIONS:,} positions."
            )
        return columns

    def _unflattened(self, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Rows flattened to (B·L,) are (B, L) again where a column tells B and L."""
        flat = (c.shape for c in self._columns.values() if c.ndim == 2 and lead == (c.size,))
        return next(flat, lead)


def positions(
    columns: Mapping[str, Shaped[np.ndarray, "..."]], lead: Sequence[int]
) -> Int64[np.ndarray, "rows"] | None:
    """Which position of its example each row is, where examples have more than one row."""
    lead = tuple(lead)
    if len(lead) < 2:
        return None
    per_example = math.prod(lead[1:])
    of_examples = (lead[0], math.prod(lead))
    if any(c.ndim and c.shape[0] not in of_examples for c in columns.values()):  # sequence first: (L, B, …)
        return np.arange(lead[0]).repeat(per_example)
    return np.tile(np.arange(per_example), lead[0])
