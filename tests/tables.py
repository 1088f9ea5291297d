"""A small table for tests of subjects and commands: three numeric columns, three classes, a few wrong labels."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl

ROOT = Path(tempfile.mkdtemp(prefix="spotlights-tables-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
CLASSES = ["setosa", "versicolor", "virginica"]
WRONG = [10, 40, 70]


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [1.0, 2.0, 0.0]])
    labels = torch.arange(count) % 3
    return centres[labels] + 0.3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)), labels


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


@cache
def trained() -> tuple[Path, nn.Module]:
    """A recorded run with examples and labels."""
    inputs, labels = rows(90, seed=1)
    labels[WRONG] = (labels[WRONG] + 1) % 3
    torch.manual_seed(0)
    model, path = network(), ROOT / "table.memory"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sl.record(model, optimizer, path) as recorder:
        for _ in range(60):
            ids = torch.randperm(90)[:16]
            recorder.batch(example=ids, label=labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    return path, model.eval()


@cache
def regression() -> tuple[Path, nn.Module]:
    """A recorded run of which nothing is known but its steps."""
    inputs, _ = rows(40, seed=1)
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), ROOT / "number.memory"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sl.record(model, optimizer, path):
        for _ in range(20):
            chosen = torch.randperm(40)[:8]
            optimizer.zero_grad()
            F.mse_loss(model(inputs[chosen]), inputs[chosen].sum(dim=1, keepdim=True)).backward()
            optimizer.step()
    return path, model.eval()


SOURCE = """
import spotlights as sl
from tables import CLASSES, network, regression, rows, trained

inputs, labels = rows(12, seed=2)
subject = sl.Subject(
    "elsewhere.memory",
    model=lambda memory: memory.primal(network()),
    inputs=inputs,
    labels=labels,
    classes=CLASSES,
    show=lambda example: {"row": example},
    example_input=lambda example: rows(90, seed=1)[0][example],
)
untrained = sl.Subject("elsewhere.memory", model=network, inputs=inputs)


def number():
    return sl.Subject(regression()[0], model=regression()[1], inputs=inputs)


not_a_subject = 3
"""
