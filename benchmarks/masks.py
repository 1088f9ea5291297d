"""How far a mask takes the weights and the logits of a network out of the range that it trained to.

For each network and mask: the largest weight without the masked slots over the largest trained one (of the layer where
that is most), the same of the test logits, and the accuracy. `dual.py` warns from a ratio of the weights on that this
script helped to choose.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import spotlights as sl

TRAINED, STEPS, BATCH = 1500, (100, 400), 32
MASKED_CLASS = 3


def dense(*, norm: bool = False) -> nn.Module:
    norms = [nn.BatchNorm1d(50)] if norm else []
    return nn.Sequential(nn.Linear(64, 50), *norms, nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))


def convolutions() -> nn.Module:
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    second = [nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1024, 10))


NETWORKS = {"dense": dense, "dense with batch norm": lambda: dense(norm=True), "convolutions": convolutions}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Adam, lr 0.01": lambda p: torch.optim.Adam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def views(memory: sl.Memory) -> dict[str, sl.Memory]:
    return {
        "without an example": memory.without(example=5),
        "without a quarter": memory.without(example=list(range(0, TRAINED, 4))),
        "without half": memory.without(example=list(range(0, TRAINED, 2))),
        "without a class": memory.without(label=MASKED_CLASS),
        "a class alone": memory.where(label=MASKED_CLASS),
    }


def weights_ratio(made: nn.Module, trained: nn.Module) -> float:
    pairs = zip(made.parameters(), trained.parameters(), strict=True)
    return max(float(a.abs().max() / b.abs().max()) for a, b in pairs)


def measure(make: Callable[[], nn.Module], optimizer: str, steps: int, images: Tensor, labels: Tensor) -> None:
    torch.manual_seed(0)
    model = make()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    test, truth = images[TRAINED:], labels[TRAINED:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memory"
        with sl.record(model, stepping, path) as recorder:
            for _ in range(steps):
                batch = torch.randint(TRAINED, (BATCH,))
                recorder.batch(example=batch, label=labels[batch])
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                stepping.zero_grad()
                loss.backward()
                stepping.step()
        with torch.no_grad():
            usual = model.eval()(test)
            print(f"  {optimizer}, {steps} steps, accuracy {(usual.argmax(1) == truth).float().mean():.2f}")
            for mask, view in views(sl.open(path)).items():
                masked = view.primal(model)
                logits = masked(test)
                far, answers = weights_ratio(masked, model), float(logits.abs().max() / usual.abs().max())
                accuracy = (logits.argmax(1) == truth)[truth != MASKED_CLASS].float().mean()
                print(
                    f"    {mask:20}  weights × {far:5.1f}  logits × {answers:6.1f}  accuracy {accuracy:.2f}", flush=True
                )


def main() -> None:
    warnings.simplefilter("ignore", sl.SpotlightsWarning)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    for name, make in NETWORKS.items():
        print(name)
        for optimizer in OPTIMIZERS:
            for steps in STEPS:
                measure(make, optimizer, steps, images.float() / 16, labels)


if __name__ == "__main__":
    main()
