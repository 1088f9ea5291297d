"""Starting the explorer: from the command line, from a script, from a notebook."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import SettingError
from spotlights.web.subject import Drawing, Subject, Tokenizer, own_subject
from spotlights.web.views import View

PORT = 8733
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Served:
    """An explorer that runs in the background."""

    def __init__(self, subject: Subject, *, host: str, port: int, framed: bool = False) -> None:
        import uvicorn

        from spotlights.web.explorer import Explorer
        from spotlights.web.server import build_app

        self.token = None if host in LOOPBACK else secrets.token_urlsafe(24)
        self._socket = _listen(host, port)
        found = self._socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{found}/" + (f"?token={self.token}" if self.token else "")
        self.explorer = Explorer(subject)
        app = build_app(self.explorer, token=self.token, framed=framed)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, h11_max_incomplete_event_size=1 << 16
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def wait(self) -> None:
        """Until somebody stops the program."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.5)
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """In a notebook: the page itself."""
        return f'<iframe src="{self.url}" width="100%" height="820" style="border:1px solid #e5e7eb"></iframe>'

    def __repr__(self) -> str:
        return f"The explorer is at {self.url}"


def serve(subject: Subject, *, host: str = "127.0.0.1", port: int = PORT, framed: bool = False) -> Served:
    """Starts the server in the background; port 0 takes any that is free."""
    _needs_extra()
    return Served(subject, host=host, port=port, framed=framed)


def explore(
    memory: sl.Memory | str | Path,
    model: nn.Module | None = None,
    inputs: Any = None,
    *,
    labels: Any = None,
    ids: Any = None,
    show: View | None = None,
    show_input: View | None = None,
    example_input: Callable[[int], Tensor] | None = None,
    classes: Sequence[str] | None = None,
    drawing: Drawing | None = None,
    tokenizer: Tokenizer | None = None,
    host: str = "127.0.0.1",
    port: int = PORT,
    open_browser: bool | None = None,
) -> Served:
    """Opens the web explorer on a memory; it runs in the background until it is closed or the program ends.

    Args:
        memory: an opened memory, with `model` and `inputs`; or the folder of a run, which has them all.
        model: the trained network.
        inputs: the test inputs, one row for each.
        labels: the right class of each input.
        ids: a number for each input; its position by default.
        show: from a training example's id to what is shown: pixels, a text, or a mapping.
        show_input: the same for the position of a test input; by default its own numbers as an image or a table.
        example_input: from a training example's id to the model's input, so that it can be the query.
        classes: what the outputs are called.
        drawing: how drawn and uploaded images become inputs.
        tokenizer: with `encode` and `decode`, so that prompts can be queries.
        host: another machine's users are let in with a token only, which is part of the printed address.
        port: 0 takes any that is free.
        open_browser: by default if somebody sits at a terminal.
    """
    if isinstance(memory, str | Path):
        from spotlights.web.runs import subject_of

        if model is not None or inputs is not None:
            raise SettingError("A run's folder brings its own model and inputs; give an opened memory with yours.")
        subject = subject_of(Path(memory))
    else:
        subject = own_subject(
            memory,
            model,
            inputs,
            labels=labels,
            ids=ids,
            show=show,
            show_input=show_input,
            example_input=example_input,
            classes=classes,
            drawing=drawing,
            tokenizer=tokenizer,
        )
    notebook = "ipykernel" in sys.modules
    served = serve(subject, host=host, port=port, framed=notebook)
    if open_browser if open_browser is not None else sys.stdout.isatty() and not notebook:
        webbrowser.open(served.url)
    if not notebook:
        print(served)
    return served


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise SettingError(f"port={port}: give 0 (any that is free) to 65535.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise SettingError(f"Nothing can listen at {host}, port {port}: {error.strerror}. Try --port 0.") from None
    return listening


def _needs_extra() -> None:
    try:
        import plotly  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SettingError(f"The explorer needs {error.name}: pip install 'spotlights[explore]'.") from None
