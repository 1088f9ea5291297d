"""The server: addresses, one shape of error, and what keeps strangers out.

Everything is read-only. The page and its parts come from this package and from the installed plotly; nothing in a
request ever names a file. A request must name the server by a name it is known under (so that no foreign web
page can reach it through a name of its own), and where the server listens to other machines, bring a token.
"""

from __future__ import annotations

import csv
import hmac
import io
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotlights.errors import SpotlightsError, TooLargeError, UnknownNameError, UnsupportedError
from spotlights.web import data
from spotlights.web.audit import audit
from spotlights.web.effects import accuracy as accuracy_under
from spotlights.web.explorer import Explorer, Preparing
from spotlights.web.measured import Wanted
from spotlights.web.measures import KINDS
from spotlights.web.overview import overview, status
from spotlights.web.parameters import LOOK, MASK, QUERY, Parameters, read_mask, read_query, read_wanted
from spotlights.web.queries import whole_number
from spotlights.web.snippets import snippet
from spotlights.web.spotlight import over_time, spotlight

COOKIE = "spotlights_token"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)
Answer = Callable[[Explorer, Request], Any]


# -- the API ----------------------------------------------------------------------------------


def about(explorer: Explorer, request: Request) -> Any:
    parameters = Parameters(request.query_params, ("newest",))
    if parameters.choice("newest", ("no", "yes")) == "yes":
        explorer.refresh()
    return overview(explorer)


def going_on(explorer: Explorer, request: Request) -> Any:
    Parameters(request.query_params, ())
    return status(explorer)


def inputs(explorer: Explorer, request: Request) -> Any:
    parameters = Parameters(request.query_params, ("only", "label", "source", "order", "seed", "first", "count"))
    return data.list_inputs(
        explorer,
        only=parameters.choice("only", ("all", "wrong", "right")),
        label=parameters.number("label", None, -(1 << 31), 1 << 31),
        source=parameters.optional("source"),
        order=parameters.choice("order", ("given", "random", "unsure")),
        seed=parameters.count("seed", 0, 0, 1 << 31),
        first=parameters.count("first", 0, 0, 1 << 31),
        count=parameters.count("count", 60, 1, 500),
    )


def query(explorer: Explorer, request: Request) -> Any:
    parameters = Parameters(request.query_params, QUERY)
    return explorer.answer(read_query(parameters, explorer))


def layer(explorer: Explorer, request: Request) -> Any:
    return _look(explorer, request, spotlight)


def time(explorer: Explorer, request: Request) -> Any:
    return _look(explorer, request, over_time)


def _look(explorer: Explorer, request: Request, answer: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    parameters = Parameters(request.query_params, LOOK)
    asked, wanted = read_query(parameters, explorer), read_wanted(parameters, explorer)
    _prepare(explorer, wanted)
    key = answer.__name__, asked.name, asked.position, wanted
    return explorer.kept(key, lambda: answer(explorer, asked, wanted))


def mask(explorer: Explorer, request: Request) -> Any:
    parameters = Parameters(request.query_params, (*QUERY, *MASK))
    return explorer.mask(read_query(parameters, explorer), read_mask(parameters, explorer))


def accuracy(explorer: Explorer, request: Request) -> Any:
    parameters = Parameters(request.query_params, MASK)
    chosen = read_mask(parameters, explorer)
    explorer.masks()
    return explorer.kept(("accuracy", chosen), lambda: accuracy_under(explorer, chosen))


def example(explorer: Explorer, request: Request) -> Any:
    Parameters(request.query_params, ())
    return data.example_facts(explorer, _id(request))


def example_png(explorer: Explorer, request: Request) -> Response:
    return _picture(data.example_png(explorer, _id(request)))


def input_png(explorer: Explorer, request: Request) -> Response:
    return _picture(data.input_png(explorer, _id(request)))


def table(explorer: Explorer, request: Request) -> Response:
    """The training examples of one layer as CSV."""
    found = _look(explorer, request, spotlight)
    return _csv([*found["top"], *reversed(found["bottom"] or [])], found["measure"], "spotlights.csv")


def audited(explorer: Explorer, request: Request) -> Any:
    """The examples whose labels look wrong, and what they do to the query, if there is one."""
    parameters = Parameters(request.query_params, (*QUERY, "layer", "measure", "target", "top"))
    asked = read_query(parameters, explorer) if parameters.optional("q") else None
    wanted = read_wanted(parameters, explorer)
    if asked is not None:
        _prepare(explorer, wanted)
    key = "audit", None if asked is None else (asked.name, asked.position), wanted
    return explorer.kept(key, lambda: audit(explorer, asked, wanted))


def audit_table(explorer: Explorer, request: Request) -> Response:
    """The same as CSV."""
    found = audited(explorer, request)
    return _csv(found["suspects"], found["measure"] or "value", "spotlights-audit.csv")


def python(explorer: Explorer, request: Request) -> Response:
    """The same questions as a Python script."""
    parameters = Parameters(request.query_params, (*LOOK, *MASK))
    asked, wanted = read_query(parameters, explorer), read_wanted(parameters, explorer)
    text = snippet(explorer, asked, wanted, read_mask(parameters, explorer))
    disposition = {"Content-Disposition": 'attachment; filename="spotlights_query.py"'}
    return Response(text, media_type="text/x-python; charset=utf-8", headers=disposition)


ADDRESSES: dict[str, Answer] = {
    "/api/run": about,
    "/api/status": going_on,
    "/api/inputs": inputs,
    "/api/inputs/{id}.png": input_png,
    "/api/query": query,
    "/api/layer": layer,
    "/api/time": time,
    "/api/mask": mask,
    "/api/accuracy": accuracy,
    "/api/examples/{id}.png": example_png,
    "/api/examples/{id}": example,
    "/api/table.csv": table,
    "/api/audit": audited,
    "/api/audit.csv": audit_table,
    "/api/query.py": python,
}


def _prepare(explorer: Explorer, wanted: Wanted) -> None:
    """Before anybody holds the scan: what the measure needs may take longer than a request should."""
    if wanted.measure in KINDS and KINDS[wanted.measure].estimate:
        explorer.moments()


def _id(request: Request) -> int:
    return whole_number(request.path_params["id"], "an id")


def _csv(rows: list[dict[str, Any]], measure: str, name: str) -> Response:
    """Rows as a table to download; what was measured gives the column of the values its name."""
    columns = [column for column in (rows[0] if rows else {"rank": 0, "value": 0}) if column != "shown"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([measure if column == "value" else column for column in columns])
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=disposition)


def _cell(value: Any) -> Any:
    """A cell that a spreadsheet will not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def _picture(data: bytes) -> Response:
    return Response(data, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})


def _json(found: Any, code: int = 200) -> Response:
    text = json.dumps(found, allow_nan=False, separators=(",", ":"), default=str)
    return Response(text, code, media_type="application/json", headers={"Cache-Control": "no-store"})


# -- errors -----------------------------------------------------------------------------------


def _error(code: int, message: str) -> Response:
    return _json({"error": {"status": code, "message": message}}, code)


def _answered(answer: Answer, explorer: Explorer) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        try:
            found = answer(explorer, request)
            return found if isinstance(found, Response) else _json(found)
        except Preparing as later:
            return _json({"progress": later.progress}, 202)
        except UnknownNameError as error:
            return _error(404, str(error))
        except (UnsupportedError, TooLargeError) as error:
            return _error(422, str(error))
        except SpotlightsError as error:
            return _error(400, str(error))

    return endpoint


def _http_error(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    sentences = {
        404: "There is nothing at this address. docs/api.md lists those that there are.",
        405: "The explorer is read-only: GET is all it answers.",
    }
    return _error(code, sentences.get(code, str(getattr(error, "detail", "Something went wrong."))))


def _unexpected(request: Request, error: Exception) -> Response:
    return _error(500, f"The explorer failed ({type(error).__name__}). Its terminal says where.")


# -- the page ---------------------------------------------------------------------------------


def _static(request: Request) -> Response:
    """A part of the page: by its name in a list made at the start, never as a path."""
    name, parts = request.path_params.get("name", "index.html"), _parts()
    if name not in parts:
        raise HTTPException(404)
    headers = {"Cache-Control": "no-cache"}
    return Response(parts[name], media_type=_TYPES[name[name.rindex(".") :]] + "; charset=utf-8", headers=headers)


@cache
def _parts() -> dict[str, bytes]:
    folder = files("spotlights.web") / "static"
    return {part.name: part.read_bytes() for part in folder.iterdir() if part.name[part.name.rfind(".") :] in _TYPES}


def _plotly(request: Request) -> Response:
    script = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return Response(script, media_type="text/javascript; charset=utf-8", headers={"Cache-Control": "max-age=86400"})


class Guard:
    """Lets in who knows the server's name and, where one is demanded, its token; adds the headers that protect."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], token: str | None, framed: bool) -> None:
        self._app, self._hosts, self._token = app, hosts, token
        ancestors = "http://127.0.0.1:* http://localhost:*" if framed else "'none'"
        self._headers = [
            (b"content-security-policy", _POLICY.format(ancestors=ancestors).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        request = Request(scope)
        refusal = self._refusal(request)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        if self._token is None:
            if _host_name(request.headers.get("host", "")) not in self._hosts:
                return _error(421, "This server does not go by that name. Open it as http://127.0.0.1 and its port.")
            return None
        brought = request.query_params.get("token")
        if request.url.path == "/" and brought is not None and self._is_token(brought):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, brought, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer):
            return None
        return _error(401, "This server wants its token: open the address that it printed when it started.")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())


def _host_name(host: str) -> str:
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0].lower()


LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


def build_app(explorer: Explorer, *, token: str | None = None, framed: bool = False) -> Starlette:
    """The whole server as an ASGI application.

    Args:
        explorer: what answers.
        token: what requests must bring; None for a server that listens to this machine only.
        framed: pages of this machine, such as a notebook, may show it in a frame.
    """
    routes = [Route(path, _answered(answer, explorer), methods=["GET"]) for path, answer in ADDRESSES.items()]
    routes += [Route("/", _static), Route("/static/plotly.min.js", _plotly), Route("/static/{name}", _static)]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, hosts=LOCAL_NAMES, token=token, framed=framed)],  # type: ignore[arg-type]
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
