"""Claims about what is kept of answers, and read back: decisions, calibrations, tables, networks that were put back."""

import copy
import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from corruption import restated
from spotlights.memory.format.tensors import lay_out
from spotlights.results import TablePage, write_rows
from test_joint import Run
from test_rewinding import PLAIN, TRAININGS
from tortured import KINDS
from training import same, state

ROW: dict[str, Any] = {"example": 1, "decision": "keep", "given": None, "label": None}
LISTED = "example,decision,given,label\n"
HOSTILE: dict[str, str | bytes] = {
    "deep.json": "[" * 100_000,
    "infinite.json": json.dumps({"decisions": [{**ROW, "example": float("inf")}]}),
    "huge.json": json.dumps({"decisions": [{**ROW, "example": 2**70}]}),
    "half.json": json.dumps({"decisions": [{**ROW, "example": 1.5}]}),
    "true.json": json.dumps({"decisions": [{**ROW, "example": True}]}),
    "digits.json": '{"decisions": [{"example": ' + "1" * 5000 + "}]}",
    "wide.csv": LISTED + "1" * 200_000 + ",drop,,\n",
    "nul.csv": LISTED + "1,dr\0op,,\n",
    "digits.csv": LISTED + "1" * 5000 + ",drop,,\n",
    "latin.csv": b"\xff\xfe",
    "list.json": "[[]]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_decisions_that_are_none_are_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    content = HOSTILE[name]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(sl.SettingError, match=name):
        sl.Decisions.read(tmp_path / name)


def test_a_pipe_holds_no_decisions_and_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(sl.SettingError, match="not a file"):
        sl.Decisions.read(tmp_path / "pipe.csv")
    with pytest.raises(sl.SettingError, match="no file"):
        sl.observe(PLAIN.network(), PLAIN.loss, [0], tmp_path / "a.memory", checkpoints=[tmp_path / "pipe.csv"])


def test_a_spreadsheet_may_begin_a_file_of_decisions_with_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(LISTED + "3,drop,,\n", encoding="utf-8-sig")
    assert sl.Decisions.read(tmp_path / "a.csv").dropped == [3]


# -- calibrations -----------------------------------------------------------------------------------------


def calibrated(path: Path) -> tuple[Run, Callable[[], Any]]:
    """A run with a calibration, and its forecast."""
    run = Run(path, F.cross_entropy)
    _calibrate(run)
    return run, lambda: sl.open(path).attend(run.model, run.inputs[:2]).forecast(1, without={"label": 2}).after


def _calibrate(run: Run) -> Any:
    def retrain(examples: list[int]) -> nn.Module:
        other = copy.deepcopy(run.model)
        with torch.no_grad():
            other[2].bias += 0.01 * len(examples)
        return other

    return run.memory.calibrate(retrain, run.model, run.inputs[:3], target=1, halves=2, seeds=1)


def test_a_damaged_calibration_changes_no_forecast_unnoticed(tmp_path: Path) -> None:
    _, forecast = calibrated(tmp_path / "a.memory")
    file, right = tmp_path / "a.memory" / "calibration.json", forecast()
    whole = file.read_bytes()
    for place in range(0, len(whole), 17):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(sl.MemoryFormatError, match="calibration"):
            forecast()
    for hostile in (b"", b"[" * 100_000, b"{}", whole[:-9], restated(whole, scale="1"), restated(whole, noise=1e999)):
        file.write_bytes(hostile)
        with pytest.raises(sl.MemoryFormatError, match="calibration"):
            forecast()
    file.write_bytes(whole)
    assert torch.equal(forecast(), right)


def test_a_calibration_is_of_one_run_and_not_of_the_next_one_at_its_place(tmp_path: Path) -> None:
    run, forecast = calibrated(tmp_path / "a.memory")
    kept = (tmp_path / "a.memory" / "calibration.json").read_bytes()
    optimizer = torch.optim.SGD(run.parameters, lr=0.1)
    with sl.record(run.model, optimizer, tmp_path / "a.memory", overwrite=True) as again:
        for step in range(12):
            again.batch(example=torch.arange(6) + step, label=torch.arange(6) % 3)
            optimizer.zero_grad()
            F.cross_entropy(run.model(run.inputs[:6]), run.targets[:6]).backward()
            optimizer.step()
    assert not (tmp_path / "a.memory" / "calibration.json").exists()
    (tmp_path / "a.memory" / "calibration.json").write_bytes(kept)
    with pytest.raises(sl.UnsupportedError, match="calibrate"):
        forecast()


def test_a_calibration_of_somebody_elses_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{}")
    model = PLAIN.network()
    recorder = sl.record(model, PLAIN.make(model.parameters()), tmp_path, overwrite=True)
    with pytest.raises(sl.MemoryExistsError, match="calibration"), recorder:
        pass
    assert (tmp_path / "calibration.json").exists()


def test_hours_of_retraining_are_not_lost_where_nothing_can_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run(tmp_path / "a.memory", F.cross_entropy)
    monkeypatch.setattr(os, "replace", lambda *a, **k: _full())
    with pytest.warns(sl.SpotlightsWarning, match="scale"):
        assert _calibrate(run).seeds == 1


# -- files of answers -------------------------------------------------------------------------------------


def _need_pyarrow(name: str) -> None:
    if name.endswith(("arrow", "parquet")):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'spotlights[arrow]'")


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["write", "replace"])
@pytest.mark.parametrize("name", ["a.csv", "a.arrow", "a.parquet", "a.html"])
def test_on_a_full_disk_the_answer_of_before_stays(tmp_path: Path, monkeypatch: Any, name: str, call: str) -> None:
    _need_pyarrow(name)

    def save(rows: list[dict[str, Any]]) -> object:
        return TablePage(str(rows)).save(tmp_path / name) if name == "a.html" else write_rows(rows, tmp_path / name)

    save([{"a": 1}])
    before = (tmp_path / name).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if call == "write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may have a byte
    else:
        monkeypatch.setattr(os, call, lambda *a, **k: _full())
    try:
        with pytest.raises(sl.StoreError, match="File too large" if call == "write" else "No space left"):
            save([{"a": 2}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before


def test_an_answer_goes_through_a_link_and_into_a_device(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "a.csv").symlink_to(tmp_path / "real" / "b.csv")
    write_rows([{"a": 1}], tmp_path / "a.csv")
    assert (tmp_path / "real" / "b.csv").read_text().split() == ["a", "1"]
    assert (tmp_path / "a.csv").is_symlink()
    (tmp_path / "null.csv").symlink_to("/dev/null")
    write_rows([{"a": 1}], tmp_path / "null.csv")
    assert not Path("/dev/null").is_file()
    with pytest.raises(sl.StoreError):
        write_rows([{"a": 1}], tmp_path / "no" / "a.csv")


@pytest.mark.parametrize("suffix", ["csv", "arrow", "parquet"])
def test_any_text_and_any_number_becomes_a_table(tmp_path: Path, suffix: str) -> None:
    _need_pyarrow(suffix)
    rows = [{"=A1": "=1", "big": 2**70, "text": "\ud800", "both": "x"}, {"=A1": "+1", "big": 1, "both": 2.0}]
    write_rows(rows, tmp_path / f"a.{suffix}")
    if suffix == "csv":
        header, first, _ = (tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()
        assert header.startswith("'=A1,")
        assert first.startswith("'=1,1180591620717411303424,?,")


# -- networks that are put back ---------------------------------------------------------------------------


def test_a_checkpoint_that_is_none_leaves_the_memory_that_was_there(tmp_path: Path) -> None:
    path, model = tmp_path / "a.memory", PLAIN.network()
    sl.observe(model, PLAIN.loss, range(8), path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    torch.save({**model.state_dict(), "0.weight": 3}, tmp_path / "number.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save(model, tmp_path / "code.pt")
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 99)
    (tmp_path / "noise.pt").write_bytes(b"\x80\x02c__builtin__\neval\n" * 9)
    bad = ["number.pt", "list.pt", "code.pt", "noise.safetensors", "noise.pt", "missing.pt", "."]
    for name in bad:
        with pytest.raises(sl.SettingError):
            sl.observe(model, PLAIN.loss, range(8), path, checkpoints=[tmp_path / name], overwrite=True)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_memory_that_does_not_fit_leaves_the_network_and_the_optimizer_as_they_were(tmp_path: Path) -> None:
    training = TRAININGS["batch norm"]
    training.record(tmp_path / "a.memory")
    model = training.network()
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).running_mean = None
    optimizer = training.make(model.parameters())
    before, options = state(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(sl.MemoryFormatError, match="running_mean"):
        sl.open(tmp_path / "a.memory").rewind(model, optimizer, without="example=17")
    assert same(state(model), before)
    assert optimizer.state_dict() == options


def test_an_optimizer_state_of_one_number_is_named_before_slots_are_computed(tmp_path: Path) -> None:
    kind = KINDS["recipe of adam"]
    kind.train(tmp_path / "a.memory", stop=6)
    segment = sorted((tmp_path / "a.memory" / "segments").iterdir())[-1]
    tensors = safetensors.numpy.load(segment.read_bytes())
    state = "/recipe/optimizer/0.weight"
    tensors[f"{state}/exp_avg"] = tensors.pop(f"{state}/step")
    beginning, blocks, _ = lay_out({name: [array] for name, array in tensors.items()})
    segment.write_bytes(b"".join([beginning, *(np.ascontiguousarray(block).tobytes() for block in blocks)]))
    manifest = tmp_path / "a.memory" / "memory.json"
    manifest.write_bytes(restated(manifest.read_bytes(), manifest.parent, segment))
    with pytest.raises(sl.MemoryFormatError, match="a recipe that step"):
        len(kind.open(tmp_path / "a.memory"))
