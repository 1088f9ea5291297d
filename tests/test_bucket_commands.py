"""Every command takes a bucket's address where it takes a folder, and answers the same; so does the explorer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import spotlights as sl
from buckets import SECRET, new_bucket
from explorers import get, prepared
from spotlights.cli import app
from spotlights.cli.subjects import find_subject
from test_parts import SUBJECT, assert_close, record

QUESTIONS: list[tuple[str, ...]] = [
    ("info",),
    ("verify",),
    ("top", "3"),
    ("totals", "3"),
    ("history", "3"),
    ("mask", "3", "label=1"),
    ("audit",),
]


@pytest.fixture
def addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The same memory in a folder and in a bucket of an S3 server; the working directory has its subject."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))
    address = str(new_bucket("s3"))
    record(tmp_path / "run.memory")
    sl.open(tmp_path / "run.memory").copy(address)
    text = SUBJECT.format(tests=str(Path(__file__).parent), memory=str(tmp_path / "run.memory"))
    (tmp_path / "subject.py").write_text(text)
    return str(tmp_path / "run.memory"), address


def run(command: str, memory: str, *args: str) -> Any:
    subject = ["--subject", "subject.py:subject", "--json"]
    result = CliRunner().invoke(app, [command, memory, *args, *subject])
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
    return json.loads(result.stdout)


def test_commands_answer_from_a_bucket_as_from_a_folder(addresses: tuple[str, str], tmp_path: Path):
    folder, address = addresses
    for command, *args in QUESTIONS:
        found = run(command, address, *args)
        expected = run(command, folder, *args)
        for answer in (found, expected):  # where the memory is, and how large its files are
            for name in ("path", "bytes", "page"):
                answer.pop(name, None) if isinstance(answer, dict) else None
            if isinstance(answer, dict) and "asked" in answer:
                assert answer["asked"].pop("memory") in addresses
        assert_close(found, expected)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"run.memory", "subject.py", "cache", "audit"}, (
        "nothing is written to a folder named like the address"
    )


def test_the_explorer_shows_a_memory_in_a_bucket(addresses: tuple[str, str]):
    def views(memory: str) -> list[Any]:
        explorer = prepared(find_subject(Path(memory), "subject.py:subject"))
        return [get("run", explorer), get("inputs", explorer), get("layer", explorer, q="test:3", layer="2", top=5)]

    folder, address = map(views, addresses)
    assert_close(folder, address)
