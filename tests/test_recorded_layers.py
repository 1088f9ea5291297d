"""What of a network is recorded, and what is not: frozen, chosen, of an unknown kind."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import spotlights as sl
from training import CLASSES, FEATURES, assert_exact, elsewhere, examples, fill, fit, network, sgd, train

X, _ = examples()


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_a_frozen_layer_has_no_slots_and_keeps_its_weights(tmp_path, in_optimizer):
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model if in_optimizer else model[2], weight_decay=0.1)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 5, recorder)
    memory = assert_exact(tmp_path / "m", model)
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 0, "2": 20}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_frozen_and_unfrozen_in_the_middle_of_a_run_stay_exact(tmp_path, set_to_none):
    model = network(FEATURES, 6, 6, CLASSES)
    model[0].requires_grad_(False)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    inputs, labels = examples()
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for step in range(12):
            model[0].requires_grad_(step >= 4)
            model[2].requires_grad_(not 4 <= step < 8)
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(inputs[:4]), labels[:4]).backward()
            optimizer.step()
    memory = assert_exact(tmp_path / "m", model)
    assert {name: layer.slots for name, layer in memory.layers.items()} == {"0": 32, "2": 32, "4": 48}


@pytest.mark.parametrize("in_optimizer", [True, False])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_of_a_layer_may_be_frozen(tmp_path, frozen, in_optimizer):
    model = network()
    getattr(model[0], frozen).requires_grad_(False)
    parameters = [p for p in model.parameters() if in_optimizer or p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 5, recorder)
    assert len(assert_exact(tmp_path / "m", model)) == 20


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_half_of_a_layer_may_be_frozen_in_the_middle_of_a_run(tmp_path, which, set_to_none):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    inputs, labels = examples()
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        for step in range(12):
            getattr(model[0], which).requires_grad_(not 4 <= step < 8)
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(inputs[:4]), labels[:4]).backward()
            optimizer.step()
    assert_exact(tmp_path / "m", model)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_parameters_that_the_optimizer_does_not_hold_do_not_disturb(tmp_path, trained):
    """They have gradients, which nobody uses and nobody sets to zero."""
    model = network()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if trained in n], lr=0.1)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 6, recorder)
    memory = assert_exact(tmp_path / "m", model)
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
    with sl.record(model, optimizer, tmp_path / "m", layers=layers, dtype="float64") as recorder:
        train(model, optimizer, 2, recorder)
    memory = assert_exact(tmp_path / "m", model)
    assert list(memory.layers) == found
    left_out = [f"{n}.{p}" for n in ("0", "2", "4") if n not in found for p in ("weight", "bias")]
    assert memory.info.as_dict()["not recorded"] == left_out


@pytest.mark.parametrize("layers", ["fc*", ["fc*"], ["0", "fc*"]])
def test_an_unknown_layer_is_an_error_that_lists_the_layers(tmp_path, layers):
    model = network()
    with pytest.raises(sl.UnknownNameError, match=r"fc\*.*The model has: 0, 2"):
        sl.record(model, sgd(model), tmp_path / "m", layers=layers)
    assert not (tmp_path / "m").exists()


def test_a_subclass_with_its_own_forward_is_recorded_by_its_gradients(tmp_path):
    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Renamed(nn.Linear):
        pass

    model = fill(nn.Sequential(Twice(5, 4), nn.Tanh(), Renamed(4, 2)).double())
    memory = fit(model, tmp_path / "m", X[:4])
    assert {name: layer.kind for name, layer in memory.layers.items()} == {
        "0.weight": "parameter",
        "0.bias": "parameter",
        "2": "linear",
    }
    assert memory.verify(model).ok


def test_a_parametrized_weight_is_recorded_by_the_gradients_of_its_factors(tmp_path):
    model = network()
    parametrizations.weight_norm(model[0])
    memory = fit(model, tmp_path / "m", X[:4])
    assert [name for name in memory.layers if name.startswith("0.")] == [
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    ]
    assert memory.info.as_dict()["not recorded"] == []
    assert memory.verify(model).ok


def test_a_model_without_layers_to_record_is_refused(tmp_path):
    model = nn.Sequential(nn.PReLU())
    with pytest.raises(sl.SettingError, match="linear"):
        sl.record(model, sgd(model), tmp_path / "m", errors=False)
    with sl.record(model, sgd(model), tmp_path / "m"):
        pass
    assert [layer.kind for layer in sl.open(tmp_path / "m").layers.values()] == ["parameter"]


def test_an_unknown_storage_type_is_refused(tmp_path):
    model = network()
    with pytest.raises(sl.SettingError, match=r"bfloat16.*float64, float32, float16, int8"):
        sl.record(model, sgd(model), tmp_path / "m", dtype="bfloat16")


def test_trained_parameters_that_are_not_recorded_are_listed_at_once_and_in_the_memory(tmp_path):
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.PReLU(6), nn.Linear(6, CLASSES)).double()
    optimizer, path = sgd(model), tmp_path / "run.memory"
    said = r"90\.4 % of 63 trained parameters are recorded; not recorded: 1\.weight"
    recorder = sl.record(model, optimizer, path, errors=False)
    with pytest.warns(sl.SpotlightsWarning, match=said):
        recorder.__enter__()
    train(model, optimizer, 2, recorder)
    recorder.__exit__(None, None, None)
    known = sl.open(path).info.as_dict()
    assert (known["recorded parameters"], known["trained parameters"]) == (57, 63)
    assert known["not recorded"] == ["1.weight"]
    shown = str(sl.open(path).info)
    assert "recorded: 90.4 % of 63 trained parameters" in shown
    assert "1.weight: not recorded because" in shown
    assert "0.weight" not in shown


def _where_warned(path: Path) -> list[str]:
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.PReLU(6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sl.record(model, sgd(model), path, errors=False):
            pass
    return [warning.filename for warning in caught]


def test_the_warning_points_at_the_users_line(tmp_path):
    # In a process without run-time type checks: these stand between the user's line and ours.
    assert elsewhere(_where_warned, tmp_path / "m") == [__file__]


def test_whoever_chooses_layers_is_not_warned_of_the_others(tmp_path, caplog):
    model = network()
    with caplog.at_level("INFO", logger="spotlights"), sl.record(model, sgd(model), tmp_path / "a", layers="2"):
        pass
    assert "36.8 % of 57 trained parameters are recorded; not recorded: 0.weight, 0.bias." in caplog.text
    with caplog.at_level("INFO", logger="spotlights"), sl.record(model, sgd(model), tmp_path / "b"):
        pass
    assert "100 % of 57 trained parameters are recorded." in caplog.text


def test_a_memory_of_keys_alone_answers_what_keys_can(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", errors=False) as recorder:
        train(model, optimizer, 4, recorder)
    memory = sl.open(tmp_path / "m")
    assert len(memory) == 16
    assert memory.attend(model, X[:2])["0"].scores().shape == (2, 16)
    with pytest.raises(sl.UnsupportedError, match="errors=False"):
        memory.verify(model)
