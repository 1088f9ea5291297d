"""Claims about somebody else's run or memory: its texts stay texts, and no path in it is used."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
from explorers import reader_run
from spotlights.cli import app
from spotlights.results import build

SCRIPT = 'x"><script>alert(1)</script>'
UNTOUCHED = "<script", "<img src=x", "javascript:"


@pytest.fixture
def stolen(tmp_path: Path) -> Path:
    """A copy of a language run's folder, to write into."""
    folder = tmp_path / "runs" / "stolen"
    shutil.copytree(reader_run(), folder, ignore=shutil.ignore_patterns("*.memory"))
    return folder


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def report(folder: Path, out: Path):
    return CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "x/../../../pwned/y"},
        {"preset": SCRIPT},
        {"preset": ["quick"]},
        {"preset": ""},
        {"preset": ".."},
        {"preset": "a\\..\\b"},
        {"preset": "quick\0"},
        {"seed": "../../../pwned/y"},
        {"seed": True},
        {"experiment": "../../x"},
        {"unit": {"a": 1}},
    ],
    ids=str,
)
def test_a_name_in_a_run_that_is_no_name_is_refused(stolen: Path, tmp_path: Path, changes: dict[str, object]):
    before = set(tmp_path.rglob("*"))
    change(stolen / "run.json", **changes)
    done = report(stolen, tmp_path / "rep")
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden": 10**6}, "shapes"),
        ({"hidden": 10**9}, "not the network"),
        ({"hidden": "64"}, "not of type int"),
        ({"hidden": -1}, "not the network"),
        ({"text": "PIPE"}, "not a file"),
        ({"text": "/dev/zero"}, "not a file"),
    ],
    ids=str,
)
def test_sizes_and_texts_that_a_run_claims_are_checked_before_they_are_used(
    tmp_path: Path, changes: dict[str, object], sentence: str
):
    folder = tmp_path / "stolen"
    shutil.copytree(reader_run(), folder)
    os.mkfifo(tmp_path / "pipe")
    changes = {name: str(tmp_path / "pipe") if value == "PIPE" else value for name, value in changes.items()}
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    change(folder / "run.json", settings={**run["settings"], **changes})
    done = CliRunner().invoke(app, ["passages", str(folder), "--prompt", "the"])
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())


def strings_replaced(plain: object, text: str) -> object:
    """The same data with every string replaced."""
    if isinstance(plain, dict):
        return {key: strings_replaced(value, text) for key, value in plain.items()}
    if isinstance(plain, list):
        return [strings_replaced(value, text) for value in plain]
    return text if isinstance(plain, str) else plain


def test_no_text_of_a_run_becomes_markup_in_its_report(stolen: Path, tmp_path: Path):
    run = json.loads((stolen / "run.json").read_text(encoding="utf-8"))
    run["versions"] = {SCRIPT: SCRIPT}
    run["settings"] = {**run["settings"], SCRIPT: "<img src=x onerror=alert(1)>"}
    run["surprise"] = {**run["surprise"], SCRIPT: 1.0}
    change(stolen / "run.json", **run)
    results = json.loads((stolen / "results.json").read_text(encoding="utf-8"))
    hit = {"token": 0, "position": 1, "score": 1.0, "visits": 1, "first_step": 0, "last_step": 1}
    passage = {"start": 0, "stop": 2, "score": 1.0, "hits": [hit], "text": ["a", "b"]}
    ours = {
        "layer": "l",
        "kernel": "k",
        "prompt": ["a"],
        "tokens": [0],
        "passages": [passage],
        "spaced": True,
        "note": "",
    }
    results["tables"] = [
        {
            "number": 1,
            "query": "",
            "source": "",
            "position": 1,
            "papers": [{"position": 1, "text": "a", "ranks": []}],
            "ours": [ours],
        }
    ]
    (stolen / "results.json").write_text(json.dumps(strings_replaced(results, SCRIPT)), encoding="utf-8")
    done = report(stolen, tmp_path / "rep")
    assert done.exit_code == 0, done.output
    assert_harmless(tmp_path / "rep" / "report.html")
    assert (tmp_path / "rep" / "report.html").read_text(encoding="utf-8").count("&lt;script") > 9


def assert_harmless(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert all(bad not in text for bad in UNTOUCHED)
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "script-src" not in policy[1]
    assert text.index("Content-Security-Policy") < text.index("<title")


def test_the_report_of_a_run_forbids_scripts(stolen: Path, tmp_path: Path):
    assert report(stolen, tmp_path / "rep").exit_code == 0
    assert_harmless(tmp_path / "rep" / "report.html")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory whose layer, columns and values are what an attacker would call them."""
    path = tmp_path_factory.mktemp("hostile") / "run.memory"
    model = nn.Sequential(nn.Linear(4, 3))
    model._modules = {SCRIPT.replace(".", ""): model._modules["0"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, path) as recorder:
        for step in range(4):
            words = [SCRIPT, "[/x]", "=1+1", "\x1b]0;title\x07", "$\\frac"]
            labels = torch.arange(5) % 3
            recorder.batch(example=torch.arange(5), label=labels, word=words)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))), labels).backward()
            optimizer.step()
    return path


def test_no_text_of_a_memory_becomes_markup_in_its_audit(hostile: Path, tmp_path: Path):
    done = CliRunner().invoke(app, ["audit", str(hostile), "--out", str(tmp_path / "audit")])
    assert done.exit_code == 0, done.output
    assert_harmless(tmp_path / "audit" / "audit.html")
    assert "\x1b" not in done.output
    table = (tmp_path / "audit" / "audit.csv").read_text(encoding="utf-8")
    assert "'=1+1" in table


@pytest.mark.filterwarnings("ignore:Glyph")
def test_no_text_of_a_memory_steers_the_terminal_or_breaks_a_table(hostile: Path):
    for command in ("info", "verify"):
        done = CliRunner().invoke(app, [command, str(hostile)])
        assert "\x1b" not in done.output
        assert "Traceback" not in done.output
    memory = sl.open(hostile)
    spot = memory.attend(_same(memory), torch.randn(1, 4))
    totals = next(iter(spot.values())).totals("word")
    assert "[/x]" in str(totals)
    assert "\x1b" not in str(totals)
    assert "[red]" in str(build("[red]", ["[/a]"], [["[/b]"]], "[/c]").title)
    totals.plot().savefig("/dev/null", format="png")  # no formula


def _same(memory: sl.Memory) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model._modules = {next(iter(memory.layers)): model._modules["0"]}
    return model
