"""Networks retrained on random halves of the training examples: the truth that estimates are compared with.

Many small networks are trained at once (`torch.func.vmap` over stacked parameters), so a hundred take minutes on two
cores. Each has its own examples, initial weights and order; a test compares the result with training them one by one.

There are three kinds of retraining: `fresh` (initial weights and order of each network's own, as a user who retrains
would have), `again` (the same halves with other seeds: how much of the truth is noise), and `same` (initial weights and
order of the recorded run). Margins are kept on disk, some networks at a time, and are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from spotlights.errors import SettingError
from spotlights_paper.experiments.progress import track
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.settings import Setting, epoch_orders, initial_network

_FIRST_SEED = {"fresh": 1000, "again": 5000, "same": 0}
"""0 is the recorded run's."""


@dataclass(frozen=True, eq=False)
class Job:
    """One network to train."""

    members: Int64[Tensor, "members"]
    """Positions of its training examples, ascending."""
    seed: int
    """Of its initial weights and of the order of its examples."""
    order: Int64[Tensor, "epochs count"] | None = None
    """The order in which all examples would come; those that are not members are skipped. None: the seed's own."""

    def epochs(self, count: int) -> Int64[Tensor, "epochs members"]:
        if self.order is None:
            return self.members[epoch_orders(len(self.members), count, self.seed)]
        inside = torch.zeros(self.order.shape[1], dtype=torch.bool)
        inside[self.members] = True
        return torch.stack([epoch[inside[epoch]] for epoch in self.order[:count]])


def retrain(setting: Setting, data: Data, jobs: Sequence[Job]) -> Float[Tensor, "jobs test"]:
    """Trains every job's network, some at once; returns its margin on each test image."""
    template = setting.network()

    def answer(parameters: dict[str, Tensor]) -> Tensor:
        return data.number(functional_call(template, parameters, (data.test.inputs,)), data.test.labels)

    with torch.no_grad():
        return torch.cat([vmap(answer)(parameters) for parameters in trained(setting, data, jobs)])


def trained(setting: Setting, data: Data, jobs: Sequence[Job]) -> Iterator[dict[str, Tensor]]:
    """The stacked parameters of every job's network, some at a time."""
    if len({len(job.members) for job in jobs}) > 1:
        raise SettingError("Networks that are trained at once need equally many examples each.")
    for start in range(0, len(jobs), setting.at_once):
        yield _together(setting, data, jobs[start : start + setting.at_once])


def _together(setting: Setting, data: Data, jobs: Sequence[Job]) -> dict[str, Tensor]:
    networks = [initial_network(setting, job.seed) for job in jobs]
    template = networks[0]
    stacked, _ = stack_module_state(networks)
    parameters = {name: values.detach() for name, values in stacked.items()}

    def loss(network: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return data.loss(functional_call(template, network, (inputs,)), labels)

    gradients = vmap(grad(loss))
    optimizer = setting.make_optimizer(list(parameters.values()))  # SGD and Adam treat each number by itself
    orders = torch.stack([job.epochs(setting.epochs) for job in jobs])
    with torch.no_grad():
        for epoch in orders.unbind(1):
            for batch in epoch.split(setting.batch, dim=1):
                found = gradients(parameters, data.train.inputs[batch], data.train.labels[batch])
                for name, parameter in parameters.items():
                    parameter.grad = found[name]
                optimizer.step()
    return parameters


# -- halves -----------------------------------------------------------------------------------


def halves(count: int, examples: int) -> Bool[Tensor, "subsets examples"]:
    """Random halves of the training examples; the first ones are the same however many are asked for."""
    generator = torch.Generator().manual_seed(0)
    members = torch.zeros(count, examples, dtype=torch.bool)
    for row in members:
        row[torch.randperm(examples, generator=generator)[: examples // 2]] = True
    return members


def retrained(folder: Path, setting: Setting, data: Data, *, kind: str, count: int) -> Float[Tensor, "subsets test"]:
    """Margins on the test images, for networks trained on `count` halves."""
    members = [row.nonzero().flatten() for row in halves(count, len(data.train))]
    first = _FIRST_SEED[kind]
    if kind == "same":
        order = epoch_orders(len(data.train), setting.epochs, first)
        jobs = [Job(rows, first, order) for rows in members]
    else:
        jobs = [Job(rows, first + index) for index, rows in enumerate(members)]
    return kept_margins(folder / "retrained" / kind, setting, data, jobs)


def kept_margins(
    path: Path, setting: Setting, data: Data, jobs: Sequence[Job], tests: Int64[Tensor, "jobs"] | None = None
) -> Float[Tensor, "jobs ..."]:
    """The margins of every job's network, or only its margin on one test image of its own.

    Kept in files that begin with the path, some networks in each. What lies there is not computed again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts, size = [], setting.at_once
    for start in track(range(0, len(jobs), size), -(-len(jobs) // size), f"retraining ({path.name})"):
        some = jobs[start : start + size]
        file = path.with_name(f"{path.name}-{start:03d}-{start + len(some):03d}.npy")
        if not file.exists():
            margin = retrain(setting, data, some)
            if tests is not None:
                margin = margin.gather(1, tests[start : start + size, None])[:, 0]
            np.save(file, margin.numpy())
        parts.append(torch.from_numpy(np.load(file)))
    return torch.cat(parts)
