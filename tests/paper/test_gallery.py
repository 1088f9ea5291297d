"""The gallery: the paper's figures and tables in its order, from finished runs."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from real_data import need
from spotlights_paper.experiments.paper import PAPER_IMAGES
from spotlights_paper.experiments.running import load_results, run_experiment, save_results
from spotlights_paper.report import write_gallery
from spotlights_paper.report.case_figures import attention_figure
from spotlights_paper.report.gallery import covers, exhibits
from spotlights_paper.report.schematic import both_forms
from spotlights_paper.statements import STATEMENTS, Findings

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mnist")
    torch.set_num_threads(1)
    folder = run_experiment("mnist-single", preset="quick", out=tmp_path_factory.mktemp("gallery") / "r", keep=False)
    results = load_results(folder)
    save_results(replace(results, cases=results.cases[:1]), folder)
    return folder


def test_the_cases_are_all_figures_from_3_to_28_but_the_schematics():
    numbers = sorted(number for image in PAPER_IMAGES.values() for number in image.figures)
    assert numbers == [*range(4, 10), *range(11, 29)]


def test_a_statement_is_shown_beside_the_figures_it_names():
    assert covers("Figures 17, 19", "Figure", [19])
    assert covers("Figures 23–25", "Figure", [24])
    assert covers("Figure 8a", "Figure", [8])
    assert covers("Tables 2 to 4", "Table", [3])
    assert not covers("Tables 2 to 4", "Figure", [3])
    assert not covers("Figure 22", "Figure", [2])
    numbers = [number for image in PAPER_IMAGES.values() for number in image.figures] + [3, 10]
    for statement in STATEMENTS:
        if statement.shown.startswith("Figure"):
            assert covers(statement.shown, "Figure", numbers)


def test_the_gallery_is_in_the_papers_order_and_on_a_page(single: Path, tmp_path: Path, quick_figures: None):
    found = exhibits(Findings.of([single]))
    titles = [each.title for each in found]
    assert titles[:4] == [
        "What does not hold, and why",
        "Figures 1 and 2: one layer, two forms",
        "Figures 3a, 4, 5, 8: a “6”",
        "Table 1: the class with the most attention",
    ]
    assert found[2].judged
    assert found[2].command == "spotlights run mnist-single --preset quick --seed 0"
    write_gallery(found, tmp_path)
    page = (tmp_path / "gallery.html").read_text(encoding="utf-8")
    assert all(title in page for title in titles)
    assert page.count("<img") == sum(len(each.pictures) for each in found)


def test_the_page_opens_with_what_does_not_hold_and_says_why():
    page = (DOCS / "paper/index.md").read_text(encoding="utf-8")
    rest = page.split("\n## ")[1:]
    assert rest[0].startswith("What does not hold, and why")
    listed = [line.strip("| ").split(" | ") for line in rest[0].splitlines() if line.startswith("| ")][2:]
    judged = {tuple(line.strip("| ").split(" | ")) for line in "\n".join(rest[1:]).splitlines() if "hold" in line}
    failing = {row for row in judged if len(row) == 4 and not holds_always(row[3])}
    assert len(listed) == len(failing) > 0
    assert {tuple(row[:4]) for row in listed} == failing
    assert all(len(row) == 5 and row[4] for row in listed)


def test_runs_of_several_days_make_one_page(single: Path, tmp_path: Path, quick_figures: None):
    script = runpy.run_path(str(DOCS / "paper_gallery.py"))
    page, verdicts = tmp_path / "index.md", tmp_path / "verdicts.json"
    told = STATEMENTS[0].text, STATEMENTS[-1].text
    earlier = {
        "mnist-single quick": {"1": {told[0]: [True, [2400]]}},
        "aesop-char paper": {"0": {told[1]: [False, [7]]}},
    }
    verdicts.write_text(json.dumps(earlier), encoding="utf-8")
    kept = "## Tables 2 to 4: passages\n\nMade by `spotlights run aesop-char --preset paper --seed 0`."
    page.write_text(
        f"# x\n\n## Figures 3a, 4, 5, 8: old\n\n`spotlights run mnist-single`\n\n{kept}\n", encoding="utf-8"
    )
    script["markdown"].__globals__.update(FOLDER=tmp_path, PAGE=page, VERDICTS=verdicts)
    written = script["markdown"]([single])
    assert kept in written
    assert "Figures 3a, 4, 5, 8: old" not in written
    assert written.index("## Figures 3a") < written.index(kept) < written.index("## Beyond the paper")
    row = next(line for line in written.splitlines() if told[0] in line)
    assert "| 1620 numbers | holds in 1 of 2 |" in row  # the mean of 2,400 and of the small network's 840
    assert set(json.loads(verdicts.read_text(encoding="utf-8"))["mnist-single quick"]) == {"0", "1"}


def test_the_verdicts_of_earlier_runs_are_about_statements_that_there_are():
    known = json.loads((DOCS / "paper/verdicts.json").read_text(encoding="utf-8"))
    texts = {(statement.experiment, preset): [] for statement in STATEMENTS for preset in statement.presets}
    for statement in STATEMENTS:
        for preset in statement.presets:
            texts[statement.experiment, preset].append(statement.text)
    for name, runs in known.items():
        assert runs
        for said in runs.values():
            assert set(said) == set(texts[tuple(name.split())])


def holds_always(verdict: str) -> bool:
    held, _, runs = verdict.removeprefix("holds in ").partition(" of ")
    return verdict == "holds" or held == runs


def test_figures_1_and_2_have_terms_that_add_up_to_the_logit(single: Path):
    results = load_results(single)
    case = results.cases[0]
    figure = both_forms(results, case, steps=10).figure
    words = [text.get_text() for text in figure.axes[0].texts]
    terms = [float(each.replace("−", "-")) for each in words if each[:1] in "+−" and "." in each]
    assert sum(terms) == pytest.approx(case.layers[-1].pushed[0].logit, abs=1e-3)
    assert sum("logit of" in each for each in words) == 2


def test_totals_of_the_input_layer_add_up_sizes(single: Path):
    results = load_results(single)
    case = results.cases[0]
    axes = attention_figure(results, case).axes
    bars = next(each for each in axes if each.get_title(loc="left") == "Figure 5: total |score|").patches
    heights = sorted(bar.get_height() for bar in bars)
    np.testing.assert_allclose(heights[-10:], sorted(case.layers[0].absolute[0]), rtol=1e-6)
    assert min(heights) >= 0
