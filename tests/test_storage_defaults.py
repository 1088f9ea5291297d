"""Without `dtype`, every layer is stored in the type of its own weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

import spotlights as sl
from training import fill


def trained(model: nn.Module, path: Path, **options: object) -> sl.Memory:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    with sl.record(model, optimizer, path, **options) as recorder:
        for step in range(12):
            optimizer.zero_grad()
            recorder.batch(example=torch.arange(8) + 8 * (step % 3))
            model(torch.randn(8, 6, generator=generator).to(dtype)).square().mean().backward()
            optimizer.step()
    return sl.open(path)


class Mixed(nn.Module):
    """A float64 head on a float32 network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh().double())


def network() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))


def storages(memory: sl.Memory) -> dict[str, str]:
    return {name: layer.storage for name, layer in memory.layers.items()}


def test_a_float64_network_is_stored_in_float64_and_verifies_to_1e_10(tmp_path: Path):
    model = network().double()
    memory = trained(model, tmp_path / "m")
    assert set(storages(memory).values()) == {"float64"}
    for check in memory.verify(model).values():
        assert check.relative_error <= 1e-10
        assert not check.unexplained_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_other_network_is_stored_in_float32_which_holds_its_numbers_exactly(dtype: torch.dtype, tmp_path: Path):
    model = network().to(dtype)
    memory = trained(model, tmp_path / "m")
    assert set(storages(memory).values()) == {"float32"}
    assert memory.verify(model).ok


def test_layers_of_one_network_may_differ(tmp_path: Path):
    model = fill(Mixed())
    memory = trained(model, tmp_path / "m")
    assert storages(memory) == {"body": "float32", "head": "float64"}
    verified = memory.verify(model)
    assert verified.ok
    assert verified["head"].relative_error <= 1e-10
    attention = memory.attend(model, torch.randn(2, 6))
    assert attention["head"].contributions(target=1).total().shape[0] == 2
    assert attention["body"].top(3, by="example")


def test_a_type_that_is_given_holds_for_all_layers(tmp_path: Path):
    memory = trained(fill(Mixed()), tmp_path / "m", dtype="float16")
    assert set(storages(memory).values()) == {"float16"}


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_answers_from_rounded_slots_add_up_to_their_rounding_and_are_not_called_exact(dtype: str, tmp_path: Path):
    model = network()
    parts = trained(model, tmp_path / "m", dtype=dtype).attend(model, torch.ones(1, 6))["2"].contributions(target=1)
    assert parts.adds_up
    assert not parts.exact
    assert f"stored as {dtype}" in (parts.note or "")


def test_running_sums_of_a_float64_network_are_stored_in_float64(tmp_path: Path):
    model = network().double()
    memory = trained(model, tmp_path / "m", fold="example")
    assert set(storages(memory).values()) == {"float64"}


def test_a_run_is_resumed_in_the_types_of_its_layers(tmp_path: Path):
    model = fill(Mixed())
    trained(model, tmp_path / "m")
    memory = trained(model, tmp_path / "m", resume=True)
    assert memory.verify(model).ok
    assert storages(memory) == {"body": "float32", "head": "float64"}
