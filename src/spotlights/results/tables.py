"""Tables: for people the same look in a terminal, in a notebook's text and in the CLI; for programs a data frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.errors import SettingError
from spotlights.results.pages import TablePage, table_page

if TYPE_CHECKING:
    import pandas

WIDTH, FEW = 110, 10
"""Characters of a line, and how many rows of a long answer are printed."""


def shown(value: Any) -> str:
    """A value in a cell: four digits are what one can read."""
    if value is None:
        return "–"
    if isinstance(value, float):
        if 1e4 <= abs(value) < 1e7:
            return f"{value:,.0f}"
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e4 else f"{value:.4g}"
    return str(value)


def layer_named(name: str) -> str:
    """A layer in a title: the number that `nn.Sequential` gives would not read as a name."""
    return f"layer {name}" if name.isdigit() else name


def first_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is printed of an answer: all of it, unless it is long."""
    return rows if len(rows) <= 2 * FEW else rows[:FEW]


class Printable:
    """Prints as a table, everywhere."""

    def __rich__(self) -> Any:
        return self.table()

    def table(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=WIDTH, no_color=True, force_jupyter=False)  # a notebook would show it at once
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())

    __repr__ = __str__

    def page(self, picture: Callable[[int], str] | None = None) -> TablePage:
        """The table as HTML, to show or `save`; `picture` makes HTML of an example (`subject.pictured` knows how)."""
        return table_page(self.table(), getattr(self, "what", None), picture)

    def save_html(self, path: str | Path) -> Path:
        """Writes the table as a file that any browser opens. `subject.pictured(…).save(path)` adds pictures."""
        return self.page().save(path)

    def _repr_html_(self) -> str:
        return self.page().html


class RowAnswer(Printable):
    """An answer of rows that name their cells."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """The answer, row by row."""
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each row of the answer."""
        return frame(self.rows())


_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text, such as a name in somebody's memory, without what steers a terminal."""
    return text.translate(_CONTROLS)


@dataclass(frozen=True)
class TitledTable:
    """A table with a title above and a note below, both as wide as the terminal."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str | None

    @property
    def numeric(self) -> list[bool]:
        """Which columns are numbers: they are set to the right."""
        return [all(_is_number(row[index]) for row in self.rows) for index in range(len(self.columns))]

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD)
        for name, numeric in zip(self.columns, self.numeric, strict=True):
            table.add_column(escape(name), justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        note = [] if self.note is None else [Text(printable(self.note), "dim")]
        return Group(Text(printable(self.title), "italic"), table, *note)


def build(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str | None) -> TitledTable:
    """A table of values as people see them."""
    body = [[printable(shown(cell)) for cell in row] for row in rows]
    return TitledTable(title, [printable(name) for name in columns], body, note)


def build_rows(title: str, rows: Sequence[dict[str, Any]], what: str, note: str | None) -> TitledTable:
    """A table of rows that name their cells; `what` was measured."""
    return build(title, list(rows[0]) if rows else ["rank", what], [list(row.values()) for row in rows], note)


def frame(rows: Iterable[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a data frame, or a sentence that says what to install."""
    try:
        import pandas
    except ImportError:
        raise SettingError("to_pandas() needs pandas: pip install 'spotlights[tables]'.") from None
    return pandas.DataFrame(list(rows))


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return cell == "–"
    return True
