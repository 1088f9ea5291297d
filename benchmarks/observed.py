"""What a memory of an already trained network is worth: `sl.observe` beside the recorded run, against retraining.

    python benchmarks/observed.py mnist-mlp --retrains 20 --out runs/truth

The setting's network is trained with recording, and observed afterwards: at its final weights alone, and at six sets of
weights from the run (the final ones among them). Prints the linear datamodeling score of each memory's influence, and
how well suspects find the labels that were flipped in another run (docs/truth.md). What lies in the folder already is
not computed again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import spotlights as sl
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.mislabelled import SHARE, auc, flipped, precision_at
from spotlights_paper.experiments.truth.recorded import Recorded, influence, order_of, record
from spotlights_paper.experiments.truth.retraining import halves, retrained
from spotlights_paper.experiments.truth.scoring import lds
from spotlights_paper.experiments.truth.settings import Setting, epoch_orders, initial_network, prepare, setting_named


def weights_on_the_way(setting: Setting, data: Data, count: int) -> list[dict[str, Tensor]]:
    """The weights of the recorded run after so many equally long parts of it."""
    model = initial_network(setting, 0)
    optimizer, kept = setting.make_optimizer(model.parameters()), []
    ends = {round(setting.epochs * (part + 1) / count) for part in range(count)}
    for number, epoch in enumerate(epoch_orders(len(data.train), setting.epochs, 0), start=1):
        for batch in epoch.split(setting.batch):
            optimizer.zero_grad()
            data.loss(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
            optimizer.step()
        if number in ends:
            kept.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return kept


def observe(data: Data, recorded: Recorded, earlier: list[dict[str, Tensor]]) -> Recorded:
    place = {number: row for row, number in enumerate(data.train.ids.tolist())}

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        rows = [place[number] for number in ids.tolist()]
        return data.loss(model(data.train.inputs[rows]), data.train.labels[rows])

    folder = recorded.folder / f"observed-{len(earlier) + 1}"
    folder.mkdir(exist_ok=True)
    started = time.perf_counter()
    sl.observe(recorded.model, loss, data.train.ids, folder / "run.memory", checkpoints=earlier, overwrite=True)
    return Recorded(recorded.setting, folder, recorded.model, time.perf_counter() - started)


def memories(setting: Setting, data: Data, folder: Path, count: int) -> dict[str, Recorded]:
    recorded = record(setting, data, folder)
    earlier = weights_on_the_way(setting, data, count)
    final = recorded.model.state_dict()
    assert all(torch.equal(final[name], tensor) for name, tensor in earlier.pop().items()), "another run"
    return {
        "recorded": recorded,
        "observed, final weights": observe(data, recorded, []),
        f"observed, {count} sets of weights": observe(data, recorded, earlier),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting")
    parser.add_argument("--retrains", type=int, default=20)
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--rules", nargs="*", default=["both", "whitened", "joint"])
    parser.add_argument("--out", type=Path, default=Path("runs/truth"))
    options = parser.parse_args()
    setting = setting_named(options.setting)
    data, folder = prepare(setting), options.out / setting.name
    truth = retrained(folder, setting, data, kind="fresh", count=options.retrains)
    members = halves(options.retrains, len(data.train))
    for name, memory in memories(setting, data, folder, options.checkpoints).items():
        scores = {rule: lds(influence(data, memory, rule), members, truth) for rule in options.rules}
        said = ", ".join(f"{rule} {score}" for rule, score in scores.items())
        print(f"{setting.name}, {name} ({memory.seconds:.1f} s): LDS {said}", flush=True)
    if data.kind == "classes":
        labels, wrong = flipped(data.train.labels, SHARE, len(data.classes))
        mislabelled = replace(data, train=replace(data.train, labels=labels))
        for name, memory in memories(setting, mislabelled, folder / "mislabelled", options.checkpoints).items():
            suspects = memory.memory.suspects(len(data.train))
            found = suspects.scores[order_of(suspects.examples, data)]
            print(
                f"{SHARE:.0%} of the labels flipped, {name}: suspects' AUC {auc(found, wrong):.4f}, precision at 100 "
                f"{precision_at(found, wrong, 100):.2f}",
                flush=True,
            )
