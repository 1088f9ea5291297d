"""The recorded run of a setting: the only training that the memory's own estimates need."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.experiments.truth.settings import Data, Setting, epoch_orders, initial_network, margins

MEMORY, MODEL, SECONDS = "run.memory", "model.safetensors", "seconds.txt"


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trained network and its memory."""

    folder: Path
    model: nn.Module
    seconds: float
    """Of training with recording."""

    @cached_property
    def memory(self) -> sl.Memory:
        return sl.open(self.folder / MEMORY)


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    if setting.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum)
    return torch.optim.Adam(model.parameters(), lr=setting.lr)


def train_plainly(setting: Setting, data: Data, seed: int = 0) -> tuple[nn.Module, float]:
    """The same training without recording, and its seconds."""
    model = initial_network(setting, seed)
    optimizer = optimizer_of(setting, model)
    started = time.perf_counter()
    for epoch in epoch_orders(len(data), setting.epochs, seed):
        for batch in epoch.split(setting.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs[batch]), data.labels[batch]).backward()
            optimizer.step()
    return model, time.perf_counter() - started


def record(setting: Setting, data: Data, folder: Path, seed: int = 0) -> Recorded:
    """Trains with recording, or opens what was recorded here before."""
    if not (folder / MODEL).exists():
        folder.mkdir(parents=True, exist_ok=True)
        model = initial_network(setting, seed)
        optimizer = optimizer_of(setting, model)
        started = time.perf_counter()
        with sl.record(model, optimizer, folder / MEMORY, dtype=setting.dtype, overwrite=True) as recorder:
            for epoch in epoch_orders(len(data), setting.epochs, seed):
                for batch in epoch.split(setting.batch):
                    recorder.batch(example=data.ids[batch], label=data.labels[batch])
                    optimizer.zero_grad()
                    F.cross_entropy(model(data.inputs[batch]), data.labels[batch]).backward()
                    optimizer.step()
        (folder / SECONDS).write_text(f"{time.perf_counter() - started:.2f}\n")
        save_file(model.state_dict(), folder / MODEL)
    model = initial_network(setting, seed)
    model.load_state_dict(load_file(folder / MODEL))
    return Recorded(folder, model, float((folder / SECONDS).read_text()))


def ask_about(data: Data, recorded: Recorded) -> sl.attention.Spotlights:
    """The attention of all test images."""
    return recorded.memory.attend(recorded.model, data.test_inputs)


def in_order(totals: sl.attention.Totals, data: Data) -> Float[Tensor, "test train"]:
    """Totals by example, in the order of the training images."""
    where = {example: index for index, example in enumerate(totals.groups)}
    return totals.values[:, [where[example] for example in data.ids.tolist()]]


def margin_of(data: Data) -> sl.attention.forward.Target:
    """The number of interest: how sure the network is of each test image's true class."""
    return lambda output: margins(output, data.test_labels)
