"""Rewind: a network put back to a checkpoint from before some examples were first seen, and trained on without them.

A record says what the network has seen since: hashes of the checkpoint and of the examples of each later step, which
anyone who has the run's memory can compute again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from spotlights.errors import SettingError, UnsupportedError
from spotlights.layers.adapter import unwrapped
from spotlights.memory.blocks import Selection, meeting
from spotlights.memory.files import write_whole
from spotlights.memory.format.recipe import AnnouncedBatch
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers.replayed import MakeOptimizer
from spotlights.query.engine import Progress, View
from spotlights.query.restore import Visits, put_back, start_before, visits_of
from spotlights.recording.recompute import as_recorded
from spotlights.recording.rerun import LeftOut, Rerun, Source
from spotlights.results.tables import Printable, build
from spotlights.selections import parse_selections

Train = Callable[[float | None, Progress], str]
"""Takes the later steps; returns the hash of the network after them."""


@dataclass(eq=False, repr=False)
class Rewound(Printable):
    """A network as of a checkpoint from before some examples were first seen, and the steps to train again."""

    memory: str
    without: str
    examples: int
    """How many examples are left out."""
    first_seen: int
    """The first step that saw one of them."""
    step: int
    """How many steps the network has taken at the checkpoint."""
    steps: int
    """How many the run took."""
    checkpoint: str
    """The SHA-256 of the network's parameters and buffers at the checkpoint."""
    batches: list[str]
    """Of each later step: the SHA-256 of the examples that are left of it, as sorted JSON."""
    trained: str | None = None
    """The SHA-256 of the network after these steps."""

    def __post_init__(self) -> None:
        self._train: Train | None = None

    def trains_by(self, train: Train) -> None:
        """How `train` trains."""
        self._train = train

    @property
    def to_train(self) -> int:
        """How many steps are to be trained again."""
        return self.steps - self.step

    def train(self, *, clip: float | None = None, progress: Progress = lambda share: None) -> Rewound:
        """Takes the later steps again without these examples, in the model and the optimizer that were rewound.

        For a recipe that was opened with its loss. Of a step that has no example left, nothing is taken.

        Args:
            clip: the largest norm of the whole gradient, if the loop clipped it.
            progress: is told the share that is done.
        """
        if self._train is None:
            raise UnsupportedError(
                f"{self.memory} does not say how a loss is computed. Train on with your own loop, or record with "
                'keep="recipe" and open with sl.open(path, model=model, recompute=loss).'
            )
        self.trained = self._train(clip, progress)
        return self

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def save(self, path: str | Path) -> Path:
        """Writes the record as JSON."""
        write_whole(path, (json.dumps(self.as_dict(), indent=1) + "\n").encode())
        return Path(path)

    def table(self) -> Any:
        rows = [
            ["left out", f"{self.without} ({self.examples:,} examples)"],
            ["first seen at step", f"{self.first_seen:,}"],
            ["checkpoint before step", f"{self.step:,}, sha256 {self.checkpoint[:12]}…"],
            ["steps to train again" if self.trained is None else "steps trained again", f"{self.to_train:,}"],
            ["network now", "the checkpoint" if self.trained is None else f"sha256 {self.trained[:12]}…"],
        ]
        return build(f"{self.memory} without some examples", ["", ""], rows, "save(path) writes the whole record")


def rewind(
    view: View, source: Source | None, model: nn.Module, optimizer: torch.optim.Optimizer | None, without: str
) -> Rewound:
    """Puts model and optimizer back; `Memory.rewind` says what the arguments are. `source`: of a recipe."""
    reader, model = view.reader, unwrapped(model)
    reader.need_recording("To rewind takes")
    if "example" not in reader.manifest.columns:
        raise SettingError(f"{reader.address} does not say which examples a step saw. Record with recorder.batch(…).")
    selections = [meeting(reader, conditions) for conditions in parse_selections(without)]
    recipe: Source | None = None
    if reader.manifest.recipe is not None:
        make = None if optimizer is None else cast(MakeOptimizer, type(optimizer))
        recipe = source or Source(reader, model, _no_loss, make)
    seen, left_out = visits_of(view, selections) if recipe is None else _announced(recipe, selections)
    if not left_out:
        raise SettingError(f'No step of {reader.address} saw "{without}". Such as: without="example=17,99".')
    first, run = min(left_out), None
    if recipe is None:
        step = start_before(reader, first)
        put_back(reader, step, model, optimizer)
    else:
        run = Rerun(recipe, max(step for step in recipe.checkpoints if step <= first))
        step = run.step
        _hand_over(run, model, optimizer)
    names = _names(reader)
    batches = [sorted(map(names, seen.get(s, set()) - left_out.get(s, set()))) for s in range(step, reader.steps)]
    rewound = Rewound(
        reader.address,
        without,
        len(set().union(*left_out.values())),
        first,
        step,
        reader.steps,
        hash_of(model),
        [hashlib.sha256(json.dumps(examples).encode()).hexdigest() for examples in batches],
    )

    if source is not None and run is not None:

        def train(clip: float | None, progress: Progress) -> str:
            _train_again(source, run, first, partial(_chosen, selections), clip, progress)
            _hand_over(run, model, optimizer)
            return hash_of(model)

        rewound.trains_by(train)
    return rewound


def hash_of(model: nn.Module) -> str:
    """The SHA-256 of a network's parameters and buffers, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _names(reader: MemoryReader) -> Callable[[int], int | str]:
    """From the number of an example to what the user called it."""
    entry = reader.manifest.columns["example"]
    return (lambda number: entry.strings[number]) if entry.kind == "string" else lambda number: number


# -- who was seen when --------------------------------------------------------------------------------


def _announced(source: Source, selections: Sequence[Selection]) -> tuple[Visits, Visits]:
    """The same from the batches of a recipe."""
    seen: Visits = {}
    left_out: Visits = {}
    for step in range(source.reader.steps):
        seen[step] = set()
        for batch in source.step(step).batches:
            ids, selected = batch.columns["example"], _chosen(selections, batch, step)
            seen[step].update(np.unique(ids).tolist())
            if selected.any():
                left_out.setdefault(step, set()).update(ids[selected].tolist())
    return seen, left_out


def _chosen(selections: Sequence[Selection], batch: AnnouncedBatch, step: int) -> Bool[np.ndarray, "..."]:
    """Which examples of a batch are selected: those of which any row is."""
    examples = batch.columns["example"].shape

    def column(name: str) -> Tensor:
        if name != "step" and name not in batch.columns:
            raise SettingError(f"{name}=: the batches of this recipe have {', '.join(batch.columns)}, and step.")
        values = np.asarray(step) if name == "step" else batch.columns[name]
        rows = values.reshape(*values.shape, *(1,) * (len(shape) - values.ndim))
        return torch.from_numpy(np.broadcast_to(rows, shape).copy())

    shape = max((values.shape for values in batch.columns.values()), key=len)
    selected = torch.zeros(shape, dtype=torch.bool)
    for selection in selections:
        mask = selection.mask(column, selected.numel())
        selected |= torch.ones_like(selected) if mask is None else mask
    return selected.reshape(*examples, -1).any(dim=-1).numpy()


# -- back to a checkpoint, and on ---------------------------------------------------------------------


def _no_loss(model: nn.Module, ids: Any) -> Tensor:
    raise UnsupportedError("This recipe was opened without its loss.")


def _hand_over(run: Rerun, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Gives the user's network and optimizer what those of a rerun have."""
    model.load_state_dict(run.model.state_dict())
    if optimizer is None:
        return
    try:
        optimizer.load_state_dict(run.optimizer.state_dict())
    except ValueError as error:
        raise SettingError(f"The optimizer does not have the groups of the recorded one: {error}") from error


def _train_again(
    source: Source, run: Rerun, first: int, left_out: LeftOut, clip: float | None, progress: Progress
) -> None:
    """Takes the later steps of a recipe, without some examples; step `first` is the first that differs."""
    start, steps = run.step, source.reader.steps
    moved = [step for step in range(first, steps) if source.moved_before(step)]
    if moved:
        raise UnsupportedError(
            f"Before step {moved[0]} the loop itself changed weights, which a recipe cannot do again. Train on "
            "with your own loop."
        )
    with as_recorded(run.threads):
        for step in range(start, steps):
            if step < first:
                run.take(step)
                continue
            factor = run.other_factor(step, clip) if step == first else None
            if factor is not None:
                raise UnsupportedError(
                    f"At step {step} the loop multiplied the gradient by {factor:.3g}"
                    + (", as clipping does" if clip is None else f", and clip={clip} does not")
                    + ". Give clip= the largest norm that the loop allowed, or train on with your own loop."
                )
            run.take_without(step, left_out, clip)
            progress((step + 1 - start) / (steps - start))
