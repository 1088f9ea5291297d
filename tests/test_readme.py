"""The README's session can be pasted, and prints what the README shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"
NUMBER = r"-?\d+\.\d+"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def session(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """What each block of the session prints, and the names that it leaves."""
    names, printed = {"__name__": "readme"}, []
    with contextlib.chdir(folder):
        for number, block in enumerate(blocks("python")):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block, f"README.md, block {number + 1}", "exec"), names)
            printed.append(output.getvalue())
    assert os.listdir(folder) == ["digits.memory"]
    return printed, names


def test_the_session_prints_what_the_readme_shows(session):
    for printed, shown in zip(session[0], blocks("text"), strict=True):
        assert re.sub(NUMBER, "#", printed).split() == re.sub(NUMBER, "#", shown).split()
        # The last digits depend on the machine's arithmetic.
        assert _numbers(printed) == pytest.approx(_numbers(shown), rel=1e-2)


def test_the_printed_parts_add_up_to_the_printed_logit(session):
    for text in (session[0][0], blocks("text")[0]):
        logit, initial, learned, total = _numbers(text)[:4]
        assert total == pytest.approx(logit, abs=2e-4)
        assert initial + learned == pytest.approx(total, abs=2e-4)


def test_the_prose_says_what_happened(session):
    names = session[1]
    answered, shown = names["answer"], int(names["labels"][1500])
    assert (answered, shown) == (3, 1)
    top = {row["example"] for row in names["parts"].top(3, by="example").rows()}
    assert {12, 2} <= top
    assert {int(names["labels"][example]) for example in (12, 2)} == {3}  # shifted by one: they show a 2


@pytest.mark.usefixtures("session")
def test_sizes_are_those_of_the_session(folder: Path):
    in_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    visits = 500 * 32
    row = next(line for line in README.read_text(encoding="utf-8").splitlines() if "the network above" in line)
    per_visit, megabytes = (float(number) for number in re.findall(r"\| (\d+)", row))
    assert in_bytes / visits == pytest.approx(per_visit, rel=0.02)
    assert in_bytes / 1e6 == pytest.approx(megabytes, rel=0.05)


def test_every_command_the_readme_names_exists():
    from spotlights.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    named = set(re.findall(r"^spotlights ([\w-]+)", "\n".join(blocks("sh")), re.M))
    assert named <= known, f"The README names commands that do not exist: {named - known}"


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(NUMBER, text)]


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) < 700
