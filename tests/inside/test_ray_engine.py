"""The Ray engine without Ray: a stand-in runs every task in this process, on pickled copies, in the order asked for."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import spotlights as sl
from spotlights.cli import app
from spotlights.interrupts import checking, watching
from spotlights.memory.layer_reader import SegmentSlots
from spotlights.memory.reader import MemoryReader
from spotlights.query import ray_engine
from test_parts import SUBJECT, adam, assert_close, everything, record
from training import examples, network, sgd


class StandIn:
    """What the engine uses of Ray. A task runs when its result is waited for, on pickled copies of its arguments."""

    def __init__(self, cpus: int) -> None:
        self.cpus, self.made, self.cancelled, self.in_task = cpus, [], [], 0
        self.strategies: dict[str, str] = {}
        self.initialized_with: str | None = "nothing"

    def is_initialized(self) -> bool:
        return self.initialized_with != "nothing"

    def init(self, address: str | None, **options: Any) -> None:
        self.initialized_with = address

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: str(id(self)))

    def put(self, value: Any) -> Any:
        return Later(self, lambda: value)

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        def remote(what: Any) -> Any:
            self.strategies[what.__name__] = options.get("scheduling_strategy", "DEFAULT")

            def later(function: Callable[..., Any]) -> Any:
                return SimpleNamespace(remote=lambda *args: Later(self, function, *args))

            def actor() -> Any:
                made = what()
                self.made.append(made)
                return SimpleNamespace(run=later(made.run), merge=later(made.merge))

            return SimpleNamespace(remote=actor) if isinstance(what, type) else later(what)

        return remote

    def wait(self, waiting: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        waiting[0].result()
        return waiting[:1], waiting[1:]

    def get(self, results: list[Any]) -> list[Any]:
        return [result.result() for result in results]

    def cancel(self, task: Any) -> None:
        self.cancelled.append(task)


class Later:
    def __init__(self, ray: StandIn, function: Callable[..., Any], *args: Any) -> None:
        self._ray, self._function, self._args = ray, function, args
        self._result: bytes | None = None

    def result(self) -> Any:
        if self._result is None:
            args = [arg.result() if isinstance(arg, Later) else arg for arg in self._args]
            self._ray.in_task += 1
            self._result = pickle.dumps(self._function(*args))
            self._ray.in_task -= 1
        return pickle.loads(self._result)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn(cpus=1)
    monkeypatch.setitem(sys.modules, "ray", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(ray_engine, "SMALL", 0)
    monkeypatch.setattr(ray_engine, "_FAN_IN", 2)
    yield stand_in
    ray_engine._opened.clear()
    ray_engine._kept.clear()


@pytest.mark.parametrize(("make", "keep"), [(sgd, True), (adam, False)])
def test_every_question_has_the_answer_of_the_threads_and_is_answered_by_tasks_alone(
    tmp_path: Path, ray: StandIn, monkeypatch: pytest.MonkeyPatch, make: Any, keep: bool
):
    model = record(tmp_path / "run", make)
    expected = everything(sl.open(tmp_path / "run"), model)

    def in_a_task(original: Any) -> Any:
        def called(*args: Any) -> Any:
            assert ray.in_task, "whoever asks has read keys, errors or whole files"
            return original(*args)

        return called

    monkeypatch.setattr(SegmentSlots, "decoded", in_a_task(SegmentSlots.decoded))
    monkeypatch.setattr(MemoryReader, "damaged", in_a_task(MemoryReader.damaged))
    assert_close(everything(sl.open(tmp_path / "run").on("ray", keep=keep), model), expected)
    assert ray.initialized_with is None
    assert len(ray.made) == int(keep)
    scans = ray.strategies["_Actor" if keep else "_run_share"]
    assert scans == "SPREAD", "Ray would keep tasks of more than half a second on the asking node"
    assert not ray.cancelled


def test_progress_counts_segments_over_all_tasks(tmp_path: Path, ray: StandIn):
    record(tmp_path / "run")
    memory, seen = sl.open(tmp_path / "run").on("ray"), []
    segments = len(memory.view.reader.segments)
    with watching(lambda done, total: seen.append((done, total))):
        len(memory.where(label=1))
    of_layer = seen[: len(seen) // len(memory.layers)]
    assert of_layer[-1] == (segments, segments)
    assert [done for done, _ in of_layer] == sorted(done for done, _ in of_layer)
    assert len(of_layer) == 4


def test_a_question_that_is_stopped_cancels_its_tasks(tmp_path: Path, ray: StandIn):
    model = record(tmp_path / "run")
    memory = sl.open(tmp_path / "run").on("ray")
    attention = memory.attend(model, examples()[0][:1])["2"]

    def stop() -> None:
        raise KeyboardInterrupt

    with checking(stop), pytest.raises(KeyboardInterrupt):
        attention.top(3)
    assert ray.cancelled


def test_the_command_line_and_the_environment_name_an_engine(
    tmp_path: Path, ray: StandIn, monkeypatch: pytest.MonkeyPatch
):
    record(tmp_path / "run")
    subject = tmp_path / "subject.py"
    tests = str(Path(__file__).parent.parent)
    subject.write_text(SUBJECT.format(tests=tests, memory=str(tmp_path / "run")))
    command = ["top", str(tmp_path / "run"), "3", "--subject", f"{subject}:subject", "--json"]
    threads = CliRunner().invoke(app, command)
    assert not ray.is_initialized()
    by_ray = CliRunner().invoke(app, [*command, "--engine", "ray://host:10001"])
    assert by_ray.exit_code == threads.exit_code == 0, (by_ray.output, threads.exception, by_ray.exception)
    assert ray.initialized_with == "ray://host:10001"
    assert_close(json.loads(by_ray.stdout), json.loads(threads.stdout))
    assert sl.open(tmp_path / "run").view.engine == sl.open(tmp_path / "run").on("threads").view.engine
    monkeypatch.setenv("SPOTLIGHTS_ENGINE", "ray")
    assert sl.open(tmp_path / "run").view.engine == ray_engine.Ray()
    refused = CliRunner().invoke(app, [*command, "--engine", "dask"])
    assert refused.exit_code == 2
    assert "There are: threads, ray" in refused.output
    with pytest.raises(sl.SettingError, match="keep=True is for a Ray cluster"):
        sl.open(tmp_path / "run").on("threads", keep=True)


def test_without_ray_the_engine_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(ray_engine, "SMALL", 0)
    with pytest.raises(sl.SettingError, match=r"pip install 'spotlights\[ray\]'"):
        sl.open(tmp_path / "run").on("ray").attend(network(), examples()[0][:1])["2"].top(1)


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, ray: StandIn, monkeypatch: pytest.MonkeyPatch):
    def init(address: str | None, **options: Any) -> None:
        raise ConnectionError("nobody is there")

    model = record(tmp_path / "run")
    monkeypatch.setattr(ray, "init", init)
    attention = sl.open(tmp_path / "run").on("ray://host:1").attend(model, examples()[0][:1])["2"]
    with pytest.raises(sl.SettingError, match="No Ray cluster answers at ray://host:1: nobody is there"):
        attention.top(1)
