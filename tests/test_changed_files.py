"""Files that change under a reader or a writer, forks, locks and moved directories: an error or the right answer."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spotlights as sl
from training import assert_exact, network, sgd, state, train

WIDE = 5, 300, 3
SEGMENT_BYTES = 60_000


def _record(path: Path, steps: int = 12, **options: Any) -> torch.nn.Module:
    model = network(*WIDE)
    optimizer = sgd(model)
    with sl.record(model, optimizer, path, segment_bytes=SEGMENT_BYTES, **options) as recorder:
        train(model, optimizer, steps, recorder)
    return model


def _ask(memory: sl.Memory, model: torch.nn.Module) -> torch.Tensor:
    return torch.from_numpy(memory.attend(model, torch.ones(1, 5, dtype=torch.float64))["2"].totals("label").numpy())


# -- readers ----------------------------------------------------------------------------------------------


def _shrink(path: Path) -> None:
    os.truncate(path, 4096)


def _overwrite_in_place(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def _copy_over(path: Path) -> None:
    shutil.copyfile(path.parent.parent / "initial.safetensors", path)


def _replace(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


def _read_while_changed(path: Path, change: Callable[[Path], None], asked: bool) -> str:
    model = _record(path)
    memory = sl.open(path)
    if asked:
        _ask(memory, model)
    for segment in (path / "segments").iterdir():
        change(segment)
    try:
        _ask(memory, model)
    except sl.MemoryFormatError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asked", [False, True], ids=["before the first question", "after it"])
@pytest.mark.parametrize("change", [_shrink, _overwrite_in_place, _copy_over])
def test_a_file_that_changes_under_a_reader_is_an_error_and_never_kills_the_process(tmp_path, change, asked):
    """With mapped files, the first and the third of these changes end the process by SIGBUS."""
    complaint = _read_while_changed(tmp_path / "m", change, asked)
    if change is _overwrite_in_place and not asked:
        assert "not a readable safetensors file" in complaint
    else:
        assert "segments/" in complaint


def test_a_file_that_is_replaced_under_a_reader_is_still_read_as_it_was(tmp_path):
    model = _record(tmp_path / "m")
    memory = sl.open(tmp_path / "m")
    before = _ask(memory, model)
    for segment in (tmp_path / "m" / "segments").iterdir():
        _replace(segment)
    assert torch.equal(_ask(memory, model), before)


def test_a_reader_survives_the_deletion_of_its_memory(tmp_path):
    model = _record(tmp_path / "m")
    memory = sl.open(tmp_path / "m")
    before = _ask(memory, model)
    shutil.rmtree(tmp_path / "m")
    assert torch.equal(_ask(memory, model), before)


def test_a_pipe_in_place_of_a_file_is_named_and_does_not_hang(tmp_path):
    _record(tmp_path / "m")
    for name in ("initial.safetensors", "memory.json"):
        (tmp_path / "m" / name).unlink()
        os.mkfifo(tmp_path / "m" / name)
        with pytest.raises(sl.MemoryFormatError, match=rf"{name} .*Not a regular file"):
            sl.open(tmp_path / "m")


@pytest.mark.parametrize(("step", "fold"), [(3, None), (6, None), (6, "example")])
def test_damage_is_not_given_a_new_checksum_by_resuming(tmp_path, step, fold):
    """Some steps of a segment are written again, its keys are looked up, or its sums are taken up."""
    model = network()
    optimizer = sgd(model)
    weights = []
    with sl.record(model, optimizer, tmp_path / "m", fold=fold) as recorder:
        train(model, optimizer, 6, recorder, after_step=lambda _: weights.append(state(model)))
        recorder.flush()
    segment = max((tmp_path / "m" / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    model.load_state_dict(weights[step - 1])
    with pytest.raises(sl.MemoryFormatError, match=f"{segment.name} has checksum"):
        sl.record(model, optimizer, tmp_path / "m", fold=fold, resume=True).__enter__()


# -- forks ------------------------------------------------------------------------------------------------


def _in_fork(function: Callable[[], object]) -> int:
    """Runs a function in a forked process; returns how that one ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # a child that hangs is killed
            function()
        except SystemExit as error:
            os._exit(int(error.code or 0))
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_copy_of_a_recorder_does_nothing_and_says_so_once(tmp_path):
    model = network(*WIDE)
    optimizer = sgd(model)

    def in_child() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, range(6, 9), recorder)
            recorder.flush()
            recorder.__exit__(None, None, None)
        said = [str(warning.message) for warning in caught if issubclass(warning.category, sl.SpotlightsWarning)]
        sys.exit(0 if len(said) == 1 and "was forked from" in said[0] else 3)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", segment_bytes=SEGMENT_BYTES) as recorder:
        train(model, optimizer, 6, recorder)
        recorder.flush()
        before = (tmp_path / "m" / "memory.json").read_bytes()
        assert _in_fork(in_child) == 0
        assert (tmp_path / "m" / "memory.json").read_bytes() == before
        train(model, optimizer, range(6, 12), recorder)
    assert assert_exact(tmp_path / "m", model).steps == 12


def test_a_forked_child_that_leaves_the_block_changes_nothing(tmp_path):
    """With steps that the parent has not written yet. The child unwinds the block, as `sys.exit()` in a worker does."""
    model = network(*WIDE)
    optimizer = sgd(model)

    def in_child() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder.__exit__(SystemExit, SystemExit(), None)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 6, recorder)
        recorder.flush()
        train(model, optimizer, range(6, 12), recorder)
        assert _in_fork(in_child) == 0
    assert assert_exact(tmp_path / "m", model).steps == 12


KILLED_TRAINER = """
import os, sys, time, warnings
import torch, spotlights as sl
warnings.simplefilter("ignore")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = sl.record(model, optimizer, sys.argv[1]).__enter__()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
os.wait()
"""


def test_the_forked_child_of_a_killed_trainer_keeps_no_lock(tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED_TRAINER, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    try:
        trainer.kill()
        trainer.wait()
        _record(tmp_path / "m", overwrite=True)
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.stdout.close()
    assert sl.open(tmp_path / "m").verify().ok


# -- locks and directories --------------------------------------------------------------------------------


def test_a_failed_start_keeps_no_lock(tmp_path, monkeypatch):
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(sl.StoreError, match=f"{tmp_path / 'm'} cannot be written: .*No space left"):
            _record(tmp_path / "m")
    _record(tmp_path / "m", overwrite=True)
    assert sl.open(tmp_path / "m").verify().ok


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_another_recorder(tmp_path, monkeypatch, code):
    fcntl = pytest.importorskip("fcntl")

    def flock(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    _record(tmp_path / "m")
    assert sl.open(tmp_path / "m").verify().ok


def test_a_run_whose_directory_is_moved_goes_on_there_and_leaves_the_new_one_alone(tmp_path):
    model = network(*WIDE)
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "run", dtype="float64", segment_bytes=SEGMENT_BYTES) as recorder:
        train(model, optimizer, 6, recorder)
        recorder.flush()
        (tmp_path / "run").rename(tmp_path / "old")
        other = _record(tmp_path / "run", steps=3, dtype="float64")
        train(model, optimizer, range(6, 12), recorder)
    assert assert_exact(tmp_path / "old", model).steps == 12
    assert assert_exact(tmp_path / "run", other).steps == 3


def _record_disturbed(path: Path, disturb: Callable[[Path], object]) -> None:
    model = network(*WIDE)
    optimizer = sgd(model)
    with sl.record(model, optimizer, path, segment_bytes=SEGMENT_BYTES) as recorder:
        train(model, optimizer, 6, recorder)
        recorder.flush()
        disturb(path)
        train(model, optimizer, range(6, 12), recorder)


def test_a_run_whose_directory_is_deleted_stops_and_training_goes_on(tmp_path):
    with pytest.warns(sl.RecordingStoppedWarning):
        _record_disturbed(tmp_path / "run", shutil.rmtree)
    assert not (tmp_path / "run").exists()


def test_a_manifest_that_somebody_else_replaced_is_not_overwritten(tmp_path):
    other = _record(tmp_path / "other", steps=3, dtype="float64")
    with pytest.warns(sl.RecordingStoppedWarning, match="was changed by another process"):
        _record_disturbed(tmp_path / "run", lambda path: shutil.copytree(tmp_path / "other", path, dirs_exist_ok=True))
    assert (tmp_path / "run" / "memory.json").read_bytes() == (tmp_path / "other" / "memory.json").read_bytes()
    assert sl.open(tmp_path / "other").verify(other).ok


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}], ids=str)
def test_files_of_others_are_never_deleted(tmp_path, options):
    _record(tmp_path / "m")
    (tmp_path / "m" / "segments" / "thesis.docx").write_text("thesis")
    (tmp_path / "m" / "memory.json.bak").write_text("mine")
    (tmp_path / "m" / "segments" / "000001-notes.safetensors").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "000000-rank0.safetensors").write_text("not yours")
    (tmp_path / "m" / "rank1").symlink_to(outside)
    model = network(*WIDE)
    with sl.record(model, optimizer := sgd(model), tmp_path / "m", **options) as recorder:
        train(model, optimizer, 3, recorder)
    assert sl.open(tmp_path / "m").steps == 3
    for name in ("segments/thesis.docx", "memory.json.bak", "segments/000001-notes.safetensors"):
        assert (tmp_path / "m" / name).exists()
    assert (outside / "000000-rank0.safetensors").exists()


def test_a_folder_of_links_is_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "segments").symlink_to(outside)
    with pytest.raises(sl.MemoryExistsError, match="is not a memory: it has segments"):
        _record(tmp_path / "m", overwrite=True)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("content", ["{}", '{"format": 2, "data": "my own"}', ""])
def test_a_folder_with_a_memory_json_of_somebody_else_is_not_overwritten(tmp_path, content):
    (tmp_path / "memory.json").write_text(content)
    (tmp_path / "initial.safetensors").write_text("mine")
    with pytest.raises(sl.MemoryExistsError, match="is not a memory"):
        _record(tmp_path, overwrite=True)
    assert (tmp_path / "memory.json").read_text() == content


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "link", tmp_path / ("a" * 300), tmp_path / "file" / "m"):
        with pytest.raises((sl.StoreError, sl.MemoryExistsError), match=str(place)[:80]):
            _record(place)
