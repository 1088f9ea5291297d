"""The explorer in a notebook, also on a remote kernel: the page asks the kernel by the notebook's own connection.

The page is the same as in a browser. It runs in a frame without the notebook's rights, and needs no port.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from spotlights.errors import SettingError
from spotlights.explorer.api import answer, finite, replied
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.saved import document, images_of

if TYPE_CHECKING:
    from spotlights.subject import Subject


def widget_of(subject: Subject, state: Mapping[str, str], *, other: Subject | None = None, height: int = 820) -> Any:
    """The widget of a subject; whoever runs it sees the page under the cell."""
    try:
        from anywidget import AnyWidget  # pyright: ignore[reportMissingImports]
        from traitlets import Int, Unicode  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SettingError("The explorer in a notebook needs anywidget: pip install 'spotlights[notebook]'.") from None

    class ExplorerWidget(AnyWidget):
        _esm = (files("spotlights.explorer") / "static" / "widget.js").read_text(encoding="utf-8")
        page = Unicode().tag(sync=True)
        height = Int().tag(sync=True)

    explorer = Explorer(subject, other=None if other is None else Explorer(other, prepare=False))
    data = {"answers": {}, "images": {}, "state": dict(state), "views": [], "kernel": True}
    widget = ExplorerWidget(page=document(data, subject.title), height=height)
    widget.on_msg(lambda _, asked, __: widget.send(reply_to(explorer, asked)))
    return widget


def reply_to(explorer: Explorer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to what the page asks, with the pictures that it names."""
    given = dict(parse_qsl(str(asked.get("parameters", "")), keep_blank_values=True))
    status, found = replied(lambda: answer(explorer, str(asked.get("path", "")), given))
    return {"id": asked.get("id"), "status": status, "answer": finite(found), "images": images_of(explorer, found)}
