"""What a question costs: one query over 384,000 slots in three layers, against reading those bytes once.

    python benchmarks/query.py

Writes a memory of the size of the paper's MNIST run (3,000 steps of 128, 784-800-800-10; random numbers
in the place of activations), then measures in turns: the top 500 per class and the totals per class of one
query in all three layers, in one pass; and `sum` over the same mapped keys by the same number of threads. Prints
the median of the ratios and the largest memory of the process; then the same for a memory five times as large
(the same segments linked five times, so that the disk need not hold them).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from in_turns import beside_reading, read_once, seconds
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.query import AskTop, AskTotals

BATCH, EXAMPLES = 128, 40_053


def write_memory(path: Path, steps: int) -> nn.Module:
    """Records a run in which a large learning rate replaces real data: only the sizes matter here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    images, labels = torch.randn(EXAMPLES, 784), torch.randint(10, (EXAMPLES,))
    with sl.record(model, optimizer, path) as recorder:
        for _ in range(steps):
            ids = torch.randint(EXAMPLES, (BATCH,))
            recorder.batch(example=ids, label=labels[ids])
            loss = F.cross_entropy(model(images[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def link_five_times(source: Path, target: Path) -> None:
    manifest = json.loads((source / "memory.json").read_text())
    (target / "segments").mkdir(parents=True)
    os.link(source / "initial.safetensors", target / "initial.safetensors")
    steps, segments = manifest["segments"][-1]["end_step"], []
    for copy in range(5):
        for segment in manifest["segments"]:
            name = f"segments/{len(segments):06d}-rank0.safetensors"
            os.link(source / segment["file"], target / name)
            shift = copy * steps
            moved = {"first_step": segment["first_step"] + shift, "end_step": segment["end_step"] + shift}
            segments.append({**segment, **moved, "file": name})
    manifest |= {"segments": segments, "final": None}
    (target / "memory.json").write_text(json.dumps(manifest))


def ask_once(path: Path, model: nn.Module) -> Callable[[], None]:
    memory = sl.open(path)
    query = torch.randn(1, 784)

    def run() -> None:
        memory.attend(model, query).ask(AskTop(500, per="label"), AskTotals("label"))

    return run


def measure(name: str, path: Path, model: nn.Module, turns: int) -> None:
    read, ask = read_once(path), ask_once(path, model)
    read()
    ask()
    pairs = [(seconds(read), seconds(ask)) for _ in range(turns)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}: {len(sl.open(path)):,} slots x 3 layers: one query, all layers, top 500 per class and totals "
        f"{beside_reading(pairs)}; largest memory so far {peak:,.0f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dir", default=".", help="a directory on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        once, five = Path(folder) / "once.memory", Path(folder) / "five.memory"
        network = write_memory(once, options.steps)
        measure("the paper's run", once, network, options.turns)
        link_five_times(once, five)
        measure("five times that", five, network, max(3, options.turns // 3))
