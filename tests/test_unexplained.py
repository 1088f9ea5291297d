"""What slots do not explain is reported, by layer and step: gradients from elsewhere, weights that others changed."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl
from training import CLASSES, FEATURES, chosen, examples, fill, network, sgd, train

X, Y = examples()


def test_a_penalty_in_the_loss_is_reported_by_layer_and_step(tmp_path):
    model = network()
    optimizer = sgd(model)
    with (  # noqa: PT031
        pytest.warns(sl.SpotlightsWarning, match="step 4.*penalty"),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64"),
    ):
        for step in range(6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[:4]), Y[:4])
            if step >= 4:
                loss = loss + 0.1 * model[0].weight.square().sum()
            loss.backward()
            optimizer.step()
    verified = sl.open(tmp_path / "m").verify(model)
    assert verified["0"].unexplained_steps == [4, 5]
    assert 0.01 < verified["0"].worst_residual <= 1.0
    assert not verified["0"].ok
    assert verified["2"].unexplained_steps == []
    assert verified["2"].ok
    assert "do not explain at 2 steps (4, 5)" in " ".join(str(verified).split())
    assert sl.open(tmp_path / "m").layers["0"].unexplained_steps == 2


def test_a_weight_used_outside_its_module_is_reported(tmp_path):
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.fc(x)) + F.linear(x, self.fc.weight))

    model = fill(Elsewhere().double())
    optimizer = sgd(model)
    with (
        pytest.warns(sl.SpotlightsWarning, match="step 0.*outside its module"),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder,
    ):
        train(model, optimizer, 3, recorder)
    verified = sl.open(tmp_path / "m").verify(model)
    assert verified["fc"].unexplained_steps == [0, 1, 2]
    assert not verified["fc"].ok
    assert verified["out"].ok


class _Around(nn.Module):
    """Uses a module's parameters and never calls it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight.T + self.inner.bias


def test_a_layer_whose_module_is_never_called_is_warned_of_once_and_reported(tmp_path):
    model = fill(_Around(nn.Linear(4, 4)).double())
    optimizer = sgd(model)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with (
        warnings.catch_warnings(record=True) as caught,
        sl.record(model, optimizer, tmp_path / "m", dtype="float64", layers="inner"),
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert len(caught) == 1
    assert re.search("inner.*outside the module", str(caught[0].message))
    assert sl.open(tmp_path / "m").verify(model)["inner"].unexplained_steps == [0, 1, 2]


def test_gradients_that_are_never_set_to_zero_are_reported(tmp_path):
    model = network()
    optimizer = sgd(model)
    with (  # noqa: PT031
        pytest.warns(sl.SpotlightsWarning, match="step 1.*not set to zero"),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64"),
    ):
        for step in range(3):
            F.cross_entropy(model(X[chosen(step)]), Y[chosen(step)]).backward()
            optimizer.step()
    assert sl.open(tmp_path / "m").verify(model)["0"].unexplained_steps == [1, 2]


@pytest.mark.parametrize("how", ["load_state_dict", "in place", "data"])
def test_weights_changed_outside_the_optimizer_are_reported(tmp_path, how):
    model = network()
    optimizer = sgd(model)

    def change(step: int) -> None:
        if step != 3:
            return
        if how == "load_state_dict":
            model[0].load_state_dict({"weight": torch.ones(6, 5), "bias": torch.ones(6)})
        elif how == "in place":
            with torch.no_grad():
                model[0].weight.clamp_(-0.01, 0.01)
        else:
            model[0].weight.data.clamp_(-0.01, 0.01)

    with (
        pytest.warns(sl.SpotlightsWarning, match="step 4.*outside the optimizer"),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder,
    ):
        train(model, optimizer, 6, recorder, after_step=change)
    verified = sl.open(tmp_path / "m").verify(model)
    assert verified["0"].moved_steps == [4], "the change came before step 4"
    assert not verified["0"].ok
    assert verified["2"].moved_steps == []
    assert verified["2"].ok
    assert sl.open(tmp_path / "m").as_of(4).verify()["0"].ok, "up to the change the memory is exact"


def test_how_much_is_unexplained_is_said_of_the_gradients_not_of_weights_that_moved(tmp_path):
    model = network()
    optimizer = sgd(model)

    def disturb(step: int) -> None:
        with torch.no_grad():
            model[0].weight.grad += 1.0

    with (  # noqa: PT031
        pytest.warns(sl.SpotlightsWarning, match="step 0.*gradients that"),
        sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder,
    ):
        train(model, optimizer, 2, recorder, before_step=disturb)
        with torch.no_grad():
            model[0].weight += 1.0
        train(model, optimizer, range(2, 3), recorder)
    said = " ".join(str(sl.open(tmp_path / "m").verify(model)).split())
    assert re.search(r"0: gradients that .* do not explain at 2 steps \(0, 1\); at worst \d+% of the gradient", said)
    assert re.search(r"0: weights changed outside the optimizer at one step \(2\)(?!;)", said)
