"""The explorer under attack and under load: hostile requests, then users for some minutes, with its memory measured.

    python tests/hostile_requests.py --requests 10000 --users 8 --minutes 10

The server is another process on this machine's loopback, with a small network: one of texts for a fifth of the
requests, then one of images for the rest and for the users, each beside the other one. The program ends by itself. It
fails when an answer is 5xx, takes more than a minute or differs from an earlier one, or when the memory grows by 10 %.
"""

# ruff: noqa: SIM905 (lists of words)

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from spotlights.explorer import api
from spotlights.explorer.server import COMPARED

HANG = 60.0
"""Seconds without an answer."""
KEPT = 16 << 20
"""Bytes of answers that the tortured server keeps: few, so that its memory is soon as large as it gets."""
GROWTH = 1.10


# -- the server -------------------------------------------------------------------------------


def serve(name: str) -> None:
    """Serves a small network, beside another one to compare it with, until the standard input is closed."""
    from explorers import digits, speller
    from spotlights.explorer.explorer import Kept
    from spotlights.explorer.launch import Served

    first, second = (digits(), speller()) if name == "digits" else (speller(), digits())
    with Served(first.subject, other=second.subject, port=0) as served:
        for explorer in (served.explorer, served.explorer.other):
            explorer.opened.kept = Kept(KEPT)
        print(json.dumps(asdict(target_of(served))), flush=True)
        sys.stdin.read()


@dataclass
class Target:
    """The server of the torture."""

    pid: int
    port: int
    inputs: list[int]
    layers: list[str]
    examples: list[int]

    def bytes_used(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def target_of(served: Any) -> Target:
    explorer = served.explorer
    examples = explorer.opened.memory.distinct("example")[:300]
    port = served._socket.getsockname()[1]
    return Target(os.getpid(), port, list(explorer.inputs.ids), list(explorer.opened.layers), examples)


@contextmanager
def target(name: str) -> Iterator[Target]:
    command = [sys.executable, __file__, "--serve", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Target(**json.loads(process.stdout.readline()))
            assert process.poll() is None, "the server has died"
        finally:
            process.stdin.close()
            process.wait(600)  # a map by UMAP is finished first


@dataclass
class Outcome:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, status: int | str, began: float, what: str, expected: tuple[int | str, ...] = ()) -> None:
        took = time.monotonic() - began
        with self.lock:
            self.statuses[f"{kind}: {status}"] += 1
            self.slowest = max(self.slowest, took)
            wrong = (isinstance(status, int) and status >= 500) or status == "hang" or took > HANG
            if wrong or (expected and status not in expected):
                self.failures.append(f"{kind}: {status} after {took:.1f} s: {what[:200]!r}")


# -- hostile requests -------------------------------------------------------------------------

WORDS = (
    "NaN -1 1e400 ../.. \0 %00 label=1 step=0-5 label=1;step=2-4 test:0 train:-1 9999999999999999999 layers.2 slot "
    "<script> ${7*7} {{7*7}} ';-- 0x10 ٣ \u202e \ud7ff \U0010ffff a\r\nX:y true None [] {} * pixels:AAAA text:a"
).split(" ")
PATHS = (
    "/../../etc/passwd /static/../server.py /static/%2e%2e%2fserver.py /static/..%5c..%5cx //evil.example/ /api /api/ "
    "/%00 /%ff%fe /api/inputs/../run /api/examples/1e9 /api/inputs/-1.png /favicon.ico /static/nothing.js /;a=b "
    "http://evil.example/api/run /api/run/ /API/RUN /api%2frun * /.git/config /static/ /static/nothing.js"
).split(" ")
ADDRESSES = {f"/api/{path.format(id=7)}": names for path, (_, names) in api.ADDRESSES.items()}
ADDRESSES["/api/page"] = (*api.LOOK, "view", "per", "mask", "projection")
ADDRESSES |= {f"/other/api/{path}": ADDRESSES[f"/api/{path}"] for path in COMPARED}
"""Whatever the explorer answers at, and the parameters that it takes there."""
SENSIBLE = {
    "measure": "contribution influence score absolute",
    "by": "example slot",
    "projection": "pca umap",
    "view": "history map audit compare",
    "per": "label source step",
    "during": "0-9 3-4 9-2",
    "where": "label=1 step=0-5 example=1,2",
    "mask": "label=1 step=2-4 label=1;step=0-9",
    "target": "1 3-0 loss",
    "examples": "0,1,2 3 -1 1,1,1",
    "top": "1 100 500",
}
"""What the server may understand, so that the rest of a request is looked at."""
SITES = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:1"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Referer": "https://evil.example/"},
)
HOSTS = (
    "evil.example [::1]evil.example 127.0.0.1.evil.example [ ]:80 localhost@evil 127.1 0 a:b:c localhost:999999".split()
)
GARBAGE = (
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\nHost: localhost\n\n",
    b"GET\0/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n",
    b"POST /api/refresh HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /api/refresh HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n",
    b"POST /api/refresh HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\xff" * 300,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
)
METHODS = "PUT DELETE PATCH OPTIONS TRACE CONNECT HEAD FOO POST".split()


class Attack:
    """Random requests, the same for the same seed."""

    def __init__(self, target: Target, outcome: Outcome, seed: int) -> None:
        self._target, self._outcome, self._random = target, outcome, random.Random(seed)
        self._held: list[socket.socket] = []

    def run(self, requests: int) -> None:
        kinds = [
            self.parameters,
            self.foreign,
            self.hosts,
            self.paths,
            self.methods,
            self.garbage,
            self.half,
            self.left,
        ]
        weights = [30, 25, 8, 12, 8, 8, 5, 4]
        for kind in self._random.choices(kinds, weights, k=requests):
            kind()
        for held in self._held:
            self.cut_off(held)

    def word(self) -> str:
        draw = self._random
        letters = [
            chr(draw.choice((draw.randrange(1, 127), draw.randrange(0xD7FF)))) for _ in range(draw.randrange(30))
        ]
        huge = draw.choice('1a=,;\\"') * draw.choice((100, 3_000, 20_000))
        number = str(draw.choice((1, -1)) * draw.getrandbits(draw.choice((4, 31, 63, 64, 200))))
        return draw.choices([draw.choice(WORDS), "".join(letters), number, huge], [6, 2, 4, 1])[0]

    def question(self) -> tuple[str, str]:
        """An address, and the address with parameters: mostly of those that it takes, and often about a real input."""
        draw = self._random
        address = draw.choice(list(ADDRESSES))
        names = ADDRESSES[address]
        given = {name: self.value(name) for name in draw.sample(names, draw.randrange(min(4, len(names)) + 1))}
        if draw.random() < 0.1:
            given[self.word()] = self.word()
        if "q" in names and draw.random() < 0.7:
            given["q"] = f"test:{draw.choice(self._target.inputs)}"
        return address, f"{address}?{urlencode(given, quote_via=quote)}"

    def value(self, name: str) -> str:
        """Of a parameter: sometimes one that makes sense."""
        sensible = [*SENSIBLE.get(name, "").split(), *(self._target.layers if name == "layer" else [])]
        return self._random.choice(sensible) if sensible and self._random.random() < 0.6 else self.word()

    def parameters(self) -> None:
        """Malformed and huge values, on all addresses."""
        self.ask("parameters", "GET", self.question()[1], {})

    def foreign(self) -> None:
        """Another site's page, on what costs and on what has effects."""
        address, question = self.question()
        method, headers = "POST" if address.removeprefix("/api/") in api.EFFECTS else "GET", self._random.choice(SITES)
        self.ask("another site", method, question, headers, expected=(403, 400))

    def hosts(self) -> None:
        """Names that are not the server's."""
        self.ask("host", "GET", "/api/run", {"Host": self._random.choice(HOSTS)}, expected=(421, 400))

    def paths(self) -> None:
        path = self._random.choice(PATHS) if self._random.random() < 0.7 else "/" + quote(self.word())[:60_000]
        self.ask("path", "GET", path, {})

    def methods(self) -> None:
        address = self._random.choice(["/", "/api/run", "/api/refresh", "/static/main.js", "/api/layer"])
        body = b"x" * self._random.choice((0, 10, 100_000, 2 << 20))
        self.ask("method", self._random.choice(METHODS), address, {}, body)

    def garbage(self) -> None:
        """What is no HTTP."""
        data = self._random.choice(GARBAGE)
        began = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", self._target.port), timeout=HANG) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1 << 16)
                status: int | str = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else "closed"
        except TimeoutError:
            status = "hang"
        except OSError:
            status = "closed"
        self._outcome.note("no HTTP", status, began, repr(data[:80]))

    def half(self) -> None:
        """Half a head, left open; the server has to cut it off."""
        connection = socket.create_connection(("127.0.0.1", self._target.port), timeout=HANG)
        whole = b"GET /api/status HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\r\n"
        with suppress(OSError):
            connection.sendall(whole[: self._random.randrange(len(whole) - 1)])
        self._held.append(connection)
        if len(self._held) > 100:
            self.cut_off(self._held.pop(0))

    def cut_off(self, connection: socket.socket) -> None:
        connection.settimeout(HANG)
        try:
            status: int | str = "cut off" if connection.recv(1) == b"" else "answered"
        except TimeoutError:
            status = "hang"
        except OSError:
            status = "cut off"
        connection.close()
        self._outcome.note("half a head", status, time.monotonic(), "half a head", expected=("cut off",))

    def left(self) -> None:
        """A costly question of somebody who leaves at once."""
        question = f"/api/layer?q=test:{self._random.choice(self._target.inputs)}&measure=influence"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._target.port)) as connection:
            connection.sendall(f"GET {question} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self._outcome.note("left", "left", time.monotonic(), question)

    def ask(
        self,
        kind: str,
        method: str,
        address: str,
        headers: dict[str, str],
        body: bytes | None = None,
        expected: tuple[int | str, ...] = (),
    ) -> None:
        began, status = time.monotonic(), "closed"
        connection = http.client.HTTPConnection("127.0.0.1", self._target.port, timeout=HANG)
        try:
            connection.putrequest(method, address.encode("ascii", "replace").decode(), skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            if body:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            status = answer.status
            answer.read()
        except TimeoutError:
            status = "hang"
        except (http.client.HTTPException, ValueError):
            status = "not sent"  # Python's own client refused
        except OSError:
            pass
        finally:
            connection.close()
        self._outcome.note(
            kind, status, began, f"{method} {address}", (*expected, "not sent", "closed") if expected else ()
        )


# -- users ------------------------------------------------------------------------------------


class User:
    """Somebody at the page: looks at inputs, layers and masks, draws on what the page asks for, sometimes leaves."""

    def __init__(self, target: Target, outcome: Outcome, seed: int) -> None:
        self._target, self._outcome, self._random = target, outcome, random.Random(seed)
        self._connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=HANG)
        self._seen: dict[str, bytes] = {}

    def stay(self, until: float) -> None:
        while time.monotonic() < until:
            address = self.address()
            self.ask(address, leave=self._random.random() < 0.02)
            time.sleep(self._random.uniform(0, 0.2))
        self._connection.close()

    def address(self) -> str:
        draw = self._random
        query = {"q": f"test:{draw.choice(self._target.inputs)}"}
        look = {
            **query,
            "layer": draw.choice(self._target.layers),
            "measure": draw.choice(["contribution", "score", "absolute", "influence"]),
            "by": draw.choice(["example", "slot"]),
            "where": draw.choice(["", "", f"label={draw.randrange(10)}", f"step=0-{draw.randrange(20, 90)}"]),
        }
        mask = {"mask": f"label={draw.randrange(10)}"}
        choices = [
            ("layer", look, 8),
            ("time", look, 3),
            ("query", query, 4),
            ("mask", {**query, **mask}, 4),
            ("accuracy", mask, 1),
            ("inputs", {"only": draw.choice(["all", "wrong"]), "first": str(draw.randrange(200))}, 3),
            (f"examples/{draw.choice(self._target.examples)}", {}, 2),
            (f"inputs/{draw.choice(self._target.inputs)}.png", {}, 4),
            ("audit", {"top": str(draw.choice((24, 100)))}, 1),
            ("tokens", look, 1),
            ("history", query, 1),
            ("map", {"layer": look["layer"]}, 1),
            ("lamp", look, 1),
            ("page", {**query, "view": draw.choice(["", "map", "audit"])}, 1),
            ("status", {}, 4),
            ("run", {}, 1),
        ]
        path, given, _ = draw.choices(choices, [weight for *_, weight in choices])[0]
        return f"/api/{path}?{urlencode(given)}"

    def ask(self, address: str, *, leave: bool) -> None:
        began, status = time.monotonic(), "closed"
        try:
            self._connection.request("GET", address, headers={"Sec-Fetch-Site": "same-origin"})
            if leave:
                self._connection.close()
                status = "left"
            else:
                answer = self._connection.getresponse()
                body, status = answer.read(), answer.status
                steady = status == 200 and "/api/layer" in address and self._seen.setdefault(address, body) != body
                if steady:
                    status = "another answer than before"
                if len(self._seen) > 500:
                    self._seen.clear()
        except TimeoutError:
            status = "hang"
            self._connection.close()
        except (OSError, http.client.HTTPException):
            self._connection.close()
        self._outcome.note("user", status, began, address, (200, 202, "left", "closed"))


# -- all of it --------------------------------------------------------------------------------


@dataclass
class Report:
    """What was run, and what came of it."""

    requests: Outcome
    users: Outcome
    bytes_used: dict[str, tuple[float, float]]
    """In each part: the median when it had warmed up and at its end."""

    @property
    def failures(self) -> list[str]:
        grown = [
            f"{part}: memory {before / 1e6:.0f} → {after / 1e6:.0f} MB"
            for part, (before, after) in self.bytes_used.items()
            if after > GROWTH * before
        ]
        return [*self.requests.failures, *self.users.failures, *grown]

    def __str__(self) -> str:
        lines = []
        for name, outcome in (("hostile requests", self.requests), ("users", self.users)):
            before, after = self.bytes_used[name]
            count, slowest = sum(outcome.statuses.values()), outcome.slowest
            lines.append(
                f"{name}: {count:,}; slowest {slowest:.1f} s; memory {before / 1e6:.0f} → {after / 1e6:.0f} MB"
            )
            lines += [f"  {kind}: {times:,}" for kind, times in sorted(outcome.statuses.items())]
        return "\n".join([*lines, f"failures: {len(self.failures)}", *self.failures[:20]])


def torture(server: Target, *, requests: int, users: int, seconds: float, seed: int = 0) -> Report:
    """Some hostile requests, then some users for some time."""
    hostile, friendly = Outcome(), Outcome()
    User(server, Outcome(), seed).stay(time.monotonic() + min(seconds, 20))  # warms up
    attack = Attack(server, hostile, seed)
    used = {"hostile requests": _measured(server, lambda: attack.run(requests))}
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=User(server, friendly, seed + n).stay, args=(until,)) for n in range(users)]

    def stay() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    used["users"] = _measured(server, stay)
    return Report(hostile, friendly, used)


def _measured(server: Target, work: Callable[[], None]) -> tuple[float, float]:
    """The server's memory in the second and in the last tenth of some work."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            samples.append(server.bytes_used())

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        work()
    finally:
        done.set()
        sampling.join()
    samples.append(server.bytes_used())
    tenth = max(1, len(samples) // 10)
    return statistics.median(samples[tenth : 2 * tenth] or samples), statistics.median(samples[-tenth:])


def _load_all(server: Target) -> None:
    """What is loaded when it is first asked for is there before memory is measured: umap takes 140 MB."""
    for layer in server.layers:
        for projection in ("pca", "umap"):
            address, status = f"/api/map?layer={layer}&projection={projection}", 202
            while status == 202:
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                connection.request("GET", address)
                status = connection.getresponse().status
                connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    failed = False
    for name, share, users, minutes in (("texts", 0.2, 0, 0), ("digits", 0.8, given.users, given.minutes)):
        with target(name) as server:
            requests = int(share * given.requests)
            _load_all(server)
            report = torture(server, requests=requests, users=users, seconds=60 * minutes, seed=given.seed)
        print(f"{name}: {report}", flush=True)
        failed |= bool(report.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
