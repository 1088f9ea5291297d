"""Claims about the explorer's API: it says what the library says, and lets in nobody else."""

import base64
import csv
import io
import json
import re
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import spotlights as sl
from explorers import digits, exact_run, speller
from spotlights.web.server import ADDRESSES, build_app
from spotlights.web.subject import Drawing, own_subject

HERE = "http://127.0.0.1:8733"


def client(explorer=None, **options) -> TestClient:
    return TestClient(build_app(explorer or digits(), **options), base_url=HERE)


def get(path: str, explorer=None, code: int = 200, **parameters):
    answer = client(explorer).get(f"/api/{path}", params=parameters)
    assert answer.status_code == code, answer.text
    return answer.json()


def first() -> int:
    return digits().subject.inputs.ids[0]


def attention(layer: str):
    found = digits().opened
    return found.memory.attend(found.model, digits().subject.inputs.tensors[:1])[layer]


# -- it says what the library says ------------------------------------------------------------


def test_the_run_says_what_can_be_asked():
    about = get("run")
    assert [layer["name"] for layer in about["layers"]] == ["layers.0", "layers.1", "layers.2"]
    assert [group["name"] for group in about["groups"]["label"]] == list("0123456789")
    assert about["groups"]["label"][3]["colour"] == "#94a4a2"  # as in every other picture
    assert about["drawing"] == {"height": 8, "width": 8}
    assert [measure["name"] for measure in about["measures"]] == ["contribution", "score", "absolute"]


def test_every_layer_is_verified():
    verified = get("status")["verified"]
    assert list(verified) == ["layers.0", "layers.1", "layers.2"]
    assert all(check["ok"] and check["relative_error"] < 1e-5 for check in verified.values())


@pytest.mark.parametrize("layer", ["layers.0", "layers.2"])
def test_the_top_examples_are_the_library_s(layer: str):
    found = get("layer", q=f"test:{first()}", layer=layer, target=3, top=5)
    expected = attention(layer).contributions(3)
    assert found["exact"] == expected.exact
    assert [row["example"] for row in found["top"]] == expected.top(5, by="example").columns["example"][0][0]
    assert [row["example"] for row in found["bottom"]] == expected.bottom(5, by="example").columns["example"][0][0]
    totals = [row["total"] for row in found["totals"]["label"]]
    assert totals == pytest.approx(expected.totals("label").values[0].tolist(), rel=1e-4, abs=1e-5)


def test_slots_and_scores_are_the_library_s():
    found = get("layer", q=f"test:{first()}", layer="layers.1", measure="score", by="slot", top=7, sorted=5)
    expected = attention("layers.1")
    assert [row["slot"] for row in found["top"]] == expected.top(7).slots[0, 0].tolist()
    per_label = expected.top(5, per="label")
    assert found["sorted"]["slots"] == per_label.slots[0].tolist()
    sizes = get("layer", q=f"test:{first()}", layer="layers.1", measure="absolute")
    totals = [row["total"] for row in sizes["totals"]["label"]]
    assert totals == pytest.approx(expected.totals("label", absolute=True).values[0].tolist(), rel=1e-4)


def test_the_parts_of_the_last_layer_add_up_to_the_output():
    found = get("layer", q=f"test:{first()}", layer="layers.2")
    query = get("query", q=f"test:{first()}")
    logit = next(output["logit"] for output in query["outputs"] if output["number"] == found["target"])
    assert found["initial"] + found["total"] == pytest.approx(logit, rel=1e-4)


def test_a_stretch_of_steps_is_the_view_of_these_steps():
    found = get("layer", q=f"test:{first()}", layer="layers.2", target=1, steps="10-30")
    opened = digits().opened
    part = opened.memory.where(step=range(10, 30)).attend(opened.model, digits().subject.inputs.tensors[:1])["layers.2"]
    totals = part.contributions(1).totals("label")
    assert [row["total"] for row in found["totals"]["label"]] == pytest.approx(totals.values[0].tolist(), abs=1e-4)
    assert found["slots"] == int(totals.counts.sum())


def test_totals_over_time_add_up_to_the_total():
    over_time = get("time", q=f"test:{first()}", layer="layers.2", target=1)
    layer = get("layer", q=f"test:{first()}", layer="layers.2", target=1)
    assert sum(over_time["totals"]) == pytest.approx(layer["total"], abs=1e-4)


@pytest.mark.parametrize("mask", ["label:1,3", "steps:0-13", "label:1;steps:4-9,20-30;example:1700000"])
def test_a_masked_answer_is_the_library_s(mask: str):
    opened = digits().opened
    example = get("layer", q=f"test:{first()}")["top"][0]["example"]
    mask = mask.replace("1700000", str(example))
    found = get("mask", q=f"test:{first()}", mask=mask)
    view = opened.memory
    for part in mask.split(";"):
        column, listed = part.split(":")
        for each in listed.split(","):
            low, _, high = each.partition("-")
            view = (
                view.without(step=range(int(low), int(high)))
                if column == "steps"
                else view.without(**{column: int(each)})
            )
    expected = view.primal(opened.model)(digits().subject.inputs.tensors[:1])[0]
    assert [o["logit"] for o in found["without"]["outputs"]] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    assert found["without"]["said"] == int(expected.argmax())


def test_the_accuracy_under_a_mask_is_that_of_the_masked_network():
    opened, inputs = digits().opened, digits().subject.inputs
    found = get("accuracy", mask="label:1")
    masked = opened.memory.without(label=1).primal(opened.model)
    right = (masked(inputs.tensors).argmax(dim=1) == torch.tensor(inputs.labels)).double().mean()
    assert found["without"]["all"] == pytest.approx(float(right))
    assert found["without"]["by_label"]["1"] == 0.0


def test_masks_and_queries_at_the_same_time_do_not_see_each_other():
    inputs = digits().subject.inputs
    alone = {label: get("mask", q=f"test:{first()}", mask=f"label:{label}")["without"]["outputs"] for label in range(4)}

    def ask(number: int) -> bool:
        query = get("query", q=f"test:{inputs.ids[5 + number]}")
        expected = digits().opened.model(inputs.tensors[5 + number : 6 + number])[0].tolist()
        masked = get("mask", q=f"test:{first()}", mask=f"label:{number % 4}")["without"]["outputs"]
        return masked == alone[number % 4] and [o["logit"] for o in query["outputs"]] == pytest.approx(
            expected, abs=1e-5
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(40)))


def test_masks_that_are_not_ready_say_how_far_they_are():
    explorer = digits()
    assert explorer.opened.masks is not None
    explorer.opened.masks.progress = 0.25
    try:
        found = get("mask", code=202, q=f"test:{first()}", mask="label:1")
    finally:
        explorer.opened.masks.progress = 1.0
    assert found == {"ready": False, "progress": 0.25}


def test_inputs_can_be_filtered_sorted_and_paged():
    wrong = get("inputs", only="wrong", count=500)
    assert all(row["said"] != row["label"] for row in wrong["inputs"])
    assert wrong["matching"] + get("inputs", only="right")["matching"] == len(digits().subject.inputs)
    assert {row["label"] for row in get("inputs", label=4)["inputs"]} == {4}
    unsure = [row["share"] for row in get("inputs", order="unsure")["inputs"]]
    assert unsure == sorted(unsure)
    assert get("inputs", first=3, count=2)["inputs"][0]["id"] == digits().subject.inputs.ids[3]


def test_a_training_example_can_be_the_query():
    example = get("layer", q=f"test:{first()}")["top"][0]["example"]
    found = get("layer", q=f"train:{example}", measure="score", layer="layers.0", by="example")
    assert found["top"][0]["value"] > 0
    assert get(f"examples/{example}")["steps"] == sorted(get(f"examples/{example}")["steps"])


def test_a_drawn_image_is_prepared_like_the_test_images():
    split = digits().subject.inputs
    pixels = torch.as_tensor(split.show(0)).numpy().tobytes()
    packed = base64.urlsafe_b64encode(zlib.compress(pixels)).decode().rstrip("=")
    drawn, test = get("query", q=f"pixels:{packed}"), get("query", q=f"test:{first()}")
    assert [o["logit"] for o in drawn["outputs"]] == pytest.approx([o["logit"] for o in test["outputs"]], abs=1e-4)


def test_a_prompt_asks_about_one_of_its_tokens():
    prompt = "the wolf"
    found = get("query", speller(), q=f"text:{prompt}", at=5)
    assert found["tokens"] == list(prompt)
    opened = speller().opened
    tokens = torch.tensor([speller().subject.tokenizer.encode(prompt)])
    expected = opened.model(tokens)[0, 5].detach()
    assert found["said"] == int(expected.argmax())
    layer = get("layer", speller(), q=f"text:{prompt}", at=5, layer="head", top=3)
    part = (
        opened.memory.attend(opened.model, tokens)["head"]
        .at(5)
        .contributions(lambda output: output[:, 5, found["said"]])
    )
    assert [row["example"] for row in layer["top"]] == part.top(3, by="example").columns["example"][0][0]
    assert layer["initial"] + layer["total"] == pytest.approx(float(expected.max()), rel=1e-4)
    assert layer["top"][0]["shown"]["kind"] == "text"


def test_the_table_as_csv_has_the_rows_of_the_page():
    text = client().get("/api/table.csv", params={"q": f"test:{first()}", "top": 4}).text
    rows = list(csv.DictReader(io.StringIO(text)))
    found = get("layer", q=f"test:{first()}", top=4)
    assert [int(row["example"]) for row in rows] == [r["example"] for r in [*found["top"], *found["bottom"][::-1]]]


@pytest.mark.parametrize("query", ["test", "train", "pixels"])
def test_the_python_snippet_runs_and_prints_the_same(query: str, capsys: pytest.CaptureFixture):
    top = get("layer", q=f"test:{first()}", top=3)["top"]
    packed = base64.urlsafe_b64encode(zlib.compress(bytes(range(64)))).decode().rstrip("=")
    q = {"test": f"test:{first()}", "train": f"train:{top[0]['example']}", "pixels": f"pixels:{packed}"}[query]
    asked = {"q": q, "top": 3, "mask": "label:1;steps:0-13", "in": "layers.2"}
    code = client().get("/api/query.py", params=asked).text
    exec(compile(code, "snippet", "exec"), {})
    printed = capsys.readouterr().out
    for row in get("layer", q=q, top=3)["top"]:
        assert str(row["example"]) in printed
    masked = get("mask", q=q, mask="label:1;steps:0-13", **{"in": "layers.2"})["without"]["outputs"][0]["logit"]
    first_logit = re.search(r"-?\d+\.\d+", printed.split("logits without:")[1])
    assert first_logit is not None
    assert float(first_logit.group()) == pytest.approx(masked, abs=1e-3)


def test_a_memory_without_groups_or_views_can_be_explored():
    memory, model = exact_run()
    torch.manual_seed(0)
    explorer_of = own_subject(memory, model, torch.randn(3, 5, dtype=torch.float64))
    from explorers import prepared

    found = get("layer", prepared(explorer_of), q="test:1", measure="score")
    assert [row["rank"] for row in found["top"]][:3] == [1, 2, 3]
    assert get("query", prepared(explorer_of), q="test:1")["shown"]["kind"] == "table"


# -- and lets in nobody else ------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "192.168.0.7:8733"])
def test_a_foreign_name_is_refused(host: str):
    answer = client().get("/api/run", headers={"host": host})
    assert answer.status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8733", "localhost:1", "[::1]:8733", "LOCALHOST"])
def test_the_machine_s_own_names_are_known(host: str):
    assert client().get("/api/status", headers={"host": host}).status_code == 200


def test_other_machines_need_the_token():
    outside = client(token="secret")
    assert outside.get("/api/run").status_code == 401
    assert outside.get("/?token=guess").status_code == 401
    assert outside.get("/api/run", headers={"authorization": "Bearer secret"}).status_code == 200
    landed = outside.get("/?token=secret")
    assert landed.status_code == 200
    assert "token" not in str(landed.url)
    assert outside.get("/api/run").status_code == 200  # the cookie


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_everything_is_read_only(method: str):
    answer = client().request(method, "/api/run", content=b"x" * 100_000)
    assert answer.status_code == 405
    assert "read-only" in answer.json()["error"]["message"]


def test_every_answer_has_the_protecting_headers_and_no_cors():
    for path in ("/", "/api/run", "/api/nothing", "/static/main.js"):
        headers = client().get(path, headers={"origin": "https://evil.example"}).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/etc/passwd"]
)
def test_no_path_reaches_the_files(path: str):
    answer = client().get(path)
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
    answer = client().get("/api/" + address.replace("{first}", str(first())))
    assert answer.status_code == BAD[address], answer.text
    error = answer.json()["error"]
    assert error["status"] == BAD[address]
    assert error["message"].endswith((".", "}"))


WORDS = st.one_of(
    st.text(max_size=40),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "NaN",
            "-1",
            "0",
            "1e400",
            "../..",
            "\x00",
            "label:1",
            "steps:0-5",
            "test:0",
            "train:-1",
            "9" * 30,
            "layers.2",
            "slot",
        ]
    ),
)
NAMES = st.sampled_from(
    [
        "q",
        "at",
        "layer",
        "measure",
        "target",
        "by",
        "per",
        "steps",
        "top",
        "sorted",
        "mask",
        "in",
        "only",
        "label",
        "first",
        "count",
        "seed",
        "order",
        "x",
    ]
)


@given(
    address=st.sampled_from([path.replace("{id}", "7") for path in ADDRESSES]),
    given=st.dictionaries(NAMES, WORDS, max_size=5),
    real=st.booleans(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_request_breaks_the_server(address: str, given: dict[str, str], real: bool):
    if real and "inputs" not in address and "examples" not in address:
        given = {"q": f"test:{first()}", **given}
    answer = client().get(address, params=given)
    assert answer.status_code in (200, 202, 400, 404, 422), answer.text
    if answer.status_code >= 400:
        assert set(json.loads(answer.text)["error"]) == {"status", "message"}


# -- a memory under recording; a user's own model ---------------------------------------------


def test_a_memory_under_recording_shows_its_steps_and_then_the_newer_ones(tmp_path):
    import training
    from explorers import prepared

    model = training.network(dtype=torch.float32)
    optimizer = training.sgd(model)
    with sl.record(model, optimizer, tmp_path / "live.memory", segment_bytes=1) as recorder:
        training.train(model, optimizer, range(5), recorder)
        wait_for(lambda: sl.open(tmp_path / "live.memory").steps >= 1)
        seen = sl.open(tmp_path / "live.memory").steps
        explorer = prepared(own_subject(sl.open(tmp_path / "live.memory"), model, torch.randn(2, 5)))
        assert get("status", explorer)["recording"] is True
        assert get("run", explorer)["steps"] >= seen
        assert get("layer", explorer, q="test:0", measure="score")["slots"] > 0
        training.train(model, optimizer, range(5, 12), recorder)
    now = get("status", explorer)
    assert (now["recording"], now["steps_now"]) == (False, 12)
    assert get("run", explorer, newest="yes")["steps"] == 12


def wait_for(condition, seconds: float = 10.0) -> None:
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_explore_serves_a_user_s_own_model_in_the_background():
    import httpx2 as httpx

    memory, model = exact_run()
    drawing = Drawing(1, 5, lambda pixels: torch.from_numpy(pixels[0]).double())
    with sl.explore(
        memory, model, torch.randn(4, 5, dtype=torch.float64), drawing=drawing, port=0, open_browser=False
    ) as served:
        assert httpx.get(served.url).text.startswith("<!doctype html>")
        assert httpx.get(f"{served.url}api/run").json()["title"] == "exact.memory"
        assert "iframe" in served._repr_html_()


def test_explore_says_what_is_missing():
    memory, model = exact_run()
    with pytest.raises(sl.SettingError, match="test inputs as one tensor"):
        sl.explore(memory, model, None)
    with pytest.raises(sl.SettingError, match="trained torch module"):
        sl.explore(memory, None, torch.zeros(1, 5))
    with pytest.raises(sl.SettingError, match="4 inputs, but 1 labels"):
        sl.explore(memory, model, torch.zeros(4, 5), labels=[1])
    with pytest.raises(sl.SettingError, match="Give them in Python"):
        sl.explore(memory.path)
