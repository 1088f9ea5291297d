"""What a question costs: one query over 384,000 slots in three layers, against reading those bytes once.

    python benchmarks/query.py
    python benchmarks/query.py --mapped

Writes a memory of the size of the paper's MNIST run (3,000 steps of 128, 784-800-800-10; random numbers
in the place of activations), then measures in turns: the top 500 per class and the totals per class of one
query in all three layers, in one pass; and `sum` over the same mapped keys by the same number of threads. Prints
the median of the ratios and the largest memory of the process; then the same for a memory five times as large
(the same segments linked five times, so that the disk need not hold them). With --mapped: the same question in turns
with a reader that maps segments instead of reading them, which a file that shrinks would kill.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_turns import beside_reading, read_once, seconds
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.memory import layer_reader
from spotlights.memory.files import FileTensors
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
    manifest.pop("checksum", None)
    (target / "memory.json").write_text(json.dumps(manifest))


def ask_once(path: Path, model: nn.Module) -> Callable[[], None]:
    memory = sl.open(path)
    query = torch.randn(1, 784)

    def run() -> None:
        memory.attend(model, query).ask(AskTop(500, per="label"), AskTotals("label"))

    return run


class Mapped(FileTensors):
    """Tensors that are views of the mapped file."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if not hasattr(self, "_map"):
            storage, path = torch.UntypedStorage, f"{self._store}/{self._entry.file}"
            self._map = storage.from_file(path, False, self._entry.bytes)
        place = self.layout[name]
        return torch.empty(0, dtype=place.dtype).set_(self._map, place.start, place.shape)

    def rows(self, name: str, rows: Any, into: torch.Tensor) -> torch.Tensor:
        return self[name][rows]


def mapped(path: Path, model: nn.Module, questions: dict[str, Callable[..., object]], turns: int) -> None:
    """Each question of a reader that maps beside one that reads."""
    memories = [sl.open(path), sl.open(path)]

    def ask(kind: int, question: Callable[..., object]) -> None:
        layer_reader.FileTensors = Mapped if kind else FileTensors
        question(memories[kind], model)

    for layer in memories[1].view.reader.layers.values():
        layer.rows_at_once = layer_reader.ROWS  # as it was, with maps
    for name, question in questions.items():
        for kind in (0, 1):
            ask(kind, question)
        pairs = [tuple(seconds(partial(ask, kind, question)) for kind in (0, 1)) for _ in range(turns)]
        reading, mapping = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name}: reading {1e3 * reading:.0f} ms, mapping {1e3 * mapping:.0f} ms; median ratio {ratio:.2f}")


QUERY = torch.randn(1, 784, generator=torch.Generator().manual_seed(1))
QUESTIONS: dict[str, Callable[..., object]] = {
    "one query, top 500 and totals": lambda m, model: m.attend(model, QUERY).ask(
        AskTop(500, per="label"), AskTotals("label")
    ),
    "one of ten labels": lambda m, model: m.where(label=3).attend(model, QUERY)["2"].totals("label"),
    "one example": lambda m, model: m.where(example=7).attend(model, QUERY)["2"].totals("label"),
    "contributions": lambda m, model: m.attend(model, QUERY)["2"].contributions(target=3).totals("label"),
    "weights": lambda m, model: m.weights("0"),
}


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
    parser.add_argument("--mapped", action="store_true", help="beside a reader that maps files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        once, five = Path(folder) / "once.memory", Path(folder) / "five.memory"
        network = write_memory(once, options.steps)
        if options.mapped:
            mapped(once, network, QUESTIONS, options.turns)
            raise SystemExit
        measure("the paper's run", once, network, options.turns)
        link_five_times(once, five)
        measure("five times that", five, network, max(3, options.turns // 3))
