"""Linear layers, whatever their shape and however they are called: the memory is exact."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spotlights as sl
from training import assert_exact, examples, fill, fit, network, sgd, train

X, _ = examples()


@pytest.mark.parametrize("lead", [(4,), (4, 3), (2, 3, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear_layers_of_any_leading_shape_are_exact(tmp_path, lead, bias):
    model = fill(nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias)).double())
    inputs = torch.randn(*lead, 5, dtype=torch.float64)
    memory = fit(model, tmp_path / "m", inputs)
    assert memory.layers["2"].slots == 5 * int(np.prod(lead))
    assert memory.layers["2"].bias is bias


def test_a_model_that_is_one_linear_layer_is_exact(tmp_path):
    memory = fit(fill(nn.Linear(5, 2).double()), tmp_path / "m", X[:4])
    assert list(memory.layers) == ["linear"]


def test_a_layer_called_with_a_keyword_is_recorded(tmp_path):
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    assert len(fit(fill(Keyword().double()), tmp_path / "m", X[:4])) == 20


def test_a_layer_called_several_times_a_step_has_the_slots_of_each_call(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.fc(x))
            return x

    memory = fit(fill(Recurrent().double()), tmp_path / "m", X[:4])
    assert memory.layers["fc"].slots == 3 * 4 * 5


def test_a_module_shared_between_places_is_one_layer_everywhere(tmp_path):
    shared = nn.Linear(5, 5)
    model = fill(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(5, 2)).double())
    before = model(X[:4])
    memory = fit(model, tmp_path / "m", X[:4])
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 40, "4": 20}
    torch.testing.assert_close(memory.as_of(0).dual(model)(X[:4]), before)


@pytest.mark.parametrize("bias", ["none", "shared", "own"])
def test_weights_tied_between_two_layers_are_one_layer(tmp_path, bias):
    first, second = (nn.Linear(5, 5, bias=bias != "none") for _ in range(2))
    second.weight = first.weight
    if bias == "shared":
        second.bias = first.bias
    model = fill(nn.Sequential(first, nn.Tanh(), second).double())
    memory = fit(model, tmp_path / "m", X[:4])
    by_gradient = {"0.bias": 5, "2.bias": 5} if bias == "own" else {}  # a slot per step, of no example
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 40, **by_gradient}
    assert memory.info.as_dict()["not recorded"] == []


def test_in_place_activations_do_not_disturb_what_is_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.LeakyReLU(inplace=True))
    fit(fill(model.append(nn.Linear(6, 2)).double()), tmp_path / "m", X[:4])


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

    memory = fit(fill(Checkpointed().double()), tmp_path / "m", X[:4])
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"first": 20, "second": 20}


def test_empty_batches_are_allowed(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        for rows in (4, 0, 3):
            recorder.batch(example=torch.arange(rows), source="x")
            optimizer.zero_grad()
            model(X[:rows]).square().sum().backward()
            optimizer.step()
    assert len(assert_exact(tmp_path / "m", model)) == 7


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
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for step in range(9):
            model.go_left = step % 3 == 0
            optimizer.zero_grad(set_to_none=step < 5)
            model(X[:4]).square().mean().backward()
            optimizer.step()
    memory = assert_exact(tmp_path / "m", model)
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"left": 12, "right": 24}


def test_a_bfloat16_network_is_recorded_to_its_own_precision(tmp_path):
    model = network(dtype=torch.bfloat16)
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m") as recorder:
        train(model, optimizer, 5, recorder)
    for check in sl.open(tmp_path / "m").verify(model).values():
        assert check.relative_error < 2e-2
