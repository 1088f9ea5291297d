"""Claims about hostile names, texts and HTML on the explorer's page and on saved pages: nothing runs or leaves."""

from __future__ import annotations

import csv
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import BrowserContext, Page
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.explorer import Served
from spotlights.explorer.saved import saved_page

MARKUP = '"></option></b><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
NAMES = [MARKUP, "__proto__", "constructor", '=HYPERLINK("//evil.example")', "</script><script>window.pwned=1</script>"]
HTML = f"""<base href="EVIL/"><meta http-equiv="refresh" content="0;url=EVIL/refresh">
<script>parent.pwned = top.pwned = window.pwned = 1; fetch("EVIL/api")</script>
<img src="EVIL/a.png" onerror="parent.pwned = 1"><svg onload="parent.pwned = 1"></svg>
<style>@import url(EVIL/a.css); b {{ background: url(EVIL/b.png) }}</style>
<link rel="stylesheet" href="EVIL/c.css"><link rel="prefetch" href="EVIL/p"><object data="EVIL/d"></object>
<iframe src="EVIL/e"></iframe><iframe srcdoc="<script>top.pwned = 1</script>"></iframe>
<form action="EVIL/f"><input autofocus onfocus="parent.pwned = 1"></form><video src="EVIL/v" autoplay></video>
<a href="EVIL/g" target="_top">out</a><b>{MARKUP}</b>"""


@pytest.fixture(scope="module")
def evil() -> Iterator[tuple[str, list[str]]]:
    """Another site: its address, and what it was asked for."""
    asked: list[str] = []

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}", asked
        server.shutdown()


class Shown:
    """What a careless `show` returns: the words of strangers as HTML."""

    def __init__(self, evil: str) -> None:
        self._evil = evil

    def _repr_html_(self) -> str:
        return HTML.replace("EVIL", self._evil)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, evil: tuple[str, list[str]]) -> sl.Subject:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("hostile") / "run.memory"
    layers = nn.ModuleDict({f"a{MARKUP}".replace(".", ""): nn.Linear(4, 8), "b": nn.Linear(8, len(NAMES))})
    model = nn.Sequential(*layers.values())
    model._modules = dict(layers.items())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, labels = torch.randn(20, 4), torch.arange(20) % len(NAMES)
    with sl.record(model, optimizer, path) as recorder:
        for step in range(12):
            ids = torch.arange(5) + 5 * (step % 4)
            recorder.batch(example=ids, label=[NAMES[label] for label in labels[ids]], source=NAMES[step % 5])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    shown = {"show": lambda example: Shown(evil[0]), "show_input": lambda place: Shown(evil[0]) if place else MARKUP}
    return sl.Subject(path, model, inputs[:4], classes=NAMES, title=MARKUP, **shown)


@pytest.fixture
def page(browser: BrowserContext) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def assert_harmless(page: Page, evil: tuple[str, list[str]], address: str) -> None:
    page.wait_for_timeout(500)
    assert evil[1] == [], "the page has asked another site"
    assert page.url.startswith(address)
    assert page.evaluate("[window.pwned, document.querySelectorAll('img[onerror], base').length]") == [None, 0]
    assert all(evil[0] not in frame.url for frame in page.frames)


READY = {
    "": "#waterfall svg",
    "history": "#view svg",
    "map": "#map-canvas[data-drawn]",
    "audit": "#suspect",
}


@pytest.fixture(scope="module")
def served(subject: sl.Subject) -> Iterator[Served]:
    with Served(subject, port=0) as served:
        yield served


def test_nothing_hostile_runs_on_the_page(page: Page, evil: tuple[str, list[str]], served: Served):
    for view, ready in READY.items():
        page.goto(f"{served.url}#q=test%3A1&view={view}")
        page.wait_for_selector(ready)
        if view == "":
            page.wait_for_selector("#waterfall [data-key^='label=']")
            page.click("#waterfall [data-key^='label='] >> nth=0")
            page.wait_for_selector("iframe.frame")
        assert_harmless(page, evil, served.url)


def test_nothing_hostile_runs_on_a_saved_page(page: Page, evil: tuple[str, list[str]], served: Served, tmp_path: Path):
    saved = saved_page(served.explorer, {"q": "test:1", "view": "audit"})
    page.goto(f"file://{saved.save(tmp_path / 'answer.html')}")
    page.wait_for_selector("#suspect")
    assert_harmless(page, evil, "file://")
    assert page.title() == f"Spotlights: {MARKUP}"
    # Even if markup got in, the page's policy would keep an inline script or handler from running.
    page.evaluate("markup => { document.body.insertAdjacentHTML('beforeend', markup) }", MARKUP)
    page.evaluate("() => document.body.append(Object.assign(document.createElement('script'), {text: 'pwned = 1'}))")
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None


def test_decisions_that_somebody_else_wrote_do_no_harm_and_no_cell_is_a_formula(
    page: Page, evil: tuple[str, list[str]], served: Served
):
    page.goto(served.url)
    for number, kept in enumerate(
        ["null", "[1, null]", "{", '{"3": {"decision": "__proto__", "example": 3}, "4": null}']
    ):
        page.evaluate("([title, kept]) => localStorage.setItem(`spotlights-decisions:${title}`, kept)", [MARKUP, kept])
        page.goto(f"{served.url}?{number}#q=test%3A1&view=audit")
        page.wait_for_selector("#suspect")
        assert page.inner_text("#decisions h2").startswith("0 decisions")
    for _ in range(20):
        page.keyboard.press("d")
    page.wait_for_function("() => document.querySelector('#decisions h2').textContent.startsWith('20 ')")
    with page.expect_download() as download:
        page.click("#export-csv")
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert {len(row) for row in rows} == {4}
    assert not any(cell.startswith("=") for row in rows for cell in row)
    assert {row[2].removeprefix("'") for row in rows[1:]} == set(NAMES)
    with page.expect_download() as download:
        page.click("#export-json")
    assert len(json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["decisions"]) == 20
    page.evaluate("localStorage.clear()")
    assert_harmless(page, evil, served.url)
