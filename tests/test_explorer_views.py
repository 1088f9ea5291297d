"""The other views on the API, and pages that are saved: the library's histories, a map, one file without a server."""

import base64
import copy
import importlib.util
import json

import numpy as np
import pytest
import torch

import spotlights as sl
from explorers import client, coloured, digits, exact_run, first, get, prepared
from spotlights.explorer import jobs
from spotlights.explorer.saved import saved_page


def waited(path: str, explorer=None, **parameters):
    """The answer, once it is there."""
    while "progress" in (found := _any(path, explorer, parameters)):
        pass
    return found


def _any(path, explorer, parameters):
    answer = client(explorer or digits()).get(f"/api/{path}", params=parameters)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


@pytest.mark.parametrize("target", ["3", "3-8"])
def test_a_history_is_the_library_s(target: str):
    opened, inputs = digits().opened, digits().subject.inputs.batch([0])
    found = waited("history", q=f"test:{first()}", target=target, per="label")
    expected = opened.memory.attend(opened.model, inputs).history(int(target) if target == "3" else target)
    curve = expected.curve().values[0]
    assert found["exact"] == expected.exact
    assert found["curve"] == pytest.approx(curve[found["at"]].tolist(), abs=1e-6)
    assert [area[-1] for area in found["areas"]] == pytest.approx(expected.totals("label").values[0].tolist(), abs=1e-5)
    rows = waited("history", q=f"test:{first()}", target=target, during="5-20", top=3)
    part = expected.during(range(5, 20))
    assert [row["example"] for row in rows["top"]] == part.top(3).columns["example"][0][0]
    assert [row["example"] for row in rows["bottom"]] == part.bottom(3).columns["example"][0][0]


def test_without_a_history_the_network_is_rebuilt_as_of_some_steps(monkeypatch: pytest.MonkeyPatch):
    memory, model = exact_run()
    explorer = prepared(sl.Subject(memory, model, torch.randn(3, 5, dtype=torch.float64)))

    def none(*_, **__):
        raise sl.UnsupportedError("no history here")

    monkeypatch.setattr(sl.Spotlights, "history", none)
    found = waited("history", explorer, q="test:1", target="2")
    batch = explorer.subject.inputs.batch([1])
    with torch.no_grad():
        expected = [float(memory.as_of(step).primal(model)(batch)[0, 2]) for step in found["at"]]
    assert found["curve"] == pytest.approx(expected, abs=1e-10)
    assert (found["exact"], found["areas"]) == (False, [])
    assert "no history here" in found["note"]


def test_a_history_that_nobody_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "FORGOTTEN", -1.0)
    monkeypatch.setattr(jobs, "PATIENCE", 60.0)
    assert "Nobody waits" in get("history", code=400, q=f"test:{first()}", target="9")["error"]["message"]


def numbers(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def last_slots(examples: str, layer: str) -> list[int]:
    memory = digits().opened.memory
    ids = np.array(memory.column("example", np.arange(len(memory)), layer=layer))
    return [int(np.flatnonzero(ids == example)[-1]) for example in numbers(examples, np.int64)]


def test_the_map_has_every_example_where_its_last_key_lies_and_the_lamp_its_contribution():
    memory, layer = digits().opened.memory, "layers.1"
    found = get("map", layer=layer, per="label")
    lamp = get("lamp", q=f"test:{first()}", layer=layer, target=3)
    examples = numbers(found["examples"], np.int64)
    assert sorted(examples.tolist()) == sorted(memory.distinct("example"))
    keys = memory.keys(last_slots(found["examples"], layer), layer=layer).double()
    scaled = torch.tensor(numbers(found["places"], np.uint16).reshape(-1, 2).astype(float)) / 65535
    low, high = torch.tensor(found["low"]), torch.tensor(found["high"])
    places = low + scaled * (high - low)
    centred = keys - keys.mean(dim=0)
    variance = torch.linalg.svdvals(centred).square()
    assert float((places - places.mean(dim=0)).square().sum()) == pytest.approx(float(variance[:2].sum()), rel=0.02)
    assert found["explained"] == pytest.approx(float(variance[:2].sum() / variance.sum()), abs=0.02)
    opened = digits().opened
    totals = memory.attend(opened.model, digits().subject.inputs.batch([0]))[layer].contributions(3).totals("example")
    expected = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
    values = numbers(lamp["values"], np.float32)
    assert values.tolist() == pytest.approx([expected[int(example)] for example in examples], rel=1e-3, abs=1e-5)


def test_a_map_by_umap_puts_neighbours_together_and_the_input_between_its_nearest():
    pytest.importorskip("umap", reason="umap-learn is not installed: pip install 'spotlights[umap]'")
    asked = {"layer": "layers.0", "projection": "umap"}
    found = patient("map", **asked)
    example = int(numbers(found["examples"], np.int64)[0])
    lamp = patient("lamp", q=f"train:{example}", **asked)
    assert found["explained"] is None
    scaled = numbers(found["places"], np.uint16).reshape(-1, 2) / 65535
    places = np.array(found["low"]) + scaled * (np.array(found["high"]) - found["low"])
    assert lamp["place"] == pytest.approx(places[0].tolist(), abs=1e-2)  # its own key is the nearest
    by_two = get("map", layer="layers.0")
    keys = digits().opened.memory.keys(last_slots(found["examples"], "layers.0"), layer="layers.0").double()
    first_places = numbers(by_two["places"], np.uint16).reshape(-1, 2).astype(float)
    assert shared_neighbours(keys, places) > 2 * shared_neighbours(keys, first_places)


def shared_neighbours(keys: torch.Tensor, places: np.ndarray, count: int = 10) -> float:
    """How many of the nearest by key are the nearest on the map."""
    near = [torch.cdist(x, x).topk(count + 1, largest=False).indices for x in (keys, torch.from_numpy(places).double())]
    return sum(len({*a} & {*b}) - 1 for a, b in zip(near[0].tolist(), near[1].tolist(), strict=True)) / len(keys)


def patient(path: str, **asked) -> dict:
    """The answer, once it is prepared."""
    for _ in range(600):
        answer = client(digits()).get(f"/api/{path}", params=asked)
        if answer.status_code != 202:
            assert answer.status_code == 200, answer.text
            return answer.json()
    raise AssertionError("it never came")


def test_without_umap_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "umap" else real(name, *more))
    said = get("map", code=422, layer="layers.1", projection="umap")["error"]["message"]
    assert "pip install 'spotlights[umap]'" in said


def test_the_share_of_examples_that_make_half_of_a_sum():
    found = get("layer", q=f"test:{first()}", layer="layers.2", target=3)
    opened = digits().opened
    part = opened.memory.attend(opened.model, digits().subject.inputs.batch([0]))["layers.2"].contributions(3)
    values = part.totals("example").values[0].double()
    shares = found["shares"]
    assert shares["for"] == pytest.approx(float(values[values > 0].sum()), rel=1e-4)
    assert shares["against"] == pytest.approx(float(values[values < 0].sum()), rel=1e-4)
    side = values[values > 0] if shares["for"] >= -shares["against"] else -values[values < 0]
    ordered = side.sort(descending=True).values
    assert float(ordered[: shares["half"]].sum()) >= 0.4999 * float(ordered.sum())
    assert float(ordered[: shares["half"] - 1].sum()) <= 0.5001 * float(ordered.sum())


# -- any data ---------------------------------------------------------------------------------


def test_without_show_examples_are_rebuilt_from_the_first_layer_s_keys():
    subject = coloured()
    explorer = prepared(subject)
    row = get("layer", explorer, q="test:0", layer="1", measure="score")["top"][0]
    assert (row["shown"]["kind"], row["shown"]["height"], row["shown"]["width"]) == ("image", 8, 8)
    example = next(number for number in range(9))
    rebuilt = explorer.subject.show_example(example)
    assert torch.equal(rebuilt, subject.inputs.data[example])


def test_an_adam_memory_can_leave_out_stretches_of_steps():
    assert get("run", prepared(coloured()))["edges"][0] == 0
    assert len(get("run", prepared(coloured()))["edges"]) > 10


# -- saved pages ------------------------------------------------------------------------------


def test_a_saved_page_holds_its_answers_and_pictures_and_no_address():
    page = saved_page(digits(), {"q": f"test:{first()}"})
    assert len(page.text) < 5_000_000
    start = page.text.index('type="application/json">') + len('type="application/json">')
    data = json.loads(page.text[start : page.text.index("</script>", start)])
    asked = [json.loads(key)[0] for key in data["answers"]]
    assert asked.count("mask") >= 10
    assert f"api/inputs/{first()}.png" in data["images"]
    assert "http://" not in page.text.replace("http://www.w3.org/", "")
    assert "srcdoc=" in page._repr_html_()


def test_a_saved_page_of_a_view_or_measure_that_does_not_exist_is_refused():
    with pytest.raises(sl.SettingError, match="view="):
        saved_page(digits(), {"q": f"test:{first()}", "view": "nothing"})
    with pytest.raises(sl.SettingError, match="No measure"):
        saved_page(digits(), {"q": f"test:{first()}", "measure": "nothing"})
    assert client(digits()).get("/api/page", params={"q": f"test:{first()}", "measure": "nothing"}).status_code == 400


def test_training_examples_can_be_asked_about_where_the_first_layer_sees_the_inputs():
    explorer = prepared(coloured())
    about = get("run", explorer)
    assert about["training_queries"]
    memory, model = explorer.opened.memory, explorer.opened.model
    for example in (4, 17):
        slot = memory.first_slots("example", layer="1")[memory.distinct("example", layer="1").index(example)]
        with torch.no_grad():
            expected = model(memory.keys([slot], layer="1").reshape(1, 3, 8, 8))[0]
        found = get("query", explorer, q=f"train:{example}")
        assert found["shown"]["kind"] == "image"
        assert [each["logit"] for each in found["outputs"]] == pytest.approx(expected.tolist(), abs=1e-6)
    get("query", explorer, 404, q="train:900")


def test_where_the_first_layer_sees_something_else_examples_are_no_inputs():
    memory, model = exact_run()
    inputs = torch.randn(3, 5, dtype=torch.float64)
    assert get("run", prepared(sl.Subject(memory, model, inputs)))["training_queries"]
    scaling = copy.deepcopy(model)
    scaling.register_forward_pre_hook(lambda _, given: (2.0 * given[0],))
    assert not get("run", prepared(sl.Subject(memory, scaling, inputs)))["training_queries"]


def test_an_answer_that_was_lost_names_who_took_it_and_shows_them():
    for example in digits().subject.inputs.ids[:40]:
        lost = waited("history", q=f"test:{example}", target="3")["lost"]
        for loss in lost:
            assert [taker["value"] for taker in loss["takers"]] == sorted(taker["value"] for taker in loss["takers"])
            assert all(taker["shown"]["kind"] == "image" for taker in loss["takers"])
        if lost:
            return
    raise AssertionError("no answer was lost")


def test_a_notebook_shows_which_layers_can_be_asked():
    memory, model = exact_run()
    spot = memory.attend(model, torch.randn(3, 5, dtype=torch.float64))
    for shown, layers in ((spot, list(spot)), (spot["2"], ["2"])):
        page = shown._repr_html_()
        assert all(f">{layer}<" in page for layer in layers)
        assert f">{spot['2'].recorded.slots:,}<" in page
