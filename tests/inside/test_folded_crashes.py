"""Folded memories through kills, full disks and resumed runs: a snapshot is there whole, and goes with a checkpoint."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import spotlights as sl
from spotlights.memory import folded_writer
from spotlights.memory.format.manifest import Manifest, parse_manifest
from training import examples, kill_at_call, network, processes, same, sgd, state, train

STEPS, FLUSH = 30, 6
"""A checkpoint, with a snapshot that goes with it, at every sixth step."""


def _run(
    start: int, end: int, path: Path | None, *, flush: int | None = FLUSH, **options: Any
) -> tuple[Any, list[dict]]:
    """The one run of these tests: unrecorded up to `start`, then folded; with its weights after each step."""
    model = network()
    optimizer = sgd(model, momentum=0.9)
    weights = [state(model)]
    train(model, optimizer, start, after_step=lambda step: weights.append(state(model)))
    if path is None:
        return model, weights
    options = {"dtype": "float64", "segment_bytes": 1000, "fold": "example", "resume": True, **options}
    with sl.record(model, optimizer, path, **options) as recorder:
        assert recorder.step == start, f"resumed at step {recorder.step}, but the model is at {start}"

        def after(step: int) -> None:
            weights.append(state(model))
            if flush is not None and (step + 1) % flush == 0:
                recorder.flush()

        train(model, optimizer, range(start, end), recorder, after_step=after)
    return model, weights


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> sl.Memory:
    """The same run with every visit."""
    path = tmp_path_factory.mktemp("full") / "m"
    _run(0, STEPS, path, fold=None)
    return sl.open(path)


def _assert_sums_as_of(path: Path, steps: int, full: sl.Memory) -> None:
    memory = sl.open(path)
    assert memory.steps == steps
    model, inputs = network(), examples()[0][:5]
    for layer, attention in memory.attend(model, inputs).items():
        got = attention.totals("example")
        wanted = full.where(step=range(steps)).attend(model, inputs)[layer].totals("example")
        seen = wanted.counts > 0
        assert got.groups == [group for group, n in zip(wanted.groups, wanted.counts.tolist(), strict=True) if n]
        assert torch.equal(got.counts, wanted.counts[seen]), "visits were lost, or counted twice"
        torch.testing.assert_close(got.values, wanted.values[:, seen], rtol=1e-10, atol=1e-10)
    with pytest.raises(sl.UnsupportedError, match="Its files are what was written"):
        memory.verify()


def _manifest(path: Path) -> Manifest:
    return parse_manifest((path / "memory.json").read_bytes(), str(path))


def _snapshots(path: Path) -> list[int]:
    return [snapshot.steps for snapshot in _manifest(path).snapshots]


def _committed(path: Path, full: sl.Memory, *, at_least: int) -> list[int]:
    """From which steps a killed run can go on; what is there is checked."""
    if not (path / "memory.json").exists():
        assert at_least == 0, "a memory with a snapshot does not open any more"
        return [0]
    found = _snapshots(path)
    assert at_least <= found[0], "a snapshot was lost"
    if found[0]:
        _assert_sums_as_of(path, found[0], full)
    return found


def _assert_finished(path: Path, full: sl.Memory) -> None:
    _assert_sums_as_of(path, STEPS, full)
    listed = {segment.file for segment in _manifest(path).segments}
    assert {f"segments/{file.name}" for file in (path / "segments").iterdir()} == listed, "something was left behind"


# -- resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [6, 12])
def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path, full, start):
    _run(0, start, tmp_path / "m")
    _, weights = _run(start, STEPS, tmp_path / "m")
    _assert_finished(tmp_path / "m", full)
    once, uninterrupted = _run(0, STEPS, tmp_path / "once")
    assert same(weights[-1], uninterrupted[-1])
    queries = examples()[0][:3]
    for layer in ("0", "2"):
        ours, theirs = (
            list(sl.open(path).attend(once, queries)[layer].top(30).rows(0))
            for path in (tmp_path / "m", tmp_path / "once")
        )
        assert ours == theirs, "the same sums, bit for bit, with the same columns"


class InterruptedRunError(Exception):
    pass


def _interrupted_at(path: Path, step: int) -> None:
    def after(at: int) -> None:
        if at + 1 == 12:
            recorder.flush()
        if at + 1 == step:
            raise InterruptedRunError

    model = network()
    optimizer = sgd(model, momentum=0.9)
    options: dict[str, Any] = {"dtype": "float64", "segment_bytes": 1000, "fold": "example"}
    with pytest.raises(InterruptedRunError), sl.record(model, optimizer, path, **options) as recorder:
        train(model, optimizer, STEPS, recorder, after_step=after)


@pytest.mark.parametrize("start", [12, 17])
def test_an_interrupted_run_goes_on_from_its_checkpoint_or_from_where_it_ended(tmp_path, full, start):
    """Step 17 is what the exception left; step 12 is the last one that was flushed, with its checkpoint."""
    _interrupted_at(tmp_path / "m", 17)
    assert _snapshots(tmp_path / "m") == [17, 12]
    _assert_sums_as_of(tmp_path / "m", 17, full)
    _run(start, STEPS, tmp_path / "m")
    _assert_finished(tmp_path / "m", full)


def test_a_step_without_a_snapshot_cannot_be_resumed_from(tmp_path):
    _interrupted_at(tmp_path / "m", 17)
    with pytest.raises(sl.ResumeError, match=r"after 17 or 12 steps. Call recorder.flush\(\)"):
        _run(14, STEPS, tmp_path / "m")


def test_a_run_goes_back_to_its_beginning(tmp_path, full):
    _run(0, 9, tmp_path / "m")
    _run(0, STEPS, tmp_path / "m")
    _assert_finished(tmp_path / "m", full)


@pytest.mark.parametrize("options", [{"fold": None}, {"fold_from": 2}, {"dtype": "float32"}], ids=str)
def test_other_settings_do_not_go_on_with_a_memory(tmp_path, options):
    _run(0, 6, tmp_path / "m")
    with pytest.raises(sl.ResumeError, match="other layers or settings"):
        _run(6, STEPS, tmp_path / "m", **options)


def test_a_finished_run_keeps_one_snapshot(tmp_path, full):
    _run(0, STEPS, tmp_path / "m", flush=7)
    assert _snapshots(tmp_path / "m") == [STEPS]
    _assert_finished(tmp_path / "m", full)


# -- kills --------------------------------------------------------------------------------------------


def _all_the_time() -> None:
    """Snapshots after every portion, as if each minute had passed."""
    folded_writer.SNAPSHOT_SECONDS, folded_writer.SNAPSHOT_SHARE = 0.0, 1e9


def _record_until_killed(path: Path, start: int) -> None:
    _all_the_time()
    _run(start, STEPS, path)
    time.sleep(60)  # if the kill comes late, it still comes


def _kill_at_call(path: Path, start: int, call: int) -> None:
    kill_at_call(call)
    _all_the_time()
    _run(start, STEPS, path)


def test_a_folded_run_killed_at_random_moments_is_readable_and_resumable(tmp_path, full):
    """10 × kill -9. Each next process goes on from the newest snapshot, or from the checkpoint before it."""
    chance = random.Random(5)
    path, start, seen = tmp_path / "run.memory", 0, []
    context = processes()
    for kill in range(10):
        process = context.Process(target=_record_until_killed, args=(path, start))
        process.start()
        # However slow the machine is: some snapshots after it began, and a little later.
        wanted, deadline = start + chance.randint(0, 12), time.monotonic() + 60
        while process.is_alive() and time.monotonic() < deadline and _newest(path) < min(wanted, STEPS):
            time.sleep(0.002)
        time.sleep(0.05 * chance.random())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found = _committed(path, full, at_least=start)
        seen.append(found[0])
        start = chance.choice(found)
        if start > STEPS - 8 or kill % 10 == 9:
            _run(start, STEPS, path)
            _assert_finished(path, full)
            path, start = tmp_path / f"run{kill}.memory", 0
    assert sum(0 < steps < STEPS for steps in seen) > 2, f"few kills came in the middle of a run: {seen}"


def _newest(path: Path) -> int:
    try:
        return _snapshots(path)[0]
    except FileNotFoundError:  # not there yet, or being replaced
        return -1


@pytest.mark.parametrize("start", [0, 12])
def test_a_folded_run_killed_at_any_call_to_the_file_system_is_readable_and_resumable(tmp_path, full, start):
    """Creating, resuming, the first snapshots and the deleting of old ones: killed before writes, syncs and renames."""
    context = processes()
    template = tmp_path / "template.memory"
    if start:
        _run(0, start, template)
    for call in range(1, 60, 8):
        path = tmp_path / f"{call}.memory"
        if start:
            os.system(f"cp -r {template} {path}")
        process = context.Process(target=_kill_at_call, args=(path, start, call))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"call {call} was never made"
        found = _committed(path, full, at_least=start)
        if call % 16 == 1:
            _run(found[-1], STEPS, path)
            _assert_finished(path, full)


# -- disks and readers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 60_000])
def test_a_full_disk_stops_the_folding_and_not_the_training(tmp_path, monkeypatch, full, room):
    path, left, write = tmp_path / "m", room, os.writev

    def limited(file: int, pieces: Any) -> int:
        nonlocal left
        left -= sum(map(len, pieces))
        if left < 0 and path.joinpath("memory.json").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, pieces)

    monkeypatch.setattr(os, "writev", limited)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, weights = _run(0, STEPS, path)
    monkeypatch.undo()
    assert same(weights[-1], _run(STEPS, STEPS, None)[1][-1]), "training did not go on as if nothing had happened"
    stopped = [str(w.message) for w in caught if issubclass(w.category, sl.RecordingStoppedWarning)]
    assert len(stopped) == 1
    assert "No space left on device" in stopped[0]
    steps = _committed(path, full, at_least=0)[0]
    assert (steps > 0) == (room > 0)
    assert sl.open(path).info.as_dict()["status"].startswith("stopped: ")
    listed = {segment.file for kept in _manifest(path).snapshots for segment in kept.segments}
    assert {f"segments/{file.name}" for file in (path / "segments").iterdir()} == listed, "the full disk is still full"


def test_sums_that_grow_too_large_stop_the_folding_and_not_the_training(tmp_path, monkeypatch, full):
    """24 examples, of which there is room for some."""
    monkeypatch.setattr(folded_writer, "MEMORY_SHARE", 1500 / folded_writer.main_memory())
    with pytest.warns(sl.RecordingStoppedWarning, match="fold fewer layers"):
        _, weights = _run(0, STEPS, tmp_path / "m", flush=2)
    assert same(weights[-1], _run(STEPS, STEPS, None)[1][-1])
    assert 0 < _committed(tmp_path / "m", full, at_least=0)[0] < STEPS


def test_a_folded_memory_can_be_read_while_it_is_recorded(tmp_path, full, monkeypatch):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    options: dict[str, Any] = {"dtype": "float64", "segment_bytes": 1000, "fold": "example"}
    with sl.record(model, optimizer, tmp_path / "m", **options) as recorder:
        train(model, optimizer, 5, recorder)
        recorder.flush()
        early = sl.open(tmp_path / "m")
        for start in (5, 9):
            train(model, optimizer, range(start, start + 4), recorder)
            recorder.flush()
            _assert_sums_as_of(tmp_path / "m", start + 4, full)
        with pytest.raises(sl.MemoryFormatError, match="being recorded, which replaces its files, open it again"):
            early.attend(model, examples()[0][:1])["2"].top(1)
