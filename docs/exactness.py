"""The tables of optimizers and layers: how far the memory is from the trained network, in float64. `make tables`.

For every optimizer and every kind of layer, a small random network is trained for 30 steps, with clipping and a
schedule, and recorded. Two differences are measured: of the weights (relative), and of initial part + contributions
from the output (absolute). The larger one counts. The numbers go to `exactness.json`, from there into `layers.md`,
and, one row per optimizer, into `optimizers.md`. A test compares the pages with the numbers, and measures some of
them again. A new kind of layer is one line in `LAYERS`.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl

HERE = Path(__file__).parent
RESULTS = HERE / "exactness.json"
PAGES = {HERE / "layers.md": "by layer", HERE / "optimizers.md": "by optimizer"}
EXACT = 1e-9

Results = dict[str, dict[str, float]]
"""The larger difference, by optimizer and layer."""


class _Tokens(nn.Module):
    """Numbers as tokens 0 to 4."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 2.5).clamp(0, 4).long()


class _Own(nn.Module):
    """Uses a parameter of its own by F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 4))
        return self.attention(x, x, x, need_weights=False)[0]


class _Tied(nn.Module):
    """An embedding and an output layer that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(_Tokens()(x[:, 0]))))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(8, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x, x[:, :3])


class _Recurrent(nn.Module):
    def __init__(self, make: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.states = make(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.states(x.unflatten(1, (4, 2)))[0]


def _ends_in(*layers: nn.Module) -> nn.Module:
    """Layers, and a linear one that maps their output to four classes."""
    body = nn.Sequential(*layers, nn.Tanh(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(body(torch.zeros(1, 8)).shape[1], 4))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)),
    "Conv1d": lambda: _ends_in(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3, padding=1, padding_mode="circular")),
    "Conv2d": lambda: _ends_in(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1, stride=2, groups=2)),
    "Conv3d": lambda: _ends_in(nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 2, 2, padding="same", dilation=2)),
    "ConvTranspose2d": lambda: _ends_in(nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2)),
    "Embedding": lambda: _ends_in(_Tokens(), nn.Embedding(5, 3)),
    "EmbeddingBag": lambda: _ends_in(_Tokens(), nn.EmbeddingBag(5, 3)),
    "Tied embedding": _Tied,
    "MultiheadAttention": lambda: _ends_in(_Attends()),
    "LSTM": lambda: _ends_in(_Recurrent(nn.LSTM)),
    "GRU": lambda: _ends_in(_Recurrent(nn.GRU)),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)),
    "RMSNorm": lambda: nn.Sequential(nn.Linear(8, 4), nn.RMSNorm(4)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4)),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(8, 4), nn.GroupNorm(2, 4)),
    "Bilinear": lambda: _ends_in(_Twice()),
    "F.linear": lambda: nn.Sequential(_Own()),
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


def difference(optimizer: str, layer: str, steps: int = 30) -> float:
    """The larger difference between memory and network."""
    sl.register_layer(sl.FunctionalLinear(_Own, {"matrix": None}))
    torch.manual_seed(0)
    model = LAYERS[layer]().double()
    make, options = OPTIMIZERS[optimizer]
    parameters = [p for p in model.parameters() if p.ndim == 2 or make is not torch.optim.Muon]
    trainer = make(parameters, **options)  # type: ignore[call-arg]
    inputs, labels = torch.randn(64, 8, dtype=torch.float64), torch.randint(4, (64,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memory"
        with sl.record(model, trainer, path, dtype="float64", segment_bytes=20_000):
            for _ in range(steps):
                some = torch.randint(64, (8,))
                trainer.zero_grad()
                F.cross_entropy(model(inputs[some]), labels[some]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                trainer.param_groups[0]["lr"] *= 0.98
                trainer.step()
        model.eval()
        memory = sl.open(path)
        worst = max(check.relative_error for check in memory.verify(_but_for_key_biases(model, memory)).values())
        spots = memory.attend(model, inputs[:4]).values()
        (last,) = (c for c in (spot.contributions(target=1) for spot in spots) if c.exact)
        output = last.initial + last.total()
        return max(worst, float((output - model(inputs[:4])[:, 1].detach()).abs().max()))


def _but_for_key_biases(model: nn.Module, memory: sl.Memory) -> nn.Module:
    """The network with the memory's own bias of attention's keys in it, so that all other parameters are compared.

    The softmax ignores such a bias, so its gradient is nothing but rounding (docs/layers.md).
    """
    compared, from_memory = copy.deepcopy(model), memory.primal(model)
    for theirs, ours in zip(compared.modules(), from_memory.modules(), strict=True):
        if isinstance(theirs, nn.MultiheadAttention) and isinstance(ours, nn.MultiheadAttention):
            keys = slice(theirs.embed_dim, 2 * theirs.embed_dim)
            theirs.in_proj_bias.data[keys] = ours.in_proj_bias.data[keys]
    return compared


def tables(results: Results) -> dict[str, str]:
    """The table of each page."""
    rows = [[optimizer, *_worst(row)] for optimizer, row in results.items()]
    by_optimizer = _table(["optimizer", "all layers", "largest difference"], rows)
    rows = [[layer, *(_number(row[layer]) for row in results.values())] for layer in LAYERS]
    return {"by optimizer": by_optimizer, "by layer": _table(["layer", *results], rows)}


def _worst(row: dict[str, float]) -> tuple[str, str]:
    layer, difference = max(row.items(), key=lambda item: item[1])
    return "exact" if difference <= EXACT else "approximate", f"{_number(difference)} ({layer})"


def _number(difference: float) -> str:
    """With a hyphen at which no line is broken."""
    return f"{difference:.0e}".replace("-", "\N{NON-BREAKING HYPHEN}")


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_table(page: str, table: str) -> str:
    """The page with the text between its two marks replaced by the table."""
    before, opening, rest = page.partition("<!-- exactness: written by `make tables` -->\n")
    _, closing, after = rest.partition("<!-- /exactness -->")
    assert opening, "the page has the first mark"
    assert closing, "the page has the second mark"
    return before + opening + table + "\n" + closing + after


if __name__ == "__main__":
    results: Results = {}
    for optimizer in OPTIMIZERS:
        results[optimizer] = {layer: float(f"{difference(optimizer, layer):.1e}") for layer in LAYERS}
        print(optimizer, results[optimizer], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for page, kind in PAGES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), tables(results)[kind]), encoding="utf-8")
