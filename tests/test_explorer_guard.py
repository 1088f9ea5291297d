"""Claims about who the explorer lets in: nobody else, and whatever is asked gets an answer."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from explorers import HERE, client, digits, first
from spotlights.web.parameters import LOOK, MASK
from spotlights.web.server import ADDRESSES, build_app


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "192.168.0.7:8733"])
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
    "layer?q=test:{first}&steps=9-3": 400,
    "layer?q=test:{first}&per=step": 404,
    "layer?q=test:{first}&colour=red": 400,
    "layer?q=pixels:AAAA": 400,
    "layer?q=pixels:" + "A" * 20_000: 400,
    "layer?q=text:hello": 400,
    "mask?q=test:{first}&mask=label": 400,
    "mask?q=test:{first}&mask=label:99": 404,
    "mask?q=test:{first}&mask=steps:a-b": 400,
    "mask?q=test:{first}&mask=example:" + ",".join(["1"] * 5000): 400,
    "mask?q=test:{first}&in=fc9&mask=label:1": 404,
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


BAD_WORDS = "NaN -1 0 1e400 ../.. \0 label:1 steps:0-5 test:0 train:-1 999999999999999999999999 layers.2 slot influence"
WORDS = st.one_of(
    st.text(max_size=40), st.integers().map(str), st.floats().map(str), st.sampled_from(BAD_WORDS.split())
)
NAMES = st.sampled_from([*LOOK, *MASK, "only", "label", "first", "count", "seed", "order", "x"])


@given(
    address=st.sampled_from([path.replace("{id}", "7") for path in ADDRESSES]),
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
