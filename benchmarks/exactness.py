"""The table of optimizers and layers: how far the memory is from the trained network, in float64.

    python benchmarks/exactness.py

For every optimizer and every kind of layer: a small random network, 30 steps with clipping and a schedule, recorded.
A cell is the larger of two differences: of the weights (relative), and of initial part + contributions from the output
(absolute). Prints a table in Markdown. A new kind of layer is one line in `LAYERS`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl


class _Tokens(nn.Module):
    """Numbers as tokens 0 to 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 2.5).clamp(0, 4).long()


def _ends_in(*layers: nn.Module) -> nn.Module:
    """Layers, and a linear one that makes classes of what they give."""
    body = nn.Sequential(*layers, nn.Tanh(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(body(torch.zeros(1, 8)).shape[1], 4))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)),
    "Conv1d": lambda: _ends_in(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3, padding=1, padding_mode="circular")),
    "Conv2d": lambda: _ends_in(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1, stride=2, groups=2)),
    "Conv3d": lambda: _ends_in(nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 2, 2, padding="same", dilation=2)),
    "Embedding": lambda: _ends_in(_Tokens(), nn.Embedding(5, 3)),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)),
    "RMSNorm": lambda: nn.Sequential(nn.Linear(8, 4), nn.RMSNorm(4)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4)),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(8, 4), nn.GroupNorm(2, 4)),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, coupled decay, AMSGrad": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
}


def difference(optimizer: str, layer: str) -> float:
    """How far memory and network are apart."""
    torch.manual_seed(0)
    model = LAYERS[layer]().double()
    make, options = OPTIMIZERS[optimizer]
    parameters = [p for p in model.parameters() if p.ndim == 2 or make is not torch.optim.Muon]
    trainer = make(parameters, **options)  # type: ignore[call-arg]
    inputs, labels = torch.randn(64, 8, dtype=torch.float64), torch.randint(4, (64,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memory"
        with sl.record(model, trainer, path, dtype="float64", segment_bytes=20_000):
            for _ in range(30):
                some = torch.randint(64, (8,))
                trainer.zero_grad()
                F.cross_entropy(model(inputs[some]), labels[some]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                trainer.param_groups[0]["lr"] *= 0.98
                trainer.step()
        model.eval()
        memory = sl.open(path)
        worst = max(check.relative_error for check in memory.verify(model).values())
        last = list(memory.layers)[-1]
        contributions = memory.attend(model, inputs[:4])[last].contributions(target=1)
        made = contributions.initial + contributions.total()
        return max(worst, float((made - model(inputs[:4])[:, 1].detach()).abs().max()))


def cell(optimizer: str, layer: str) -> str:
    found = difference(optimizer, layer)
    return f"exact ({found:.0e})" if found <= 1e-9 else f"to {found:.0e}"


if __name__ == "__main__":
    print(f"| optimizer | {' | '.join(LAYERS)} |\n| --- |{' --- |' * len(LAYERS)}")
    for name in OPTIMIZERS:
        print(f"| {name} | {' | '.join(cell(name, layer) for layer in LAYERS)} |", flush=True)
