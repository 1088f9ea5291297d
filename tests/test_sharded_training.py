"""A run under `fully_shard` (FSDP2) in two processes leaves the memory of one process with the union of the batches."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import spotlights as sl
from test_processes import RANKS, STEPS, batch, in_all
from training import EXACT, FEATURES, assert_exact, distance, examples, fill, network

WIDTH, LENGTH = 6, 4
on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="the fully_shard of this torch does not train on CPUs"
)


class Transformer(nn.Module):
    """Every kind of layer that transformers are made of, and a table of positions as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(FEATURES + 8, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(tokens) + self.positions).mean(dim=1))


def transformer() -> nn.Module:
    return fill(Transformer().double())


def convolutions() -> nn.Module:
    layers = [nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 2, groups=2)]
    return fill(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3)).double())


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": network, "transformer": transformer, "convolutions": convolutions}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


def inputs_of(name: str) -> Tensor:
    inputs = examples()[0]
    return (inputs[:, :LENGTH].abs() * 4).long().clamp(max=FEATURES + 7) if name == "transformer" else inputs


def sharded(model: nn.Module, *, mesh: tuple[int, ...] = (RANKS,), **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicas", "shards")[-len(mesh) :]
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    for child in model.children():
        if isinstance(child, nn.Linear | nn.TransformerEncoderLayer | nn.Conv1d):
            fully_shard(child, mesh=devices, **options)
    return fully_shard(model, mesh=devices, **options)


def train(
    model: nn.Module,
    trainer: torch.optim.Optimizer,
    recorder: sl.Recorder,
    ranks: list[int],
    until: int,
    *,
    name: str = "mlp",
    accumulate: int = 1,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Training on the batches of these ranks, with clipping."""
    inputs, labels = inputs_of(name), examples()[1]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    for step in range(recorder.step, until):
        trainer.zero_grad()
        for part in range(accumulate):
            ids = torch.cat([batch(step * accumulate + part, rank) for rank in ranks])
            recorder.batch(example=ids, label=labels[ids])
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(part == accumulate - 1)
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        trainer.step()


def run(model: nn.Module, name: str, ranks: list[int], path: Path, optimizer: str, **options: Any) -> None:
    trainer = OPTIMIZERS[optimizer](model.parameters())
    with sl.record(model, trainer, path, segment_bytes=1500) as recorder:
        train(model, trainer, recorder, ranks, STEPS, name=name, **options)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}  # type: ignore[operator]


def _sharded(rank: int, folder: Path, name: str, optimizer: str, mesh: tuple[int, ...], options: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    model = sharded(MODELS[name](), mesh=mesh)
    run(model, name, [rank], folder / "run.memory", optimizer, **options)
    return whole_state(model)


@on_cpus
@pytest.mark.parametrize(
    ("name", "optimizer", "mesh", "options"),
    [
        ("mlp", "sgd", (2,), {"accumulate": 2}),
        ("transformer", "adamw", (2,), {"accumulate": 2}),
        ("convolutions", "sgd", (2,), {}),
        ("mlp", "adamw", (2, 2), {}),
        ("mlp", "adamw", (1, 2), {"accumulate": 2}),
    ],
)
def test_shards_leave_the_memory_of_one_process(tmp_path, name, optimizer, mesh, options):
    ranks = math.prod(mesh)
    states = in_all(_sharded, tmp_path, name, optimizer, mesh, options, ranks=ranks)
    assert all(distance(states[0], state) == 0.0 for state in states)
    model = MODELS[name]()
    run(model, name, [*range(ranks)], tmp_path / "one.memory", optimizer, **options)
    assert distance(model.state_dict(), states[0]) <= EXACT
    model.load_state_dict(states[0])
    inputs = inputs_of(name)[:4]
    both, one = (assert_exact(tmp_path / f"{which}.memory", model, inputs) for which in ("run", "one"))
    for layer in one.layers:
        once = one.layers[layer].kind != "parameter"  # else a slot for each part of the gradient
        assert both.layers[layer].slots == one.layers[layer].slots * (1 if once else ranks)
        for step in (STEPS, 3):
            for view in (lambda m: m, lambda m: m.without(label=1)):
                ours, theirs = (view(memory.as_of(step)).weights(layer) for memory in (both, one))
                torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    last = list(one.layers)[-1]
    ours, theirs = (
        memory.attend(model, inputs)[last].contributions(target=1).totals("example") for memory in (both, one)
    )
    assert ours.groups == theirs.groups
    torch.testing.assert_close(ours.values, theirs.values, rtol=EXACT, atol=EXACT)


def _killed(rank: int, folder: Path, at: int, after: int) -> None:
    """Saves what this process holds at one step, and is killed after another one."""
    model = sharded(network())
    trainer = OPTIMIZERS["adamw"](model.parameters())
    recorder = sl.record(model, trainer, folder / "run.memory", segment_bytes=1500)
    recorder.__enter__()
    train(model, trainer, recorder, [rank], at)
    torch.save([model.state_dict(), trainer.state_dict()], folder / f"checkpoint-{rank}")
    if rank == 0:
        torch.save(whole_state(model), folder / "weights")
    else:
        whole_state(model)
    train(model, trainer, recorder, [rank], after)
    recorder.flush()
    (folder / f"flushed-{rank}").touch()
    while not all((folder / f"flushed-{each}").exists() for each in range(RANKS)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank: int, folder: Path) -> dict[str, Tensor]:
    model = sharded(network())
    trainer = OPTIMIZERS["adamw"](model.parameters())
    weights, state = torch.load(folder / f"checkpoint-{rank}", weights_only=False)
    model.load_state_dict(weights)
    trainer.load_state_dict(state)
    with sl.record(model, trainer, folder / "run.memory", segment_bytes=1500, resume=True) as recorder:
        assert recorder.step == 4
        train(model, trainer, recorder, [rank], STEPS)
    return whole_state(model)


@on_cpus
def test_a_sharded_run_that_was_killed_is_resumed_from_its_checkpoint(tmp_path):
    with pytest.raises(BrokenProcessPool):
        in_all(_killed, tmp_path, 4, 5)
    model = network()
    model.load_state_dict(torch.load(tmp_path / "weights"))
    memory = sl.open(tmp_path / "run.memory")
    assert memory.steps == 5
    assert memory.verify().ok
    assert memory.as_of(4).verify(model).ok
    (tmp_path / "group").unlink(missing_ok=True)
    model.load_state_dict(in_all(_resumed, tmp_path)[0])
    memory = assert_exact(tmp_path / "run.memory", model, inputs_of("mlp")[:4])
    assert memory.steps == STEPS
    uninterrupted = network()
    run(uninterrupted, "mlp", [*range(RANKS)], tmp_path / "one.memory", "adamw")
    assert distance(model.state_dict(), uninterrupted.state_dict()) <= EXACT


def _in_bfloat16(rank: int, folder: Path) -> dict[str, Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = sharded(network(dtype=torch.float32), mp_policy=policy)
    run(model, "mlp", [rank], folder / "run.memory", "sgd", dtype=torch.float32, accumulate=2)
    return whole_state(model)


@on_cpus
def test_a_policy_of_bfloat16_is_recorded_to_its_rounding(tmp_path):
    weights = in_all(_in_bfloat16, tmp_path)[0]
    model = network(dtype=torch.float32)
    model.load_state_dict(weights)
    memory = sl.open(tmp_path / "run.memory")
    verified = memory.verify(model)
    assert verified.ok, verified
    assert {entry.computed for entry in memory.view.reader.manifest.layers.values()} == {"bfloat16"}
    assert distance(memory.primal(model).state_dict(), weights) < 1e-3


def _refusals(rank: int, folder: Path) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, said = init_device_mesh("cpu", (RANKS,)), []
    by_tensors = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})
    in_part = network()
    fully_shard(in_part[0], mesh=mesh)
    for model in (by_tensors, in_part):
        try:
            sl.record(model, torch.optim.SGD(model.parameters(), lr=0.1), folder / "no.memory")
        except sl.UnsupportedError as error:
            said.append(str(error))
    return said


def test_tensor_parallelism_and_parameters_left_out_are_refused_in_a_sentence(tmp_path):
    by_tensors, in_part = in_all(_refusals, tmp_path)[0]
    assert "tensor parallelism cannot be recorded" in by_tensors
    assert "fully_shard does not manage 2.weight, 2.bias" in in_part
