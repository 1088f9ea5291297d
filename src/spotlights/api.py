"""An opened memory: where every question starts.

A `Memory` is a view: some slots (all of them at first) as of some step (the last one at first). Views cost
nothing, and compose: `memory.as_of(3000).where(source="mnist").without(label=3)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.dual import dual_model
from spotlights.errors import SettingError, UnknownNameError, UnsupportedError
from spotlights.info import LayerInfo, MemoryInfo, layer_infos
from spotlights.memory.blocks import Everything, as_of, meeting
from spotlights.memory.copying import copy_memory
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store import CACHE_BYTES, Cache, store_at
from spotlights.optimizers.replayed import MakeOptimizer
from spotlights.query.attention import KERNELS, Attention, Spotlights
from spotlights.query.columns import Visits, column_values, distinct, few_groups, grouping
from spotlights.query.engine import Engine, Progress, Threads, Turn, View
from spotlights.query.forecast import Retrain, calibrate
from spotlights.query.forward import ForwardPass, Target, answer, what_differs
from spotlights.query.history import AskedNetwork
from spotlights.query.masks import Masks
from spotlights.query.primal import primal_model
from spotlights.query.ray_engine import Ray
from spotlights.query.suspects import find_suspects
from spotlights.query.weights import view_parameters
from spotlights.query.whitening import has_moments, key_moments
from spotlights.recording.observing import Checkpoint, observe_network
from spotlights.recording.recompute import Recomputation
from spotlights.recording.rerun import Loss, Source
from spotlights.results import Calibration, ExampleVisits, Label, ReplayedInfluence, Suspects
from spotlights.rewinding import Rewound, rewind
from spotlights.verification import Verification, verify


def open(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    recompute: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    cache: str | Path | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> Memory:
    """Opens a memory that `record` wrote, also while it is still being recorded.

    Args:
        path: a directory, or an address: `s3://bucket/run.memory`, `gs://…`, `az://…`, `file://…`.
        model: for a recipe: the network, whose weights do not matter and stay as they are.
        recompute: for a recipe: `loss(model, ids)`, the loss of the batch with these examples as the loop computed it;
            or one loss for each example, of which the mean is taken. A question then computes the slots again.
        optimizer: for a recipe: the optimizer's class, if it is not one of torch's own.
        cache: for a memory in a bucket or a recipe: a directory that keeps what has been read or computed, for further
            questions. By default that in the environment variable SPOTLIGHTS_CACHE, or ~/.cache/spotlights.
        cache_bytes: how large this directory may become; 0 for no cache.
    """
    kept = Cache.at(cache, cache_bytes)
    reader = MemoryReader(store_at(path, kept))
    view = _whole(reader, _engine(os.environ.get("SPOTLIGHTS_ENGINE") or "threads"))
    if (model is None) != (recompute is None):
        raise SettingError("A recipe needs both: sl.open(path, model=model, recompute=loss).")
    if model is None or recompute is None or reader.manifest.recipe is None:  # other memories have their slots
        return Memory(view)
    return Memory(view, Recomputation(Source(reader, model, recompute, optimizer), kept))


def observe(
    model: nn.Module,
    loss: Loss,
    ids: Any,
    path: str | Path,
    *,
    checkpoints: Sequence[Checkpoint] = (),
    columns: Mapping[str, Any] | None = None,
    batch: int = 128,
    layers: str | Sequence[str] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda share: None,
) -> Memory:
    """Writes a memory of a network that is already trained: scores, influence and suspects, as estimates.

    One pass over the training data notes keys and errors at the trained weights, and one more for each checkpoint of
    the training that was kept. Contributions, masks, histories and verify need a recording (docs/observed.md).

    Args:
        model: the trained network. A copy of it is run, in eval mode.
        loss: `loss(model, ids)`: the mean loss of these examples, or one loss for each.
        ids: the training examples, as whole numbers or names.
        path: the directory to write, or an address in a bucket.
        checkpoints: state dicts of earlier weights, or files of them. All weigh the same.
        columns: further columns by name, one value for each example: `{"label": labels}`.
        batch: how many examples are run at once.
        layers: names or patterns of the layers to observe; all by default.
        dtype: how keys and errors are stored, as for `record`.
        overwrite: replace the memory at `path`.
        progress: is told the share that is done.
    """
    observe_network(
        *(model, loss, ids, store_at(path)),
        checkpoints=checkpoints,
        columns=columns or {},
        batch=batch,
        layers=layers,
        dtype=dtype,
        overwrite=overwrite,
        told=progress,
    )
    return open(path)


def _whole(reader: MemoryReader, engine: Engine) -> View:
    return View(reader, as_of(reader, Everything(), reader.steps), reader.steps, engine)


def _engine(engine: Engine | str, *, keep: bool = False) -> Engine:
    ray = isinstance(engine, str) and (engine == "ray" or ":" in engine)
    if keep and not ray:
        raise SettingError('keep=True is for a Ray cluster: memory.on("ray", keep=True).')
    if not isinstance(engine, str):
        return engine
    if not ray and engine != "threads":
        raise SettingError(
            f"Unknown engine {engine!r}. There are: threads, ray, and addresses such as ray://host:10001."
        )
    return Ray(None if engine == "ray" else engine, keep) if ray else Threads()


class Memory:
    """A memory, or a view of one: some of its slots, as of some step."""

    def __init__(self, view: View, recomputation: Recomputation | None = None) -> None:
        self._known = view
        """What is known without any slots."""
        self._recomputation = recomputation

    @cached_property
    def view(self) -> View:
        """The slots. Those of a recipe are computed when they are first asked for."""
        if self._recomputation is None:
            return self._known
        engine = self._known.engine
        return _whole(self._recomputation.reader(each=engine.each), engine)

    # -- what is in it -------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where the memory is; for one in a bucket, `open` takes this path too."""
        return Path(self._known.reader.address)

    @property
    def steps(self) -> int:
        """How many optimizer steps the view looks back on."""
        return self._known.until

    @property
    def columns(self) -> list[str]:
        """What is known of a slot."""
        return list(self.view.reader.manifest.columns)

    @property
    def layers(self) -> dict[str, LayerInfo]:
        """What is known of each recorded layer (of the whole memory, not of the view)."""
        return layer_infos(self.view.reader)

    @property
    def status(self) -> str:
        """ "recording", "closed", or how else the recording ended."""
        return self._known.reader.manifest.status

    @property
    def folded(self) -> bool:
        """Whether a slot is the sum of all visits of its example."""
        return self.view.reader.manifest.fold is not None

    @property
    def sampled(self) -> bool:
        """Whether only some of the slots were kept."""
        return self.view.reader.manifest.sample is not None

    @property
    def recomputed(self) -> float | None:
        """Of slots computed again from a recipe: how far weights were off at a checkpoint, relative to them, at most.

        0 if all were the same bit for bit; None if the slots were recorded.
        """
        return self.view.reader.manifest.recomputed

    @property
    def observed(self) -> int:
        """Of a network that was already trained: at how many sets of weights; 0 if a training was recorded."""
        return self._known.reader.manifest.observed

    @property
    def has_errors(self) -> bool:
        """Whether errors were recorded; without them there are scores only."""
        return self.view.reader.manifest.errors

    def distinct(self, column: str, *, layer: str | None = None) -> list[Label]:
        """The values that a column takes in a layer (the last one by default) of the whole memory, sorted."""
        return grouping(self.view, self._layer(layer), column).labels

    def first_slots(self, column: str, *, layer: str | None = None) -> np.ndarray:
        """The number of the first slot with each value of `distinct(column)`."""
        return distinct(self.view, self._layer(layer), column)[1]

    def column(self, name: str, slots: Sequence[int] | np.ndarray, *, layer: str | None = None) -> list[Label]:
        """The values of a column for some slots, given by their numbers."""
        recorded, entries = self._layer(layer), self.view.reader.manifest.columns
        recorded.column_kind(name)  # an unknown column gets its error here
        values = recorded.column_at(name, torch.as_tensor(slots, dtype=torch.int64))
        return column_values(values, entries[name].kind, entries[name].strings)

    def keys(self, slots: Sequence[int] | np.ndarray, *, layer: str | None = None) -> Float[Tensor, "slots features"]:
        """The keys of some slots, given by their numbers; those of the first layer are the network's inputs."""
        return self._layer(layer).keys_at(torch.as_tensor(slots, dtype=torch.int64))

    def groups(self, limit: int = 64) -> dict[str, list[Label]]:
        """The columns that divide the slots into at most `limit` groups, each with its values; labels come first."""
        return few_groups(self.view, limit)

    def visits(self, example: int, *, layer: str | None = None) -> ExampleVisits:
        """When training visited an example, and what is known of it."""
        recorded = self._layer(layer)
        self.view.reader.need_examples()
        groups = grouping(self.view, recorded, "example")
        ids = groups.labels
        if example not in ids:
            known = [number for number in ids if number is not None]
            exist = f" There are examples {known[0]} to {known[-1]}." if known else ""
            raise UnknownNameError(f"No slot has example={example}.{exist}")
        names = [name for name in self.columns if name not in ("example", "position")]
        rows = Visits(self.view, recorded, groups, torch.tensor([ids.index(example)]), names)
        columns = {name: rows.values(name) for name in (names if len(rows.slots) else ())}
        steps = sorted({step for step in columns.pop("step", []) if isinstance(step, int)})
        return ExampleVisits(example, {name: values[0] for name, values in columns.items()}, steps)

    def _layer(self, name: str | None) -> LayerReader:
        return self.view.reader.layer(list(self.view.reader.layers)[-1] if name is None else name)

    def __len__(self) -> int:
        """The number of slots of the view, in the layer that has most of them."""
        return self.view.slots

    @property
    def info(self) -> MemoryInfo:
        """What the memory is, as a table."""
        return MemoryInfo(self._known if "view" not in self.__dict__ else self.view)

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    def __repr__(self) -> str:
        layers = ", ".join(self._known.reader.layers)
        manifest = self._known.reader.manifest
        what = self._known.selection if manifest.recipe is None else "a recipe"
        if manifest.observed:
            what = f"{what}, {manifest.slots_note}"
        return f"Memory({self._known.reader.address}: {what}, {self.steps:,} steps, layers {layers})"

    # -- views ---------------------------------------------------------------------------------

    def where(self, **conditions: Any) -> Memory:
        """Only the slots that meet all conditions: a value, a list of values, or a range per column."""
        return Memory(self.view.where(meeting(self.view.reader, conditions)))

    def without(self, **conditions: Any) -> Memory:
        """Only the slots that do not meet all conditions: what if it had never seen these?"""
        return Memory(self.view.where(~meeting(self.view.reader, conditions)))

    def __invert__(self) -> Memory:
        view = self.view
        return Memory(replace(view, selection=view.all_slots & ~view.selection))

    def as_of(self, step: int) -> Memory:
        """The network as it was after `step` optimizer steps; `as_of(0)` is the initial one."""
        if not 0 <= step <= self.steps:
            raise SettingError(f"as_of({step}): this view has steps 0 to {self.steps}.")
        if step != self.steps:
            self.view.reader.need_visits("what came before a step and what after", "Ask about the whole of it")
        view = self.view
        return Memory(replace(view, selection=as_of(view.reader, view.selection, step), until=step))

    # -- questions -----------------------------------------------------------------------------

    def attend(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        layers: str | Sequence[str] | None = None,
        kernel: str = "dot",
        part: str | None = None,
    ) -> Spotlights:
        """Runs the model once on the inputs; gives each layer's attention over the slots of this view.

        Args:
            model: the trained network. It is run in eval mode and left as it was.
            inputs: a batch (a tensor), or a tuple or dict of the model's arguments.
            layers: only these; a convolution has a query for each position of each input, so many inputs fill the
                main memory.
            kernel: "dot" is what the network computes; the others are for looking. "cosine" takes no account of how
                large a key is, "cosine-parts" adds up the cosines of the parts of a key that is put together of several
                (`[x; h]` of a recurrent layer), "softmax" is that of transformers.
            part: of such a key, one part alone ("h"), under any kernel; layers without that part are left out.
        """
        if kernel not in KERNELS:
            raise SettingError(f"Unknown kernel {kernel!r}. There are: {', '.join(KERNELS)}.")
        reader = self.view.reader
        parts = {name: entry.parts for name, entry in reader.manifest.layers.items() if entry.parts}
        if part is not None and not any(part in of_layer for of_layer in parts.values()):
            raise UnknownNameError(f'No layer has keys with a part "{part}". There are: {parts or "no parts at all"}.')
        entries, layers = reader.manifest.layers, [layers] if isinstance(layers, str) else layers
        if layers is not None:
            entries = {name: entry for name, entry in entries.items() if name in layers or entry.turned}
        forward = ForwardPass(model, inputs, entries)
        for name in layers or ():
            if name not in forward.transposed_uses:
                reader.layer(name)  # an unknown one gets its error here
        differs = what_differs(self.view, forward.parameters, list(entries))
        attentions = {
            name: Attention(self.view, reader.layers[name], forward, kernel, part=part, differs=differs)
            for name, entry in entries.items()
            if forward.calls[name].queries and (part is None or part in entry.parts)
        }
        for use, name in forward.transposed_uses.items():
            if forward.calls[use].queries and part is None:
                attentions[use] = Attention(self.view, reader.layers[name], forward, kernel, use=use, differs=differs)
        if layers is not None:
            attentions = {name: attention for name, attention in attentions.items() if name in layers}
        return Spotlights(attentions, forward.output, AskedNetwork(self.view, model, inputs))

    def on(self, engine: Engine | str, *, keep: bool = False) -> Memory:
        """The same memory, its questions run by another engine.

        Args:
            engine: "threads" for this machine, which is the default; "ray" for the Ray cluster that `ray.init()` finds,
                or the address of one; `sl.Shard` and `sl.Merged` for the jobs of an array.
            keep: for a series of questions to a Ray cluster: actors keep what they have read, and the cluster's CPUs,
                until this process ends.
        """
        runner = _engine(engine, keep=keep)
        if self._recomputation is not None and "view" not in self.__dict__:
            return Memory(replace(self._known, engine=runner), self._recomputation)
        return Memory(replace(self.view, engine=runner))

    def copy(self, path: str | Path, *, overwrite: bool = False) -> Memory:
        """Copies the whole memory to another directory or bucket, and opens the copy; `verify` checks it.

        Args:
            path: where to; a directory or an address, as for `open`.
            overwrite: replace a memory that is there.
        """
        reader = self.view.reader
        if self.view.selection != as_of(reader, Everything(), reader.steps):
            raise SettingError("Only a whole memory can be copied, not a view of it.")
        copy_memory(reader.store, store_at(path), overwrite=overwrite)
        return open(path)

    def materialise(
        self,
        path: str | Path | None = None,
        *,
        steps: range | None = None,
        overwrite: bool = False,
        progress: Progress = lambda share: None,
    ) -> Memory:
        """Computes the slots of a recipe, and keeps them.

        Args:
            path: a directory for a memory as if the run had been recorded whole. None fills the cache, so that
                questions are quick.
            steps: with a path: only these. The new memory counts its steps from their first one.
            overwrite: replace a memory that is there.
            progress: is told the share that is done.
        """
        if self._recomputation is None:
            self._known.reader.need_slots()
            raise SettingError(f"{self.path} has its slots already. Copy it with memory.copy(path).")
        if path is None:
            if steps is not None:
                raise SettingError("Give a path for the memory of some steps: materialise(path, steps=range(…)).")
            engine = self._known.engine
            self.__dict__.setdefault("view", _whole(self._recomputation.reader(progress, engine.each), engine))
            return self
        kept_steps = range(self.steps) if steps is None else steps
        if not (kept_steps.step == 1 and 0 <= kept_steps.start < kept_steps.stop <= self.steps):
            raise SettingError(f"steps={steps}: give a range within 0 to {self.steps}.")
        self._recomputation.record(store_at(path), kept_steps, progress, overwrite=overwrite)
        return open(path)

    def replay(self, inputs: Any, target: Target, *, progress: Progress = lambda share: None) -> ReplayedInfluence:
        """Influence by exact replay of a short training: a number's derivative with respect to each example's weight.

        The memory has to be a recipe, opened with `recompute=`, whose loss gives one number for each example; the
        optimizer SGD, Adam or AdamW. The adjoint goes back through every step of the training, which costs some
        trainings for a few dozen inputs. Two more trainings, without a random tenth each, tell whether to trust it.

        Args:
            inputs: a batch, or a tuple or dict of the model's arguments.
            target: the number of interest, as for `Spotlights.influence`.
            progress: is told the share that is done.
        """
        if self._recomputation is None:
            raise UnsupportedError(
                f"Exact replay trains again, and {self.path} has nothing to train with. Train once more with "
                "keep='recipe', and open that with sl.open(path, model=model, recompute=loss)."
            )
        derivative, names = self._recomputation.sweep_back(lambda model: answer(model, inputs, target), progress)
        return ReplayedInfluence.of(derivative.values, derivative.growth, derivative.explained, names)

    def rewind(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, without: str) -> Rewound:
        """Puts a network and its optimizer back to a checkpoint from before some examples were first seen.

        What is given back says how many steps are to be trained again, and has hashes of the checkpoint and of the
        examples of each later step. Of a recipe that was opened with its loss, `train()` takes these steps itself.

        Args:
            model: the network, of the structure of the recorded one. Its weights and buffers are replaced.
            optimizer: made as the recorded one was. Its state and options are replaced. Not needed for a recipe.
            without: what is to be forgotten, as in `spotlights mask`: "example=17,99", "label=3; source=mails".
        """
        source = None if self._recomputation is None else self._recomputation.source
        return rewind(self._known, source, model, optimizer, without)

    def prepare_influence(self, *, turn: Turn = nullcontext, progress: Progress = lambda share: None) -> None:
        """Adds up the second moments of the keys, which influence needs; they are kept beside the memory.

        Args:
            turn: what to hold during each stretch of the pass.
            progress: is told the share that is done.
        """
        key_moments(self.view, turn=turn, progress=progress)

    @property
    def influence_is_prepared(self) -> bool:
        """Whether influence can be asked for without a pass over all keys first."""
        reader = self.view.reader
        return bool(reader.moments) or not any(map(has_moments, reader.layers.values()))

    def masks(self, model: nn.Module, columns: Sequence[str] | None = None) -> Masks:
        """Answers of the model under any mask; after `build()`, most masks need no pass over slots.

        Args:
            model: the trained network.
            columns: whose values can be masked at once; those of `groups()` by default.
        """
        return Masks(self.view, model, list(self.groups()) if columns is None else columns)

    def calibrate(
        self,
        retrain: Retrain,
        model: nn.Module,
        inputs: Any,
        *,
        target: Target,
        halves: int = 8,
        seeds: int = 2,
        curvature: float = 2.0,
    ) -> Calibration:
        """Retrains on a few random halves, so that forecasts have a size and an interval; kept with the memory.

        Args:
            retrain: a function of a list of example ids that trains a fresh network on these, with a seed of its own.
            model: the trained network.
            inputs: a few inputs like those that forecasts will be about.
            target: the number of interest, as for forecasts.
            halves: how many random halves of the examples to train on.
            seeds: how often to train on all examples, for the noise of seeds.
            curvature: as for `Spotlights.forecast`.
        """
        spot = self.attend(model, inputs)
        return calibrate(spot, target, retrain, halves=halves, seeds=seeds, curvature=curvature)

    def suspects(self, k: int = 100, *, layer: str | None = None, per_class: bool = False) -> Suspects:
        """The k training examples of this view that look most mislabelled, and why.

        Ranks by the sum over visits of the norm of the last layer's error (docs/truth.md has how well). Says which
        class the network would give instead, how often it agreed with the label, and which examples of other classes
        look most alike. Works while training still runs.

        Args:
            k: how many.
            layer: the layer that gives the answer; the last one that was recorded by default.
            per_class: k of each class.
        """
        return find_suspects(self.view, k, layer, per_class=per_class)

    def parameters(self, layer: str) -> dict[str, Tensor]:
        """Weight and bias that the slots of this view, with the initial part, make up; in float64.

        The weight is the matrix that acts on keys. `primal` gives a network with weights in their own shapes. A layer
        made of several parameters, as an LSTM's is, has these by their names.
        """
        return view_parameters(self.view, layer)

    def weights(self, layer: str) -> Float[Tensor, "out_features in_group"]:
        """The weight matrix that the slots of this view, with the initial part, make up; in float64."""
        parameters = self.parameters(layer)
        return torch.cat([parameters[name] for name in self.view.reader.layer(layer).entry.weight_columns], dim=1)

    def final_parameters(self) -> dict[str, dict[str, Tensor]] | None:
        """The weights that the closed recording left, by layer; None while it is still open."""
        reader = self.view.reader
        if reader.final is None or self.view.until != reader.manifest.steps:
            return None
        by_layer: dict[str, dict[str, Tensor]] = {}
        for name, value in reader.final.items():
            layer, parameter = name.rsplit("/", 1)
            by_layer.setdefault(layer, {})[parameter] = value
        return by_layer

    def dual(self, model: nn.Module) -> nn.Module:
        """A copy of the model that computes in dual form from the slots of this view: it attends."""
        return dual_model(self.view, model)

    def primal(self, model: nn.Module, *, layers: Sequence[str] | None = None) -> nn.Module:
        """A copy of the model with the weights of this view: the same answers as `dual`, for many inputs.

        Args:
            model: the trained network.
            layers: only in these layers; the others keep the model's weights.
        """
        names = list(self.view.reader.layers) if layers is None else layers
        parameters = {name: self.parameters(name) for name in names}
        return primal_model(self.view, model, parameters)

    def verify(
        self,
        model: nn.Module | None = None,
        *,
        files: bool = True,
        parameters: Mapping[str, dict[str, Tensor]] | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> Verification:
        """Compares `a·W_0 + Σ v⊗k` with the trained weights, layer by layer.

        Without a model: with the weights that the closed recording left; for a run that was killed, or as of
        an earlier step, with the entries of the weights that the step log keeps for every step.

        Args:
            model: the trained network.
            files: also read every file and compare it with its checksum.
            parameters: what `parameters(layer)` gave for each layer, if it has been added up already.
            optimizer: for a run whose optimizer has no exact rule: its class, which is then run again on the
                recorded gradients. One of torch's own need not be given.
        """
        return verify(self.view, model, files=files, parameters=parameters, optimizer=optimizer)
