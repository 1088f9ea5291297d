"""What a recording starts from: the writer of a new or resumed memory, copies of parameters, one process or several.

All processes agree on what they need when recording starts and ends. In between, no process needs anything from the
others (`memory/reader.py`). A memory is resumed at the step whose weights the model holds.
"""

from __future__ import annotations

import datetime
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spotlights._version import __version__
from spotlights.errors import ResumeError, UnsupportedError
from spotlights.layers.adapter import wrappers
from spotlights.memory.buffers import BufferPool
from spotlights.memory.files import FileTensors, writable
from spotlights.memory.folded_writer import FoldedWriter
from spotlights.memory.format.names import MANIFEST, PROBED, STATISTICS, log_tensor, probed_entries, state_tensor
from spotlights.memory.reader import MemoryReader, rank_store
from spotlights.memory.slots import plain
from spotlights.memory.store import Store
from spotlights.memory.writer import MemoryWriter
from spotlights.optimizers import WEIGHTS, UpdateRule
from spotlights.recording.find_layers import Coverage
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.optimizers import Optimizers
from spotlights.recording.settings import RecordingSettings
from spotlights.recording.shards import is_distributed

T = TypeVar("T")
Samples = Mapping[tuple[str, str], Tensor]
"""The probed entries (`probed_entries`) by layer and parameter."""


@dataclass(frozen=True)
class Processes:
    """The processes that train one model together."""

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> Processes:
        """The processes of a model under DistributedDataParallel or `fully_shard`; others have this process alone."""
        mesh: Any = next((getattr(p, "device_mesh", None) for p in model.parameters() if is_distributed(p)), None)
        if mesh is not None:
            if mesh.size() != dist.get_world_size() and mesh.ndim > 1:
                raise UnsupportedError(
                    "A model under fully_shard is recorded if its mesh has all processes of the run."
                )
            group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
            return cls(dist.get_rank(group), mesh.size(), group)
        for wrapper in wrappers(model):
            if isinstance(wrapper, DistributedDataParallel):
                group = wrapper.process_group
                return cls(dist.get_rank(group), dist.get_world_size(group), group)
        return cls()

    def agree(self, decide: Callable[[], T]) -> T:
        """Returns what rank 0 decides, or raises its error, on all ranks. All ranks must call this."""
        if self.count == 1:
            return decide()
        decision: list[Any] = [None, None]
        if self.rank == 0:
            try:
                decision[0] = decide()
            except Exception as error:
                decision[1] = error
        dist.broadcast_object_list(decision, src=dist.get_global_rank(self.group, 0), group=self.group)
        result, error = decision
        if error is not None:
            raise error
        return result

    def sum(self, samples: Samples) -> Samples:
        """On rank 0, the sums of what the processes have."""
        of_ranks: list[Any] = [None] * self.count
        dist.all_gather_object(of_ranks, samples, group=self.group)
        return {name: torch.stack([own[name] for own in of_ranks]).sum(dim=0) for name in samples}

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier(group=self.group)


@dataclass(frozen=True)
class Checkpoints:
    """Copies the parameters of the recorded layers, and the optimizer's state of them."""

    layers: Mapping[str, RecordedLayer]
    optimizers: Optimizers

    @cached_property
    def rules(self) -> dict[str, dict[str, UpdateRule]]:
        """By layer and trained parameter: the rule that the parameter follows in this recording."""
        return {
            name: {p: self.optimizers.rule_of(layer.parameters[p]) for p in layer.trained}
            for name, layer in self.layers.items()
        }

    def other_rules(self, layer: str) -> dict[str, str]:
        """The rules of parameters that do not follow the rule of the first optimizer."""
        first = self.optimizers.rules[0].name
        return {p: rule.name for p, rule in self.rules[layer].items() if rule.name != first}

    def _kept(self, rank: int) -> Iterator[tuple[RecordedLayer, str, UpdateRule | None, dict[str, Tensor]]]:
        """Each parameter that this process writes, with its rule: its weights and its state as the memory has them."""
        for layer in self.layers.values():
            for name, parameter in layer.parameters.items():
                if not layer.writes(name, rank):
                    continue
                rule = self.rules[layer.name].get(name)
                held = {**self.optimizers.state_of(parameter), WEIGHTS: parameter.detach()}
                wanted = (WEIGHTS, *(rule.states if rule is not None else ()))
                given = {key: held[key] for key in wanted if held.get(key) is not None}
                dense = {key: tensor.to_dense() if tensor.is_sparse else tensor for key, tensor in given.items()}
                yield layer, name, rule, {key: layer.as_kept(name, tensor) for key, tensor in dense.items()}

    def copy(self, rank: int, *, states: bool = False) -> dict[str, Tensor]:
        """The parameters as they are now, and the state that the optimizer has of them: what this process writes."""
        return {
            f"{layer.name}/{name}{'' if key == WEIGHTS else f'/{key}'}": _copy(tensor)
            for layer, name, _, kept in self._kept(rank)
            for key, tensor in kept.items()
            if states or key == WEIGHTS
        }

    def before_step(self, rank: int, wanted: Callable[..., bool]) -> dict[str, Tensor]:
        """The part of the optimizer's state from which the rules can replay the next step and later ones; or all of it.

        Args:
            rank: the number of this process.
            wanted: whether a checkpoint of so many bytes is due (`MemoryWriter.wants`); otherwise nothing is returned.
        """
        needed: dict[str, Tensor] = {}
        whole: dict[str, Tensor] = {}
        groups = self.optimizers.groups()
        for layer, name, rule, kept in self._kept(rank):
            if rule is None:
                continue
            whole |= {state_tensor(layer.name, name, key): tensor for key, tensor in kept.items()}
            parameter = layer.parameters[name]
            if id(parameter) in groups:
                logged = rule.log(groups[id(parameter)][1], self.optimizers.state_of(parameter), True)
                needed |= {state_tensor(layer.name, name, k): kept[k] for k in rule.needed(logged) & kept.keys()}
        for due, tensors in ((wanted(_size(whole), whole=True), whole), (wanted(_size(needed)), needed)):
            if due:
                return {name: plain(_copy(tensor)) for name, tensor in tensors.items()}
        return {}


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _copy(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    return tensor.clone(memory_format=torch.contiguous_format)


class RunningStatistics:
    """The running means and variances of batch and instance norms, on which the network's answers depend."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name in ("running_mean", "running_var")
            if isinstance(getattr(module, name, None), Tensor)
        ]

    def initial(self) -> dict[str, Tensor]:
        """As they are when recording starts, under their names in the file of initial weights."""
        return {STATISTICS + name: getattr(module, own).detach().clone() for name, module, own in self._owners}

    def now(self) -> dict[str, np.ndarray]:
        """As they are after a step, for the step log."""
        return {name: plain(getattr(module, own)).numpy().copy() for name, module, own in self._owners}


@dataclass(frozen=True)
class Start:
    """What a recording starts from."""

    store: Store
    model: nn.Module
    checkpoints: Checkpoints
    settings: RecordingSettings
    processes: Processes
    pool: BufferPool
    statistics: RunningStatistics

    def open_writer(self, step: int) -> tuple[int, MemoryWriter]:
        """The step at which recording starts, the same in all processes, and the writer of this process.

        Args:
            step: at which the memory is; 0 for a new memory, or if that is still to be found out.
        """
        own_writer: list[MemoryWriter] = []
        samples = self._samples()
        if self.settings.resume and any(layer.is_sharded for layer in self.checkpoints.layers.values()):
            samples = self.processes.sum(samples)

        def decide() -> tuple[int, str]:
            """On rank 0, whose writer must exist before the others."""
            first = self._matching_step(samples) if self.settings.resume and self.store.exists(MANIFEST) else step
            own_writer.append(self._open(first, uuid.uuid4().hex if self.processes.count > 1 else ""))
            return first, own_writer[0].manifest.run

        first, run = self.processes.agree(decide)
        return first, own_writer[0] if own_writer else self._open(first, run)

    def _samples(self) -> Samples:
        return {
            (name, parameter): torch.from_numpy(entries)
            for name, layer in self.checkpoints.layers.items()
            for parameter, entries in layer.samples().items()
        }

    def _matching_step(self, samples: Samples) -> int:
        """The latest step of the memory whose weights the model holds; 0 if it holds the initial weights."""
        reader = MemoryReader(self.store)
        path, manifest = reader.address, reader.manifest
        for field, own in self._description().items():
            recorded, wanted = _comparable(field, getattr(manifest, field)), _comparable(field, own)
            if recorded != wanted:
                raise ResumeError(
                    f"{path} was recorded with other layers or settings. It has {field}: {recorded}; this recording "
                    f"has: {wanted}. Record to another path."
                )
        step = _logged_step(reader, samples) if manifest.fold is None else _snapshot_step(reader, samples)
        if step is not None:
            return step
        if _are_initial(reader, samples):
            return 0
        if manifest.fold is None:
            raise ResumeError(
                f"The model's weights are those of none of the {reader.steps} steps in {path}. Before resuming, load a "
                "checkpoint of the recorded run; otherwise record to another path."
            )
        steps = " or ".join(str(snapshot.steps) for snapshot in manifest.snapshots)
        raise ResumeError(
            f"{path} is folded, so it can be resumed only from its snapshots, and the model's weights are not those "
            f"after {steps} steps. Call recorder.flush() just before you save a checkpoint; this time, record to "
            "another path."
        )

    def initial(self) -> dict[str, Tensor]:
        """What the memory has of the network and the optimizers before the first step."""
        return {**self.checkpoints.copy(self.processes.rank, states=True), **self.statistics.initial()}

    def _description(self) -> dict[str, Any]:
        """The fields of the manifest in which a resumed memory must agree with this recording."""
        return {
            "layers": {
                name: replace(layer.entry(), rules=self.checkpoints.other_rules(name))
                for name, layer in self.checkpoints.layers.items()
            },
            "errors": self.settings.keeps_errors,
            "fold": self.settings.fold_entry,
            "sample": self.settings.sampling,
            "recipe": self.settings.recipe_entry,
            "optimizer": self.checkpoints.optimizers.name,
            "ranks": self.processes.count,
        }

    def _open(self, step: int, run: str) -> MemoryWriter:
        kind = MemoryWriter if self.settings.fold is None else FoldedWriter
        store, size = rank_store(self.store, self.processes.rank), self.settings.segment_bytes
        with writable(self.store):
            if step:
                return kind.resume(store, step, pool=self.pool, segment_bytes=size)
            overwrite = self.settings.overwrite or self.settings.resume or self.processes.rank > 0
            manifest = self._new_manifest(run)
            return kind.create(store, manifest, self.initial(), pool=self.pool, overwrite=overwrite, segment_bytes=size)

    def _new_manifest(self, run: str) -> dict[str, object]:
        rank, rule, settings = self.processes.rank, self.checkpoints.optimizers.rules[0], self.settings
        coverage = Coverage.of(self.model, self.checkpoints.optimizers, self.checkpoints.layers, settings)
        if rank == 0:
            coverage.report(on_purpose=settings.patterns is not None)
            self.checkpoints.optimizers.report()
        return {
            "spotlights": __version__,
            "torch": torch.__version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **self._description(),
            "rule": rule.name,
            "log_fields": list(rule.fields),
            "observed": settings.observed,
            "git_revision": _git_revision(),
            "seed": torch.initial_seed(),
            "uncovered": coverage.uncovered,
            "covered_numbers": coverage.covered,
            "trained_numbers": coverage.trained,
            "parameters": coverage.parameters,
            "rank": rank,
            "run": run,
        }


def _git_revision() -> str | None:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _logged_step(reader: MemoryReader, samples: Samples) -> int | None:
    agrees = torch.ones(reader.steps, dtype=torch.bool)
    for (layer, parameter), value in samples.items() if len(agrees) else ():
        agrees &= (reader.log(layer).probed[parameter] == value).all(dim=-1)
    return int(agrees.nonzero()[-1]) + 1 if agrees.any() else None


def _snapshot_step(reader: MemoryReader, samples: Samples) -> int | None:
    for snapshot in reader.manifest.snapshots:
        for log in snapshot.segments[:1]:
            tensors = FileTensors(reader.store, log)
            logged = ((tensors[log_tensor(*name, PROBED)][0], value) for name, value in samples.items())
            if all(torch.equal(entries, value) for entries, value in logged):
                return snapshot.steps
    return None


def _are_initial(reader: MemoryReader, samples: Samples) -> bool:
    initial = ((reader.initial["/".join(name)].reshape(-1), value) for name, value in samples.items())
    return all(torch.equal(weights[probed_entries(weights.numel())], value) for weights, value in initial)


def _comparable(field: str, value: Any) -> Any:
    """What of a field of the manifest must be equal in a memory and in the recording that resumes it."""
    if field == "recipe":
        return value is not None
    if field == "fold":
        return None if value is None else (value.by, value.from_step)
    if field != "layers":
        return value
    return {
        name: (
            *(entry.kind, entry.map, entry.in_features, entry.out_features, entry.groups),
            *(entry.weights, entry.bias_names, entry.storage, entry.trained, entry.tokens, entry.rules),
        )
        for name, entry in value.items()
    }
