"""Backward passes: whenever slots are copied, the same memory is recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spotlights as sl
from training import fill

MODES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "at the end of the pass": lambda patch: None,
    "as early as possible": lambda patch: patch.setattr("spotlights.recording.hooks._MAX_BYTES", 0),
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    MODES[request.param](monkeypatch)
    return request.param


def momentum(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def explained(memory: sl.Memory, module: nn.Module) -> bool:
    verified = memory.verify(module)
    return verified.ok and not any(check.unexplained_steps for check in verified.values())


def inputs(step: int = 0) -> Tensor:
    return torch.randn(17, 16, 20, generator=torch.Generator().manual_seed(step))


def test_a_torch_that_does_not_tell_passes_apart_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("spotlights.torch_internals.at_end_of_pass", None)
    module = fill(Twice())
    with pytest.raises(sl.UnsupportedError, match=r"2\.6"):
        sl.record(module, momentum(module), tmp_path / "m")


def test_any_pass_is_recorded_whatever_it_reaches_and_however_often(mode: str, tmp_path: Path):
    module = fill(nn.LSTM(20, 64, 2))
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        for which in (0, 1):
            optimizer.zero_grad()
            module(inputs())[1][which].square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        output, (states, cells) = module(inputs(1))
        (output.sum() + states.sum() + cells.sum()).backward(retain_graph=True)
        (output.square().sum() - states.sum() + 2 * cells.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        output, _ = module(inputs(2))
        (gradient,) = torch.autograd.grad(output.square().sum(), output, retain_graph=True)
        (output * gradient).sum().backward()  # two passes, of which the first does not train the layer
        optimizer.step()
        optimizer.zero_grad()
        upper = [parameter for name, parameter in module.named_parameters() if name.endswith("l1")]
        module(inputs(3))[0].square().sum().backward(inputs=upper)
        optimizer.step()
    memory = sl.open(tmp_path / "m")
    assert explained(memory, module), str(memory.verify(module))
    assert memory.layers["lstm.l1"].slots == (2 + 2 + 1 + 1) * 17 * 16
    assert memory.layers["lstm.l0"].slots == (2 + 2 + 1) * 17 * 16


class Twice(nn.Module):
    """Uses one layer twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).relu()).relu())


def test_passes_that_leave_nothing_leave_nothing_in_any_mode(mode: str, tmp_path: Path):
    module = fill(Twice())
    optimizer = momentum(module)
    made: list[Any] = []
    with sl.record(module, optimizer, tmp_path / "m"):
        for step in range(4):
            x = inputs(step)[0].requires_grad_()
            module(x).square().mean().backward()  # thrown away below
            loss = module(x).square().mean()
            optimizer.zero_grad()
            made += torch.autograd.grad(loss, x, retain_graph=True)  # a pass that trains nothing
            loss.backward()
            (0.5 * module(x.detach())).square().mean().backward()  # accumulated
            optimizer.step()
    memory = sl.open(tmp_path / "m")
    assert explained(memory, module), str(memory.verify(module))
    assert memory.layers["layer"].slots == 4 * 2 * 2 * 16
    assert memory.layers["head"].slots == 4 * 2 * 16


def test_a_pass_that_raises_an_error_leaves_nothing_in_any_mode(mode: str, tmp_path: Path):
    module = fill(Twice())
    optimizer = momentum(module)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    with sl.record(module, optimizer, tmp_path / "m"):
        for step in range(2):
            optimizer.zero_grad()
            x = inputs(step)[0]
            hidden = module.layer(x)
            hidden.register_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                module.head(module.layer(hidden.relu()).relu()).sum().backward()
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    memory = sl.open(tmp_path / "m")
    assert explained(memory, module), str(memory.verify(module))
    assert memory.layers["layer"].slots == 2 * 2 * 16
