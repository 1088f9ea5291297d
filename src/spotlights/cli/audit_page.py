"""The page of `spotlights audit`: the suspects with their pictures, texts or rows, as HTML; and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

import spotlights as sl
from spotlights._version import __version__
from spotlights.errors import UnknownNameError
from spotlights.explorer.views import Show, as_json, picture, png_url
from spotlights.results import Suspects, shown, write_whole

CSV, PAGE, TEMPLATE = "audit.csv", "audit.html", "audit.html.jinja"


def write_audit(memory: sl.Memory, suspects: Suspects, subject: sl.Subject | None, out: Path) -> Path:
    """Writes audit.csv and audit.html; returns the page. The subject, if there is one, says how examples look."""
    show, classes = (None, []) if subject is None else (subject.show_example, subject.class_names())
    out.mkdir(parents=True, exist_ok=True)
    suspects.to_csv(out / CSV)
    rows = list(suspects.rows())
    template = Environment(autoescape=True).from_string(Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8"))
    page = template.render(
        memory=memory.path,
        steps=memory.steps,
        layer=suspects.layer,
        csv=CSV,
        version=__version__,
        head=list(rows[0]) if rows else [],
        rows=[
            {"cells": [_cell(name, value, classes) for name, value in row.items()], **_look(row, show)} for row in rows
        ],
    )
    write_whole(out / PAGE, page.encode("utf-8", "replace"))
    return out / PAGE


def _cell(column: str, value: Any, classes: Sequence[str]) -> str:
    """A value as people read it; a class by its name."""
    known = column in ("label", "network says") and isinstance(value, int) and 0 <= value < len(classes)
    return f"{value}: {classes[value]}" if known and classes[value] != str(value) else shown(value)


def _look(row: dict[str, Any], show: Show | None) -> dict[str, Any]:
    """A picture as the source of an <img>, a text, or the cells of a row."""
    if show is None:
        return {}
    try:
        looks = show(row["example"])
    except UnknownNameError:
        return {"text": "–"}
    plain = as_json(looks)
    if plain["kind"] == "image":
        return {"picture": png_url(picture(looks))}
    if plain["kind"] == "html":
        return {"text": "HTML, which the explorer shows"}
    return {"text": plain["text"]} if plain["kind"] == "text" else {"table": plain["rows"]}
