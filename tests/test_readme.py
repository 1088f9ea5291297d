"""The README's session can be pasted, and prints what the README shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.S | re.M)


def words(text: str) -> list[str]:
    """Numbers depend on the machine's arithmetic in their last digits; words and their order do not."""
    return re.findall(r"[a-z]{2,}", text)


def test_the_readme_session_runs_and_prints_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session, shown = blocks("python")[0], blocks("text")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(session, "README.md", "exec"), {"__name__": "readme"})
    assert words(printed.getvalue()) == words(shown), "The session prints something else than the README shows."
    assert os.listdir(tmp_path) == ["digits.memory"]


def test_every_command_the_readme_names_exists():
    from spotlights.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    named = set(re.findall(r"^spotlights ([\w-]+)", "\n".join(blocks("sh")), re.M))
    assert named <= known, f"The README names commands that do not exist: {named - known}"
