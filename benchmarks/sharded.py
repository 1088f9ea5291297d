"""What recording costs under `fully_shard`, beside `DistributedDataParallel`: two processes on this machine (gloo).

    python benchmarks/sharded.py

Four copies of a network train in turns, some steps each, in the same two processes: under DDP and under fully_shard,
each unrecorded and recorded. A recorded turn ends when all of it is on disk. Prints the median time of a step, and the
median over the turns of recorded / unrecorded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import spotlights as sl

RANKS, VOCABULARY, LENGTH, WIDTH = 2, 2000, 64, 256


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens)).mean(dim=1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "784-800-800-10, 64 images in each process, SGD": (perceptron, lambda: torch.rand(64, 784), 10),
    "transformer, 8 × 64 tokens in each process, AdamW": (
        LanguageModel,
        lambda: torch.randint(VOCABULARY, (8, LENGTH)),
        VOCABULARY,
    ),
}


class Training:
    """One of the four copies."""

    def __init__(self, network: str, folder: Path, *, sharded: bool, recorded: bool) -> None:
        torch.manual_seed(0)
        make, self._inputs, self._classes = NETWORKS[network]
        model = make()
        if sharded:
            mesh = init_device_mesh("cpu", (RANKS,))
            for part in (*model.children(), *getattr(model, "blocks", ())):
                if not isinstance(part, nn.Sequential):
                    fully_shard(part, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        else:
            self.model = DistributedDataParallel(model)
        kind = torch.optim.AdamW if network.startswith("transformer") else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.recorder = sl.record(self.model, self.optimizer, folder, dtype="float16").__enter__() if recorded else None

    def turn(self, steps: int) -> float:
        """Seconds of a step, when both processes are done."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            inputs = self._inputs()
            labels = torch.randint(self._classes, (len(inputs),))
            if self.recorder is not None:
                self.recorder.batch(example=torch.randint(60_000, (len(labels),)), label=labels)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        if self.recorder is not None:
            self.recorder.flush()
        dist.barrier()
        return (time.perf_counter() - start) / steps


def work(rank: int, folder: str, turns: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    for number, network in enumerate(NETWORKS):
        arms = {
            (sharded, recorded): Training(
                network, Path(folder) / f"{number}-{sharded}.memory", sharded=sharded, recorded=recorded
            )
            for sharded in (False, True)
            for recorded in (False, True)
        }
        rounds = [{arm: training.turn(steps) for arm, training in arms.items()} for _ in range(turns + 1)][1:]
        for training in arms.values():
            if training.recorder is not None:
                training.recorder.__exit__(None, None, None)
        if rank:
            continue
        print(f"{network} ({turns} turns of {steps} steps; load {os.getloadavg()[0]:.1f})")
        for sharded, name in ((False, "DDP"), (True, "fully_shard")):
            plain, recorded = (statistics.median(each[sharded, r] for each in rounds) for r in (False, True))
            ratio = statistics.median(each[sharded, True] / each[sharded, False] for each in rounds)
            print(f"  {name:12} {1e3 * plain:6.1f} ms, recorded {1e3 * recorded:6.1f} ms: {ratio:.2f} times")
        both = statistics.median(each[True, True] / each[False, True] for each in rounds)
        alone = statistics.median(each[True, False] / each[False, False] for each in rounds)
        print(f"  fully_shard / DDP: {alone:.2f} unrecorded, {both:.2f} recorded", flush=True)
    dist.destroy_process_group()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--turns", type=int, default=9)
    arguments.add_argument("--steps", type=int, default=40)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, options.turns, options.steps), nprocs=RANKS)


if __name__ == "__main__":
    main()
