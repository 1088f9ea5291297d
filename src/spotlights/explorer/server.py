"""The server: the page, the API's addresses, and what keeps strangers out.

No request changes a memory. The page and its parts come from this package; nothing in a
request ever names a file. A request must name the server by a name it is known under (so that no foreign web
page can reach it through a name of its own), and where the server listens to other machines, bring a token. Whatever
costs something is answered to the page itself and to programs, never to another site's page, and stops when the
one who asked has gone.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import threading
import time
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotlights import interrupts
from spotlights.errors import TooLargeError
from spotlights.explorer.api import ADDRESSES, EFFECTS, answer, as_text, refused, replied
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.saved import SavedPage, saved_page

COOKIE = "spotlights_token"
COMPARED = ("run", "query", "layer")
"""What the memory answers that another one is compared with."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?")
MOST_BODY = 1 << 20
"""Bytes that a request may announce; no address takes a body."""
LONGEST = 600.0
"""Seconds for an answer. What takes longer is a question for Python."""


# -- responses --------------------------------------------------------------------------------


def _response(status: int, answer: Any) -> Response:
    """A picture, a page to keep, or data as JSON."""
    if isinstance(answer, bytes):
        return Response(answer, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})
    headers = {"Cache-Control": "no-store"}
    if isinstance(answer, SavedPage):
        headers["Content-Disposition"] = 'attachment; filename="answer.html"'
        return Response(answer.text, media_type="text/html; charset=utf-8", headers=headers)
    return Response(as_text(answer), status, media_type="application/json", headers=headers)


def _refusal(status: int, message: str) -> Response:
    return _response(*refused(status, message))


def _error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return _refusal(500, f"The explorer failed ({type(error).__name__}). Its terminal says where.")
    sentences = {
        404: "There is nothing at this address. docs/explorer_api.md lists all addresses.",
        405: "The explorer is read-only: GET is all it answers, except for POST /api/refresh.",
    }
    return _refusal(error.status_code, sentences.get(error.status_code, error.detail))


# -- the page ---------------------------------------------------------------------------------


async def _static(request: Request) -> Response:
    """A part of the page: by its name in a list made at the start, never as a path."""
    name, parts = request.path_params.get("name", "index.html"), _parts()
    if name not in parts:
        raise HTTPException(404)
    headers = {"Cache-Control": "no-cache"}
    return Response(parts[name], media_type=_TYPES[name[name.rindex(".") :]] + "; charset=utf-8", headers=headers)


@cache
def _parts() -> dict[str, bytes]:
    folder = files("spotlights.explorer") / "static"
    return {part.name: part.read_bytes() for part in folder.iterdir() if part.name[part.name.rfind(".") :] in _TYPES}


# -- answers ----------------------------------------------------------------------------------


class Gone(Exception):  # noqa: N818 (nobody is left to tell)
    """Who asked has closed the connection."""


def while_there(act: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Answers in a thread, for as long as somebody waits for it and at most for `LONGEST` seconds."""

    async def answered(request: Request) -> Response:
        gone, until = threading.Event(), time.monotonic() + LONGEST

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()

        def check() -> None:
            if gone.is_set():
                raise Gone
            if time.monotonic() > until:
                raise TooLargeError(f"This takes longer than {LONGEST:.0f} seconds here. Ask in Python.")

        def work() -> Response:
            with interrupts.checking(check):
                return _response(*replied(lambda: act(request)))

        watching = asyncio.ensure_future(watch())
        try:
            return await run_in_threadpool(work)
        except Gone:
            return Response(status_code=400)
        finally:
            watching.cancel()

    return answered


def _address(explorer: Explorer, path: str) -> Callable[[Request], Any]:
    return lambda request: answer(explorer, path.format(**request.path_params), request.query_params)


def _page(explorer: Explorer) -> Callable[[Request], SavedPage]:
    """The view of a state as one HTML file."""

    def page(request: Request) -> SavedPage:
        if explorer.opened.masks is not None:
            explorer.masks()  # or the answer comes later
        return saved_page(explorer, dict(request.query_params))

    return page


# -- who is let in ----------------------------------------------------------------------------


class RequestGuard:
    """Lets in who knows the server's name and, where one is demanded, its token; adds the headers that protect."""

    def __init__(self, app: ASGIApp, *, token: str | None, framed: bool) -> None:
        self._app, self._token = app, token
        ancestors = "http://127.0.0.1:* http://localhost:*" if framed else "'none'"
        self._headers = [
            (b"content-security-policy", _POLICY.format(ancestors=ancestors).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        request = Request(scope)
        refusal = self._unknown(request) or _foreign(request) or _too_much(request)
        await (refusal or self._app)(scope, receive, guarded)

    def _unknown(self, request: Request) -> Response | None:
        if self._token is None:
            if _host_name(request.headers.get("host", "")) not in LOCAL_NAMES:
                return _refusal(421, "This server does not go by that name. Open it as http://127.0.0.1 and its port.")
            return None
        brought = request.query_params.get("token")
        if request.scope["path"] == "/" and brought is not None and self._is_token(brought):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, brought, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer):
            return None
        return _refusal(401, "This server wants its token: open the address that it printed when it started.")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())


def _host_name(host: str) -> str:
    match = _HOST.fullmatch(host.lower())
    return "" if match is None else match[1]


def _foreign(request: Request) -> Response | None:
    """Refuses what another site's page asks for. A browser says so; a program says nothing."""
    if not request.scope["path"].startswith(("/api/", "/other/api/")):
        return None  # the page itself: a link from anywhere may lead there
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = origin is None or origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
    if own and site in (None, "none", "same-origin"):
        return None
    return _refusal(403, "Only the explorer's own page may ask for this, not a page of another site.")


def _too_much(request: Request) -> Response | None:
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and len(announced) < 10 and int(announced) <= MOST_BODY:
        return None
    return _refusal(413, "No address of the explorer takes that much.")


def build_app(explorer: Explorer, *, token: str | None = None, framed: bool = False) -> Starlette:
    """The whole server as an ASGI application.

    Args:
        explorer: what answers.
        token: what requests must bring; None for a server that listens to this machine only.
        framed: pages of this machine, such as a notebook, may show it in a frame.
    """
    routes = [
        Route(f"/api/{path}", while_there(_address(explorer, path)), methods=["POST" if path in EFFECTS else "GET"])
        for path in ADDRESSES
    ]
    if explorer.other is not None:
        routes += [Route(f"/other/api/{path}", while_there(_address(explorer.other, path))) for path in COMPARED]
    routes += [Route("/api/page", while_there(_page(explorer)))]
    routes += [Route("/", _static), Route("/static/{name}", _static)]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestGuard, token=token, framed=framed)],  # type: ignore[arg-type]
        exception_handlers={HTTPException: _error, Exception: _error},
    )
    app.router.redirect_slashes = False  # an address is there or not
    return app
