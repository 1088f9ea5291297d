"""The tutorials run and show what they say, the reference has every public name, and the README is short.

`make docs` builds the site, and fails on a broken link.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import spotlights as sl
from spotlights import figures, results

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a tutorial in an empty directory, and gives its names."""
    monkeypatch.chdir(tmp_path)

    def run_tutorial(name: str) -> dict[str, Any]:
        return runpy.run_path(str(DOCS / "tutorials" / f"{name}.py"))

    return run_tutorial


def test_wrong_labels_are_the_first_suspects(run):
    names = run("find_wrong_labels_in_a_table")
    assert sum(names["hits"][:10]) >= 8
    assert sum(names["hits"]) >= 20
    assert Path("suspects.csv").read_text(encoding="utf-8").count("\n") == 31


def test_the_parts_of_a_prediction_add_up_and_a_mask_changes_it(run):
    names = run("why_this_prediction")
    assert names["memory"].verify(names["model"]).ok
    assert names["contributions"].exact
    assert names["initial"] + names["total"] == pytest.approx(float(names["logits"][names["answer"]]), abs=1e-4)
    assert names["contributions"].totals("label").largest() == [names["answer"]]
    assert names["contributions"].totals("step", bins=5).largest() == [0], "The early steps do most of the work."
    assert int(names["masked"](names["query"]).argmax()) != names["answer"]


def test_the_source_of_a_wrong_answer_is_found_and_masked(run):
    names = run("a_text_classifier")
    bad, good = 0, 1
    margin = float(names["logits"][bad] - names["logits"][good])
    assert names["answer"] == bad
    assert names["initial"] + names["total"] == pytest.approx(margin, abs=1e-4)
    assert names["contributions"].totals("source").largest() == ["forum"]
    assert {row["source"] for row in names["embedded"].top(3, by="example").rows()} == {"forum"}
    assert int(names["fair"](names["query"]).argmax()) == good


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_use_public_names_and_are_on_the_first_page(path: Path):
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imported = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in imported if name.startswith("spotlights")} == {"spotlights"}
    assert f"tutorials/{path.stem}\n" in (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)", page, re.M))
    errors = {name for name in sl.__all__ if name.endswith(("Error", "Warning"))}
    assert documented == set(sl.__all__) - errors - {"__version__"}
    for module in (results, figures):  # their pages take all of `__all__`
        assert f"automodule:: {module.__name__}" in (
            DOCS / "reference" / f"{module.__name__.rpartition('.')[2]}.md"
        ).read_text(encoding="utf-8")


def test_every_page_is_in_a_table_of_contents():
    entries = set(re.findall(r"^[\w/]+$", (DOCS / "index.md").read_text(encoding="utf-8"), re.M))
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages <= entries


def test_links_of_the_readme_lead_to_pages_and_headings():
    for target, heading in re.findall(r"\]\(([^)#:]+)#?([\w-]*)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        page = ROOT / target
        assert page.exists(), target
        assert not heading or heading in _headings(page), f"{target}#{heading}"


def _headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
