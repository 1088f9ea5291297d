"""Tables as files for other programs: CSV, Arrow, Parquet."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spotlights.errors import SettingError

SUFFIXES = (".csv", ".arrow", ".parquet")
_WRITERS = {".arrow": ("pyarrow.feather", "write_feather"), ".parquet": ("pyarrow.parquet", "write_table")}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def check_table_file(path: str | Path) -> Path:
    """The path, if its suffix names a kind of file that can be written here."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise SettingError(f"{path}: the name of a table ends with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.")
    if path.suffix in _WRITERS:
        _pyarrow("pyarrow")
    return path


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Writes one line for each row, as the suffix of the file says: CSV, an Arrow (Feather) file, or Parquet."""
    path, rows = check_table_file(path), list(rows)
    if path.suffix == ".csv":
        return write_csv(rows, path)
    module, write = _WRITERS[path.suffix]
    columns = {name: _column([row.get(name) for row in rows]) for name in _names(rows)}
    getattr(_pyarrow(module), write)(_pyarrow("pyarrow").table(columns), str(path))
    return path


def write_csv(rows: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Writes one line for each row, and their names above."""
    path, rows = Path(path), list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=_names(rows))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return path


def _names(rows: list[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> Any:
    """A cell that a spreadsheet will not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: texts where there are several."""
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1 or types <= {int, float}:
        return values
    return [None if value is None else str(value) for value in values]


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SettingError("Arrow and Parquet files need pyarrow: pip install 'spotlights[arrow]'.") from None
