"""Starts the explorer, from the command line, a script or a notebook."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

from spotlights.errors import SettingError

if TYPE_CHECKING:
    from spotlights.subject import Subject

PORT = 8733
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Served:
    """An explorer that runs in the background."""

    def __init__(
        self,
        subject: Subject,
        *,
        other: Subject | None = None,
        host: str = "127.0.0.1",
        port: int = PORT,
        framed: bool = False,
    ) -> None:
        """
        Args:
            subject: what is explored.
            other: the same on another memory, to compare with.
            host: another address than this machine's own demands a token.
            port: 0 takes any that is free.
            framed: a notebook may show the page in a frame.
        """
        try:
            import starlette  # noqa: F401
            import uvicorn
        except ImportError as error:
            raise SettingError(f"The explorer needs {error.name}: pip install 'spotlights[explore]'.") from None

        from spotlights.explorer.connections import HEAD_BYTES, Connection
        from spotlights.explorer.explorer import Explorer
        from spotlights.explorer.server import build_app

        self.token = None if host in LOOPBACK else secrets.token_urlsafe(24)
        self._socket = _listen(host, port)
        try:
            compared = None if other is None else Explorer(other, prepare=False)
            self.explorer = Explorer(subject, other=compared)
        except BaseException:
            self._socket.close()
            raise
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}/" + (f"?token={self.token}" if self.token else "")
        app = build_app(self.explorer, token=self.token, framed=framed)
        settings = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="error",  # no stranger fills the terminal, and no address with a token is written to it
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def wait(self) -> None:
        """Returns when somebody stops the program."""
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
