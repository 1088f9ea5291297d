"""Tables for people: the same look in a terminal, in a notebook's text and in the CLI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 110


def shown(value: Any) -> str:
    """A value in a cell: four digits are what one can read."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


class Printable:
    """Prints as a table, everywhere."""

    def __rich__(self) -> Any:
        return self.table()

    def table(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=WIDTH, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())

    __repr__ = __str__


def build(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str | None) -> Any:
    """A rich table; numbers are set to the right. A cell may be something that rich can show."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=note, caption_justify="left", box=box.SIMPLE_HEAD)
    body = [[cell if hasattr(cell, "__rich_console__") else shown(cell) for cell in row] for row in rows]
    for index, name in enumerate(columns):
        numbers = all(_is_number(str(row[index])) for row in body)
        table.add_column(name, justify="right" if numbers else "left")
    for row in body:
        table.add_row(*row)
    return table


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return cell == "–"
    return True
