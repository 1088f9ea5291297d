"""Exact replay against networks trained again with the weight of a random tenth of the examples at 0.

    python benchmarks/exact_replay.py mnist-mlp --epochs 5 --out runs/replay

The networks have the recorded run's initial weights and order. A setting of classes or of tokens, with SGD, Adam or
AdamW. Printed: the rank correlation of what replay and influence say with the truth, replay's slope, and its cost.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

import spotlights as sl
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.recorded import in_order, record, train_plainly
from spotlights_paper.experiments.truth.scoring import correlation
from spotlights_paper.experiments.truth.settings import Setting, epoch_orders, initial_network, prepare, setting_named

TENTHS, TESTS, AT_ONCE, EVERY = 40, 30, 20, 80


def losses(data: Data, output: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="none")
    return each.view(len(labels), -1).mean(dim=1)


def train_weighted(setting: Setting, data: Data, weights: Tensor, tests: Tensor, labels: Tensor) -> Tensor:
    """The numbers of interest of networks that differ in the weights of examples alone."""
    networks = [initial_network(setting, 0) for _ in weights]
    stacked, _ = stack_module_state(networks)
    parameters = {name: values.detach() for name, values in stacked.items()}

    def loss(network: dict[str, Tensor], inputs: Tensor, wanted: Tensor, some: Tensor) -> Tensor:
        return (losses(data, functional_call(networks[0], network, (inputs,)), wanted) * some).mean()

    gradients = vmap(grad(loss), in_dims=(0, None, None, 0))
    optimizer = setting.make_optimizer(list(parameters.values()))
    with torch.no_grad():
        for epoch in epoch_orders(len(data.train), setting.epochs, 0):
            for batch in epoch.split(setting.batch):
                found = gradients(parameters, data.train.inputs[batch], data.train.labels[batch], weights[:, batch])
                for name, parameter in parameters.items():
                    parameter.grad = found[name]
                optimizer.step()
        return vmap(lambda own: data.number(functional_call(networks[0], own, (tests,)), labels))(parameters)


def record_recipe(setting: Setting, data: Data, path: Path) -> sl.Memory:
    model = initial_network(setting, 0)
    optimizer = setting.make_optimizer(model.parameters())
    with sl.record(model, optimizer, path, keep="recipe", checkpoint_every=EVERY, overwrite=True) as recorder:
        for epoch in epoch_orders(len(data.train), setting.epochs, 0):
            for batch in epoch.split(setting.batch):
                recorder.batch(example=batch)
                optimizer.zero_grad()
                data.loss(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
                optimizer.step()

    def loss(network: nn.Module, ids: Tensor) -> Tensor:
        return losses(data, network(data.train.inputs[ids]), data.train.labels[ids])

    return sl.open(path, model=initial_network(setting, 0), recompute=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", help="as given to spotlights evaluate truth")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, help="another learning rate than the setting's")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"))
    options = parser.parse_args()
    setting = replace(setting_named(options.setting), epochs=options.epochs)
    setting = replace(setting, lr=options.lr or setting.lr)
    data = prepare(setting)
    tests, labels = data.test.inputs[:TESTS], data.test.labels[:TESTS]
    folder = options.out / f"{setting.name}-{setting.epochs}-{setting.lr:g}"
    model, plain = train_plainly(setting, data)
    with torch.no_grad():
        now = data.number(model(tests), labels).double()
    memory = record_recipe(setting, data, folder / "recipe.memory")
    started = time.perf_counter()
    found = memory.replay(tests, lambda output: data.number(output, labels))
    seconds = time.perf_counter() - started
    generator = torch.Generator().manual_seed(5)
    weights = torch.ones(TENTHS, len(data.train))
    for row in weights:
        row[torch.randperm(len(row), generator=generator)[: len(row) // 10]] = 0.0
    truth = [train_weighted(setting, data, some, tests, labels) for some in weights.split(AT_ONCE)]
    change = torch.cat(truth).double() - now
    left_out = 1 - weights.double()
    said = -left_out @ found.values.double().T
    recorded = record(setting, data, folder)
    spot = recorded.memory.attend(recorded.model, tests)
    influence = in_order(spot.influence(lambda output: data.number(output, labels)).totals("example"), data)
    print(f"replay: LDS {correlation(said, change)}, slope {float((said * change).sum() / said.square().sum()):.2f}")
    print(f"influence: LDS {correlation(-left_out @ influence.double().T, change)}")
    print(f"explained in two trainings of its own: {found.explained:.2f}; trusted: {found.trusted}")
    print(f"{seconds / plain:.1f} plain trainings; growth of the adjoint {float(found.growth.median()):.2f}")


if __name__ == "__main__":
    main()
