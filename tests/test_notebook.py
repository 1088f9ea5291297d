"""Notebooks: answers as tables with pictures, and the explorer as a widget that needs no port."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import spotlights as sl
from explorers import coloured, digits, exact_run, first
from spotlights.explorer.explorer import Explorer
from spotlights.results import Printable, build


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
    found = widget.reply_to(explorer, {"id": "a", "path": "query", "parameters": f"q=test%3A{first()}"})
    assert (found["id"], found["status"]) == ("a", 200)
    (address,) = found["images"]
    assert address == found["answer"]["shown"]["image"]
    assert found["images"][address].startswith("data:image/png;base64,")
    example = explorer.opened.memory.distinct("example")[0]
    assert widget.reply_to(explorer, {"path": f"examples/{example}"})["answer"]["example"] == example
    for path, status in (("nothing", 404), ("query", 400), ("examples/x", 400), ("refresh/../run", 404)):
        assert widget.reply_to(explorer, {"id": 1, "path": path})["status"] == status


def test_the_kernel_answers_about_a_network_that_diverged():
    """A notebook's messages are JSON, which has no NaN."""
    widget = pytest.importorskip("spotlights.explorer.widget")
    subject = copy.copy(coloured())
    subject.target = lambda output: output * torch.tensor([1.0, float("nan"), float("inf")])
    found = widget.reply_to(Explorer(subject, prepare=False), {"path": "query", "parameters": "q=test%3A0"})
    outputs = json.loads(json.dumps(found, allow_nan=False))["answer"]["outputs"]
    assert [output["logit"] for output in outputs][1:] == [None, None]


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
