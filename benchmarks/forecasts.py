"""How often the intervals of forecasts hold, against networks retrained with fresh seeds.

    python benchmarks/forecasts.py diabetes friedman digits-mlp cancer --out runs/forecasts

A random tenth and a random half of the training examples are left out, twenty times each. For classes, a calibration on
the first half of the test inputs comes first, and forecasts are about the other half.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlights_paper.experiments.truth.data import Data, ExampleRows
from spotlights_paper.experiments.truth.recorded import record, train_plainly
from spotlights_paper.experiments.truth.retraining import Job, retrain
from spotlights_paper.experiments.truth.settings import Setting, prepare, setting_named

SHARES, GROUPS = (0.1, 0.5), 20


def retraining(setting: Setting, data: Data) -> Callable[[list[Any]], nn.Module]:
    """Trains on some examples, with another seed each time."""
    where = {example: place for place, example in enumerate(data.train.ids.tolist())}
    seeds = iter(range(50_000, 60_000))

    def train(examples: list[Any]) -> nn.Module:
        rows, every = torch.tensor(sorted(where[example] for example in examples)), data.train
        some = ExampleRows(every.inputs[rows], every.labels[rows], every.ids[rows])
        return train_plainly(setting, replace(data, train=some), next(seeds))[0]

    return train


def number_of(data: Data, labels: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: data.number(output, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="+", help="as given to spotlights evaluate truth")
    parser.add_argument("--out", type=Path, default=Path("runs/forecasts"))
    options = parser.parse_args()
    for name in options.settings:
        setting = setting_named(name)
        data = prepare(setting)
        recorded = record(setting, data, options.out / name)
        asked = slice(0, None)
        if data.kind == "classes":
            middle = len(data.test) // 2
            asked, known = slice(middle, None), slice(0, middle)
            made = recorded.memory.calibrate(
                retraining(setting, data),
                recorded.model,
                data.test.inputs[known],
                target=number_of(data, data.test.labels[known]),
            )
            print(made)
        spot = recorded.memory.attend(recorded.model, data.test.inputs[asked])
        target = number_of(data, data.test.labels[asked])
        count, generator = len(data.train), torch.Generator().manual_seed(7)
        whole = [Job(torch.arange(count), 29_000 + seed) for seed in range(GROUPS)]
        usual = retrain(setting, data, whole)[:, asked].double().mean(dim=0)
        for share in SHARES:
            left = count - round(share * count)
            orders = [torch.randperm(count, generator=generator) for _ in range(GROUPS)]
            jobs = [Job(order[:left].sort().values, 30_000 + number) for number, order in enumerate(orders)]
            truth = retrain(setting, data, jobs)[:, asked].double()
            said = [spot.forecast(target, without={"example": data.train.ids[o[left:]].tolist()}) for o in orders]
            pairs = list(zip(said, truth, strict=True))
            held = torch.stack([(one >= f.low) & (one <= f.high) for f, one in pairs]).double().mean()
            x = torch.stack([f.after - f.before for f in said]).flatten()
            y = (truth - usual).flatten()
            slope, alike = float(x @ y / (x @ x)), float(torch.corrcoef(torch.stack([x, y]))[0, 1])
            print(f"{name}, {share:.0%} left out: {held:.1%} within, slope {slope:.2f}, correlation {alike:.2f}")


if __name__ == "__main__":
    main()
