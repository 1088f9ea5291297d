"""The settings in which answers are compared with retraining, and which of them were used for choosing something.

`mnist-mlp` is the one of the dattri benchmark (first 5,000 training and 500 test images), on which λ was
chosen, on one half of its tests and subsets. That influence leaves out Adam's preconditioner was chosen on
`mnist-mlp-adam`; what was seen on `mnist-cnn` is told in docs/truth.md. Nothing was chosen on the others. In the
convolutional ones whatever the recorder covers is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spotlights.errors import UnknownNameError
from spotlights_paper.datasets import load
from spotlights_paper.experiments.images import Prepared, normalised
from spotlights_paper.experiments.training import mlp


class SmallCNN(nn.Module):
    """Two convolutions that halve the image each, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.hidden = nn.Linear(16 * 7 * 7, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, inputs: Float[Tensor, "batch 784"]) -> Float[Tensor, "batch 10"]:
        maps = self.first(inputs.reshape(-1, 1, 28, 28)).relu()
        maps = self.second(maps).relu()
        return self.last(self.hidden(maps.flatten(1)).relu())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, on what, and how."""

    name: str
    data: str
    network: Callable[[], nn.Module]
    train_images: int = 5000
    test_images: int = 500
    optimizer: str = "sgd"
    """"sgd" or "adam"."""
    lr: float = 0.01
    momentum: float = 0.9
    """Of SGD."""
    batch: int = 64
    epochs: int = 50
    dtype: str = "float32"
    """How keys and errors are stored; float32 is exact here."""

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)
        return torch.optim.Adam(parameters, lr=self.lr)


def _mnist_mlp() -> nn.Module:
    return mlp((784, 128, 64, 10))


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(name="mnist-mlp", data="mnist", network=_mnist_mlp),
        Setting(name="fashion-mlp", data="fashion-mnist", network=_mnist_mlp),
        Setting(name="mnist-cnn-sgd", data="mnist", network=SmallCNN, epochs=20),
        Setting(name="mnist-cnn", data="mnist", network=SmallCNN, optimizer="adam", lr=1e-3, epochs=15),
        Setting(name="mnist-mlp-adam", data="mnist", network=_mnist_mlp, optimizer="adam", lr=1e-3, epochs=15),
    )
}


def setting_named(name: str, *, quick: bool = False) -> Setting:
    """A setting; `quick` makes it small enough for a test, and meaningless."""
    if name not in SETTINGS:
        raise UnknownNameError(f'No setting "{name}". There are: {", ".join(SETTINGS)}.')
    setting = SETTINGS[name]
    return replace(setting, train_images=200, test_images=20, epochs=3) if quick else setting


def prepare(setting: Setting) -> Prepared:
    """The first images of both splits, normalised by the training images that are used."""
    return normalised(load(setting.data), torch.arange(setting.train_images), setting.test_images)


def initial_network(setting: Setting, seed: int) -> nn.Module:
    """A fresh network; the same one for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return setting.network()


def epoch_orders(count: int, epochs: int, seed: int) -> Int64[Tensor, "epochs count"]:
    """The order of the examples in each epoch; the same one for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator) for _ in range(epochs)])


def margins(output: Float[Tensor, "... classes"], labels: Int64[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The margin of the true class: its logit against all the others together, `log p/(1−p)`."""
    chosen = labels[..., None].expand(*output.shape[:-1], 1)
    others = output.scatter(-1, chosen, float("-inf"))
    return output.gather(-1, chosen)[..., 0] - others.logsumexp(dim=-1)
