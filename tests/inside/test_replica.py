"""The replica's gradients are autograd's, whether they are kept as outer products or multiplied out."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl
from spotlights.dual_form import OuterSum
from spotlights.query.replica import FEW_ROWS, Replica
from training import fill, sgd

FEATURES, OUTPUTS = 5, 3


class InPlace(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 6), nn.ReLU(inplace=True), nn.Linear(6, OUTPUTS, bias=False))


class Twice(nn.Module):
    """Calls one layer twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(input=torch.tanh(self.inner(x))))


class Outside(nn.Module):
    """Uses a linear layer's weight past the layer, too, in a way that no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)) @ self.inner.weight)


class Rows(nn.Module):
    """Several rows for each input, more than are kept as outer products in the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(1, 4), nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        few = torch.tanh(self.inner(x.unsqueeze(-1)))
        return self.head(few.repeat(1, FEW_ROWS, 1)).mean(dim=1)


class _Doubled(torch.autograd.Function):
    """Has no rule for several derivatives at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(2 * gradient.numpy())


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Doubled.apply(torch.tanh(self.inner(x))))


@pytest.mark.filterwarnings("ignore::spotlights.errors.SpotlightsWarning")
@pytest.mark.parametrize(
    ("network", "as_outer_products"),
    [
        (InPlace, {"0", "2"}),
        (Twice, {"inner", "head"}),
        (Outside, {"head"}),
        (Rows, {"inner"}),
        (Custom, {"inner", "head"}),
    ],
)
def test_gradients_are_those_of_autograd(tmp_path: Path, network: type[nn.Module], as_outer_products: set[str]) -> None:
    model = fill(network().double())
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m"):
        F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    layers = sl.open(tmp_path / "m").view.reader.manifest.layers
    places = [(layer, name) for layer, entry in layers.items() for name in entry.trained]
    replica = Replica(model, x, layers, places, {"1": 1})
    seen = set[str]()
    for number, gradients in enumerate(replica.gradients()):
        parameters = [model.get_submodule(layer).get_parameter(name) for layer, name in places]
        expected = torch.autograd.grad(model(x)[number, 1], parameters)
        for (layer, _), gradient, own in zip(places, gradients, expected, strict=True):
            if isinstance(gradient, OuterSum):
                seen.add(layer)
                gradient = gradient.value
            torch.testing.assert_close(gradient, own, rtol=1e-12, atol=1e-14)
    assert seen == as_outer_products
