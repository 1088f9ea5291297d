"""What leaves no slots: passes that train nothing, steps that are not taken, gradients of others."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl
from training import assert_exact, chosen, examples, fill, network, sgd, slots, train

X, _ = examples()


def test_nothing_is_recorded_in_eval_mode_or_without_gradients(tmp_path):
    model = network()
    optimizer = sgd(model)
    inputs, labels = examples()
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        for step in range(4):
            recorder.batch(example=torch.arange(4))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[:4]), labels[:4]).backward()
            model.eval()
            model(inputs).sum()
            model.train()
            with torch.no_grad():
                model(inputs)
            with torch.inference_mode():
                model(inputs)
            optimizer.step()
            assert recorder.step == step + 1
    assert len(assert_exact(tmp_path / "m", model)) == 16


def test_training_in_eval_mode_is_warned_of_and_reported(tmp_path):
    model = network().eval()
    optimizer = sgd(model)
    with (
        sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder,
        pytest.warns(sl.SpotlightsWarning, match="eval mode") as caught,
    ):
        train(model, optimizer, 3, recorder)
    assert len(caught) == 1
    memory = sl.open(tmp_path / "m")
    assert len(memory) == 0
    assert memory.verify(model)["0"].unexplained_steps == [0, 1, 2]
    assert not memory.verify(model).ok


def test_nothing_is_recorded_while_paused(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 3, recorder)
        with recorder.paused(), recorder.paused():
            train(model, optimizer, range(3, 5), recorder)
        train(model, optimizer, range(5, 8), recorder)
    memory = sl.open(tmp_path / "m")
    assert {row["step"] for row in slots(memory, model, "0", X[:1])} == {0, 1, 2, 5, 6, 7}
    assert memory.verify(model)["2"].unexplained_steps == [3, 4], "a paused step must not pass for exact"


def test_a_paused_pass_beside_the_training_leaves_nothing(tmp_path):
    model = network()
    optimizer = sgd(model)

    def look(step: int) -> None:
        with recorder.paused():
            torch.autograd.grad(model(X).sum(), list(model.parameters()))

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 3, recorder, before_step=look)
    assert len(assert_exact(tmp_path / "m", model)) == 12


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_skipped_step_leaves_no_slots(tmp_path, set_to_none):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        for step in range(9):
            recorder.batch(example=torch.arange(4) + 100 * step)
            model(X[:4]).square().mean().backward()
            if step % 3 != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    memory = assert_exact(tmp_path / "m", model)
    assert memory.steps == 6
    visited = {row["example"] // 100 for row in slots(memory, model, "2", X[:1])}
    assert visited == {0, 2, 3, 5, 6, 8}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_exception_in_the_middle_of_a_pass_leaves_no_slots(tmp_path, where, set_to_none):
    class Fails(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and where == "forward":
                raise RuntimeError("out of memory")
            if self.armed:
                x.register_hook(self._fail)
            return x

        def _fail(self, gradient: Tensor) -> None:
            raise RuntimeError("out of memory")

    model = fill(nn.Sequential(nn.Linear(5, 4), Fails(), nn.Linear(4, 2)).double())
    optimizer = sgd(model, momentum=0.9)
    caught = 0
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for step in range(8):
            model[1].armed = step % 3 == 2
            optimizer.zero_grad(set_to_none=set_to_none)
            try:
                model(X[:4]).square().mean().backward()
            except RuntimeError:
                caught += 1
                continue
            optimizer.step()
    memory = assert_exact(tmp_path / "m", model)
    assert caught == 2
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 24, "2": 24}


def test_gradients_taken_with_autograd_grad_leave_no_slots(tmp_path):
    """As in adversarial training: the gradient by the input passes through every layer."""
    model = network()
    optimizer = sgd(model)
    inputs, labels = examples()
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for step in range(4):
            x = inputs[chosen(step)].requires_grad_()
            (by_input,) = torch.autograd.grad(F.cross_entropy(model(x), labels[chosen(step)]), x)
            F.cross_entropy(model(x), labels[chosen(step)]).backward(inputs=[x])
            x = (x + 0.1 * by_input.sign()).detach()
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels[chosen(step)]).backward()
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
            optimizer.step()
    assert len(assert_exact(tmp_path / "m", model)) == 16


def test_a_second_backward_pass_through_one_graph_adds_its_own_slots(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for _ in range(4):
            optimizer.zero_grad()
            output = model(X[:4])
            output.square().mean().backward(retain_graph=True)
            output.sin().mean().backward()
            optimizer.step()
    assert len(assert_exact(tmp_path / "m", model)) == 32


def test_two_losses_over_one_forward_pass_are_one_slot_each(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for _ in range(4):
            optimizer.zero_grad()
            output = model(X[:4])
            (output.square().mean() + output.sin().mean()).backward()
            optimizer.step()
    assert len(assert_exact(tmp_path / "m", model)) == 16


def test_gradients_from_before_the_block_are_not_taken_for_slots(tmp_path):
    model = network()
    optimizer = sgd(model)
    model(X[:4]).sum().backward()
    with (  # noqa: PT031
        pytest.warns(sl.SpotlightsWarning, match="not set to zero"),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64"),
    ):
        model(X[:4]).square().sum().backward()
        optimizer.step()
    check = sl.open(tmp_path / "m").verify(model)["0"]
    assert check.unexplained_steps == [0]
    assert not check.ok
