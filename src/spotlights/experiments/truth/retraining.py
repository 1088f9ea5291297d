"""Training many small networks at once: the truth that estimates are compared with.

The networks share each step's arithmetic (`torch.func.vmap` over stacked parameters), so a hundred take
minutes on two cores. Each has its own examples, initial weights and order. That it gives what training them
one after the other gives is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from spotlights.errors import SettingError
from spotlights.experiments.truth.settings import Data, Setting, epoch_orders, initial_network, margins

AT_ONCE = 20
"""Networks trained together: so few that their parameters stay in the processor's cache."""


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

    def answer(held: dict[str, Tensor]) -> Tensor:
        return margins(functional_call(template, held, (data.test_inputs,)), data.test_labels)

    with torch.no_grad():
        return torch.cat([vmap(answer)(parameters) for parameters in trained(setting, data, jobs)])


def trained(setting: Setting, data: Data, jobs: Sequence[Job]) -> Iterator[dict[str, Tensor]]:
    """The stacked parameters of every job's network, some at a time."""
    if len({len(job.members) for job in jobs}) > 1:
        raise SettingError("Networks that are trained at once need equally many examples each.")
    for start in range(0, len(jobs), AT_ONCE):
        yield _together(setting, data, jobs[start : start + AT_ONCE])


def _together(setting: Setting, data: Data, jobs: Sequence[Job]) -> dict[str, Tensor]:
    networks = [initial_network(setting, job.seed) for job in jobs]
    template = networks[0]
    stacked, _ = stack_module_state(networks)
    parameters = {name: held.detach() for name, held in stacked.items()}

    def loss(held: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(template, held, (inputs,)), labels)

    gradients = vmap(grad(loss))
    step = _optimizer(setting, parameters)
    orders = torch.stack([job.epochs(setting.epochs) for job in jobs])
    with torch.no_grad():
        for epoch in orders.unbind(1):
            for batch in epoch.split(setting.batch, dim=1):
                step(gradients(parameters, data.inputs[batch], data.labels[batch]))
    return parameters


def _optimizer(setting: Setting, parameters: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """torch's SGD with momentum, or Adam, on stacked parameters: both work on each number by itself."""
    held = list(parameters.values())
    if setting.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(held, lr=setting.lr, momentum=setting.momentum)
    else:
        optimizer = torch.optim.Adam(held, lr=setting.lr)

    def step(gradients: dict[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()

    return step
