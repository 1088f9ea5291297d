"""One answer as one HTML file. The file opens anywhere without a server, and holds what the page may still ask.

Its bars open, and each group can be left out. The questions are those that `static/answer.js` asks, word by word.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from spotlights.errors import SettingError, SpotlightsError
from spotlights.explorer.api import answer, as_text
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import kind_named
from spotlights.explorer.views import png_url
from spotlights.results import write_whole
from spotlights.selections import format_selections

TOP, TILES, STRETCHES, MOST_PARTS, SUSPECTS = 10, 60, 8, 14, 60
"""As in `static/answer.js` and `static/audit.js`."""
VIEWS = ("", "history", "map", "audit", "compare")
_PICTURE = re.compile(r"api/(inputs|examples)/-?[0-9]+\.png")
_POLICY = (
    "default-src 'none'; script-src {scripts} data:; style-src 'unsafe-inline'; img-src data: blob:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'"
)
"""Two inline scripts run, which are known by their hashes, and the modules that they import."""
Plain = dict[str, Any]
Asked = tuple[str, Plain]


class SavedPage:
    """A view of one answer as one HTML file; a notebook shows it in place, without a server."""

    def __init__(self, text: str, title: str) -> None:
        self.text, self.title = text, title

    def save(self, path: str | Path) -> Path:
        """Writes the file."""
        write_whole(path, self.text.encode("utf-8", "replace"))
        return Path(path)

    def _repr_html_(self) -> str:
        frame = 'sandbox="allow-scripts allow-downloads" width="100%" height="820" style="border:1px solid #8884"'
        return f'<iframe title="{html.escape(self.title)}" {frame} srcdoc="{html.escape(self.text)}"></iframe>'

    def __repr__(self) -> str:
        return f"{self.title}: a page of {len(self.text) / 1e6:.1f} MB; .save(path) writes it"


def saved_page(explorer: Explorer, state: dict[str, Any]) -> SavedPage:
    """What the page shows in a state, with all that it asks for when somebody goes on clicking."""
    view = state.get("view", "")
    if view not in VIEWS:
        raise SettingError(f"view={view[:40]!r}: give one of {', '.join(name or 'nothing' for name in VIEWS)}.")
    asking = {"q": state.get("q"), "at": state.get("at")}
    shown = answer(explorer, "query", asking)
    state = {**state, "layer": state.get("layer") or shown["layer"]}
    run = answer(explorer, "run", {})
    run |= {"edges": [], "layers": [layer for layer in run["layers"] if layer["name"] == state["layer"]]}
    run |= {"training_queries": False, "prompt": False, "saved": True}
    answers = {_key("run", {}): run, _key("query", asking): shown, _key("status", {}): answer(explorer, "status", {})}
    for path, given in _questions(explorer, run, shown, state, asking):
        try:
            answers[_key(path, given)] = answer(explorer, path, given)
        except SpotlightsError:
            if path in ("layer", "history", "map", "lamp", "audit"):
                raise
    data = {"answers": answers, "images": images_of(explorer, answers), "state": state, "views": [view] if view else []}
    return SavedPage(document(data, explorer.subject.title), f"{explorer.subject.title}: {state['q']}")


def _questions(explorer: Explorer, run: Plain, shown: Plain, state: Plain, asking: Plain) -> Iterator[Asked]:
    measure = state.get("measure") or run["measures"][0]["name"]
    kind = kind_named(measure)
    by = "example" if run["examples"] else "slot"
    target = state.get("target") if kind.signed else None
    look = {**asking, "layer": state["layer"], "measure": measure, "target": target}
    columns = [name for name, values in run["groups"].items() if len(values) > 1]
    per = state["per"] if state.get("per") in columns else next(iter(columns), None)
    if state.get("view") == "history":
        yield "history", {**asking, "target": target, "per": per}
    elif state.get("view") == "map":
        projection = state.get("projection") or None
        yield "map", {"layer": state["layer"], "per": per, "projection": projection}
        yield "lamp", {**look, "projection": projection}
    elif state.get("view") == "audit":
        yield "audit", {"top": SUSPECTS}
    elif state.get("view") == "compare" and explorer.other is not None:
        pair = {**look, "by": by, "top": 24, "target": state.get("target") or shown["said"]}
        yield from (("layer", pair), ("other/layer", pair), ("other/run", {}), ("other/query", asking))
    layer = {**look, "by": by, "top": TOP if kind.signed else 2 * TOP}
    yield "layer", layer
    if run["texts"] and not kind.estimate:
        reply = answer(explorer, "layer", layer)
        examples = {row["example"] for row in [*reply["top"], *(reply["bottom"] or [])] if "example" in row}
        yield "tokens", {**look, "examples": ",".join(map(str, sorted(examples)))}
    if run["times"]:
        yield "time", look
    for part in _parts(explorer, run, look, columns, by):
        yield "layer", {**look, "by": by, "where": part, "top": TILES}
        if run["no_masks"] is None and not kind.estimate:
            yield "mask", {**asking, "mask": part}
            if part.startswith("step="):
                yield "time", {**look, "where": part}
            else:
                yield "layer", {**look, "by": by, "where": part, "top": 1}


def _parts(explorer: Explorer, run: Plain, look: Plain, columns: list[str], by: str) -> Iterator[str]:
    """The bars of the waterfall, by any column, as selections."""
    reply = answer(explorer, "layer", {**look, "by": by, "top": TOP})
    for column in columns:
        rows = sorted(reply["totals"][column], key=lambda row: -abs(row["total"]))
        yield from (format_selections([{column: row["value"]}]) for row in rows[:MOST_PARTS])
    if run["times"]:
        times = answer(explorer, "time", look)
        size = math.ceil(len(times["totals"]) / STRETCHES)
        starts = [*times["starts"][::size], times["steps"]]
        edges = [math.floor(start + 0.5) for start in starts]
        yield from (f"step={first}-{end}" for first, end in itertools.pairwise(edges))


def _key(path: str, given: Plain) -> str:
    """What `static/api.js` looks an answer up by."""
    pairs = sorted([name, str(value)] for name, value in given.items() if value not in (None, ""))
    return json.dumps([path, *pairs], separators=(",", ":"), ensure_ascii=False)


def images_of(explorer: Explorer, answers: Any) -> dict[str, str]:
    """Every picture that the answers name, as bytes."""
    images: dict[str, str] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)
        elif isinstance(value, str) and value not in images and _PICTURE.fullmatch(value):
            images[value] = png_url(answer(explorer, value.removeprefix("api/"), {}))

    walk(answers)
    return images


def document(data: dict[str, Any], title: str) -> str:
    """The page with its parts in it; modules find each other by name, in a map of imports."""
    static = files("spotlights.explorer") / "static"
    parts = {part.name: part.read_text(encoding="utf-8") for part in static.iterdir() if part.is_file()}
    scripts = {
        name: "data:text/javascript;base64," + base64.b64encode(text.replace('from "./', 'from "').encode()).decode()
        for name, text in parts.items()
        if name.endswith(".js")
    }
    answers = as_text(data).replace("<", "\\u003c")
    modules, start = json.dumps({"imports": scripts}), 'import "main.js";'
    policy = _POLICY.format(scripts=" ".join(map(_hash, (modules, start))))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{parts["style.css"]}</style>\n'
        f'<script type="importmap">{modules}</script>\n'
        f'<script id="answers" type="application/json">{answers}</script>\n'
        f'<script type="module">{start}</script>\n'
    )
    page = re.sub(r"<link [^>]*>\n|<script src[^>]*></script>\n", "", parts["index.html"])
    page = page.replace("<title>Spotlights</title>", f"<title>Spotlights: {html.escape(title)}</title>")
    return page.replace("</head>", head + "</head>", 1)


def _hash(script: str) -> str:
    """What a content security policy calls an inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
