"""What one connection may cost: how many there are, how long a request's head or an unread answer may take.

A client that sends half a request, or reads no answer, is cut off; so is one too many. None of them gets an error page,
as none of them is a browser that somebody looks at.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256
"""Connections at once. A browser opens six for a page."""
HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""
HEAD_SECONDS = 10.0
"""For a whole request to arrive, from its first byte or from the connection."""
READ_SECONDS = 60.0
"""For a client that does not read an answer."""


class Connection(H11Protocol):
    """uvicorn's connection, with limits."""

    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving, self._unread = _stopped(self._arriving), _stopped(self._unread)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unread = _stopped(self._unread)
        super().resume_writing()

    def _watch(self) -> None:
        """The clock runs while a request has arrived in part."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._arriving = _stopped(self._arriving)
        elif self._arriving is None and not self.transport.is_closing():
            self._arriving = self.loop.call_later(HEAD_SECONDS, self.transport.abort)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
