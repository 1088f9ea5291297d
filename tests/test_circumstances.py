"""What people do around a training loop: compile it, checkpoint activations, lower its precision."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spotlights as sl
from training import assert_exact, chosen, elsewhere, examples, network, sgd, state, train

WAYS = [("wrapped", "aot_eager"), ("in place", "eager"), ("step", "eager")]


def _compiled(folder: str) -> dict[str, Any]:
    """Runs with torch.compile, in the ways people use it; in a process of their own, for its caches' sake."""
    return {how: _compiled_so(how, backend, Path(folder) / how) for how, backend in WAYS}


def _compiled_so(how: str, backend: str, path: Path) -> tuple[list[str], int, dict[str, torch.Tensor]]:
    torch.compiler.reset()
    model = network()
    optimizer = sgd(model, momentum=0.9)
    called: Any = model
    if how == "wrapped":
        called = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    with sl.record(called, optimizer, path, dtype="float64") as recorder:
        if how == "step":
            _compiled_step(model, optimizer, backend, recorder)
        else:
            train(called, optimizer, 3, recorder)
    memory = assert_exact(path, called)
    assert memory.attend(called, examples()[0][:2])["2"].contributions(target=1).exact
    return list(memory.layers), len(memory), state(model)


def _compiled_step(model: nn.Module, optimizer: torch.optim.Optimizer, backend: str, recorder: sl.Recorder) -> None:
    inputs, labels = examples()

    @torch.compile(backend=backend)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for number in range(3):
        ids = chosen(number)
        recorder.batch(example=ids, label=labels[ids])
        step(inputs[ids], labels[ids])


def test_a_compiled_network_is_recorded_exactly_and_trains_as_before(tmp_path: Path):
    model = network()
    train(model, sgd(model, momentum=0.9), 3)
    for how, (layers, slots, found) in elsewhere(_compiled, str(tmp_path)).items():
        assert (layers, slots) == (["0", "2"], 12), how
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def _compiled_before(path: str) -> tuple[list[str], str, dict[str, Any]]:
    import warnings

    model = network()
    optimizer = sgd(model)
    called = torch.compile(model, backend="eager", fullgraph=True)
    train(called, optimizer, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with sl.record(model, optimizer, path) as recorder:
            train(called, optimizer, range(2, 5), recorder)
    return [str(w.message) for w in said], sl.open(path).info.as_dict()["status"], state(model)


def test_recording_stops_with_one_sentence_if_the_network_was_compiled_before(tmp_path: Path):
    said, status, found = elsewhere(_compiled_before, str(tmp_path / "run.memory"))
    assert len(said) == 1
    assert "has stopped: torch.compile compiled the model before recording began" in said[0]
    assert "torch.compiler.reset()" in said[0]
    assert status.startswith("stopped: torch.compile")
    model = network()
    train(model, sgd(model), 5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def _in_one_graph(path: str) -> str:
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, path):
        try:
            torch.compile(model, backend="eager", fullgraph=True)(examples()[0])
        except Exception as error:
            return str(error)
    return ""


def test_a_network_compiled_to_one_graph_is_refused_with_what_to_do(tmp_path: Path):
    says_why = "reason" in signature(torch.compiler.disable).parameters  # since torch 2.7
    error = elsewhere(_in_one_graph, str(tmp_path / "run.memory"))
    assert ("compile without fullgraph=True" if says_why else "disable()") in error


def test_a_network_that_was_recorded_compiled_is_asked_about_without_being_compiled(tmp_path: Path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "run.memory", dtype="float64") as recorder:
        train(model, optimizer, 3, recorder)
    data_parallel = nn.DataParallel(model)
    assert_exact(tmp_path / "run.memory", data_parallel)
    inputs = examples()[0][:2]
    memory = sl.open(tmp_path / "run.memory")
    assert torch.equal(memory.attend(data_parallel, inputs)["2"].scores(), memory.attend(model, inputs)["2"].scores())


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_autocast_is_recorded_to_its_own_precision_with_and_without_a_scaler(tmp_path: Path, make: Any, scaled: bool):
    """The network itself rounds its gradients to 8 bits here; the memory keeps what it really multiplied."""
    model = network(5, 32, 3, dtype=torch.float32)
    optimizer = make(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10, growth_interval=3)
    x, y = examples(torch.float32)
    with sl.record(model, optimizer, tmp_path / "run.memory"):
        for step in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y) * (float("inf") if scaled and step == 5 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    memory = sl.open(tmp_path / "run.memory")
    assert memory.steps == (11 if scaled else 12)  # the scaler skips the step that overflowed
    for check in memory.verify(model).values():
        assert check.ok
        assert check.change_error < 1e-3
        assert not check.unexplained_steps
