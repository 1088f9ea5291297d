"""The user's run does not notice that it is recorded, and the memory can be read meanwhile."""

import copy
import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import spotlights as sl
from training import assert_exact, distance, elsewhere, examples, network, same, sgd, state, train

X, _ = examples()


def _run(path: Path | None, dtype: torch.dtype, storage: str, dropout: float) -> tuple:
    """Everything a run leaves behind: losses, weights, momentum, the states of the random generators."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    model = network(dtype=dtype, dropout=dropout)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    if path is None:
        losses = train(model, optimizer, 20, before_step=clip)
    else:
        with sl.record(model, optimizer, path, dtype=storage, segment_bytes=2000) as recorder:
            losses = train(model, optimizer, 20, recorder, before_step=clip)
    numpy_state = np.random.get_state()
    numbers = (torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2], random.getstate())
    buffers = {str(i): s["momentum_buffer"] for i, s in optimizer.state_dict()["state"].items()}
    return losses, state(model), buffers, numbers


def _twice(path: Path, *settings) -> tuple:
    return _run(None, *settings), _run(path, *settings)


@pytest.mark.parametrize(
    ("dtype", "storage", "dropout"),
    [
        (torch.float32, "float32", 0.5),
        (torch.float32, "float32", 0.0),
        (torch.float32, "float16", 0.5),
        (torch.float32, "int8", 0.5),
        (torch.float64, "float64", 0.5),
    ],
    ids=str,
)
def test_a_recorded_run_is_bit_identical_to_an_unrecorded_one(tmp_path, dtype, storage, dropout):
    # In a process without run-time type checks: beartype itself draws from Python's random numbers.
    plain, recorded = elsewhere(_twice, tmp_path / "m", dtype, storage, dropout)
    assert recorded[0] == plain[0], "losses differ: a hook changed the forward pass"
    assert same(recorded[1], plain[1]), "weights differ: a hook changed a gradient or a parameter"
    assert same(recorded[2], plain[2]), "momentum differs: a hook changed the optimizer"
    assert recorded[3] == plain[3], "random numbers differ: recording drew from a global generator"


def test_model_and_optimizer_are_left_without_hooks(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m") as recorder:
        train(model, optimizer, 2, recorder)
    train(model, optimizer, range(2, 4))
    assert sl.open(recorder.path).steps == 2
    assert not any(m._forward_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep", "pickle"])
def test_a_model_can_be_copied_while_it_is_recorded_and_the_copy_is_not(tmp_path, copied):
    """As for keeping the best model, or a moving average of it."""
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 2, recorder)
        copied_model = copied(model)
        assert same(state(copied_model), state(model))
        copied_model(X).sum().backward()
        copied(optimizer)
        train(model, optimizer, range(2, 4), recorder)
    assert len(assert_exact(tmp_path / "m", model)) == 16


def test_recording_goes_on_until_an_exception_leaves_the_block(tmp_path):
    model = network()
    optimizer = sgd(model)

    def interrupt(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder,
    ):
        train(model, optimizer, 10, recorder, before_step=interrupt)
    memory = assert_exact(tmp_path / "m", model)
    assert memory.steps == 6


def test_the_threads_of_torch_stay_as_they_were(tmp_path: Path):
    """The writer computes in its own thread alone: that must hold for no other one."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model = network()
        optimizer = sgd(model)
        with sl.record(model, optimizer, tmp_path / "m") as recorder:
            train(model, optimizer, 2, recorder)
            recorder.flush()
            started_later: list[int] = []
            thread = threading.Thread(target=lambda: started_later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert (torch.get_num_threads(), started_later) == (3, [3])
    finally:
        torch.set_num_threads(before)


# -- a reader beside the writer --------------------------------------------------------------------


def test_a_memory_can_be_read_while_it_is_recorded(tmp_path):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    seen = {0: state(model)}
    lengths = []

    def read(step: int) -> None:
        seen[step + 1] = state(model)
        memory = sl.open(tmp_path / "m")
        lengths.append(memory.steps)
        assert memory.steps <= step + 1
        assert distance(memory.primal(model).state_dict(), seen[memory.steps]) < 1e-12
        assert memory.verify().ok

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", segment_bytes=1500) as recorder:
        train(model, optimizer, 12, recorder, after_step=read)
        early = sl.open(tmp_path / "m")
        recorder.flush()
        assert sl.open(tmp_path / "m").steps == 12, "flush() waits until every step is on disk"
        before = early.steps, len(early)
    assert (early.steps, len(early)) == before, "an opened memory stays as it was"
    assert len(set(lengths)) > 1, "no segment was committed during the run: is the writer in the background?"
