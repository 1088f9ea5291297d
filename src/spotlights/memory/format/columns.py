"""Columns: what a user says of the examples in a batch, as numbers, matched to the rows of each layer.

Numbers are stored as int64 or float64, strings as numbers into a list of strings in the manifest. A slot for which a
column was not given holds the missing value of the column's kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.memory.format.manifest import ColumnEntry

MISSING_INT = torch.iinfo(torch.int64).min
MISSING_STRING = -1
MAX_INT, MAX_EXACT = torch.iinfo(torch.int64).max, 1 << 53
"""The largest integers of columns of integers, and of columns of fractions."""
_SURROGATE = re.compile("[\ud800-\udfff]")
VISITS, FIRST_STEP, LAST_STEP = "visits", "first_step", "last_step"
"""Columns that a folded memory adds: how many visits a slot sums up, and when they were."""
RESERVED = (
    *("step", "position", "module", "layer", "slot", "score", "contribution", "influence", "rank", "query", "total"),
    *(VISITS, FIRST_STEP, LAST_STEP),
)
MAX_POSITIONS, MAX_EXAMPLE = 1 << 20, 1 << 42
"""A slot of a folded memory is an example *and* a position; the two are combined into one number."""

_MISSING: dict[str, np.generic] = {
    "int": np.int64(MISSING_INT),
    "float": np.float64("nan"),
    "string": np.int64(MISSING_STRING),
}

_EITHER = 0, 1
"""Examples are counted along the first axis, or (sequence first) along the second one."""
_Rows = Mapping[str, Shaped[np.ndarray, "rows"]]


def missing(kind: str, rows: int) -> Shaped[Tensor, "rows"]:
    """Rows for which a column of this kind was not given."""
    return torch.from_numpy(np.full(rows, _MISSING[kind]))


def is_missing(kind: str, values: Shaped[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows"]:
    """Where a column of this kind was not given."""
    return np.isnan(values) if kind == "float" else values == _MISSING[kind]


class ColumnTable:
    """The columns that a run has used so far; converts a user's values to numbers."""

    def __init__(self, entries: Mapping[str, ColumnEntry] | None = None) -> None:
        known = dict(entries or {})
        self._kinds = {name: entry.kind for name, entry in known.items()}
        self._codes = {name: {text: code for code, text in enumerate(e.strings)} for name, e in known.items()}

    def entries(self) -> dict[str, ColumnEntry]:
        # list() of a dict is atomic: the training thread may add a string while the writer asks.
        return {name: ColumnEntry(kind, list(self._codes.get(name, {}))) for name, kind in list(self._kinds.items())}

    def kind(self, name: str) -> str:
        return self._kinds[name]

    def declare(self, name: str, kind: str) -> None:
        """Adds a column that Spotlights itself writes."""
        self._kinds.setdefault(name, kind)

    def code(self, name: str, text: str) -> int:
        """The number of a string in a column of strings."""
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
        if isinstance(values, str) and known == "string" and values.isascii():
            return np.array(self.code(name, values), dtype=np.int64)
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
        if kind == "int":
            return _whole(name, array.astype(np.int64))
        if kind == "float":
            return array.astype(np.float64)
        flat = [self.code(name, str(text)) for text in array.reshape(-1).tolist()]
        return np.array(flat, dtype=np.int64).reshape(array.shape)


def _whole(name: str, array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    if array.size and array.min() == MISSING_INT:
        raise SettingError(f'The column "{name}" has the number {MISSING_INT}, which stands for missing values.')
    return array


def _as_array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        array = values.double().numpy() if values.is_floating_point() else values.numpy()
    else:
        try:
            array = np.asarray(values)
            if array.dtype.kind == "U":  # numpy makes strings of numbers beside strings, and drops zeros at their ends
                array = np.asarray(values, dtype=object)
            elif array.dtype.kind == "f" and not isinstance(values, np.ndarray):  # and fractions of large integers
                given = np.asarray(values, dtype=object).reshape(-1)
                inexact = [n for n in given if isinstance(n, int) and abs(n) > MAX_EXACT]
                if inexact:
                    raise SettingError(f'The column "{name}" has {inexact[0]} among fractions, which cannot hold it.')
        except SettingError:
            raise
        except ValueError as error:
            raise SettingError(f'The column "{name}" is ragged: {error}.') from error
    if array.dtype.kind == "S":
        raise SettingError(f'The column "{name}" is given bytes. A column holds numbers or strings: decode them first.')
    if array.dtype.kind not in "iubfO" or array.ndim > 2:
        raise SettingError(
            f'The column "{name}" has type {array.dtype} and shape {array.shape}. A column holds numbers or '
            "strings, one for the whole batch, one per example (B,), or one per position (B, L)."
        )
    if array.dtype.kind == "O" and not all(isinstance(item, str) for item in array.reshape(-1)):
        kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in array.reshape(-1)))
        raise SettingError(f'The column "{name}" was given {kinds}. A column holds numbers or strings, not both.')
    if array.dtype.kind == "O" and any(_SURROGATE.search(text) for text in array.reshape(-1)):
        raise SettingError(
            f'The column "{name}" has a string with half a character (a lone surrogate). Repair it first.'
        )
    if array.dtype.kind == "u" and array.size and int(array.max()) > MAX_INT:
        raise SettingError(f'The column "{name}" has the number {array.max()}; the largest one is {MAX_INT}.')
    return array


@dataclass(frozen=True)
class Misfit:
    """Columns that do not fit the rows of a layer."""

    columns: tuple[str, ...]
    given: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass
class Matching:
    """How the batches of one recording were matched to the rows of its layers."""

    axes: dict[str, int] = field(default_factory=dict)
    """By layer: which axis of its rows counted the examples, the last time that their shape told."""
    misfits: dict[str, Misfit] = field(default_factory=dict)
    """By layer, since they were last looked at: rows that got no value of a column."""
    ambiguous: dict[str, Misfit] = field(default_factory=dict)
    """By layer: rows with as many positions as examples, in a layer that could have either first."""


def example_axis(lead: Sequence[int], count: int, axes: Sequence[int] | None = None) -> int | None:
    """Which axis of rows with the leading shape `lead` counts the examples; `axes` is as in `Call`."""
    return next((a for a in (_EITHER if axes is None else axes) if a < len(lead) and lead[a] == count), None)


class Batch:
    """The columns of one batch, spread over the rows of any layer when asked."""

    def __init__(
        self,
        columns: Mapping[str, Shaped[np.ndarray, "..."]] | None = None,
        *,
        fold: bool = False,
        matching: Matching | None = None,
    ) -> None:
        self._columns = columns or {}
        self._by_row: dict[str, Mapping[str, np.ndarray]] = {}
        self._fold = fold
        self._matching = matching or Matching()
        self._fitting: dict[tuple[Any, ...], list[int]] = {}
        self._spread: dict[tuple[Any, ...], tuple[_Rows, Misfit | None]] = {}
        self.used = False
        """Whether the rows of any layer were described by these columns."""

    def __bool__(self) -> bool:
        return bool(self._columns or self._by_row)

    def describe_rows(self, layers: str, columns: Mapping[str, Shaped[np.ndarray, "..."]]) -> None:
        """Adds columns for the layers whose names match a pattern: one value for each of their rows."""
        self._by_row[layers] = {**self._by_row.get(layers, {}), **columns}
        self._fitting.clear()
        self._spread.clear()

    def rows(
        self, lead: Sequence[int], layer: str, *, shared: bool | None = False, axes: Sequence[int] | None = None
    ) -> _Rows:
        """The columns for a layer whose rows have the leading shape `lead`; `shared` and `axes` are as in `Call`.

        A column that does not fit is left out, and noted.
        """
        self.used = True
        lead = tuple(lead)
        if shared and self._fit_by_chance(lead):
            return self._of_all(lead, layer)
        own = tuple(name for name in self._by_row if fnmatchcase(layer, name)) if self._by_row else ()
        axis = self._axis(lead, layer, axes, own)
        key = lead, axes, axis, own
        if key not in self._spread:
            self._spread[key] = self._fitted(lead, layer, axes, axis, own)
        rows, misfit = self._spread[key]
        if misfit is not None:
            if shared is not False:
                return self._of_all(lead, layer)
            self._matching.misfits.setdefault(layer, misfit)
        return rows

    def _axis(self, lead: tuple[int, ...], layer: str, axes: Sequence[int] | None, own: tuple[str, ...]) -> int | None:
        """Which axis of the rows counts the examples: told by a column, by the kind of layer, or by earlier batches."""
        key = lead, axes, own
        if key not in self._fitting:
            given = [column for column in self._for_examples(own).values() if column.ndim]
            counts = {a: sum(_fits(c, lead, a) for c in given) for a in (_EITHER if axes is None else axes)}
            as_is = axes is None and any(column.shape == lead[:2] for column in given if column.ndim == 2)
            best = [a for a, count in counts.items() if 0 < count == max(counts.values())]
            self._fitting[key] = [0] if as_is else best
        fitting = self._fitting[key]
        if axes is None and len(lead) > 1 and fitting:
            known = self._matching.axes.get(layer)
            if len(fitting) == 1:
                self._matching.axes[layer] = fitting[0]
            elif known is not None:
                return known
            elif lead[0] > 1:
                name, column = next((n, c) for n, c in self._for_examples(own).items() if c.ndim)
                self._matching.ambiguous.setdefault(layer, Misfit((name,), column.shape, lead))
        return fitting[0] if fitting else None

    def _for_examples(self, own: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The columns that are not given row by row."""
        by_row = {name for pattern in own for name in self._by_row[pattern]}
        return {name: column for name, column in self._columns.items() if name not in by_row}

    def _fitted(
        self,
        lead: tuple[int, ...],
        layer: str,
        axes: Sequence[int] | None,
        axis: int | None,
        own: tuple[str, ...],
    ) -> tuple[_Rows, Misfit | None]:
        count, matched, misfits = math.prod(lead), dict[str, np.ndarray](), dict[str, tuple[int, ...]]()
        by_row = {name: column for pattern in own for name, column in self._by_row[pattern].items()}
        columns = self._for_examples(own)
        for name, column in by_row.items():
            if column.size == count or not column.ndim:
                matched[name] = np.broadcast_to(column.reshape(-1), count)
            elif column.size and column.shape == lead[: column.ndim]:
                matched[name] = column.reshape(-1).repeat(count // column.size)
            else:
                misfits[name] = column.shape
        # Rows flattened to (B·L,) are (B, L) again where a column tells B and L.
        shaped = next((c.shape for c in columns.values() if c.ndim == 2 and lead == (c.size,)), lead)
        axis = axis if shaped is lead else 0
        of_one_example = axes == ()
        for name, column in columns.items():
            rows = _spread(column, lead, shaped, axis)
            if rows is None and column.ndim and column.shape[0] == 1:
                rows, of_one_example = _spread(column[0], lead, lead, 0), True
            rows = self._of_same_example(column, matched.get("example")) if rows is None else rows
            if rows is not None:
                matched[name] = rows
            elif not (column.ndim == 2 and lead == column.shape[:1]):  # else it is about positions, which rows are not
                misfits[name] = column.shape
        alike = [name for name, shape in misfits.items() if shape == next(iter(misfits.values()))]
        misfit = Misfit(tuple(alike), misfits[alike[0]], lead) if alike else None
        if of_one_example:
            if count > 1:
                matched["position"] = np.arange(count)
        elif len(shaped) > 1:
            inner, sequence_first = math.prod(shaped[1:]), axis == 1 or (axis is None and bool(axes) and axes[0] == 1)
            per_row = np.arange(shaped[0]).repeat(inner) if sequence_first else np.tile(np.arange(inner), shaped[0])
            matched["position"] = per_row
        if self._fold:
            if misfit is not None:
                raise SettingError(
                    f'fold="example" needs an example for every row, but the column "{misfit.columns[0]}" has shape '
                    f'{misfit.given} and layer "{layer}" has rows of shape {misfit.rows}'
                )
            matched = self._identified(matched, {**columns, **by_row}.get("example"), layer)
        return matched, misfit

    def _of_same_example(
        self, column: Shaped[np.ndarray, "..."], owners: Shaped[np.ndarray, "rows"] | None
    ) -> Shaped[np.ndarray, "rows"] | None:
        """What is said of each example, for rows whose examples are known; None if that does not tell."""
        ids = self._columns.get("example")
        if owners is None or ids is None or ids.ndim != 1 or column.shape != ids.shape:
            return None
        known, first = np.unique(ids, return_index=True)
        if len(known) < len(ids) or not np.isin(owners, known).all():
            return None
        return column[first[np.searchsorted(known, owners)]]

    def _fit_by_chance(self, lead: tuple[int, ...]) -> bool:
        """Whether rows that count up are positions even if there are as many of them as there are examples."""
        given = [column.shape for column in self._columns.values() if column.ndim]
        if any(shape[0] == 1 for shape in given):
            return False  # of one example, which they are of then
        return any(lead[0] == 1 or shape[1:] == lead for shape in given)

    def _of_all(self, lead: tuple[int, ...], layer: str) -> _Rows:
        """Rows of no single example have a position, and what is said of the whole batch."""
        if self._fold:
            raise SettingError(
                f'Layer "{layer}" is called on what is the same for all examples, such as their positions: it has no '
                "visits of an example to add up. Leave it out (layers=…)."
            )
        rows = math.prod(lead)
        whole = {name: np.full(rows, column) for name, column in self._columns.items() if not column.ndim}
        return {**whole, "position": np.arange(rows)}

    def _identified(self, columns: dict[str, np.ndarray], ids: np.ndarray | None, layer: str) -> dict[str, np.ndarray]:
        """Columns whose `example`, with `position` if it is there, say which slot of a folded memory a row is of."""
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


def _fits(column: Shaped[np.ndarray, "..."], lead: tuple[int, ...], axis: int) -> bool:
    """Whether a column of shape (B,) or (B, L) fits rows that count the examples along this axis."""
    if axis >= len(lead) or lead[axis] != column.shape[0]:
        return False
    return column.ndim == 1 or (len(lead) > 1 and lead[1 - axis] == column.shape[1])


def _spread(
    column: Shaped[np.ndarray, "..."], lead: tuple[int, ...], shaped: tuple[int, ...], axis: int | None
) -> Shaped[np.ndarray, "rows"] | None:
    """One value for each row of a layer, None if the column does not fit.

    A value of shape (B,) holds for all positions of its example, one of shape (B, L) for its position. `shaped` is the
    leading shape `lead` of the rows, with (B·L,) as (B, L) if that is known; its `axis` counts the examples.
    """
    if not column.ndim:
        return np.full(math.prod(lead), column)
    if column.shape == lead and len(lead) == 1:
        return column
    if axis is None or not _fits(column, shaped, axis):
        return None
    sequence_first = column.T if column.ndim == 2 else column[None]
    first_axes = sequence_first if axis else column
    others = (1,) * (len(shaped) - first_axes.ndim)
    return np.broadcast_to(first_axes.reshape(*first_axes.shape, *others), shaped).reshape(-1)
