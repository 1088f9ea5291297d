"""Recording to a path where there is something already: it goes on, or is replaced, only when asked to."""

from pathlib import Path

import pytest
import torch

import spotlights as sl
from training import assert_exact, network, sgd, state, train


@pytest.fixture
def started(tmp_path):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    path = tmp_path / "m"
    checkpoints = {}
    with sl.record(model, optimizer, path, dtype="float64", segment_bytes=1500) as recorder:
        train(model, optimizer, 10, recorder, after_step=lambda s: checkpoints.update({s + 1: state(model)}))
    return path, model, optimizer, checkpoints


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# -- what exists is never overwritten unasked --------------------------------------------------------


def test_a_memory_is_never_overwritten_unasked(started):
    path, model, optimizer, _ = started
    before = _contents(path)
    with (
        pytest.raises(sl.MemoryExistsError, match=r"resume=True.*overwrite=True"),
        sl.record(model, optimizer, path),
    ):
        pass
    assert _contents(path) == before


def test_overwrite_replaces_a_memory(started):
    path, *_ = started
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, path, dtype="float64", overwrite=True) as recorder:
        train(model, optimizer, 3, recorder)
    assert assert_exact(path, model).steps == 3


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=str)
@pytest.mark.parametrize("content", ["thesis.tex", "segments/thesis.tex", "initial.safetensors/thesis.tex"])
def test_a_foreign_directory_is_never_touched(tmp_path, options, content):
    path = tmp_path / "mine" / content
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    model = network()
    with (
        pytest.raises(sl.MemoryExistsError, match="mine"),
        sl.record(model, sgd(model), tmp_path / "mine", **options),
    ):
        pass
    assert _contents(tmp_path) == {str(path): b"years of work"}


def test_a_file_in_the_place_of_the_memory_is_never_touched(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    model = network()
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(sl.MemoryExistsError), sl.record(model, sgd(model), tmp_path / "mine", **options):
            pass
    assert (tmp_path / "mine").read_text() == "years of work"


def test_an_empty_directory_may_become_a_memory(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path, dtype="float64") as recorder:
        train(model, optimizer, 2, recorder)
    assert_exact(tmp_path, model)


# -- resuming -----------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_where_it_was(started):
    path, model, optimizer, _ = started
    with sl.record(model, optimizer, path, dtype="float64", resume=True) as recorder:
        assert recorder.step == 10
        train(model, optimizer, range(10, 15), recorder)
    memory = assert_exact(path, model)
    assert memory.steps == 15
    assert len(memory) == 60


@pytest.mark.parametrize("step", range(1, 10))
def test_resuming_from_an_earlier_checkpoint_drops_the_later_steps(started, step):
    path, _, _, checkpoints = started
    model = network()
    model.load_state_dict(checkpoints[step])
    optimizer = sgd(model, momentum=0.9)  # without its state: the momentum starts anew
    with sl.record(model, optimizer, path, dtype="float64", resume=True) as recorder:
        assert recorder.step == step
        train(model, optimizer, 3, recorder)
    memory = assert_exact(path, model)
    assert memory.steps == step + 3
    assert len(memory) == 4 * (step + 3)


def test_resuming_without_a_memory_starts_one(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "new", dtype="float64", resume=True) as recorder:
        train(model, optimizer, 2, recorder)
    assert_exact(tmp_path / "new", model)


def test_resuming_before_the_first_step_starts_again(tmp_path):
    model = network()
    optimizer = sgd(model)
    for steps in (0, 2):
        with sl.record(model, optimizer, tmp_path / "m", dtype="float64", resume=True) as recorder:
            assert recorder.step == 0
            train(model, optimizer, steps, recorder)
    assert assert_exact(tmp_path / "m", model).steps == 2


@pytest.mark.parametrize("what", ["weights", "layers", "shapes", "storage", "errors", "optimizer", "frozen"])
def test_a_run_that_does_not_continue_the_memory_is_refused_and_nothing_changes(started, what):
    path, model, optimizer, _ = started
    options = {"dtype": "float64"}
    if what == "weights":
        model = network()
        with torch.no_grad():
            model[0].weight += 1.0
    elif what == "layers":
        options["layers"] = "0"
    elif what == "shapes":
        model = network(5, 7, 3)
    elif what == "storage":
        options["dtype"] = "float32"
    elif what == "errors":
        options["errors"] = False
    optimizer = torch.optim.Adam(model.parameters()) if what == "optimizer" else sgd(model)
    if what == "frozen":
        optimizer = sgd(model[2])
    before = _contents(path)
    with (
        pytest.raises(sl.ResumeError, match=r"Record to another path\.|record to another path\."),
        sl.record(model, optimizer, path, resume=True, **options),
    ):
        pass
    assert _contents(path) == before


def test_resume_and_overwrite_are_not_both(tmp_path):
    model = network()
    with pytest.raises(sl.SettingError, match="not both"):
        sl.record(model, sgd(model), tmp_path / "m", resume=True, overwrite=True)
