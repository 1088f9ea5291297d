"""The report: one page that needs nothing else, with the paper's numbers beside ours."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import spotlights as sl
from real_data import need
from spotlights.cli import app
from spotlights_paper.experiments.paper import TABLE_1, TABLE_1_COLUMNS, Estimate, holds
from spotlights_paper.experiments.running import load_results, load_run, run_experiment, save_results
from spotlights_paper.report import write_report
from spotlights_paper.report.case_figures import case_figures
from spotlights_paper.report.tables import (
    accuracy_rows,
    cells_that_hold,
    groups_of,
    mask_rows,
    table_1_rows,
)
from spotlights_paper.statements import Findings

pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    need("mnist", "fashion-mnist")
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("report")
    found = {}
    for name, seed in (("mnist-single", 0), ("mnist-single", 1), ("mnist-continual", 0)):
        found[f"{name}-{seed}"] = run_experiment(
            name, preset="quick", seed=seed, out=root / f"{name}-{seed}", keep=False
        )
    continual = found["mnist-continual-0"]
    results = load_results(continual)
    save_results(replace(results, cases=results.cases[:1]), continual)  # one picture of each kind is enough
    return found


@pytest.fixture(scope="module")
def page(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, quick_figures: None) -> Path:
    out = tmp_path_factory.mktemp("page")
    done = CliRunner().invoke(app, ["report", str(runs["mnist-continual-0"]), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out / "report.html"


def test_the_page_needs_no_network_and_no_other_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') == text.count("<img")
    without_images = re.sub(r"base64,[^\"]*", "", text)
    assert "http" not in without_images.replace("<meta http-equiv=", "")
    assert "<script" not in without_images
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', without_images))


def test_the_page_opens_with_its_pictures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.index("<figure") < text.index("<table")


def test_every_figure_is_there_as_png_and_pdf_and_on_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    figures = page.parent / "figures"
    names = {path.stem for path in figures.glob("*.png")}
    assert names == {path.stem for path in figures.glob("*.pdf")}
    expected = {
        *(f"-1-{what}" for what in ("attention", "contributions")),
        *(f"-{what}" for what in ("masks", "interference", "cross-task", "over-time", "samples")),
    }
    assert names == {f"mnist-continual-quick{each}" for each in expected}
    for name in names:
        assert f'<figure id="{name}">' in text
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_says_how_it_was_made_and_what_was_found(page: Path, runs: dict[str, Path]) -> None:
    text = page.read_text(encoding="utf-8")
    run = load_run(runs["mnist-continual-0"])
    assert "spotlights run mnist-continual --preset quick --seed 0" in text
    assert "Figure" in (page.parent / "gallery.html").read_text(encoding="utf-8")
    assert f"{100 * run.accuracy['fashion-mnist']:.1f}" in text
    assert "600 mnist, 600 fashion-mnist" in text
    for setting, value in run.settings.items():
        assert f"<td>{setting}</td>" in text
        assert f"<td>{value}</td>" in text
    assert f"{max(check.relative_error for check in run.exactness.values()):.1e}" in text


def test_table_1_has_means_over_seeds_beside_the_papers(runs: dict[str, Path]) -> None:
    (group,) = groups_of(Findings.of([runs["mnist-single-1"], runs["mnist-single-0"]]))
    assert [run.seed for run in group.runs] == [0, 1]
    rows = table_1_rows(group)
    hold = 0
    for row, layer in zip(rows, ("layers.0", "layers.1", "layers.2"), strict=True):
        assert row[0] == layer
        for index, column in enumerate(TABLE_1_COLUMNS):
            cells = []
            for folder in (runs["mnist-single-0"], runs["mnist-single-1"]):
                vote = next(v for v in load_results(folder).votes if v.layer == layer)
                right, wrong = vote.right, vote.wrong
                counts = {
                    "target_given_wrong": vote.wrong_target / wrong,
                    "output_given_wrong": vote.wrong_output / wrong,
                    "target_given_right": vote.right_target / right,
                }
                cells.append(100 * counts[column])
            assert str(row[1 + 2 * index]) == f"{statistics.mean(cells):.1f} ± {statistics.stdev(cells):.1f}"
            reported = TABLE_1[layer][index]
            assert str(row[2 + 2 * index]) == f"{reported.mean:.1f} ± {reported.error:.1f}"
            hold += abs(statistics.mean(cells) - reported.mean) <= (2 * reported.error or 1.5)
    assert cells_that_hold(group) == (hold, 9)


def test_accuracies_and_masks_are_those_of_the_runs(runs: dict[str, Path]) -> None:
    folder = runs["mnist-continual-0"]
    (group,) = groups_of(Findings.of([folder]))
    rows = accuracy_rows([group])
    run, results = load_run(folder), load_results(folder)
    assert [row[3] for row in rows] == ["45", "85", "97"]
    assert str(rows[1][4]) == f"{100 * run.accuracy['fashion-mnist']:.1f}"
    assert str(rows[2][4]) == f"{100 * results.masks[0].accuracy['mnist']:.1f}"
    masks = mask_rows(group)
    assert len(masks) == 10
    assert masks[1][0] == "nothing masked, as of step 160"
    assert str(masks[1][1]) == f"{100 * run.accuracy['mnist']:.1f}"
    assert "mnist masked in layers.1 only" in [row[0] for row in masks]


def test_a_cell_holds_within_two_deviations_or_1_5_points() -> None:
    assert holds(Estimate(60.1, 4.5), 69.0)
    assert not holds(Estimate(60.1, 4.5), 69.2)
    assert holds(Estimate(75.1, 0.0), 76.5)
    assert not holds(Estimate(75.1, 0.0), 76.7)


def test_one_run_has_no_deviation() -> None:
    assert Estimate.over_seeds([0.5]).text(1, percent=True) == "50.0"
    assert Estimate.over_seeds([0.5, 0.7]).text(1, percent=True) == f"60.0 ± {statistics.stdev([50, 70]):.1f}"


def test_what_a_run_says_of_itself_is_text(runs: dict[str, Path], tmp_path: Path, quick_figures: None) -> None:
    folder = Path(shutil.copytree(runs["mnist-single-1"], tmp_path / "run"))
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run["versions"]["machine"] = "<b>mine</b>"
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    assert "&lt;b&gt;mine" in write_report([folder], tmp_path / "page").read_text(encoding="utf-8")


def test_a_report_about_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sl.MemoryFormatError, match="spotlights run"):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(sl.SettingError, match="at least one run"):
        write_report([], tmp_path / "out")


def test_tasks_that_share_a_scale_are_all_shown_whole(runs: dict[str, Path]) -> None:
    results = load_results(runs["mnist-continual-0"])
    case = results.cases[0]
    larger = np.array([1.0, 10.0])[:, None]
    layers = [
        replace(each, top=each.top * larger[..., None], absolute=each.absolute * larger) for each in case.layers[:1]
    ]
    picture = next(case_figures(results, replace(case, layers=layers), "x"))
    drawn = {axes.get_title(loc="left"): axes.get_ylim() for axes in picture.figure.axes}
    assert drawn["fashion-mnist, top 20 by class"] == drawn["Figure 21: mnist, top 20 by class"]
    assert drawn["fashion-mnist, top 20 by class"][1] >= np.nanmax(layers[0].top)
    assert drawn["Figure 22: total |score|"][1] >= layers[0].absolute.max()
