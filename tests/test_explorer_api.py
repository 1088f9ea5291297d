"""Claims about the explorer's API: it says what the library says."""

import base64
import threading
import time
import zlib

import pytest
import torch

import spotlights as sl
import training
from explorers import client, digits, exact_run, first, get, prepared, reader_run, speller
from spotlights.explorer.explorer import Explorer, Turns
from spotlights.memory.format.names import MOMENTS
from spotlights_paper.subjects import subject_of


def attention(layer: str):
    found = digits().opened
    return found.memory.attend(found.model, digits().subject.inputs.batch([0]))[layer]


def test_the_run_says_what_can_be_asked():
    about = get("run")
    assert [layer["name"] for layer in about["layers"]] == ["layers.0", "layers.1", "layers.2"]
    assert [group["name"] for group in about["groups"]["label"]] == list("0123456789")
    assert about["groups"]["label"][3]["colour"] == "#94a4a2"  # as in every other picture
    assert about["drawing"] == {"height": 8, "width": 8}
    assert [measure["name"] for measure in about["measures"]] == ["contribution", "influence", "score", "absolute"]


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
    found = get("layer", q=f"test:{first()}", layer="layers.1", measure="score", by="slot", top=7)
    expected = attention("layers.1")
    assert [row["slot"] for row in found["top"]] == expected.top(7).slots[0, 0].tolist()
    sizes = get("layer", q=f"test:{first()}", layer="layers.1", measure="absolute")
    totals = [row["total"] for row in sizes["totals"]["label"]]
    assert totals == pytest.approx(expected.totals("label", absolute=True).values[0].tolist(), rel=1e-4)


@pytest.mark.parametrize("steps", [None, (10, 30)])
def test_influence_is_the_library_s_over_all_layers_and_says_that_it_is_an_estimate(steps: tuple[int, int] | None):
    opened, inputs = digits().opened, digits().subject.inputs.batch([0])
    asked = {"q": f"test:{first()}", "measure": "influence", "target": 3, "top": 5, "by": "slot"}
    found = get("layer", **asked, **({} if steps is None else {"where": "step=10-30"}))
    view = opened.memory if steps is None else opened.memory.where(step=range(*steps))
    expected = view.attend(opened.model, inputs).influence(3, rule="whitened")
    assert (found["layer"], found["by"], found["exact"]) == ("all layers", "example", False)
    assert found["caution"] == "estimate"
    assert "estimate" in found["note"]
    assert [row["example"] for row in found["top"]] == expected.top(5).columns["example"][0][0]
    assert [row["example"] for row in found["bottom"]] == expected.bottom(5).columns["example"][0][0]
    assert [row["value"] for row in found["bottom"]] == pytest.approx(
        expected.bottom(5).values[0, 0].tolist(), rel=1e-3
    )
    totals = [row["total"] for row in found["totals"]["label"]]
    assert totals == pytest.approx(expected.totals("label").values[0].tolist(), rel=1e-3, abs=1e-6)
    over_time = get("time", **asked)["totals"]
    whole = opened.memory.attend(opened.model, inputs).influence(3, rule="whitened").total()
    assert sum(over_time) == pytest.approx(float(whole), rel=1e-3)


def test_influence_that_must_be_prepared_says_how_far_it_is_and_holds_up_nobody(monkeypatch):
    fresh = Explorer(digits().subject, prepare=False)
    (fresh.opened.memory.path / MOMENTS).unlink(missing_ok=True)
    monkeypatch.setattr("spotlights.explorer.jobs.PATIENCE", 0.05)
    asked = {"q": f"test:{first()}", "measure": "influence", "target": 3, "top": 5}
    with fresh.scanning:  # somebody else's scan
        assert get("layer", fresh, code=202, **asked) == {"progress": 0.0}
        assert get("status", fresh)["steps"] == fresh.opened.memory.steps
    assert fresh.opened.influence is not None
    fresh.opened.influence.join()
    assert get("layer", fresh, **asked)["top"] == get("layer", **asked)["top"]


def test_influence_on_a_token_adds_up_all_rows_of_the_text():
    opened, prompt = speller().opened, "the wolf"
    found = get("layer", speller(), q=f"text:{prompt}", at=5, measure="influence", target=2, top=3)
    tokens = torch.tensor([speller().subject.tokenizer.encode(prompt)])
    expected = (
        opened.memory.attend(opened.model, tokens).influence(lambda output: output[:, 5, 2], rule="whitened").top(3)
    )
    assert [row["example"] for row in found["top"]] == expected.columns["example"][0][0]
    assert [row["value"] for row in found["top"]] == pytest.approx(expected.values[0, 0].tolist(), rel=1e-3)


def test_the_parts_of_the_last_layer_add_up_to_the_output():
    found = get("layer", q=f"test:{first()}", layer="layers.2")
    query = get("query", q=f"test:{first()}")
    logit = next(output["logit"] for output in query["outputs"] if output["number"] == found["target"])
    assert found["initial"] + found["total"] == pytest.approx(logit, rel=1e-4)


def test_a_stretch_of_steps_is_the_view_of_these_steps():
    found = get("layer", q=f"test:{first()}", layer="layers.2", target=1, where="step=10-30")
    opened = digits().opened
    part = opened.memory.where(step=range(10, 30)).attend(opened.model, digits().subject.inputs.batch([0]))["layers.2"]
    totals = part.contributions(1).totals("label")
    assert [row["total"] for row in found["totals"]["label"]] == pytest.approx(totals.values[0].tolist(), abs=1e-4)
    assert found["slots"] == int(totals.counts.sum())


def test_totals_over_time_add_up_to_the_total():
    over_time = get("time", q=f"test:{first()}", layer="layers.2", target=1)
    layer = get("layer", q=f"test:{first()}", layer="layers.2", target=1)
    assert sum(over_time["totals"]) == pytest.approx(layer["total"], abs=1e-4)


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


def test_the_tokens_of_a_text_add_up_to_what_the_text_adds():
    asked = {"q": "text:the wolf", "at": 5, "layer": "head"}
    layer = get("layer", speller(), **asked, top=4)
    ids = [row["example"] for row in layer["top"]]
    found = get("tokens", speller(), **asked, examples=",".join(map(str, ids)))
    for row in layer["top"]:
        text = found["examples"][str(row["example"])]
        assert "".join(text["tokens"]) == row["shown"]["text"]
        assert sum(value or 0.0 for value in text["values"]) == pytest.approx(row["value"], rel=1e-4, abs=1e-6)
    through = get("layer", speller(), **{**asked, "layer": "embed"})
    opened, tokens = speller().opened, torch.tensor([speller().subject.tokenizer.encode("the wolf")])
    part = opened.memory.attend(opened.model, tokens)["embed"]
    whole = part.contributions(lambda output: output[:, 5, through["target"]])
    assert found["input"]["layer"] == "embed"
    assert sum(found["input"]["values"]) == pytest.approx(float(whole.total()), rel=1e-4)
    assert get("tokens", speller(), **asked, measure="score")["input"] is None
    assert get("tokens", q=f"test:{first()}") == {"input": None, "examples": {}}
    assert "100 at most" in get("tokens", speller(), 400, **asked, examples="1," * 101)["error"]["message"]


def test_the_tokens_of_a_passage_have_the_scores_of_their_places():
    explorer = prepared_reader()
    asked = {"q": "text:the wolf and", "at": 7, "measure": "score"}
    layer = get("layer", explorer, **asked, top=3)
    row = layer["top"][0]
    text = get("tokens", explorer, **asked, examples=row["example"])["examples"][str(row["example"])]
    assert text["values"][text["mark"]] == pytest.approx(row["value"])
    assert text["tokens"][text["mark"]] == row["shown"]["text"][row["shown"]["start"] : row["shown"]["end"]]
    assert len(text["values"]) == len(text["tokens"]) > 1


def prepared_reader() -> Explorer:
    return Explorer(subject_of(reader_run()), prepare=False)


def test_a_memory_without_groups_or_views_can_be_explored():
    memory, model = exact_run()
    torch.manual_seed(0)
    explorer_of = sl.Subject(memory, model, torch.randn(3, 5, dtype=torch.float64))
    found = get("layer", prepared(explorer_of), q="test:1", measure="score")
    assert [row["rank"] for row in found["top"]][:3] == [1, 2, 3]
    assert get("query", prepared(explorer_of), q="test:1")["shown"]["kind"] == "table"


def test_a_thread_that_was_born_during_a_scan_scans_with_all_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    turns, seen = Turns(), []
    torch.set_num_threads(1)  # as a scan does meanwhile

    def ask() -> None:
        seen.append(torch.get_num_threads())
        with turns:
            seen.append(torch.get_num_threads())

    try:
        born = threading.Thread(target=ask)
        born.start()
        born.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


# -- a memory under recording; a user's own model ---------------------------------------------


def test_a_memory_under_recording_shows_its_steps_and_then_the_newer_ones(tmp_path):
    model = training.network(dtype=torch.float32)
    optimizer = training.sgd(model)
    with sl.record(model, optimizer, tmp_path / "live.memory", segment_bytes=1) as recorder:
        training.train(model, optimizer, range(5), recorder)
        wait_for(lambda: sl.open(tmp_path / "live.memory").steps >= 1)
        seen = sl.open(tmp_path / "live.memory").steps
        explorer = prepared(sl.Subject(tmp_path / "live.memory", model, torch.randn(2, 5)))
        assert get("status", explorer)["recording"] is True
        assert get("run", explorer)["steps"] >= seen
        assert get("layer", explorer, q="test:0", measure="score")["slots"] > 0
        training.train(model, optimizer, range(5, 12), recorder)
    now = get("status", explorer)
    assert (now["recording"], now["steps_now"], now["outdated"], now["verified"]) == (False, 12, True, None)
    assert client(explorer).post("/api/refresh").json()["steps"] == 12


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_explore_serves_a_user_s_own_model_in_the_background():
    import httpx2 as httpx

    memory, model = exact_run()
    drawing = sl.Drawing(1, 5, lambda pixels: torch.from_numpy(pixels[0]).double())
    subject = sl.Subject(memory, model, torch.randn(4, 5, dtype=torch.float64), drawing=drawing)
    with subject.explore(port=0, open_browser=False) as served:
        assert httpx.get(served.url).text.startswith("<!doctype html>")
        assert httpx.get(f"{served.url}api/run").json()["title"] == "exact.memory"
        assert "iframe" in served._repr_html_()


def test_explore_says_what_is_missing():
    memory, model = exact_run()
    with pytest.raises(sl.SettingError, match="inputs= are the test inputs"):
        sl.Subject(memory, model, None).explore()
    with pytest.raises(sl.SettingError, match="no network"):
        sl.Subject(memory, None, torch.zeros(1, 5)).explore()
    with pytest.raises(sl.SettingError, match="4 inputs, but 1 labels"):
        sl.Subject(memory, model, torch.zeros(4, 5), labels=[1]).explore()
    with pytest.raises(sl.SettingError, match="inputs= are the test inputs"):
        sl.Subject(memory.path).explore()
