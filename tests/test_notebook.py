"""Notebooks: answers as tables with pictures, and the explorer as a widget that needs no port."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import spotlights as sl
from explorers import coloured, digits, exact_run, first
from spotlights.explorer.explorer import Explorer
from spotlights.results import Printable, build

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def answers() -> dict[str, Any]:
    memory, model = exact_run()
    spot = memory.attend(model, torch.ones(1, 5, dtype=torch.float64))
    contributions = spot[next(reversed(memory.layers))].contributions(target=1)
    return {
        "top": contributions.top(3),
        "totals": contributions.totals("label"),
        "suspects": memory.suspects(4),
        "history": spot.history(target=1),
        "memory": memory,
        "info": memory.info,
    }


@pytest.mark.parametrize("name", ["top", "totals", "suspects", "history", "memory", "info"])
def test_a_notebook_shows_answers_as_tables(name: str):
    shown = answers()[name]._repr_html_()
    assert "<table" in shown
    assert shown.count("<tr>") > 1


def test_a_table_has_a_bar_for_each_value_and_lets_no_name_in():
    top = answers()["top"]
    assert top._repr_html_().count('class="bar"') == 3

    class Named(Printable):
        def table(self):
            return build("<b>", ["<script>"], [["<i>x</i>"]], "<u>")

    shown = Named()._repr_html_()
    assert not any(tag in shown for tag in ("<b>", "<script>", "<i>", "<u>"))


def test_a_subject_shows_the_examples_of_an_answer_and_a_file_holds_them(tmp_path: Path):
    explorer = digits()
    top = explorer.opened.memory.suspects(3)
    page = explorer.subject.pictured(top)
    assert page._repr_html_().count("data:image/png;base64,") == 3
    assert page.save(tmp_path / "suspects.html").read_text().startswith("<!doctype html>")
    assert "<table" in top.save_html(tmp_path / "plain.html").read_text()
    with pytest.raises(sl.SpotlightsError, match="show="):
        coloured().pictured(top)


def test_the_kernel_answers_the_widget_s_page_with_pictures():
    widget = pytest.importorskip("spotlights.explorer.widget")
    explorer = digits()
    found = widget.replied(explorer, {"id": "a", "path": "query", "parameters": f"q=test%3A{first()}"})
    assert (found["id"], found["status"]) == ("a", 200)
    (address,) = found["images"]
    assert address == found["answer"]["shown"]["image"]
    assert found["images"][address].startswith("data:image/png;base64,")
    example = explorer.opened.memory.distinct("example")[0]
    assert widget.replied(explorer, {"path": f"examples/{example}"})["answer"]["example"] == example
    for path in ("nothing", "query", "examples/x", "refresh/../run"):
        assert widget.replied(explorer, {"id": 1, "path": path})["status"] == 400


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_widget_s_page_works_without_a_server():
    """A page of a notebook's kind: it loads the widget's module, and hands messages on to the kernel's side."""
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    from playwright.sync_api import sync_playwright

    from spotlights.explorer.widget import replied

    subject = digits().subject
    widget = subject.widget(first(), height=700)
    explorer = Explorer(subject)
    module = (files("spotlights.explorer") / "static" / "widget.js").read_text()
    host = """async ([module, page]) => {
        const { default: widget } = await import(`data:text/javascript,${encodeURIComponent(module)}`);
        const heard = [];
        const tell = async (asked) => JSON.parse(await kernel(JSON.stringify(asked)));
        const send = async (asked) => { const answer = await tell(asked); heard.forEach((hear) => hear(answer)); };
        const get = (name) => ({ page, height: 700 })[name];
        widget.render({ model: { get, send, on: (_, hear) => heard.push(hear), off() {} }, el: document.body });
    }"""
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.expose_function("kernel", lambda asked: json.dumps(replied(explorer, json.loads(asked)), default=str))
        page.evaluate(host, [module, widget.page])
        frame = page.frame_locator("iframe")
        frame.locator("#mosaic .tile").first.wait_for()
        frame.locator("#waterfall [data-key='label=4']").click()
        frame.locator("#group-title >> text=label 4").wait_for()
        frame.locator("#inputs .thumb").nth(1).click()
        frame.locator(f"#which >> text=test input {subject.inputs.ids[1]}").wait_for()
        browser.close()
    assert wrong == []


def test_a_notebook_runs_with_tables_and_the_widget():
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    here = str(Path(__file__).parent)
    cells = [
        f"import sys; sys.path.insert(0, {here!r})\nfrom explorers import digits\nexplorer = digits()",
        "explorer.opened.memory.suspects(3)",
        "explorer.subject.pictured(explorer.opened.memory.suspects(2))",
        "explorer.subject.widget()",
        "explorer.subject.page(explorer.subject.inputs.ids[0])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    data = [[output.data for output in cell.outputs if "data" in output] for cell in notebook.cells]
    assert "<table" in data[1][0]["text/html"]
    assert data[2][0]["text/html"].count("data:image/png") == 2
    assert "application/vnd.jupyter.widget-view+json" in data[3][0]
    assert "srcdoc=" in data[4][0]["text/html"]
