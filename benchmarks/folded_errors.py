"""Could a folded memory keep contributions too? What is left of them in low-rank summaries of each example's errors.

    python benchmarks/folded_errors.py

An example's contribution to `g·y` for a query x is `gᵀ S x` with `S = Σ value ⊗ key` over its visits. Trains the
digits network (64-100-10) by SGD for some epochs with a full memory, replaces S by summaries that a folded memory could
hold, and compares contributions to the network's answers: the relative error over all examples, and how many of the
true top 10 are found. `sums`: (Σ value) ⊗ (Σ key) / visits. `best r`: the best rank-r summary of S, which needs all
visits at once. `running r`: the best rank-r summary of the one before plus the next visit, which is all that can be had
while training runs. `numbers` is the size, relative to that of all visits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.memory.blocks import in_blocks
from spotlights.query.coefficients import StepNumbers, unroll
from spotlights_paper import datasets

Visits = tuple[Tensor, Tensor]
"""Values (visits, out) and keys (visits, in) of one example."""
Summary = Callable[[Visits], Visits]


def trained(path: Path, epochs: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    digits = datasets.load("digits")
    images, labels = digits.train.images.flatten(1) / 255, digits.train.labels
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with sl.record(model, optimizer, path) as recorder:
        for _ in range(epochs):
            for ids in torch.randperm(len(images)).split(32):
                recorder.batch(example=ids)
                optimizer.zero_grad()
                F.cross_entropy(model(images[ids]), labels[ids]).backward()
                optimizer.step()
    return model, digits.test.images.flatten(1) / 255


def visits_of(memory: sl.Memory, layer: str) -> list[Visits]:
    view = memory.view
    unrolled = unroll(view.reader, layer, view.until)
    assert isinstance(unrolled, StepNumbers)
    keys, values, examples = [], [], []
    for block in in_blocks(view.reader.layer(layer), view.selection, 4096):
        keys.append(torch.cat([rows.rows.double() for rows in block.keys()]))  # noqa: SIM118
        errors = torch.cat([rows.rows.double() for rows in block.errors()])
        values.append(errors * unrolled.weight[block.column("step")][:, None])
        examples.append(block.column("example"))
    key, value, example = torch.cat(keys), torch.cat(values), torch.cat(examples)
    return [(value[example == e], key[example == e]) for e in example.unique()]


def of_sums(visits: Visits) -> Visits:
    values, keys = visits
    return values.sum(dim=0, keepdim=True), keys.mean(dim=0, keepdim=True)


def best(rank: int) -> Summary:
    def summary(visits: Visits) -> Visits:
        values, keys = visits
        left, of_left = torch.linalg.qr(values.T)  # S = left (of_left of_rightᵀ) rightᵀ, and that is a small matrix
        right, of_right = torch.linalg.qr(keys.T)
        u, sizes, v = torch.linalg.svd(of_left @ of_right.T, full_matrices=False)
        return ((left @ u[:, :rank]) * sizes[:rank]).T, (right @ v[:rank].T).T

    return summary


def running(rank: int) -> Summary:
    def summary(visits: Visits) -> Visits:
        values, keys = visits[0][:0], visits[1][:0]
        for value, key in zip(*visits, strict=True):
            values, keys = best(rank)((torch.cat([values, value[None]]), torch.cat([keys, key[None]])))
        return values, keys

    return summary


def contributions(summaries: list[Visits], queries: Tensor, directions: Tensor) -> Tensor:
    return torch.stack([((directions @ v.T) * (queries @ k.T)).sum(dim=1) for v, k in summaries], dim=1)


def compare(memory: sl.Memory, model: nn.Module, inputs: Tensor, layer: str) -> None:
    attention = memory.attend(model, inputs)[layer]
    target = model(inputs).argmax(dim=1)
    directions = attention._forward.directions(layer, target).double()
    queries, visits = attention.queries.double(), visits_of(memory, layer)
    exact = contributions(visits, queries, directions)
    size = sum(v.numel() + k.numel() for v, k in visits)
    kinds: dict[str, Summary] = {"sums": of_sums}
    for rank in (1, 2, 4):
        kinds |= {f"best {rank}": best(rank), f"running {rank}": running(rank)}
    for name, summary in kinds.items():
        start = time.perf_counter()
        kept = [summary(each) for each in visits]
        spent = (time.perf_counter() - start) / sum(len(v) for v, _ in visits)
        found = contributions(kept, queries, directions)
        error = ((found - exact).norm(dim=1) / exact.norm(dim=1)).median()
        same = [
            len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found.topk(10)[1], exact.topk(10)[1], strict=True)
        ]
        numbers = sum(v.numel() + k.numel() for v, k in kept) / size
        print(
            f"layer {layer}  {name:9}  relative error {float(error):.3f}  top 10 found {sum(same) / len(same):4.1f}  "
            f"numbers {100 * numbers:3.0f} %  {1e6 * spent:4.0f} µs a visit"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--inputs", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        network, tests = trained(Path(folder) / "run.memory", options.epochs)
        for each in ("0", "2"):
            compare(sl.open(Path(folder) / "run.memory"), network, tests[: options.inputs], each)
