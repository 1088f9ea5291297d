"""What is recorded, what is not, and that the user's run does not notice."""

import copy
import pickle
import random
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import spotlights as sl
from training import (
    CLASSES,
    FEATURES,
    assert_exact,
    chosen,
    distance,
    elsewhere,
    examples,
    fill,
    network,
    same,
    sgd,
    slots,
    state,
    train,
)

X, Y = examples()


def _memory(tmp_path: Path) -> Path:
    return tmp_path / "run.memory"


# -- the user's run does not notice ----------------------------------------------------------------


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
    plain, recorded = elsewhere(_twice, _memory(tmp_path), dtype, storage, dropout)
    assert recorded[0] == plain[0], "losses differ: a hook changed the forward pass"
    assert same(recorded[1], plain[1]), "weights differ: a hook changed a gradient or a parameter"
    assert same(recorded[2], plain[2]), "momentum differs: a hook changed the optimizer"
    assert recorded[3] == plain[3], "random numbers differ: recording drew from a global generator"


def test_model_and_optimizer_are_left_without_hooks(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path)) as recorder:
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
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        train(model, optimizer, 2, recorder)
        copied_model = copied(model)
        assert same(state(copied_model), state(model))
        copied_model(X).sum().backward()
        copied(optimizer)
        train(model, optimizer, range(2, 4), recorder)
    assert len(assert_exact(_memory(tmp_path), model)) == 16


def test_recording_goes_on_until_an_exception_leaves_the_block(tmp_path):
    model = network()
    optimizer = sgd(model)

    def interrupt(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder,
    ):
        train(model, optimizer, 10, recorder, before_step=interrupt)
    memory = assert_exact(_memory(tmp_path), model)
    assert memory.steps == 6


# -- linear layers of every shape --------------------------------------------------------------------


def _fit(model: nn.Module, path: Path, inputs: Tensor, steps: int = 5, **options) -> sl.Memory:
    """Trains towards zero on the same inputs, recorded in float64, and checks that the memory is exact."""
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    with sl.record(model, optimizer, path, dtype="float64", **options):
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return assert_exact(path, model, inputs)


@pytest.mark.parametrize("lead", [(4,), (4, 3), (2, 3, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear_layers_of_any_leading_shape_are_exact(tmp_path, lead, bias):
    model = fill(nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias)).double())
    inputs = torch.randn(*lead, 5, dtype=torch.float64)
    memory = _fit(model, _memory(tmp_path), inputs)
    assert memory.layers["2"].slots == 5 * int(np.prod(lead))
    assert memory.layers["2"].bias is bias


def test_a_model_that_is_one_linear_layer_is_exact(tmp_path):
    memory = _fit(fill(nn.Linear(5, 2).double()), _memory(tmp_path), X[:4])
    assert list(memory.layers) == ["linear"]


def test_a_layer_called_with_a_keyword_is_recorded(tmp_path):
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    assert len(_fit(fill(Keyword().double()), _memory(tmp_path), X[:4])) == 20


def test_a_layer_called_several_times_a_step_has_the_slots_of_each_call(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.fc(x))
            return x

    memory = _fit(fill(Recurrent().double()), _memory(tmp_path), X[:4])
    assert memory.layers["fc"].slots == 3 * 4 * 5


def test_a_module_shared_between_places_is_one_layer_everywhere(tmp_path):
    shared = nn.Linear(5, 5)
    model = fill(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(5, 2)).double())
    before = model(X[:4])
    memory = _fit(model, _memory(tmp_path), X[:4])
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 40, "4": 20}
    torch.testing.assert_close(memory.as_of(0).dual(model)(X[:4]), before)


@pytest.mark.parametrize("bias", ["none", "shared", "own"])
def test_weights_tied_between_two_layers_are_one_layer(tmp_path, bias):
    first, second = (nn.Linear(5, 5, bias=bias != "none") for _ in range(2))
    second.weight = first.weight
    if bias == "shared":
        second.bias = first.bias
    model = fill(nn.Sequential(first, nn.Tanh(), second).double())
    listed = pytest.warns(sl.SpotlightsWarning, match="0.bias, 2.bias") if bias == "own" else nullcontext()
    with listed:
        memory = _fit(model, _memory(tmp_path), X[:4])
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 40}
    if bias == "own":
        assert memory.info.as_dict()["not recorded"] == ["0.bias", "2.bias"]


def test_in_place_activations_do_not_disturb_what_is_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.LeakyReLU(inplace=True))
    _fit(fill(model.append(nn.Linear(6, 2)).double()), _memory(tmp_path), X[:4])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_records_each_slot_once(tmp_path, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            if not hidden.requires_grad:
                return torch.tanh(self.second(hidden))
            return checkpoint(lambda h: torch.tanh(self.second(h)), hidden, use_reentrant=reentrant)

    memory = _fit(fill(Checkpointed().double()), _memory(tmp_path), X[:4])
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"first": 20, "second": 20}


def test_empty_batches_are_allowed(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        for rows in (4, 0, 3):
            recorder.batch(example=torch.arange(rows), source="x")
            optimizer.zero_grad()
            model(X[:rows]).square().sum().backward()
            optimizer.step()
    assert len(assert_exact(_memory(tmp_path), model)) == 7


def test_a_layer_that_is_not_used_in_a_step_has_no_slots_there(tmp_path):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)
            self.go_left = True

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) if self.go_left else self.right(x)

    model = fill(Branches().double())
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for step in range(9):
            model.go_left = step % 3 == 0
            optimizer.zero_grad(set_to_none=step < 5)
            model(X[:4]).square().mean().backward()
            optimizer.step()
    memory = assert_exact(_memory(tmp_path), model)
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"left": 12, "right": 24}


def test_bfloat16_autocast_is_recorded_to_its_own_precision(tmp_path):
    model = network(dtype=torch.float32)
    optimizer = sgd(model)
    x, y = examples(torch.float32)
    with sl.record(model, optimizer, _memory(tmp_path)):
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    for check in sl.open(_memory(tmp_path)).verify(model).values():
        assert check.relative_error < 1e-2


def test_a_bfloat16_network_is_recorded_to_its_own_precision(tmp_path):
    model = network(dtype=torch.bfloat16)
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path)) as recorder:
        train(model, optimizer, 5, recorder)
    for check in sl.open(_memory(tmp_path)).verify(model).values():
        assert check.relative_error < 2e-2


# -- frozen, left out, not covered -------------------------------------------------------------------


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_a_frozen_layer_has_no_slots_and_keeps_its_weights(tmp_path, in_optimizer):
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model if in_optimizer else model[2], weight_decay=0.1)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        train(model, optimizer, 5, recorder)
    memory = assert_exact(_memory(tmp_path), model)
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 0, "2": 20}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_frozen_and_unfrozen_in_the_middle_of_a_run_stay_exact(tmp_path, set_to_none):
    model = network(FEATURES, 6, 6, CLASSES)
    model[0].requires_grad_(False)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    inputs, labels = examples()
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for step in range(12):
            model[0].requires_grad_(step >= 4)
            model[2].requires_grad_(not 4 <= step < 8)
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(inputs[:4]), labels[:4]).backward()
            optimizer.step()
    memory = assert_exact(_memory(tmp_path), model)
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 32, "2": 32, "4": 48}


@pytest.mark.parametrize("in_optimizer", [True, False])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_of_a_layer_may_be_frozen(tmp_path, frozen, in_optimizer):
    model = network()
    getattr(model[0], frozen).requires_grad_(False)
    parameters = [p for p in model.parameters() if in_optimizer or p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        train(model, optimizer, 5, recorder)
    assert len(assert_exact(_memory(tmp_path), model)) == 20


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_half_of_a_layer_may_be_frozen_in_the_middle_of_a_run(tmp_path, which, set_to_none):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    inputs, labels = examples()
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for step in range(12):
            getattr(model[0], which).requires_grad_(not 4 <= step < 8)
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(inputs[:4]), labels[:4]).backward()
            optimizer.step()
    assert_exact(_memory(tmp_path), model)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_parameters_that_the_optimizer_does_not_hold_do_not_disturb(tmp_path, trained):
    """They have gradients, which nobody uses and nobody sets to zero."""
    model = network()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if trained in n], lr=0.1)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        train(model, optimizer, 6, recorder)
    memory = assert_exact(_memory(tmp_path), model)
    assert memory.layers["0"].trained == [trained]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (None, ["0", "2", "4"]),
        ("2", ["2"]),
        ("[02]", ["0", "2"]),
        (["4", "0"], ["0", "4"]),
        ("*", ["0", "2", "4"]),
    ],
)
def test_layers_are_chosen_by_name_or_pattern(tmp_path, layers, found):
    model = network(FEATURES, 4, 4, CLASSES)
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path), layers=layers, dtype="float64") as recorder:
        train(model, optimizer, 2, recorder)
    memory = assert_exact(_memory(tmp_path), model)
    assert list(memory.layers) == found
    left_out = [f"{n}.{p}" for n in ("0", "2", "4") if n not in found for p in ("weight", "bias")]
    assert memory.info.as_dict()["not recorded"] == left_out


@pytest.mark.parametrize("layers", ["fc*", ["fc*"], ["0", "fc*"]])
def test_an_unknown_layer_is_an_error_that_lists_the_layers(tmp_path, layers):
    model = network()
    with pytest.raises(sl.UnknownNameError, match=r"fc\*.*The model has: 0, 2"):
        sl.record(model, sgd(model), _memory(tmp_path), layers=layers)
    assert not _memory(tmp_path).exists()


def test_a_subclass_with_its_own_forward_is_not_recorded(tmp_path):
    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Renamed(nn.Linear):
        pass

    model = fill(nn.Sequential(Twice(5, 4), nn.Tanh(), Renamed(4, 2)).double())
    with pytest.warns(sl.SpotlightsWarning, match="29.4 % of 34 trained parameters are recorded"):
        memory = _fit(model, _memory(tmp_path), X[:4])
    assert list(memory.layers) == ["2"]
    assert memory.info.as_dict()["not recorded"] == ["0.weight", "0.bias"]


def test_a_parametrized_weight_is_not_recorded_and_listed_as_such(tmp_path):
    model = network()
    parametrizations.weight_norm(model[0])
    with pytest.warns(sl.SpotlightsWarning, match="33.3 % of 63 trained parameters are recorded"):
        memory = _fit(model, _memory(tmp_path), X[:4])
    assert list(memory.layers) == ["2"]
    assert [name.split(".")[0] for name in memory.info.as_dict()["not recorded"]] == ["0"] * 3
    assert "not recorded: 0." in str(memory.info)


def test_a_model_without_layers_to_record_is_refused(tmp_path):
    model = nn.Sequential(nn.PReLU())
    with pytest.raises(sl.SettingError, match="linear"):
        sl.record(model, sgd(model), _memory(tmp_path))


def test_an_unknown_storage_type_is_refused(tmp_path):
    model = network()
    with pytest.raises(sl.SettingError, match=r"bfloat16.*float64, float32, float16, int8"):
        sl.record(model, sgd(model), _memory(tmp_path), dtype="bfloat16")


# -- what leaves no slots ----------------------------------------------------------------------------


def test_nothing_is_recorded_in_eval_mode_or_without_gradients(tmp_path):
    model = network()
    optimizer = sgd(model)
    inputs, labels = examples()
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
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
    assert len(assert_exact(_memory(tmp_path), model)) == 16


def test_training_in_eval_mode_is_warned_of_and_reported(tmp_path):
    model = network().eval()
    optimizer = sgd(model)
    with (
        sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder,
        pytest.warns(sl.SpotlightsWarning, match="eval mode") as caught,
    ):
        train(model, optimizer, 3, recorder)
    assert len(caught) == 1
    memory = sl.open(_memory(tmp_path))
    assert len(memory) == 0
    assert memory.verify(model)["0"].unexplained_steps == [0, 1, 2]
    assert not memory.verify(model).ok


def test_nothing_is_recorded_while_paused(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        train(model, optimizer, 3, recorder)
        with recorder.paused(), recorder.paused():
            train(model, optimizer, range(3, 5), recorder)
        train(model, optimizer, range(5, 8), recorder)
    memory = sl.open(_memory(tmp_path))
    assert {row["step"] for row in slots(memory, model, "0", X[:1])} == {0, 1, 2, 5, 6, 7}
    assert memory.verify(model)["2"].unexplained_steps == [3, 4], "a paused step must not pass for exact"


def test_a_paused_pass_beside_the_training_leaves_nothing(tmp_path):
    model = network()
    optimizer = sgd(model)

    def look(step: int) -> None:
        with recorder.paused():
            torch.autograd.grad(model(X).sum(), list(model.parameters()))

    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        train(model, optimizer, 3, recorder, before_step=look)
    assert len(assert_exact(_memory(tmp_path), model)) == 12


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_skipped_step_leaves_no_slots(tmp_path, set_to_none):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64") as recorder:
        for step in range(9):
            recorder.batch(example=torch.arange(4) + 100 * step)
            model(X[:4]).square().mean().backward()
            if step % 3 != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    memory = assert_exact(_memory(tmp_path), model)
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
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for step in range(8):
            model[1].armed = step % 3 == 2
            optimizer.zero_grad(set_to_none=set_to_none)
            try:
                model(X[:4]).square().mean().backward()
            except RuntimeError:
                caught += 1
                continue
            optimizer.step()
    memory = assert_exact(_memory(tmp_path), model)
    assert caught == 2
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 24, "2": 24}


def test_gradients_taken_with_autograd_grad_leave_no_slots(tmp_path):
    """As in adversarial training: the gradient by the input passes through every layer."""
    model = network()
    optimizer = sgd(model)
    inputs, labels = examples()
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for step in range(4):
            x = inputs[chosen(step)].requires_grad_()
            (by_input,) = torch.autograd.grad(F.cross_entropy(model(x), labels[chosen(step)]), x)
            F.cross_entropy(model(x), labels[chosen(step)]).backward(inputs=[x])
            x = (x + 0.1 * by_input.sign()).detach()
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels[chosen(step)]).backward()
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
            optimizer.step()
    assert len(assert_exact(_memory(tmp_path), model)) == 16


def test_a_second_backward_pass_through_one_graph_adds_its_own_slots(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for _ in range(4):
            optimizer.zero_grad()
            output = model(X[:4])
            output.square().mean().backward(retain_graph=True)
            output.sin().mean().backward()
            optimizer.step()
    assert len(assert_exact(_memory(tmp_path), model)) == 32


def test_two_losses_over_one_forward_pass_are_one_slot_each(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        for _ in range(4):
            optimizer.zero_grad()
            output = model(X[:4])
            (output.square().mean() + output.sin().mean()).backward()
            optimizer.step()
    assert len(assert_exact(_memory(tmp_path), model)) == 16


def test_gradients_from_before_the_block_are_not_taken_for_slots(tmp_path):
    model = network()
    optimizer = sgd(model)
    model(X[:4]).sum().backward()
    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64"):
        model(X[:4]).square().sum().backward()
        optimizer.step()
    check = sl.open(_memory(tmp_path)).verify(model)["0"]
    assert check.unexplained_steps == [0]
    assert not check.ok


# -- a reader beside the writer ---------------------------------------------------------------------------


def test_a_memory_can_be_read_while_it_is_recorded(tmp_path):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    seen = {0: state(model)}
    lengths = []

    def read(step: int) -> None:
        seen[step + 1] = state(model)
        memory = sl.open(_memory(tmp_path))
        lengths.append(memory.steps)
        assert memory.steps <= step + 1
        assert distance(memory.primal(model).state_dict(), seen[memory.steps]) < 1e-12
        assert memory.verify().ok

    with sl.record(model, optimizer, _memory(tmp_path), dtype="float64", segment_bytes=1500) as recorder:
        train(model, optimizer, 12, recorder, after_step=read)
        early = sl.open(_memory(tmp_path))
        recorder.flush()
        assert sl.open(_memory(tmp_path)).steps == 12, "flush() waits until every step is on disk"
        before = early.steps, len(early)
    assert (early.steps, len(early)) == before, "an opened memory stays as it was"
    assert len(set(lengths)) > 1, "no segment was committed during the run: is the writer in the background?"


def test_trained_parameters_that_are_not_recorded_are_listed_at_once_and_in_the_memory(tmp_path):
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.PReLU(6), nn.Linear(6, CLASSES)).double()
    optimizer, path = sgd(model), tmp_path / "run.memory"
    said = r"90\.4 % of 63 trained parameters are recorded; not recorded: 1\.weight"
    recorder = sl.record(model, optimizer, path)
    with pytest.warns(sl.SpotlightsWarning, match=said) as warned:
        recorder.__enter__()
    assert warned[0].filename == __file__, "the warning points at the user's line"
    train(model, optimizer, 2, recorder)
    recorder.__exit__(None, None, None)
    known = sl.open(path).info.as_dict()
    assert (known["recorded parameters"], known["trained parameters"]) == (57, 63)
    assert known["not recorded"] == ["1.weight"]
    assert "recorded: 90.4 % of 63 trained parameters" in str(sl.open(path).info)


def test_whoever_chooses_layers_is_not_warned_of_the_others(tmp_path, caplog):
    model = network()
    with caplog.at_level("INFO", logger="spotlights"), sl.record(model, sgd(model), tmp_path / "a", layers="2"):
        pass
    assert "36.8 % of 57 trained parameters are recorded; not recorded: 0.weight, 0.bias." in caplog.text
    with caplog.at_level("INFO", logger="spotlights"), sl.record(model, sgd(model), tmp_path / "b"):
        pass
    assert "100 % of 57 trained parameters are recorded." in caplog.text


def test_the_threads_of_torch_stay_as_they_were(tmp_path: Path):
    """The writer computes in its own thread alone: that must hold for no other one."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model = network()
        optimizer = sgd(model)
        with sl.record(model, optimizer, _memory(tmp_path)) as recorder:
            train(model, optimizer, 2, recorder)
            recorder.flush()
            started_later: list[int] = []
            thread = threading.Thread(target=lambda: started_later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert (torch.get_num_threads(), started_later) == (3, [3])
    finally:
        torch.set_num_threads(before)
