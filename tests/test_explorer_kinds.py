"""The page in a real browser: memories, data and links of every kind, two memories side by side, counted clicks."""

import base64
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import BrowserContext, Page
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
import tables
from browsing import compared, opened, point, shown
from explorers import ROOT, coloured, digits, get, prepared
from spotlights.cli import app
from spotlights.explorer import Served

WORDS = ["the lamp is lovely", "the chair is dull", "a dull clock", "a lovely table"]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(24) % 3
    return torch.eye(16)[4 * labels].reshape(24, 4, 4) + 0.3 * torch.rand(24, 4, 4), labels


@cache
def recorded(kind: str) -> sl.Subject:
    """One small run, stored in another way; "other" has other initial weights."""
    how: dict[str, Any] = {
        "float16": {"dtype": "float16"},
        "folded": {"fold": "example"},
        "sampled": {"sample": 0.5},
    }.get(kind, {})
    torch.manual_seed(1)
    data, labels = images()
    torch.manual_seed(2 if kind == "other" else 0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    path = ROOT / f"{kind}.memory"
    with sl.record(model, optimizer, path, **how) as recorder:
        for step in range(12):
            ids = (torch.arange(8) + 8 * step) % 24
            recorder.batch(example=ids, label=labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(data[ids]), labels[ids]).backward()
            optimizer.step()
    return sl.Subject(path, model.eval(), data[:6], labels=labels[:6], show=lambda example: data[example])


@cache
def of_words() -> sl.Subject:
    """A classifier of short texts, of which the page is told how they read, and nothing of tokens."""
    words = sorted({word for text in WORDS for word in text.split()})
    rows = torch.tensor([[float(word in text.split()) for word in words] for text in WORDS])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(len(words), 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    labels = torch.tensor([1, 0, 0, 1])
    with sl.record(model, optimizer, ROOT / "words.memory") as recorder:
        for _ in range(10):
            recorder.batch(example=torch.arange(4), label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(rows), labels).backward()
            optimizer.step()
    show, names = WORDS.__getitem__, ["bad", "good"]
    return sl.Subject(ROOT / "words.memory", model, rows, labels=labels, classes=names, show=show, show_input=show)


def waterfall(page: Page, place: str = "waterfall") -> dict[str, float]:
    page.wait_for_selector(f"#{place} [data-key]")
    rows = page.locator(f"#{place} [data-key]").evaluate_all("all => all.map(e => [e.dataset.key, e.dataset.value])")
    return {key: float(value) for key, value in rows}


@pytest.mark.parametrize("kind", ["float16", "folded", "sampled"])
def test_a_memory_that_is_not_exact_says_so_and_shows_the_library_s_totals(browser: BrowserContext, kind: str):
    subject = recorded(kind)
    memory, batch = subject.open(), subject.inputs.batch([0])
    spot = memory.attend(subject.network(memory), batch)
    said = int(spot.output.argmax())
    measure = spot["3"].whole() if kind == "folded" else spot["3"].contributions(said)
    totals = measure.totals("label")
    with Served(subject, port=0) as served, opened(browser, served, "#q=test:0") as page:
        shown(page)
        drawn = waterfall(page)
        expected = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
        assert {label: drawn[f"label={label}"] for label in expected} == pytest.approx(expected, rel=1e-4)
        caution = {"float16": "approximate", "folded": "visits added up", "sampled": "estimate"}[kind]
        assert page.inner_text("#controls .caution") == caution
        assert page.locator("#mosaic .tile").count() > 0
        assert page.locator("#leave .chip[data-column]").count() == (3 if kind == "float16" else 0)
        words = page.inner_text("#mask-controls")
        assert str(subject.path) not in words
        if kind != "float16":
            assert ("This memory is folded" if kind == "folded" else "This memory is a sample") in words
        tones = page.locator("#waterfall .row:not([data-key=initial]) text:last-of-type").all_text_contents()
        assert any(tone.startswith("+") for tone in tones) == (kind != "folded")  # scores have no sign


def test_a_table_stands_under_the_row_that_is_asked_about(browser: BrowserContext):
    path, model = tables.trained()
    inputs, _ = tables.rows(12, seed=2)
    rows, _ = tables.rows(90, seed=1)
    names = ("petals", "sepals", "stem")

    def told(row: torch.Tensor) -> dict[str, float]:
        return dict(zip(names, row.tolist(), strict=True))

    subject = sl.Subject(
        path,
        model,
        inputs,
        classes=tables.CLASSES,
        show=lambda example: told(rows[example]),
        show_input=lambda place: told(inputs[place]),
    )
    with Served(subject, port=0) as served, opened(browser, served, "#q=test:0") as page:
        shown(page)
        heads = page.locator("#examples .data").first.locator("thead th").all_inner_texts()
        assert [head for head in heads if head in names] == list(names)
        asked = page.locator("#examples .asked").first.locator("td").all_inner_texts()
        assert asked[-3:] == [f"{value:.4g}" for value in inputs[0].tolist()]
        page.click("#views [data-view=audit]")
        page.wait_for_selector("#suspect")
        page.wait_for_function("() => document.querySelectorAll('.data [data-example]').length > 5")


def test_a_text_classifier_shows_its_sentences_and_marks_shared_words(browser: BrowserContext):
    with Served(of_words(), port=0) as served, opened(browser, served, "#q=test:0") as page:
        shown(page)
        assert page.inner_text("#query-text") == WORDS[0]
        assert page.inner_text("#said") == "good"
        table = page.locator(".card[data-example='3']").first
        assert table.locator("mark").all_inner_texts() == ["lovely"]


def test_two_memories_side_by_side_are_two_sums(browser: BrowserContext):
    one, other = recorded("float32"), recorded("other")
    with Served(one, other=other, port=0) as served, opened(browser, served, "#q=test:2&view=compare&target=1") as page:
        page.wait_for_selector("#twin-1 [data-key=answer]")
        for number, subject in enumerate((one, other)):
            memory = subject.open()
            spot = memory.attend(subject.network(memory), subject.inputs.batch([2]))
            drawn = waterfall(page, f"twin-{number}")
            assert drawn["answer"] == pytest.approx(float(spot.output[0, 1]), abs=1e-4)
            totals = spot["3"].contributions(1).totals("label")
            expected = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
            assert {label: drawn[f"label={label}"] for label in expected} == pytest.approx(expected, abs=1e-4)
        point(page, "#twin-0 .row", 1)


# -- links that lead nowhere ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "place", "says"),
    [
        ("q=test:99999", "#story", "No test input has the id 99999"),
        ("q=nonsense:1", "#story", "a query begins with one of"),
        ("q=test:0&layer=nothing", "#examples", 'No layer "nothing"'),
        ("q=test:0&target=99", "#examples", "the network has the outputs 0 to 2"),
        ("q=test:0&where=colour%3Dred", "#examples", "It has: step, example, label"),
        ("q=test:0&mask=colour%3Dred", "#verdict", "It has: step, example, label"),
        ("q=test:0&view=nothing", "#sentence", "The logit for"),
        ("q=test:0&by=nothing", "#examples", "give one of example, slot"),
        ("q=test:0&measure=nothing&per=nothing&open=nothing", "#sentence", "The logit for"),
    ],
)
def test_a_bad_link_says_what_is_wrong_and_leaves_nothing_waiting(kinds: Page, link: str, place: str, says: str):
    address = kinds.url.split("#")[0]
    kinds.goto("about:blank")
    kinds.goto(f"{address}#{link}")
    kinds.wait_for_function(
        "([place, says]) => document.querySelector(place)?.innerText.includes(says)", arg=[place, says]
    )
    kinds.wait_for_function("() => !document.querySelector('.busy, progress')")
    assert kinds.locator("#sentence:text-is('…')").count() == 0
    kinds.goto(f"{address}#q=test:1")  # and the page goes on
    shown(kinds)


@pytest.fixture(scope="module")
def kinds(browser: BrowserContext):
    """One tab; what is refused stands on its console."""
    with Served(recorded("float32"), port=0) as served:
        page = browser.new_page()
        page.goto(served.url)
        shown(page)
        yield page
        page.close()


# -- newcomers --------------------------------------------------------------------------------


def test_the_page_opens_with_an_answer_that_is_wrong(browser: BrowserContext):
    wrong = get("inputs", only="wrong", count=1)["inputs"]
    with Served(digits().subject, port=0) as served, opened(browser, served) as page:
        shown(page)
        assert wrong
        assert "wrong: it is" in page.inner_text("#story")


def test_three_tasks_of_a_newcomer_take_at_most_three_clicks_each(browser: BrowserContext):
    """Find why; find a wrong label and what it does; send somebody the picture. Each from the page as it opens."""
    clicks = 0

    def click(page: Page, selector: str) -> None:
        nonlocal clicks
        page.click(selector)
        clicks += 1

    with Served(digits().subject, port=0) as served, opened(browser, served) as page:
        shown(page)
        said, parts = page.inner_text("#said"), waterfall(page)
        best = max((key for key in parts if key.startswith("label=")), key=lambda key: abs(parts[key]))
        assert page.inner_text("#group-title").startswith(f"label {best.removeprefix('label=')}: ")
        assert page.locator("#mosaic .tile").count() > 10
        assert (said, clicks) == (page.inner_text("#said"), 0)

        click(page, "#views [data-view=audit]")
        page.wait_for_selector("#suspect .says")
        click(page, "#see-affected")
        page.wait_for_selector("#affected-answer")
        assert clicks == 2

        page.goto(served.url)
        shown(page)
        clicks = 0
        with page.expect_download():
            click(page, "#save")
        assert clicks == 1


# -- by keyboard ------------------------------------------------------------------------------


def test_by_keyboard_a_ring_around_the_input_chooses_points_of_the_map(browser: BrowserContext):
    with Served(recorded("float32"), port=0) as served, opened(browser, served, "#q=test:0&view=map") as page:
        page.wait_for_selector("#map-canvas[data-drawn]")
        shown(page)
        page.focus("#map-canvas")
        counts = []
        for key in ("ArrowUp", *["ArrowUp"] * 12):
            page.keyboard.press(key)
        page.wait_for_function("() => Number(document.body.dataset.chosen) > 0")
        counts.append(int(page.evaluate("document.body.dataset.chosen")))
        page.click("#mask-chosen")
        compared(page, "example=")
        assert counts[0] <= 24


def test_the_tiles_of_a_mosaic_are_one_stop_and_arrows_go_among_them(browser: BrowserContext):
    with Served(recorded("float32"), port=0) as served, opened(browser, served, "#q=test:0") as page:
        shown(page)
        tiles = page.locator("#mosaic .tile").evaluate_all("all => all.map(e => [e.dataset.example, e.tabIndex])")
        assert [place for _, place in tiles] == [0] + [-1] * (len(tiles) - 1)
        page.focus("#mosaic .tile >> nth=0")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.example") == tiles[1][0]
        page.keyboard.press("Enter")
        shown(page, f"location.hash.includes('train%3A{tiles[1][0]}')")


def test_axe_finds_nothing_serious_on_the_comparison(browser: BrowserContext):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python").Axe()
    with (
        Served(coloured(), other=coloured(), port=0) as served,
        opened(browser, served, "#q=test:1&view=compare") as page,
    ):
        page.wait_for_selector("#twin-1 [data-key=answer]")
        found = axe.run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_the_map_and_the_comparison_on_the_command_line_are_the_page_s(tmp_path, monkeypatch):
    one, other = recorded("float32"), recorded("other")
    monkeypatch.setattr("spotlights.cli.views.find_subject", lambda *_: one)
    monkeypatch.setattr("spotlights.cli.views.other_subject", lambda *_: other)
    explorer, there = prepared(one), prepared(other)
    asked: dict[str, Any] = {"q": "test:2", "layer": "3"}
    lamp = get("lamp", explorer, **asked)

    def printed(*arguments: object) -> dict:
        done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    table = tmp_path / "map.csv"
    shown_map = printed("map", one.path, 2, "--table", table, "-k", 3)
    assert shown_map["place"] == pytest.approx(lamp["place"], abs=1e-4)
    values = np.frombuffer(base64.b64decode(lamp["values"]), np.float32)
    written = np.genfromtxt(table, delimiter=",", names=True)
    assert written["value"].tolist() == pytest.approx(values.tolist(), abs=1e-5)
    places = np.frombuffer(base64.b64decode((on_page := get("map", explorer, layer="3"))["places"]), np.uint16)
    drawn = np.array(on_page["low"]) + places.reshape(-1, 2) / 65535 * np.subtract(on_page["high"], on_page["low"])
    assert written["x"].tolist() == pytest.approx(drawn[:, 0].tolist(), abs=1e-3)
    found = printed("compare", one.path, other.path, 2)
    said = get("query", explorer, q="test:2")["said"]
    for name, of in (("here", explorer), ("there", there)):
        expected = get("layer", of, **asked, target=said)
        assert found[name]["totals"] == expected["totals"]
        assert sum(row[name] for row in found["rows"][:-1]) == pytest.approx(expected["value"], abs=1e-4)
    done = CliRunner().invoke(app, ["compare", str(one.path), str(other.path), "2", "--by", "weather"])
    assert done.exit_code == 2, done.output
    assert "'weather' divides the training. There are: " in " ".join(done.output.split())
