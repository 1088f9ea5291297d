"""What users write of columns, `label=3` or `step=range(0, 3000)`, as selections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from spotlights.errors import SettingError, UnknownNameError
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Between, Everything, OneOf, Selection


def meeting(reader: MemoryReader, conditions: Mapping[str, Any]) -> Selection:
    """The slots that meet all conditions: a value, a list of values, or a range per column."""
    if not conditions:
        raise SettingError('Give at least one condition, such as where(label=3) or where(source="mnist").')
    selected: Selection = Everything()
    for column, wanted in conditions.items():
        selected = selected & _condition(reader, column, wanted)
    return selected


def as_of(reader: MemoryReader, selection: Selection, step: int) -> Selection:
    """Those of the selected slots that the first `step` steps left."""
    return selection if step == reader.manifest.steps else selection & Between("step", range(step))


def _condition(reader: MemoryReader, column: str, wanted: Any) -> Selection:
    kind = reader.column_kind(column)
    if isinstance(wanted, range) and kind != "string":
        return Between(column, wanted if wanted.step > 0 else wanted[::-1])
    if isinstance(wanted, Tensor | np.ndarray):
        wanted = wanted.tolist()
    several = isinstance(wanted, Sequence | set | frozenset | range) and not isinstance(wanted, str)
    items: list[Any] = list(wanted) if several else [wanted]
    items = [item.item() if isinstance(item, Tensor | np.generic) else item for item in items]
    shown = str(wanted) if len(items) <= 8 else f"one of {len(items):,} values"
    if kind != "string":
        if not all(isinstance(item, int | float) for item in items):
            raise SettingError(f'The column "{column}" holds numbers; {shown} cannot be one of them.')
        if kind == "int":
            items = [item for item in items if float(item).is_integer()]  # 2.5 is no label
        return OneOf(column, tuple(items), shown)
    strings = reader.manifest.columns[column].strings
    for item in items:
        if item not in strings:
            raise UnknownNameError(f"No slot has {column}={item!r}. The column has: {', '.join(strings[:20])}.")
    return OneOf(column, tuple(strings.index(item) for item in items), shown)
