"""Wrong labels: how well suspects find them, beside cleanlab with out-of-fold predictions and beside the loss.

    pip install 'spotlights[peers]' scikit-learn
    python benchmarks/wrong_labels.py digits-mlp cancer passages --out runs/wrong-labels

Some labels are flipped: to any other class ("uniform"), or always to the next one ("class-dependent"). A run is
recorded on them, and the training examples are ranked. cleanlab gets the probabilities of five networks like the
recorded one, each trained on four fifths of the examples, for the fifth that it has not seen: five trainings instead of
one. The loss is that of the recorded network at the end of its training. Printed is the AUC: how often a flipped
example ranks before one that is not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.mislabelled import auc, flipped
from spotlights_paper.experiments.truth.recorded import order_of, record
from spotlights_paper.experiments.truth.retraining import Job, trained
from spotlights_paper.experiments.truth.settings import Setting, prepare, setting_named

SHARES, KINDS, FOLDS = (0.05, 0.1, 0.2), ("uniform", "class-dependent"), 5


def with_wrong_labels(data: Data, share: float, kind: str) -> tuple[Data, Tensor]:
    classes = len(data.classes)
    labels, wrong = flipped(data.train.labels, share, classes)
    if kind == "class-dependent":
        labels = torch.where(wrong, (data.train.labels + 1) % classes, data.train.labels)
    return replace(data, train=replace(data.train, labels=labels)), wrong


def out_of_fold(setting: Setting, data: Data) -> Tensor:
    """Probabilities for each training example by a network that has not seen it."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
    template, found = setting.network(), torch.zeros(len(data.train), len(data.classes))
    for number, fold in enumerate(order.chunk(FOLDS)):
        members = torch.ones(len(order), dtype=torch.bool).index_fill(0, fold, False).nonzero().flatten()
        stacked = next(trained(setting, data, [Job(members, 7000 + number)]))
        weights = {name: values[0] for name, values in stacked.items()}
        found[fold] = functional_call(template, weights, (data.train.inputs[fold],)).softmax(dim=1).detach()
    return found


def measure(name: str, share: float, kind: str, out: Path) -> dict[str, float]:
    from cleanlab.rank import get_label_quality_scores

    setting = setting_named(name)
    data, wrong = with_wrong_labels(prepare(setting), share, kind)
    recorded = record(setting, data, out / f"{name}-{share:g}-{kind}")
    suspects = recorded.memory.suspects(len(data.train))
    quality = get_label_quality_scores(data.train.labels.numpy(), out_of_fold(setting, data).double().numpy())
    with torch.no_grad():
        loss = F.cross_entropy(recorded.model(data.train.inputs), data.train.labels, reduction="none")
    return {
        "suspects": auc(suspects.scores[order_of(suspects.examples, data)], wrong),
        "cleanlab, out of fold": auc(-torch.from_numpy(quality), wrong),
        "loss at the end": auc(loss, wrong),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="+", help="of classes, as given to spotlights evaluate truth")
    parser.add_argument("--out", type=Path, default=Path("runs/wrong-labels"), help="the folder; goes on with it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.settings:
        for kind in KINDS:
            for share in SHARES:
                path = options.out / f"{name}-{share:g}-{kind}.json"
                if not path.exists():
                    path.write_text(json.dumps(measure(name, share, kind, options.out)))
                found = json.loads(path.read_text())
                numbers = " | ".join(f"{value:.3f}" for value in found.values())
                print(f"| {name} | {kind} | {share:.0%} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
