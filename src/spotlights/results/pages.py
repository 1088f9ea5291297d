"""Tables as HTML: what a notebook shows, and files to pass on; with a picture of each example, if somebody says how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from spotlights.memory.files import write_whole

if TYPE_CHECKING:
    from spotlights.results.tables import TitledTable

STYLE = """<style>.spotlights{font:13px/1.4 system-ui,sans-serif;border-collapse:collapse}
.spotlights{font-variant-numeric:tabular-nums}
.spotlights caption,.spotlights tfoot td{text-align:left;font-style:italic;padding:4px 8px;opacity:.8}
.spotlights th,.spotlights td{padding:2px 8px;text-align:right;border-bottom:1px solid #8883}
.spotlights .words{text-align:left}.spotlights .bar{display:inline-block;height:.7em;margin-left:6px;border-radius:2px}
.spotlights img{height:40px;image-rendering:pixelated;vertical-align:middle}</style>"""
FOR, AGAINST, LONGEST = "#00857d", "#d4690b", 60
"""The colours of what speaks for and against, as in the explorer; and the length of the longest bar in pixels."""


@dataclass(frozen=True, repr=False)
class TablePage:
    """A table as HTML; a notebook shows it."""

    html: str

    def save(self, path: str | Path) -> Path:
        """Writes a file that any browser opens."""
        page = f'<!doctype html><meta charset="utf-8"><title>Spotlights</title>{self.html}'
        write_whole(path, page.encode("utf-8", "replace"))
        return Path(path)

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"a table of {len(self.html) / 1e6:.2f} MB; .save(path) writes it"


def table_page(table: TitledTable, what: str | None, picture: Callable[[int], str] | None = None) -> TablePage:
    """A table as HTML, with a bar for each value of the column `what`, and what `picture` makes of examples."""
    names, sides = table.columns, ["" if numeric else "words" for numeric in table.numeric]
    valued = names.index(what) if what in names else None
    largest = 0.0 if valued is None else max((abs(_number(row[valued])) for row in table.rows), default=0.0)

    def cell(at: int, text: str) -> str:
        seen = picture(int(text)) if picture is not None and names[at] == "example" and text.isdecimal() else ""
        bar = _bar(_number(text), largest) if at == valued else ""
        return f'<td class="{sides[at]}">{seen}{escape(text)}{bar}</td>'

    head = "".join(f'<th class="{side}">{escape(name)}</th>' for name, side in zip(names, sides, strict=True))
    body = "".join(f"<tr>{''.join(cell(at, text) for at, text in enumerate(row))}</tr>" for row in table.rows)
    note = f'<tfoot><tr><td colspan="{len(names)}">{escape(table.note)}</td></tr></tfoot>' if table.note else ""
    return TablePage(
        f'{STYLE}<table class="spotlights"><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody>{note}</table>"
    )


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def _bar(value: float, largest: float) -> str:
    length = LONGEST * abs(value) / largest if largest else 0.0
    bar = f'<i class="bar" style="width:{length:.0f}px;background:{FOR if value >= 0 else AGAINST}"></i>'
    return f'<span style="display:inline-block;width:{LONGEST + 6}px;text-align:left">{bar}</span>'
