"""The paper's statements: each is a function of results, and its verdict follows the results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from real_data import need
from spotlights.cli import app
from spotlights_paper import statements
from spotlights_paper.experiments.running import load_results, run_experiment, save_results
from spotlights_paper.statements.judging import Judged

pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mnist")
    torch.set_num_threads(1)
    return run_experiment("mnist-single", preset="quick", out=tmp_path_factory.mktemp("statements") / "r", keep=False)


def verdicts(*folders: Path) -> list[Judged]:
    return statements.judge(statements.Findings.of(folders))


def find(judged: list[Judged], words: str) -> Judged:
    return next(each for each in judged if words in each.statement.text)


def test_every_part_of_the_paper_has_statements_and_each_is_said_once():
    sections = {part for each in statements.STATEMENTS for part in each.section.split(", ")}
    assert sections == {"5.1", "5.2", "5.3", "5.4", "A", "B.1", "B.2", "B.3", "C.1", "C.2", "C.3"}
    assert len(statements.STATEMENTS) >= 40
    said = [(each.text, each.experiment, each.shown) for each in statements.STATEMENTS]
    assert len(set(said)) == len(said)


def test_a_verdict_counts_the_runs_it_held_in_and_averages_their_numbers():
    judged = Judged(replace(statements.STATEMENTS[0], numbers="{:.1f}"), [(True, (1.0,)), (False, (2.0,))])
    assert (judged.verdict, judged.ours) == ("holds in 1 of 2", "1.5")
    assert Judged(judged.statement, judged.verdicts[1:] * 2).verdict == "does not hold in any of 2"
    assert Judged(judged.statement, judged.verdicts[:1]).verdict == "holds"
    assert Judged(judged.statement, judged.verdicts[1:]).verdict == "does not hold"


def test_verdicts_follow_the_results(single: Path, tmp_path: Path):
    words = "Class 3 has the largest total score"
    before = find(verdicts(single), words)
    results = load_results(single)
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text((single / "run.json").read_text())
    case = next(case for case in results.cases if case.figure == "10a")

    def with_total(factor: float) -> None:
        layers = []
        for layer in case.layers:
            totals = layer.absolute.copy()
            totals[0, 3] = factor * totals.max()
            layers.append(replace(layer, absolute=totals))
        save_results(replace(results, cases=[replace(case, layers=layers)]), other)

    with_total(2)
    assert find(verdicts(other), words).verdict == "holds"
    with_total(0)
    after = find(verdicts(other), words)
    assert after.verdict == "does not hold"
    assert after.ours == "ranks 10, 10, 10"
    both = find(verdicts(single, other), words)
    assert (both.held, len(both.verdicts)) == (before.held, 2)


def test_a_run_is_not_asked_about_what_it_does_not_have(single: Path, tmp_path: Path):
    judged = verdicts(single)
    assert {each.statement.experiment for each in judged} == {"mnist-single"}
    assert find(judged, "The “6” is answered")
    (tmp_path / "run.json").write_text((single / "run.json").read_text())
    save_results(replace(load_results(single), cases=[]), tmp_path)
    left = verdicts(tmp_path)
    assert len(left) < len(judged)
    assert not any("“6”" in each.statement.text for each in left)


def test_reproduce_says_what_holds(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotlights_paper.experiments.running.run_plan", lambda **options: [single])
    monkeypatch.setattr("spotlights_paper.report.write_report", lambda folders, out: out / "report.html")
    done = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["statements"]
    assert len(said) == len(verdicts(single))
    assert all(0 <= each["held"] <= each["runs"] == 1 for each in said)
    table = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path)]).stdout
    assert statements.summary(verdicts(single)) in " ".join(table.split())
