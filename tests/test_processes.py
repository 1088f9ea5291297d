"""A run in several processes is one memory: that of one process with the union of the batches."""

import contextlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spotlights as sl
from buckets import new_bucket
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store import store_at
from spotlights.query import contributions
from training import EXAMPLES, assert_exact, examples, network, processes, state

RANKS, STEPS, SHARE = 2, 6, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1),
    "replayed": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


def in_all(function: Callable[..., Any], *args: Any, ranks: int = RANKS) -> list[Any]:
    """Calls the function in so many processes at once, with its rank first."""
    with ProcessPoolExecutor(ranks, mp_context=processes()) as pool:
        started = [pool.submit(_in_group, function, rank, ranks, *args) for rank in range(ranks)]
        return [each.result(timeout=120) for each in started]


def _in_group(function: Callable[..., Any], rank: int, ranks: int, folder: Path, *args: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    try:
        return function(rank, folder, *args)
    finally:
        dist.destroy_process_group()


def batch(step: int, rank: int) -> Tensor:
    """The numbers of the examples that a process sees at a step."""
    every = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(step))
    return every[rank * SHARE : (rank + 1) * SHARE]


def run(
    model: nn.Module,
    ranks: list[int],
    path: Path | str,
    optimizer: str,
    *,
    accumulate: int = 1,
    apart: bool = False,
    **options: Any,
) -> None:
    """Training on the batches of these ranks, with clipping: of all parameters together, or of each kind apart."""
    inputs, labels = examples()
    trainer = OPTIMIZERS[optimizer](model.parameters())
    quiet = model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    with sl.record(model, trainer, path, **{"dtype": "float64", "segment_bytes": 1500, **options}) as recorder:
        for step in range(recorder.step, STEPS):
            trainer.zero_grad()
            for part in range(accumulate):
                ids = torch.cat([batch(step * accumulate + part, rank) for rank in ranks])
                sources = [("first" if i % 2 else "second") if i < 12 else "third" for i in ids.tolist()]
                recorder.batch(example=ids, label=labels[ids], source=sources)
                with quiet() if part < accumulate - 1 else contextlib.nullcontext():
                    F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            for kind in ("weight", "bias") if apart else ("",):
                nn.utils.clip_grad_norm_([p for name, p in model.named_parameters() if name.endswith(kind)], 0.3)
            trainer.step()


def _data_parallel(rank: int, folder: Path, optimizer: str, options: dict[str, Any]) -> dict[str, Tensor]:
    model = network()
    run(DistributedDataParallel(model), [rank], folder / "run.memory", optimizer, **options)
    if rank == 0:
        assert sl.open(folder / "run.memory").steps == STEPS  # complete as soon as the block is left
    return state(model)


def _to_a_bucket(rank: int, folder: Path, address: str, environment: dict[str, str]) -> dict[str, Tensor]:
    os.environ |= environment  # a server of forks may be older than the bucket
    model = network()
    run(DistributedDataParallel(model), [rank], address, "sgd")
    return state(model)


def test_processes_record_to_one_bucket_each_in_its_own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))
    store = new_bucket("s3")
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    first, _ = in_all(_to_a_bucket, tmp_path, str(store), credentials)
    model = network()
    model.load_state_dict(first)
    memory = assert_exact(str(store), model)
    assert len(memory) == RANKS * SHARE * STEPS
    places = {name.rpartition("segments/")[0] for name in store.list() if "segments/" in name}
    assert places == {"", "rank1/"}


def by_example(memory: sl.Memory, model: nn.Module, layer: str) -> dict[Any, Tensor]:
    totals = memory.attend(model, examples()[0][:4])[layer].contributions(target=1).totals("example")
    return {group: totals.values[:, at] for at, group in enumerate(totals.groups) if totals.counts[at]}


@pytest.mark.parametrize(("optimizer", "accumulate"), [("sgd", 1), ("sgd", 2), ("adam", 2)])
def test_two_processes_leave_the_memory_of_one_with_the_union_of_the_batches(
    tmp_path, monkeypatch, optimizer, accumulate
):
    first, second = in_all(_data_parallel, tmp_path, optimizer, {"accumulate": accumulate})
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = network()
    run(model, [*range(RANKS)], tmp_path / "one.memory", optimizer, accumulate=accumulate)
    one = assert_exact(tmp_path / "one.memory", model)
    model.load_state_dict(first)
    both = assert_exact(tmp_path / "run.memory", model)

    assert len(both) == len(one) == RANKS * SHARE * accumulate * STEPS
    assert sorted(both.columns) == sorted(one.columns)
    for layer in one.layers:
        assert both.layers[layer].slots == one.layers[layer].slots
        for step in (STEPS, 3):
            for view in (lambda m: m, lambda m: m.without(label=1), lambda m: m.where(source="first")):
                torch.testing.assert_close(
                    view(both.as_of(step)).weights(layer), view(one.as_of(step)).weights(layer), rtol=1e-9, atol=1e-9
                )
        ours, theirs = by_example(both, model, layer), by_example(one, model, layer)
        assert ours.keys() == theirs.keys()
        for example in ours:
            torch.testing.assert_close(ours[example], theirs[example], rtol=1e-9, atol=1e-9)
    logits = both.attend(model, examples()[0][:4])["2"].contributions(target=1)
    every = torch.from_numpy(logits.numpy()).sum(dim=1)
    torch.testing.assert_close(logits.initial + every, model(examples()[0][:4])[:, 1].detach(), rtol=1e-9, atol=1e-9)
    top = both.attend(model, examples()[0][:4])["2"].contributions(target=1).top(5).rows(0)
    same = one.attend(model, examples()[0][:4])["2"].contributions(target=1).top(5).rows(0)
    assert [(row["example"], row["step"], row["source"]) for row in top] == [
        (row["example"], row["step"], row["source"]) for row in same
    ]
    monkeypatch.setattr(contributions, "ROWS", SHARE)  # blocks that hold slots of both processes
    ranked = logits.top(len(both))
    by_number = torch.from_numpy(logits.numpy()).gather(1, ranked.slots[:, 0])
    torch.testing.assert_close(by_number, ranked.values[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weights_and_biases_clipped_apart_are_exact_in_several_processes(tmp_path, optimizer):
    first, _ = in_all(_data_parallel, tmp_path, optimizer, {"apart": True})
    model = network()
    model.load_state_dict(first)
    memory = assert_exact(tmp_path / "run.memory", model)
    run(network(), [*range(RANKS)], tmp_path / "one.memory", optimizer, apart=True)
    for layer in memory.layers:
        ours, theirs = (
            MemoryReader(store_at(tmp_path / f"{name}.memory")).log(layer).factor for name in ("run", "one")
        )
        assert not torch.allclose(ours["weight"], ours["bias"])
        for parameter in ("weight", "bias"):  # the loss of one process is the mean over half of the examples
            torch.testing.assert_close(RANKS * ours[parameter], theirs[parameter], rtol=1e-9, atol=1e-9)


def test_an_optimizer_without_a_rule_is_run_again_on_the_gradients_of_all_processes(tmp_path):
    first, _ = in_all(_data_parallel, tmp_path, "replayed", {})
    model = network()
    model.load_state_dict(first)
    assert sl.open(tmp_path / "run.memory").verify(model).ok


def _interrupted(rank: int, folder: Path, after: int) -> dict[str, Tensor]:
    model = network()
    with contextlib.suppress(StopIteration):
        run(DistributedDataParallel(_Stops(model, after)), [rank], folder / "run.memory", "sgd")
    return state(model)


class _Stops(nn.Sequential):
    """Training dies after some steps."""

    def __init__(self, model: nn.Sequential, after: int) -> None:
        super().__init__(*model)
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.left == 0:
            raise StopIteration
        self.left -= 1
        return super().forward(x)


def _resumed(rank: int, folder: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    model = network()
    model.load_state_dict(weights)
    run(DistributedDataParallel(model), [rank], folder / "run.memory", "sgd", resume=True)
    return state(model)


def test_a_run_whose_processes_wrote_unequally_much_is_read_as_far_as_all_of_them_did(tmp_path):
    weights = in_all(_interrupted, tmp_path, 4)[0]
    model = network()
    model.load_state_dict(weights)
    memory = sl.open(tmp_path / "run.memory")
    assert (memory.steps, memory.info.as_dict()["status"]) == (4, "closed")
    # As a process leaves it that was killed before its last segments.
    manifest = tmp_path / "run.memory" / "rank1" / "memory.json"
    held = json.loads(manifest.read_text())
    del held["checksum"]
    assert len(held["segments"]) > 1
    held |= {"segments": held["segments"][:-1], "final": None, "status": "recording"}
    manifest.write_text(json.dumps(held))
    memory = sl.open(tmp_path / "run.memory")
    assert memory.steps == held["segments"][-1]["end_step"] < 4
    assert memory.info.as_dict()["status"] == "recording"
    assert memory.verify().ok
    assert memory.verify()["0"].compared_with.startswith("samples")
    assert len(memory) == RANKS * SHARE * memory.steps


def test_a_run_in_several_processes_is_resumed_by_as_many(tmp_path):
    weights = in_all(_interrupted, tmp_path, 4)[0]
    (tmp_path / "group").unlink(missing_ok=True)
    resumed = in_all(_resumed, tmp_path, weights)[0]
    model = network()
    model.load_state_dict(resumed)
    memory = sl.open(tmp_path / "run.memory")
    assert memory.steps == STEPS
    with pytest.raises(sl.ResumeError, match="ranks: 2; this recording has: 1"):
        run(model, [0], tmp_path / "run.memory", "sgd", resume=True)
    run(model, [0], tmp_path / "run.memory", "sgd", overwrite=True)
    assert not (tmp_path / "run.memory" / "rank1").exists()


def _refused(rank: int, folder: Path) -> str:
    try:
        run(DistributedDataParallel(network()), [rank], folder / "run.memory", "sgd")
    except sl.MemoryExistsError as error:
        return str(error)
    return ""


def test_an_error_of_the_first_process_is_that_of_all(tmp_path):
    (tmp_path / "run.memory").mkdir()
    (tmp_path / "run.memory" / "something.txt").write_text("x")
    said = in_all(_refused, tmp_path)
    assert said[0] == said[1]
    assert "is not a memory" in said[0]
