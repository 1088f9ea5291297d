"""Kills, full disks and slow ones: what was committed stays, training goes on, killed runs resume."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import spotlights as sl
from training import (
    EXACT,
    FEATURES,
    assert_exact,
    distance,
    elsewhere,
    kill_at_call,
    network,
    processes,
    same,
    sgd,
    state,
    train,
)

STEPS = 40
SEGMENT_BYTES = 1000
"""Two or three steps: a kill at any moment is close to a commit."""


def _run(start: int, steps: range, path: Path | None, **options: Any) -> tuple[Any, list[dict], list[dict]]:
    """The one run of these tests: unrecorded up to `start`, then recorded; with all its checkpoints."""
    model = network()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    weights = [state(model)]

    def keep(step: int) -> None:
        weights.append(state(model))

    train(model, optimizer, start, after_step=keep)
    if path is not None:
        options = {"dtype": "float64", "segment_bytes": SEGMENT_BYTES, "resume": True, **options}
        with sl.record(model, optimizer, path, **options) as recorder:
            assert recorder.step == start, f"resumed at step {recorder.step}, but the model is at {start}"
            train(model, optimizer, steps, recorder, after_step=keep)
    else:
        train(model, optimizer, steps, after_step=keep)
    return model, weights


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict]:
    """The weights after each step of the run that nobody disturbs."""
    return _run(0, range(STEPS), None)[1]


def _record_until_killed(path: Path, start: int, begins: Any) -> None:
    begins.set()
    _run(start, range(start, STEPS), path)
    time.sleep(60)  # if the kill comes late, it still comes


def _kill_at_call(path: Path, start: int, call: int) -> None:
    kill_at_call(call)
    _run(start, range(start, STEPS), path)


def _wait_for_steps(path: Path, steps: int) -> None:
    for _ in range(30_000):
        with contextlib.suppress(sl.MemoryFormatError):
            if sl.open(path).steps >= steps:
                return
        time.sleep(0.001)
    pytest.fail(f"{path} did not come to {steps} steps")


def _committed(path: Path, weights: list[dict], *, at_least: int) -> int:
    """How many steps a killed run has left, checked in every way there is."""
    try:
        memory = sl.open(path)
    except sl.MemoryFormatError:
        assert at_least == 0, "a memory with committed steps does not open any more"
        return 0
    assert memory.steps >= at_least, "committed steps were lost"
    verified = memory.verify()
    assert verified.ok, f"what is there does not verify as of its last step:\n{verified}"
    assert not verified.damaged
    off = distance(memory.primal(network()).state_dict(), weights[memory.steps])
    assert off <= EXACT, f"as of step {memory.steps} it differs from the uninterrupted run by {off:.1e}"
    return memory.steps


def _finish(path: Path, start: int, weights: list[dict]) -> None:
    """Resumes from the checkpoint of step `start` and checks the result against the uninterrupted run."""
    model, _ = _run(start, range(start, STEPS), path)
    memory = assert_exact(path, model)
    assert memory.steps == STEPS
    assert len(memory) == 4 * STEPS
    assert same(state(model), weights[-1])
    listed = {path / name for name in ("memory.json", "initial.safetensors", "final.safetensors", "segments")}
    assert set(path.iterdir()) == listed, "something was left behind"


def test_a_run_killed_at_random_moments_is_always_readable_and_resumable(tmp_path, uninterrupted):
    """30 × kill -9. Each next process resumes from the last committed step or an earlier checkpoint."""
    chance = random.Random(5)
    path, start, rounds, seen = tmp_path / "run.memory", 0, 0, []
    context = processes()
    for kill in range(30):
        begins = context.Event()
        process = context.Process(target=_record_until_killed, args=(path, start, begins))
        process.start()
        assert begins.wait(120)
        if kill % 3 == 0:  # in the middle of the run, however slow the machine is
            _wait_for_steps(path, start + 1)
        else:
            time.sleep(chance.choice([0.0, 0.02, 0.1, 0.2, 0.3]) * chance.random())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        steps = _committed(path, uninterrupted, at_least=start)
        seen.append(steps)
        start = min(STEPS - 15, chance.choice([steps, chance.randint(0, steps)]))
        if kill % 10 == 9:
            _finish(path, start, uninterrupted)
            path, start, rounds = tmp_path / f"run{kill}.memory", 0, rounds + 1
    assert rounds == 3
    assert any(0 < steps < STEPS for steps in seen), f"no kill came in the middle of a run: {seen}"


@pytest.mark.parametrize("start", [0, 11])
def test_a_run_killed_at_any_call_to_the_file_system_is_readable_and_resumable(tmp_path, uninterrupted, start):
    """Creating, resuming with a cut segment, the first commits: killed before each write, sync and rename."""
    context = processes()
    template = tmp_path / "template.memory"
    if start:
        _run(0, range(start + 2), template)
    for call in range(1, 19):
        path = tmp_path / f"{call}.memory"
        if start:
            os.system(f"cp -r {template} {path}")
        process = context.Process(target=_kill_at_call, args=(path, start, call))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"call {call} was never made"
        steps = _committed(path, uninterrupted, at_least=start)
        if call % 4 == 1:
            _finish(path, steps, uninterrupted)


def _hold(path: Path, ready: Any, done: Any) -> None:
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, path, dtype="float64") as recorder:
        train(model, optimizer, 3, recorder)
        recorder.flush()
        ready.set()
        done.wait(60)


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}], ids=str)
def test_two_processes_cannot_record_one_memory(tmp_path, options):
    context = processes()
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "m", ready, done))
    process.start()
    assert ready.wait(60)
    try:
        model = network()
        with (
            pytest.raises(sl.ResumeError, match="being recorded by another process"),
            sl.record(model, sgd(model), tmp_path / "m", dtype="float64", **options),
        ):
            pass
    finally:
        done.set()
        process.join()
    assert process.exitcode == 0
    assert sl.open(tmp_path / "m").verify().ok
    assert sl.open(tmp_path / "m").steps == 3


# -- disks that fail ---------------------------------------------------------------------------------


def _run_with_failing_disk(path: Path, **options: Any) -> tuple[dict, list[str]]:
    """Trains to the end, returning the final weights and the warnings about the recording."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, weights = _run(0, range(STEPS), path, resume=False, **options)
    stopped = [str(w.message) for w in caught if issubclass(w.category, sl.RecordingStoppedWarning)]
    return weights[-1], stopped


def _assert_stopped_well(path: Path, final: dict, stopped: list[str], weights: list[dict]) -> int:
    assert same(final, weights[-1]), "training did not go on as if nothing had happened"
    assert len(stopped) == 1, f"one warning was expected, not {len(stopped)}: {stopped}"
    assert str(path) in stopped[0]
    return _committed(path, weights, at_least=0)


@pytest.mark.parametrize("room", [0, 4_000, 40_000])
def test_a_full_disk_stops_the_recording_and_not_the_training(tmp_path, monkeypatch, uninterrupted, room):
    path = tmp_path / "m"
    left = room
    write = os.writev

    def limited(file: int, pieces: Any) -> int:
        nonlocal left
        left -= sum(map(len, pieces))
        if left < 0 and path.joinpath("memory.json").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, pieces)

    monkeypatch.setattr(os, "writev", limited)
    final, stopped = _run_with_failing_disk(path)
    monkeypatch.undo()
    steps = _assert_stopped_well(path, final, stopped, uninterrupted)
    assert "No space left on device" in stopped[0]
    assert (steps > 0) == (room >= 40_000)
    assert not list(path.rglob("*.part")), "half-written files were left on the full disk"
    status = sl.open(path).info.as_dict()["status"]
    assert status.startswith("stopped: ")
    assert "No space left on device" in status


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_to_sync_or_rename_stops_the_recording(tmp_path, monkeypatch, uninterrupted, call):
    calls, original = 0, getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(errno.EIO, "Input/output error")
        return original(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    final, stopped = _run_with_failing_disk(tmp_path / "m")
    monkeypatch.undo()
    assert _assert_stopped_well(tmp_path / "m", final, stopped, uninterrupted) > 0


def _with_limited_files(path: Path) -> tuple[dict, list[str]]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
    return _run_with_failing_disk(path, segment_bytes=4 * SEGMENT_BYTES)


def test_a_limit_of_the_system_stops_the_recording_and_not_the_training(tmp_path, uninterrupted):
    """RLIMIT_FSIZE: the kernel itself refuses the bytes of a segment."""
    final, stopped = elsewhere(_with_limited_files, tmp_path / "m")
    _assert_stopped_well(tmp_path / "m", final, stopped, uninterrupted)


def test_a_recording_that_stopped_can_be_resumed(tmp_path, monkeypatch, uninterrupted):
    path = tmp_path / "m"

    def full(file: int, pieces: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    _run(0, range(20), path)
    monkeypatch.setattr(os, "writev", full)
    with pytest.warns(sl.RecordingStoppedWarning):
        _run(20, range(20, STEPS), path)
    monkeypatch.undo()
    _finish(path, 20, uninterrupted)


def test_a_failure_at_the_very_end_is_warned_of(tmp_path, monkeypatch):
    model = network()
    optimizer = sgd(model)

    def full(file: int, pieces: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
            train(model, optimizer, 3, recorder)
            recorder.flush()
            monkeypatch.setattr(os, "writev", full)
    monkeypatch.undo()
    assert caught[0].category is sl.RecordingStoppedWarning
    assert len(caught) == 1
    assert sl.open(tmp_path / "m").steps == 3
    assert sl.open(tmp_path / "m").verify(model).ok


def test_a_slow_disk_slows_training_instead_of_filling_the_memory(tmp_path, monkeypatch):
    """At most two segments wait, one is written, one is collected: whatever the number of steps."""
    model = network(FEATURES, 64, 64, 3)
    optimizer = sgd(model)
    write, ahead, slowed, trainer = os.writev, [], [], threading.current_thread()

    def slow(file: int, pieces: Any) -> int:
        """Twice it waits until training waits, too, or waits no more: however slow the machine is."""
        if threading.current_thread() is not trainer and len(slowed) < 2:
            slowed.append(file)
            steps = -1
            while steps < len(ahead) < STEPS or not ahead:
                steps = len(ahead)
                time.sleep(0.5)
        return write(file, pieces)

    monkeypatch.setattr(os, "writev", slow)
    step_bytes = 4 * 8 * (FEATURES + 64 + 64 + 64 + 64 + 3)

    def look(step: int) -> None:
        ahead.append(step + 1 - sl.open(tmp_path / "m").steps)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", segment_bytes=2 * step_bytes) as recorder:
        train(model, optimizer, STEPS, recorder, after_step=look)
    assert max(ahead) <= 2 * 4, f"{max(ahead)} steps waited in memory: the queue is not bounded"
    assert max(ahead) > 2, "the disk was not slow: this test shows nothing"
    assert_exact(tmp_path / "m", model)
