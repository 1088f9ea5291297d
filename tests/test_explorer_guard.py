"""Claims about who the explorer lets in: nobody else, and whatever is asked gets an answer."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from explorers import HERE, client, digits, first
from hostile_requests import target_of, torture
from spotlights import interrupts
from spotlights.explorer import connections
from spotlights.explorer.api import ADDRESSES, EFFECTS, LOOK, MASK, as_text
from spotlights.explorer.launch import Served
from spotlights.explorer.server import build_app

NO_HOSTS = "[::1]evil.example", "[::1", "[::1]:80:80", "[::1]:x", "localhost:", "localhost:123456", "127.0.0.1 ", "::1"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "192.168.0.7:8733", *NO_HOSTS])
def test_a_foreign_name_is_refused(host: str):
    answer = client(digits()).get("/api/run", headers={"host": host})
    assert answer.status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8733", "localhost:1", "[::1]:8733", "LOCALHOST"])
def test_the_machine_s_own_names_are_known(host: str):
    assert client(digits()).get("/api/status", headers={"host": host}).status_code == 200


def test_other_machines_need_the_token():
    outside = TestClient(build_app(digits(), token="secret"), base_url=HERE)
    assert outside.get("/api/run").status_code == 401
    assert outside.get("/?token=guess").status_code == 401
    assert outside.get("/api/run", headers={"authorization": "Bearer secret"}).status_code == 200
    landed = outside.get("/?token=secret")
    assert landed.status_code == 200
    assert "token" not in str(landed.url)
    assert outside.get("/api/run").status_code == 200  # the cookie


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_everything_is_read_only(method: str):
    answer = client(digits()).request(method, "/api/run", content=b"x" * 100_000)
    assert answer.status_code == 405
    assert "read-only" in answer.json()["error"]["message"]


def test_every_answer_has_the_protecting_headers_and_no_cors():
    for path in ("/", "/api/run", "/api/nothing", "/static/main.js"):
        headers = client(digits()).get(path, headers={"origin": "https://evil.example"}).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/etc/passwd"]
)
def test_no_path_reaches_the_files(path: str):
    answer = client(digits()).get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


# -- other sites ------------------------------------------------------------------------------

FOREIGN = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},  # another port of this machine
    {"sec-fetch-site": "nonsense"},
    {"origin": "https://evil.example"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": "null"},
    {"sec-fetch-site": "same-origin", "origin": "https://evil.example"},
]
OWN = [{}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin", "origin": HERE}]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_no_page_of_another_site_gets_an_answer_or_an_effect(headers: dict[str, str]):
    for path in ADDRESSES:
        method, address = "POST" if path in EFFECTS else "GET", f"/api/{path.format(id=1)}"
        answer = client(digits()).request(method, address, headers=headers)
        assert answer.status_code == 403
        assert "another site" in answer.json()["error"]["message"]
    assert client(digits()).get("/", headers=headers).status_code == 200  # a link may lead to the page


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_page_itself_and_programs_get_their_answers(headers: dict[str, str]):
    assert client(digits()).get("/api/status", headers=headers).status_code == 200
    assert client(digits()).post("/api/refresh", headers=headers).status_code == 200


def test_looking_never_opens_the_memory_again_and_refreshing_only_for_new_steps():
    opened = digits().opened
    for _ in range(12):
        assert client(digits()).get("/api/run", params={"newest": "yes"}).status_code == 400
        assert client(digits()).get("/api/refresh").status_code == 405
        assert client(digits()).post("/api/refresh").json()["steps"] == opened.memory.steps
    assert digits().opened is opened


def test_what_is_being_prepared_for_a_memory_stops_when_the_memory_is_opened_again():
    explorer = digits()
    stale = replace(explorer.opened, replaced=True)
    explorer.prepare(stale)
    assert stale.masks is None
    assert explorer.opened.masks is not None


def test_a_body_that_nobody_wants_is_refused():
    assert client(digits()).post("/api/refresh", content=b"x" * (2 << 20)).status_code == 413
    for announced in ("-1", "9" * 30, "x"):
        assert client(digits()).get("/api/status", headers={"content-length": announced}).status_code == 413


def test_a_network_that_diverged_is_still_shown():
    assert json.loads(as_text({"a": [1.0, float("nan")], "b": float("inf")})) == {"a": [1.0, None], "b": None}


# -- a real server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(digits().subject, port=0) as server:
        server._server.config.timeout_keep_alive = 1
        yield server


def sent(served: Served, data: bytes, seconds: float = 30.0) -> bytes:
    """What comes back, until the server closes the connection or nothing comes for a while."""
    with socket.create_connection(served._socket.getsockname()[:2], timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        try:
            while more := connection.recv(1 << 16):
                received += more
        except ConnectionResetError:
            pass
        except TimeoutError:
            return received + b"(still open)"
        return received


def test_half_a_request_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    whole = b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert sent(served, b"") == b""
    assert sent(served, whole[:-2]) == b""
    assert b"200 OK" in (found := sent(served, whole + whole[:20]))
    assert not found.endswith(b"(still open)")
    assert sent(served, b"POST /api/refresh HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx").endswith(b"}")


def test_a_head_that_never_ends_is_refused(served: Served):
    answer = sent(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000)
    assert answer == b"" or b" 400 " in answer


def test_one_connection_too_many_is_closed_and_the_next_one_works(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MOST", 8)
    address = served._socket.getsockname()[:2]
    held = [socket.create_connection(address, timeout=30) for _ in range(30)]
    closed = [connection for connection in held[8:] if _is_closed(connection)]
    assert len(closed) >= 20
    for connection in held:
        connection.close()
    for _ in range(50):  # until the server has noticed
        if b"200 OK" in (answer := sent(served, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")):
            break
    assert b"200 OK" in answer


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_hostile_requests_and_users_leave_the_explorer_as_it_was(served: Served, monkeypatch: pytest.MonkeyPatch):
    """The short form of `make torture-explorer`."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 2.0)
    report = torture(target_of(served), requests=200, users=3, seconds=2)
    assert report.failures == []
    assert sum(report.requests.statuses.values()) == 200
    assert report.users.statuses["user: 200"] >= 3


def test_a_scan_stops_when_nobody_waits_for_it_any_more(served: Served, monkeypatch: pytest.MonkeyPatch):
    begun, ended = threading.Event(), threading.Event()

    def endless(*_: object) -> None:
        begun.set()
        try:
            while True:
                interrupts.check()  # as between two blocks
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(served.explorer, "answer", endless)
    with socket.create_connection(served._socket.getsockname()[:2]) as connection:
        connection.sendall(f"GET /api/query?q=test:{first()} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert begun.wait(60)
    assert ended.wait(60)


def test_who_has_gone_waits_for_no_scan_and_a_pass_stops_between_two_blocks():
    explorer = digits()

    class GoneError(Exception):
        pass

    def check() -> None:
        raise GoneError

    inputs = explorer.inputs.batch([0])
    attention = explorer.opened.memory.attend(explorer.opened.model, inputs)[next(iter(explorer.opened.layers))]
    expected = attention.totals("label").values
    with interrupts.checking(check), pytest.raises(GoneError):
        attention.totals("label")
    assert torch.equal(attention.totals("label").values, expected)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with explorer.scanning:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    with interrupts.checking(check), pytest.raises(GoneError), explorer.scanning:
        pass
    done.set()
    holder.join()


def test_no_token_is_written_anywhere(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    with Served(digits().subject, host="0.0.0.0", port=0) as outside:
        assert outside.token is not None
        port = outside._socket.getsockname()[1]
        for path in (f"/?token={outside.token}", f"/api/nothing?token={outside.token}", f"/%ff?token={outside.token}"):
            request = f"GET {path} HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(request)
                assert b" 500 " not in connection.recv(1 << 16)
    written = capfd.readouterr()
    assert outside.token not in written.out + written.err + caplog.text


BAD = {
    "layer?q=test:999999999999999999999999": 400,
    "layer?q=test:12345678": 404,
    "layer?q=nonsense": 400,
    "layer": 400,
    "layer?q=test:{first}&layer=fc9": 404,
    "layer?q=test:{first}&top=NaN": 400,
    "layer?q=test:{first}&top=100000": 400,
    "layer?q=test:{first}&target=77": 400,
    "layer?q=test:{first}&measure=magic": 400,
    "layer?q=test:{first}&where=step=9-3": 400,
    "layer?q=test:{first}&per=step": 400,
    "layer?q=test:{first}&colour=red": 400,
    "layer?q=pixels:AAAA": 400,
    "layer?q=pixels:" + "A" * 20_000: 400,
    "layer?q=text:hello": 400,
    "mask?q=test:{first}&mask=label:1": 400,
    "mask?q=test:{first}&mask=label=99": 404,
    "mask?q=test:{first}&mask=step=a-b": 404,
    "mask?q=test:{first}&mask=example=" + ",".join(["1"] * 5000): 400,
    "mask?q=test:{first}&in=fc9&mask=label=1": 404,
    "examples/-1": 404,
    "examples/1e9": 400,
    "inputs?count=0": 400,
    "inputs/99999999.png": 404,
}


@pytest.mark.parametrize("address", BAD)
def test_a_bad_request_gets_a_sentence(address: str):
    answer = client(digits()).get("/api/" + address.replace("{first}", str(first())))
    assert answer.status_code == BAD[address], answer.text
    error = answer.json()["error"]
    assert error["status"] == BAD[address]
    assert error["message"].endswith((".", "}"))


BAD_WORDS = "NaN -1 1e400 ../.. \0 label=1 step=0-5 label=1;step=2-4 test:0 train:-1 9999999999999999999 layers.2 slot"
WORDS = st.one_of(
    st.text(max_size=40), st.integers().map(str), st.floats().map(str), st.sampled_from(BAD_WORDS.split())
)
NAMES = st.sampled_from([*LOOK, *MASK, "only", "label", "first", "count", "seed", "order", "x"])


@given(
    address=st.sampled_from([f"/api/{path.format(id=7)}" for path in ADDRESSES if path not in EFFECTS]),
    given=st.dictionaries(NAMES, WORDS, max_size=5),
    real=st.booleans(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_request_breaks_the_server(address: str, given: dict[str, str], real: bool):
    if real and "inputs" not in address and "examples" not in address:
        given = {"q": f"test:{first()}", **given}
    answer = client(digits()).get(address, params=given)
    assert answer.status_code in (200, 202, 400, 404, 422), answer.text
    if answer.status_code >= 400:
        assert set(json.loads(answer.text)["error"]) == {"status", "message"}
