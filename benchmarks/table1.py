"""Table 1's totals, our way against the straightforward way, side by side.

    spotlights run mnist-single --preset table1
    python benchmarks/table1.py runs/mnist-single-table1-0

Ours: `attention.totals("label", absolute=True)` for all 10,000 test images and all slots, layer by layer. The
straightforward way: for each step's batch of keys a matrix product with all queries, then |·|, then sums per
class. It is timed on some steps, spread evenly over the run, and scaled to all of them (every step costs the
same); on these very steps the answers are compared. Both use the same threads and the same float32 numbers.
The keys of the straightforward way lie ready in main memory, ours come from the memory on disk.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import spotlights as sl
from spotlights.memory.blocks import in_blocks
from spotlights_paper.experiments.images import prepare
from spotlights_paper.experiments.training import mlp

CLASSES = 10


def straightforward(queries: Tensor, keys: Tensor, labels: Tensor, batch: int) -> tuple[Tensor, float]:
    """Totals of |score| per class, step by step, and how long it took."""
    totals = torch.zeros(len(queries), CLASSES)
    start = time.perf_counter()
    for first in range(0, len(keys), batch):
        scores = (queries @ keys[first : first + batch].T).abs()
        totals.index_add_(1, labels[first : first + batch], scores)
    return totals, time.perf_counter() - start


def keys_of(memory: sl.Memory, layer: str, steps: range) -> tuple[Tensor, Tensor]:
    """The keys and labels of some steps, as they were recorded."""
    view = memory.where(step=steps)
    info = memory.layers[layer]
    reader = view._view.reader.layer(layer)
    rows, labels = [], []
    for block in in_blocks(reader, view._view.selection, 1 << 16):
        part = torch.empty(len(block), info.in_features)
        for keys in block.keys():  # noqa: SIM118
            part[keys.place] = keys.rows
        rows.append(part)
        labels.append(block.column("label").clone())
    return torch.cat(rows), torch.cat(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run of mnist-single that kept its memory")
    parser.add_argument("--steps", type=int, default=50, help="steps that the straightforward way is timed on")
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    options = parser.parse_args()

    memory = sl.open(options.run / "run.memory")
    weights = load_file(options.run / "model.safetensors")
    sizes = [weights["layers.0.weight"].shape[1]] + [len(weights[f"layers.{i}.bias"]) for i in range(3)]
    model = mlp(sizes)
    model.load_state_dict(weights)
    images = prepare("mnist").test.inputs[: options.images]
    every = max(memory.steps // options.steps, 1)
    chosen = range(0, memory.steps, every)
    scale = memory.steps / len(chosen)
    print(
        f"{len(images):,} test images, {len(memory):,} slots, {torch.get_num_threads()} threads; the "
        f"straightforward way on every {every}th step ({len(chosen)} of {memory.steps:,}), times {scale:g}"
    )
    spot = memory.attend(model, images)
    some = memory.where(step=chosen).attend(model, images)
    ours_all = theirs_all = 0.0
    for layer, attention in spot.items():
        start = time.perf_counter()
        attention.totals("label", absolute=True)
        ours = time.perf_counter() - start
        keys, labels = keys_of(memory, layer, chosen)
        batch = len(keys) // len(chosen)
        expected, took = straightforward(attention.queries, keys, labels, batch)
        theirs = took * scale
        found = some[layer].totals("label", absolute=True).values
        error = float(((found - expected) / expected).abs().max())
        ours_all, theirs_all = ours_all + ours, theirs_all + theirs
        print(
            f"{layer}: ours {ours:7.1f} s, straightforward {theirs:8.1f} s, {theirs / ours:6.1f} times; "
            f"largest relative difference on the compared steps {error:.1e}"
        )
        assert error < 1e-4, "the two ways must agree"
    times = theirs_all / ours_all
    print(f"all:      ours {ours_all:7.1f} s, straightforward {theirs_all:8.1f} s, {times:6.1f} times")


if __name__ == "__main__":
    main()
