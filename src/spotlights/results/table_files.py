"""Tables as files for other programs: CSV, Arrow, Parquet."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spotlights.errors import SettingError
from spotlights.memory.files import write_whole

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
    buffer = io.BytesIO()
    getattr(_pyarrow(module), write)(_pyarrow("pyarrow").table(columns), buffer)
    write_whole(path, buffer.getvalue())
    return path


def write_csv(rows: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Writes one line for each row, and their names above."""
    path, rows = Path(path), list(rows)
    columns, text = _names(rows), io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(name, "")) for name in columns] for row in rows)
    write_whole(path, text.getvalue().encode("utf-8", "replace"))
    return path


def _names(rows: list[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> Any:
    """A cell that a spreadsheet will not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: texts where there are several, or numbers of more than 64 bits."""
    types = {type(value) for value in values if value is not None}
    small = all(-(2**63) <= value < 2**63 for value in values if type(value) is int)
    if (small and types <= {int, float}) or (len(types) <= 1 and not types & {int, str}):
        return values
    return [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SettingError("Arrow and Parquet files need pyarrow: pip install 'spotlights[arrow]'.") from None
