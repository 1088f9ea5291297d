"""A Ray cluster answers as threads do: two nodes of one CPU each, on this machine."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spotlights as sl
from spotlights.query import ray_engine
from test_parts import adam, assert_close, everything, rows
from training import examples, network, sgd, train

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'spotlights[ray]')")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        yield nodes.address
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(autouse=True)
def small_memories_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "SMALL", 0)


def record(path: Path, make: Any) -> torch.nn.Module:
    model = network()
    optimizer = make(model)
    with sl.record(model, optimizer, path, segment_bytes=4000) as recorder:
        train(model, optimizer, 40, recorder)
    return model


def test_a_cluster_answers_as_threads_do(tmp_path: Path, cluster: str):
    for make in (sgd, adam):
        path = tmp_path / make.__name__
        model = record(path, make)
        memory = sl.open(path)
        assert_close(everything(memory.on(cluster), model), everything(sl.open(path), model))


def test_actors_that_keep_what_they_read_answer_as_threads_do_and_are_replaced_when_they_die(
    tmp_path: Path, cluster: str
):
    model = record(tmp_path / "run", sgd)
    memory = sl.open(tmp_path / "run")
    expected = everything(memory, model)
    kept = sl.open(tmp_path / "run").on(cluster, keep=True)
    assert_close(everything(kept, model), expected)
    (actors,) = ray_engine._kept.values()
    ray.kill(actors[0], no_restart=False)  # as if its process had died
    assert_close(everything(kept, model), expected)
    for actor in actors:
        ray.kill(actor)  # they hold the CPUs that other tests need
    ray_engine._kept.clear()


def test_a_memory_that_grows_is_seen_as_it_was_opened(tmp_path: Path, cluster: str):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "run", segment_bytes=2000) as recorder:
        train(model, optimizer, range(20), recorder)
        recorder.flush()
        memory = sl.open(tmp_path / "run")
        expected = memory.attend(model, examples()[0])["2"].totals("label").values
        train(model, optimizer, range(20, 40), recorder)
    again = memory.on(cluster).attend(network(), examples()[0])["2"]
    assert again.totals("label").counts.sum() == 80
    assert expected.shape == again.totals("label").values.shape


def _die_once(mark: str) -> None:
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_replaced(tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch):
    model = record(tmp_path / "run", sgd)
    memory = sl.open(tmp_path / "run")
    expected = rows([memory.attend(model, examples()[0])["2"].top(5)])
    share, mark = ray_engine._run_share, str(tmp_path / "killed")

    def dying(*args: Any) -> Any:
        _die_once(mark)
        return share(*args)

    monkeypatch.setattr(ray_engine, "_run_share", dying)
    assert_close(rows([memory.on(cluster).attend(model, examples()[0])["2"].top(5)]), expected)
    assert os.path.exists(mark)


def test_a_recipe_is_computed_by_the_cluster_bit_for_bit(tmp_path: Path, cluster: str):
    """Stretches side by side, in other processes, with the random numbers of the run; the slots are then read here."""
    x, y = examples(count=30)
    ids = torch.arange(30)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(x.shape[1], 4), torch.nn.Dropout(), torch.nn.Linear(4, 3)).to(x)

    def loss(network: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        (tmp_path / f"{os.getpid()}.computed").touch()
        return torch.nn.functional.cross_entropy(network(x[ids]), y[ids])

    trained = model()
    optimizer = sgd(trained)
    with sl.record(trained, optimizer, tmp_path / "run", keep="recipe", checkpoint_every=5) as recorder:
        for step in range(20):
            recorder.batch(example=ids[step : step + 8])
            optimizer.zero_grad()
            loss(trained, ids[step : step + 8]).backward()
            optimizer.step()
    answers = []
    (tmp_path / f"{os.getpid()}.computed").unlink()
    for engine in (cluster, "threads"):
        options: dict[str, Any] = {"model": model(), "recompute": loss, "cache": tmp_path / f"cache {engine[:3]}"}
        memory = sl.open(tmp_path / "run", **options).on(engine)
        answers.append(memory.attend(trained, x[:2])["2"].contributions(target=1).top(10, by="example").values)
        assert memory.recomputed == 0.0
        if engine == cluster:
            pids = {int(path.stem) for path in tmp_path.glob("*.computed")}
            assert pids
            assert os.getpid() not in pids
    assert torch.equal(*answers)
