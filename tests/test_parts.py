"""Job arrays: the merged answer of all shards is the answer."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import spotlights as sl
from spotlights.cli import app
from spotlights.query.parts import checksum_of_part
from training import examples, network, sgd, train

COUNT = 3
SUBJECT = """
import sys
sys.path.insert(0, {tests!r})
import spotlights as sl
from training import examples, network
inputs, labels = examples()
subject = sl.Subject({memory!r}, model=lambda memory: memory.primal(network()), inputs=inputs, labels=labels)
"""


def record(path: Path, make: Any = sgd, **options: Any) -> torch.nn.Module:
    model = network()
    optimizer = make(model)
    with sl.record(model, optimizer, path, segment_bytes=2000, **options) as recorder:
        train(model, optimizer, 40, recorder)
    return model


def ask(memory: sl.Memory, model: torch.nn.Module, measure: str) -> list[Any]:
    """Everything that can be asked of a measure, as one list of results."""
    spot = memory.attend(model, examples()[0][:3])
    if measure == "influence":
        values = spot.influence(target=1)
        return [values.totals("label"), values.top(5, by="example")]
    values = {"score": lambda: spot["2"], "contribution": lambda: spot["2"].contributions(target=1)}[measure]()
    per_label = values.top(4, per="label")
    return [values.totals("label"), values.top(5), values.bottom(5), values.top(5, by="example"), per_label]


def rows(results: list[Any]) -> list[Any]:
    return [list(result.rows(query)) for result in results for query in range(3)]


def everything(memory: sl.Memory, model: torch.nn.Module) -> list[Any]:
    """The answers to all questions that pass over slots."""
    answers = [rows(ask(memory, model, measure)) for measure in ("score", "contribution", "influence")]
    spot = memory.attend(model, examples()[0][:3])
    many = memory.attend(model, examples()[0].repeat(8, 1))
    masks = memory.masks(model, ["label"])
    masks.build()
    layers = list(memory.layers)
    answers += [
        list(memory.suspects(5).rows()),
        rows([spot.history(target=1).totals("label")]),
        [memory.without(label=1).weights(layer).tolist() for layer in layers],
        [spot[layer].scores().tolist() for layer in layers],
        [many[layer].totals("label", absolute=True).values.tolist() for layer in layers],
        memory.verify(model).ok,
        len(memory.where(label=1)),
    ]
    return answers


def assert_close(one: Any, other: Any) -> None:
    """Equal but for rounding: sums may be added up in another order."""
    if isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12, nan_ok=True)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_close(first, second)
    else:
        assert one == other


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("measure", ["score", "contribution", "influence"])
@pytest.mark.parametrize(("make", "options"), [(sgd, {}), (adam, {}), (sgd, {"sample": 0.7})])
def test_merged_parts_are_the_answer(tmp_path: Path, measure: str, make: Any, options: dict[str, Any]):
    model = record(tmp_path / "run", make, **options)
    memory = sl.open(tmp_path / "run")
    parts, shares = [], []
    for number in range(1, COUNT + 1):
        shard = sl.Shard(number, COUNT)
        shares.append(rows(ask(sl.open(tmp_path / "run").on(shard), model, measure)))
        parts.append(tmp_path / f"part{number}")
        shard.save(parts[-1], {"any": "thing"})
    merged = sl.Merged(parts[::-1])
    assert merged.about == {"any": "thing"}
    expected = rows(ask(memory, model, measure))
    assert_close(rows(ask(memory.on(merged), model, measure)), expected)
    assert all(share != expected for share in shares) or make is adam, "one shard has answered everything"


def test_a_softmax_is_divided_by_the_sum_over_all_shares(tmp_path: Path):
    model = record(tmp_path / "run")
    paths = []
    for number in (1, 2):
        shard = sl.Shard(number, 2)
        sl.open(tmp_path / "run").on(shard).attend(model, examples()[0][:3], kernel="softmax")["2"].top(5)
        paths.append(tmp_path / f"part{number}")
        shard.save(paths[-1])
    memory = sl.open(tmp_path / "run")
    merged, expected = (
        view.attend(model, examples()[0][:3], kernel="softmax")["2"].top(5)
        for view in (memory.on(sl.Merged(paths)), memory)
    )
    assert_close(rows([merged]), rows([expected]))


def spotlights(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "question",
    [("top", "-k", 4), ("top", "--slots", "--against"), ("totals", "--by", "step", "--bins", 5, "--measure", "score")],
)
def test_the_command_line_merges_what_it_divided(tmp_path: Path, question: tuple[object, ...]):
    memory, subject = tmp_path / "run", tmp_path / "who.py"
    record(memory)
    subject.write_text(SUBJECT.format(memory=str(memory), tests=str(Path(__file__).parent)))
    command, *settings = question
    asked = (command, memory, 3, "--subject", f"{subject}:subject", "--where", "label=0,1", *settings)
    parts = [tmp_path / f"part{number}" for number in range(1, COUNT + 1)]
    for number, part in enumerate(parts, start=1):
        done = spotlights(*asked, "--shard", f"{number}/{COUNT}", "--out", part)
        assert done.exit_code == 0, done.output
    merged = spotlights("merge", *parts, "--subject", f"{subject}:subject", "--json")
    assert merged.exit_code == 0, merged.output
    assert_close(json.loads(merged.stdout), json.loads(spotlights(*asked, "--json").stdout))
    refused = spotlights("merge", *parts)
    assert refused.exit_code == 2, "a part must not say which code is run"


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    model = record(tmp_path / "run")
    for number in (1, 2):
        shard = sl.Shard(number, 2)
        sl.open(tmp_path / "run").on(shard).attend(model, examples()[0][:3])["2"].top(5)
        shard.save(tmp_path / f"part{number}")
    return [tmp_path / "part1", tmp_path / "part2"]


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, parts: list[Path]):
    with pytest.raises(sl.SettingError, match="2 missing"):
        sl.Merged(parts[:1])
    with pytest.raises(sl.SettingError, match="given twice"):
        sl.Merged([*parts, parts[0]])
    memory = sl.open(tmp_path / "run")
    spot = memory.on(sl.Merged(parts)).attend(network(), examples()[0][:3])
    with pytest.raises(sl.SettingError, match="another question"):
        spot["2"].top(6)
    record(tmp_path / "other", adam)
    other = sl.open(tmp_path / "other").on(sl.Merged(parts)).attend(network(), examples()[0][:3])
    with pytest.raises(sl.SettingError, match="not of"):
        other["2"].top(5)
    with pytest.raises(sl.UnsupportedError, match="cannot be divided"):
        sl.Shard(1, 2).save(tmp_path / "nothing")


def test_files_of_strangers_execute_nothing_and_are_refused(tmp_path: Path, parts: list[Path]):
    executed = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (executed,)

    (tmp_path / "pickled").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "empty").write_bytes(b"")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain")
    save_file(
        {"a": torch.zeros(1)}, tmp_path / "other", metadata={"part": '{"format": "spotlights-part-1", "about": 1}'}
    )
    for name in ("pickled", "empty", "plain", "other", "absent"):
        with pytest.raises(sl.SettingError, match="is not a part"):
            sl.Merged([tmp_path / name])
    assert not executed.exists()
    tensors = load_file(parts[0])
    from safetensors import safe_open

    with safe_open(parts[0], framework="pt") as file:
        metadata = file.metadata()
    for change in ({"0/0/slots0": torch.full((3, 5), 10**9)}, {"0/0/values0": torch.zeros(3, 99)}):
        forged = {**metadata, "checksum": checksum_of_part(metadata["part"], tensors | change)}
        save_file(tensors | change, parts[0], metadata=forged)
        with pytest.raises(sl.SettingError, match="not a part"):
            sl.open(tmp_path / "run").on(sl.Merged(parts)).attend(network(), examples()[0][:3])["2"].top(5)


def test_a_part_that_was_changed_or_is_no_file_is_refused(tmp_path: Path, parts: list[Path]):
    content = bytearray(parts[0].read_bytes())
    content[-1] ^= 1
    (tmp_path / "changed").write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("changed", "does not have its checksum"),
        ("pipe", "Not a regular file"),
        ("run", "is not a part"),
    ):
        with pytest.raises(sl.SettingError, match=said):
            sl.Merged([tmp_path / name, parts[1]])


def test_a_part_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path):
    shard = sl.Shard(1, 2)
    record(tmp_path / "run")
    sl.open(tmp_path / "run").on(shard).attend(network(), examples()[0][:3])["2"].top(5)
    with pytest.raises(sl.StoreError, match="cannot be written"):
        shard.save(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize("shard", ["0/3", "4/3", "x/3", "3"])
def test_shards_that_do_not_exist_are_refused(tmp_path: Path, shard: str):
    refused = spotlights("top", tmp_path, 3, "--shard", shard, "--out", tmp_path / "part")
    assert refused.exit_code == 2
    assert "shard" in refused.output
