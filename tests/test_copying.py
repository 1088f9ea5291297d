"""A copy of a memory is the same memory, in a directory or in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import spotlights as sl
from buckets import new_bucket
from spotlights.cli import app
from training import assert_exact, examples, network, sgd, train


def record(path: Path, **options: object) -> object:
    model = network()
    optimizer = sgd(model, momentum=0.9)
    with sl.record(model, optimizer, path, segment_bytes=3000, **options) as recorder:  # type: ignore[arg-type]
        train(model, optimizer, 20, recorder)
    return model


def copied(*arguments: object):
    return CliRunner().invoke(app, ["copy", *map(str, arguments)])


def test_a_copy_verifies_and_is_not_made_twice(tmp_path: Path):
    model = record(tmp_path / "a", dtype="float64")
    assert copied(tmp_path / "a", tmp_path / "b").exit_code == 0
    assert_exact(tmp_path / "b", model)
    refused = copied(tmp_path / "a", tmp_path / "b")
    assert refused.exit_code == 2
    assert "already holds a memory" in " ".join(refused.output.split())
    assert copied(tmp_path / "a", tmp_path / "b", "--overwrite").exit_code == 0
    with pytest.raises(sl.SettingError, match="whole memory"):
        sl.open(tmp_path / "a").where(label=1).copy(tmp_path / "c")


def test_a_memory_goes_to_a_bucket_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))
    address = str(new_bucket("s3"))
    model = record(tmp_path / "a", dtype="float64")
    assert copied(tmp_path / "a", address).exit_code == 0
    assert copied(address, tmp_path / "b").exit_code == 0
    assert (tmp_path / "a" / "memory.json").read_bytes() == (tmp_path / "b" / "memory.json").read_bytes()
    assert_exact(tmp_path / "b", model)
    info = CliRunner().invoke(app, ["info", address])
    assert info.exit_code == 0, info.output


def test_a_folded_memory_is_copied_though_it_cannot_be_verified(tmp_path: Path):
    model = record(tmp_path / "a", fold="example")
    assert copied(tmp_path / "a", tmp_path / "b").exit_code == 0
    tops = [sl.open(tmp_path / name).attend(model, examples()[0])["2"].top(5) for name in "ab"]
    assert list(tops[0].rows(0)) == list(tops[1].rows(0))


def test_a_damaged_memory_is_not_copied(tmp_path: Path):
    record(tmp_path / "a")
    segment = next((tmp_path / "a" / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    with pytest.raises(sl.MemoryFormatError, match="checksum"):
        sl.open(tmp_path / "a").copy(tmp_path / "b")
    with pytest.raises(sl.MemoryFormatError, match="not a memory"):
        sl.open(tmp_path / "b")


def test_a_memory_is_never_copied_onto_itself(tmp_path: Path):
    model = record(tmp_path / "a", dtype="float64")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for place in (tmp_path / "a", tmp_path / "link", f"{tmp_path}/b/../a"):
        with pytest.raises(sl.SettingError, match="is the memory itself"):
            sl.open(tmp_path / "a").copy(place, overwrite=True)
    assert_exact(tmp_path / "a", model)


def test_a_damaged_memory_replaces_no_whole_one(tmp_path: Path):
    model = record(tmp_path / "a", dtype="float64")
    sl.open(tmp_path / "a").copy(tmp_path / "backup")
    segment = max((tmp_path / "a" / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    with pytest.raises(sl.MemoryFormatError, match=segment.name):
        sl.open(tmp_path / "a").copy(tmp_path / "backup", overwrite=True)
    assert_exact(tmp_path / "backup", model)
