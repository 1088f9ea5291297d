"""One file over http(s), with a progress bar and little patience.

A closed network often drops packets instead of refusing them. Resolving a name and trying its
addresses one after the other can then take minutes, which no socket timeout covers; hence the
thread, which is left behind when its time is up.
"""

import queue
import threading
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

CONNECT_SECONDS = 5
STALL_SECONDS = 15


def download(url: str, *, limit: int) -> bytes:
    """The body at `url`. Raises OSError, with a reason to show, for whatever goes wrong."""
    try:
        with _connect(url) as response:
            return _read(response, url, limit)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise OSError(f"no connection ({error.reason})") from error
    except HTTPException as error:
        raise OSError(f"the connection broke ({error!r})") from error


def _connect(url: str) -> HTTPResponse:
    answers: queue.Queue[HTTPResponse | Exception] = queue.Queue()
    given_up = threading.Event()

    def ask() -> None:
        try:
            answer = urllib.request.urlopen(url, timeout=STALL_SECONDS)
        except Exception as error:
            answers.put(error)
        else:
            answers.put(answer)
            if given_up.is_set():
                answer.close()

    threading.Thread(target=ask, daemon=True, name=f"connect to {urlsplit(url).netloc}").start()
    try:
        answer = answers.get(timeout=CONNECT_SECONDS)
    except queue.Empty:
        given_up.set()
        raise OSError(f"no answer within {CONNECT_SECONDS} seconds") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _read(response: HTTPResponse, url: str, limit: int) -> bytes:
    body = bytearray()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(url.rsplit("/", 1)[-1], total=response.length)
        while chunk := response.read(1 << 16):
            body += chunk
            progress.update(task, completed=len(body))
            if len(body) > limit:
                raise OSError(f"more than {limit} bytes came, which this file cannot have")
    return bytes(body)
