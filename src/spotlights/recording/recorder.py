"""`sl.record`: one `with` line around the user's training loop.

Hooks on the layers, on their outputs and on the optimizer record the run. The loop, its results and its random numbers
do not change. If the memory can no longer be written, recording stops and training continues.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlights.errors import (
    SettingError,
    SpotlightsError,
    UnknownNameError,
    UnsupportedError,
)
from spotlights.layers.adapter import unwrapped
from spotlights.memory.buffers import BufferPool
from spotlights.memory.format.columns import Batch, ColumnTable, Matching
from spotlights.memory.format.recipe import AnnouncedBatch, Columns, StepRecipe
from spotlights.memory.format.sampling import Draw, Sample
from spotlights.memory.slots import LayerStep, StepRecord
from spotlights.memory.store import Store, store_at
from spotlights.memory.writer import SEGMENT_BYTES, MemoryWriter
from spotlights.recording.changes import WEIGHTS, Changes
from spotlights.recording.find_layers import find_layers
from spotlights.recording.hooks import BackwardPasses, Guard
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.optimizers import Optimizers
from spotlights.recording.recipe import RecipeNotes
from spotlights.recording.reports import Reports
from spotlights.recording.settings import RecordingSettings
from spotlights.recording.shards import check_sharded
from spotlights.recording.start import Checkpoints, Processes, RunningStatistics, Start
from spotlights.torch_internals import Untraced, compiled_graphs, running_steps


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    path: str | Path,
    *,
    layers: str | Sequence[str] | None = None,
    dtype: str | None = None,
    errors: bool = True,
    fold: str | None = None,
    fold_from: int = 0,
    sample: float = 1.0,
    sample_steps: float = 1.0,
    keep: str = "slots",
    checkpoint_every: int | str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> Recorder:
    """Records a training run as a memory: `with sl.record(model, optimizer, "run.memory") as recorder:`.

    Args:
        model: the network. All layers of a known kind are recorded (docs/layers.md). Other trained parameters are
            listed in one warning and in `memory.info`.
        optimizer: what trains the model: an optimizer, a wrapper that has it as `.optimizer` (accelerate), or a list of
            optimizers. Each parameter follows its own one. A step of the memory is what happens between two backward
            passes: one step of each optimizer at most.
        path: the directory to write, or an address in a bucket: `s3://bucket/run.memory`, `gs://…`, `az://…`.
        layers: names or patterns (`"layers.*"`) of the layers to record; all by default. A parameter that no kind of
            layer knows is recorded by its gradient of each step if it is small, or if a pattern has its name.
        dtype: how keys and errors are stored. None stores each layer in the type of its weights: float64 as float64,
            everything else as float32, which represents float16 and bfloat16 exactly. "float64" and "float32" can be
            forced. "float16" and "int8" (one scale per row) are smaller; answers are then approximate and say so.
        errors: False stores keys only: scores work, contributions and masks do not.
        fold: "example" stores one running sum of keys for each example (and position) instead of every visit, and no
            errors. Totals of scores are the same, at the size of one epoch. Needs `recorder.batch(example=…)`; for a
            text, the position of each token: shape (B, L). The sums stay in main memory until they are written.
        fold_from: the first optimizer step (counted from 0) whose visits are folded. In a run of `steps` steps,
            `steps - 1000` folds the last 1,000. Early visits come from an untrained network.
        sample: the probability with which each slot (a token, a position of a convolution) is stored, for runs that are
            too large to store completely. Totals, contributions and influence are then estimates with standard errors;
            weights, masks and verify need all slots. Contributions need SGD.
        sample_steps: the same for whole steps. The step log has all steps.
        keep: "recipe" keeps checkpoints and the examples of each step instead of slots, which takes far less room.
            `sl.open(path, model=…, recompute=loss)` computes the slots again (docs/recipes.md). Needs
            `recorder.batch(example=…)` before each forward pass.
        checkpoint_every: of a recipe: the steps between two checkpoints; "auto" spends at most 5 % of the time on them.
        resume: continue the memory at `path`. The model must hold the weights of one of its steps: of the last one, or
            of an earlier checkpoint, whose later steps are then dropped. Starts a new memory if there is none.
        overwrite: replace the memory at `path`.
        segment_bytes: how much is collected before it is written. A crash loses at most this much.
    """
    settings = RecordingSettings(
        layers=layers,
        dtype=dtype,
        errors=errors,
        fold=fold,
        fold_from=fold_from,
        sample=sample,
        sample_steps=sample_steps,
        keep=keep,
        checkpoint_every=checkpoint_every,
        resume=resume,
        overwrite=overwrite,
        segment_bytes=segment_bytes,
    )
    return Recorder(model, optimizer, store_at(path), settings)


class Recorder:
    """Records while its `with` block runs; created by `record`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        store: Store,
        settings: RecordingSettings,
        columns: ColumnTable | None = None,
    ) -> None:
        self.path = Path(str(store))
        self.step = 0
        """The number of optimizer steps in the memory."""
        self._model = unwrapped(model)
        check_sharded(self._model)
        self._processes = Processes.of(model)
        if settings.fold is not None and self._processes.count > 1:
            raise SettingError("fold= does not work in several processes. Record without it.")
        self._optimizers = Optimizers(optimizer)
        self._settings = settings
        self._folded = settings.fold is not None
        self._pool = BufferPool(max_bytes=4 * settings.segment_bytes)
        self._layers, self._hooks = find_layers(self._model, self._optimizers, settings, pool=self._pool)
        self._sharded = any(layer.is_sharded for layer in self._layers.values())
        self._checkpoints = Checkpoints(self._layers, self._optimizers)
        self._changes = Changes(self._model, self._optimizers, self._layers)
        self._recipe: RecipeNotes | None = None
        if settings.is_recipe:
            if self._processes.count > 1:
                raise SettingError('keep="recipe" does not work in several processes. Record without it.')
            every = settings.checkpoint_every
            self._recipe = RecipeNotes(self._model, self._optimizers, every if isinstance(every, int) else None)
        kept = self._processes.rank == 0 and settings.fold is None and self._recipe is None
        self._statistics = RunningStatistics(self._model if kept else nn.Module())
        self._start = Start(
            store, self._model, self._checkpoints, settings, self._processes, self._pool, self._statistics
        )
        self._reports = Reports(store)
        self._guard = Guard(self._on_error, self._reports.forked)
        self._passes = BackwardPasses(
            self._layers.values(), self._guard, self._close_step, keeps_errors=settings.keeps_errors
        )
        self._handles: list[Any] = []
        self._optimizer_handles: list[Any] = []
        self._writer: MemoryWriter | None = None
        self._columns, self._given_columns = ColumnTable(), columns
        self._matching = Matching()
        self._batch = self._no_columns()
        self._paused = 0
        self._was_paused = False
        self._may_be_compiled = False
        self._staged: dict[str, LayerStep] = {}
        """The step that the optimizers are about to take, or have begun."""
        self._stepped: set[int] = set()
        """The `id`s of the optimizers that have stepped since the last backward pass, if there are several."""
        self._state: dict[str, Tensor] = {}
        self._step_recipe: StepRecipe | None = None

    # -- what users call -------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self.step, self._writer = self._start.open_writer(self.step)
        if self._given_columns is not None:
            self._writer.columns = self._given_columns
        self._columns = self._writer.columns
        if not self._folded:
            self._columns.declare("step", "int")
        guard = self._guard
        if self._recipe is not None:
            self._handles += self._recipe.register(guard, lambda: not self._paused)
        for hooks in self._hooks if self._recipe is None else ():
            self._handles += hooks.register(self._columns, self._current_batch, self._passes, guard)
        if compiled_graphs():  # of this model, or of anything else: only a compiled model does not call its hooks
            self._may_be_compiled = True
            self._handles.append(guard.watch_calls(self._model))
        for optimizer in self._optimizers.all:
            self._optimizer_handles += [
                optimizer.register_step_pre_hook(Untraced(guard(self._on_step))),
                optimizer.register_step_post_hook(Untraced(guard(self._after_step))),
            ]
        self._optimizer_handles += self._changes.watch(
            guard, lambda *of: self._reports.another_optimizer(self.step, *of)
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._guard.forked():
            return
        self._guard(self._close_step)()
        self._guard(self._look_again)()
        self._unhook()
        for handle in self._optimizer_handles:
            handle.remove()
        self._optimizer_handles.clear()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            final = self._checkpoints.copy(self._processes.rank)
            writer.close(final, interrupted=kind is not None)
            if kind is None:
                self._processes.wait_for_all()  # so that any process may open the whole memory after the block
            self._reports.gap(writer.gap)
            if writer.failure is not None:
                self._reports.stop(writer.failure)

    def batch(self, *, layer: str | None = None, **columns: Any) -> None:
        """Describes the next batch: `recorder.batch(example=ids, label=labels, source="mnist")`.

        Each column has one value for the whole batch, one per example (B,), or one per position (B, L): numbers,
        strings or tensors. The columns are valid until the next call, at most until the optimizer steps.

        Where the rows of a layer are neither (the nodes of a graph, the tokens that one expert gets), give one value
        for each row: `recorder.batch(example=ids_of_nodes, layer="nodes")`, after the call for the whole batch.

        Args:
            layer: the layer, or a pattern of names (`"experts.*"`), that these columns are for.
            columns: by name.
        """
        if self._guard.forked():
            return
        if self._writer is None and not self._reports.stopped:
            raise SettingError("recorder.batch(…) was called outside its `with` block.")
        self._announce({name: self._columns.encode(name, values) for name, values in columns.items()}, layer)

    def accept_weights(self) -> None:
        """Takes the weights as they are for those after the last step: loading them is nothing to report."""
        for layer in self._layers.values():
            layer.settle()

    def announce(self, batch: AnnouncedBatch) -> None:
        """The same for a batch of a recipe, whose values are numbers already."""
        self._announce(batch.columns, None)
        for layers, columns in batch.by_row.items():
            self._announce(columns, layers)

    def _announce(self, encoded: Columns, layer: str | None) -> None:
        if layer is None:
            self._batch = Batch(encoded, fold=self._folded, matching=self._matching)
            if self._recipe is not None:
                self._recipe.announce(encoded)
        elif any(fnmatchcase(name, layer) for name in self._layers):
            self._batch.describe_rows(layer, encoded)
            if self._recipe is not None:
                self._recipe.describe_rows(layer, encoded)
        else:
            raise UnknownNameError(f'No layer matches "{layer}". The memory has: {", ".join(self._layers)}.')

    def _no_columns(self) -> Batch:
        return Batch(fold=self._folded, matching=self._matching)

    def flush(self) -> None:
        """Waits until all steps so far are on disk. Call this just before you save a checkpoint.

        A folded memory writes all of its sums at each flush, and can be resumed from such steps only.
        """
        if self._guard.forked():
            return
        self._guard(self._close_step)()
        if self._writer is not None:
            self._writer.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside: `with recorder.paused(): …`."""
        self._paused += 1
        self._was_paused = True
        try:
            yield
        finally:
            self._paused -= 1

    # -- hooks ---------------------------------------------------------------------------------

    def _current_batch(self) -> Batch | None:
        return None if self._paused or self.step < self._settings.fold_from else self._batch

    def _on_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_nested(optimizer):
            return None
        # The optimizer uses the gradients that its closure computes.
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._then_stage(optimizer, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._then_stage(optimizer, kwargs["closure"])}
        self._stage(optimizer)
        return None

    def _is_nested(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is part of another step of the same optimizer, by `super().step()`."""
        return id(optimizer) in self._optimizers.nested and running_steps(optimizer) > 1

    def _then_stage(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        stage, again = self._guard(self._stage), self._guard(self.accept_weights)
        calls = 0

        def wrapped() -> Any:
            nonlocal calls
            result = closure()
            if calls:  # LBFGS itself has changed the weights in between
                again()
            stage(optimizer)
            calls += 1
            return result

        return wrapped

    def _stage(self, optimizer: torch.optim.Optimizer) -> None:
        """Collects the slots whose gradients an optimizer is about to use, and its options at this step."""
        if id(optimizer) in self._stepped:
            self._close_step()
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        scale = getattr(optimizer, "grad_scale", None)  # fused optimizers unscale gradients themselves
        loss_scale = 1.0 if scale is None else float(scale)
        rule = self._optimizers.rules[self._optimizers.all.index(optimizer)]
        self._passes.clear()
        without_slots: list[RecordedLayer] = []
        with torch.no_grad():
            if not self._stepped:
                self._staged = {}
                if not self.step:
                    self._start_over_if_changed()
                if self._recipe is None:  # which may have copied a state for a step that was then skipped
                    self._state = self._due_state()
            reasons = self._changes.before_step(self.step, optimizer, groups.keys())
            for name, layer in self._layers.items():
                logged = {}
                for parameter_name, own_rule in self._checkpoints.rules[name].items():
                    parameter = layer.parameters[parameter_name]
                    group = groups.get(id(parameter))
                    if group is not None and own_rule is rule:
                        state, has_gradient = optimizer.state.get(parameter, {}), parameter.grad is not None
                        logged[parameter_name] = rule.log(group, state, has_gradient)
                if name in self._staged:  # another optimizer trains parameters of this layer too
                    self._staged[name].rule |= logged
                    self._staged[name].moved |= reasons.get(name, 0)
                    continue
                if not logged and name not in reasons:
                    continue
                taken = logged and self._recipe is None
                rows, gradients = layer.take(loss_scale) if taken else ([], None)
                if not rows and gradients is not None:
                    without_slots.append(layer)
                compared = gradients if gradients is not None and self._settings.keeps_errors else {}
                self._staged[name] = LayerStep(rows, compared, self._reasons(layer) | reasons.get(name, 0), logged)
            if self._recipe is not None:
                self._step_recipe = self._recipe.step(self.step)
                changed = any(staged.moved for staged in self._staged.values())
                if self._recipe.due(self.step, changed=changed) and self._writer is not None:
                    self._writer.start_segment()
                    self._state = self._recipe.checkpoint(self.step)
        any_rows = any(staged.rows for staged in self._staged.values())
        if without_slots:
            self._report_without_slots(without_slots[0])
        if self._matching.misfits or self._matching.ambiguous:
            self._reports.rows(self._matching, self._staged)
        if any_rows and self._batch and not self._batch.used:
            self._reports.late(self.step)

    def _reasons(self, layer: RecordedLayer) -> int:
        """Whether anything but an optimizer changed the layer since the last step (`names.MOVED`)."""
        if not layer.moved():
            return 0
        if layer.name in self._changes.known:
            return self._changes.known[layer.name]
        self._changes.log(self.step, WEIGHTS, "weights were changed outside the optimizer", [layer.name])
        return WEIGHTS

    def _look_again(self) -> None:
        """When recording ends: what was changed after the last step."""
        if not self._guard.stopped:
            self._changes.replaced(self.step)
        for layer in self._layers.values() if self.step and not self._guard.stopped else ():
            if layer.trained:
                self._reasons(layer)

    def _start_over_if_changed(self) -> None:
        """Before the first step, weights and state may be loaded: the memory starts from these."""
        assert self._writer is not None
        if self._changes.loaded or any(layer.moved() for layer in self._layers.values()):
            self._changes.loaded.clear()  # the memory starts from it
            self.accept_weights()
            if not self._processes.rank or self._sharded:
                self._writer.replace_initial(self._start.initial())

    def _report_without_slots(self, layer: RecordedLayer) -> None:
        if self.step < self._settings.fold_from:
            return
        if self._was_paused:  # on purpose
            logging.getLogger("spotlights").info(
                'At step %d layer "%s" has a gradient of passes inside recorder.paused(), and no slots. '
                "The step log marks such steps, and verify reports them.",
                self.step,
                layer.name,
            )
            return
        in_training = any(module.training for module in self._model.modules())
        if self._may_be_compiled and in_training and not self._guard.called:
            raise UnsupportedError(
                "torch.compile compiled the model before recording began, so without hooks. Start recording before "
                "the first training step, or call torch.compiler.reset() before recording"
            )
        self._reports.without_slots(self.step, layer.name, in_training=in_training)

    def _on_error(self, error: Exception) -> None:
        """Ends the recording; training continues."""
        assert self._writer is not None
        reason = str(error)
        if not isinstance(error, SpotlightsError):
            logging.getLogger("spotlights").info("An error in a hook of Spotlights.", exc_info=error)
            reason = f"{type(error).__name__} in a hook of Spotlights, which is a mistake of ours: {error}"
        self._guard.stopped = True
        self._staged = {}
        self._passes.clear()
        self._unhook()
        self._writer.flush()
        self._writer.failure = self._writer.failure or UnsupportedError(reason.removesuffix("."))
        self._reports.stop(self._writer.failure)

    def _due_state(self) -> dict[str, Tensor]:
        """A checkpoint of the optimizer's state, if one is due."""
        assert self._writer is not None
        if self._settings.sampling or not self._settings.keeps_errors or not self.step:
            return {}  # neither P nor weights can be recomputed
        if self._sharded:
            state = self._checkpoints.before_step(self._processes.rank, partial(self._writer.aligned, self.step))
            if state:
                self._writer.start_segment()
            return state
        if self._processes.rank or not self._writer.starts_segment:
            return {}
        return self._checkpoints.before_step(0, self._writer.wants)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_nested(optimizer):
            return
        skipped = getattr(optimizer, "found_inf", None)  # fused optimizers skip steps themselves
        if skipped is not None and float(skipped) != 0.0:
            self._unstage(optimizer)
            return
        if not self._staged:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers.all):
            self._close_step()
            self._batch = self._no_columns()

    def _unstage(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has skipped the step. Others may have taken theirs."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, step in self._staged.items() if self._stepped else ():
            own = {n for n, parameter in self._layers[name].parameters.items() if id(parameter) in held}
            step.rule = {n: logged for n, logged in step.rule.items() if n not in own}
        self._staged = {name: step for name, step in self._staged.items() if self._stepped and step.rule}

    def _close_step(self) -> None:
        """Hands the step over to the writer, if an optimizer has taken it."""
        if not self._stepped:
            return
        staged, state, self._staged, self._state = self._staged, self._state, {}, {}
        self._stepped = set()
        self._was_paused = self._paused > 0
        layers: dict[str, LayerStep] = {}
        with torch.no_grad():
            for name, layer in self._layers.items():
                step = staged.get(name)
                if step is None:  # no optimizer that stepped trains the layer
                    step = LayerStep([], {}, self._reasons(layer))
                    if len(self._optimizers.all) == 1 or not self._changes.holds(layer):
                        layer.forget()
                for parameter, rule in self._checkpoints.rules[name].items():
                    if parameter not in step.rule:
                        step.rule[parameter] = rule.idle
                step.probed = layer.settle()
                layers[name] = step
        if self._settings.sampling is not None:
            layers = self._thinned(layers, self._settings.sampling)
        assert self._writer is not None
        if not self._writer.order and any(step.rows for step in layers.values()):
            self._writer.order = sorted(self._layers, key=lambda name: self._layers[name].called)
        self._reports.gap(self._writer.gap)
        record = StepRecord(self.step, layers, state, self._statistics.now(), self._step_recipe)
        self._step_recipe = None
        if not self._folded:  # a folded memory does not grow with the steps
            self._reports.bytes(record)
        self._writer.add(record)
        self.step += 1
        if self._writer.failure is not None:
            self._guard.stopped = True
            self._unhook()
            self._reports.stop(self._writer.failure)

    def _thinned(self, layers: dict[str, LayerStep], sample: Sample) -> dict[str, LayerStep]:
        """The step with the sampled slots only."""
        assert self._writer is not None
        manifest = self._writer.manifest
        seed = int(manifest.run, 16) if manifest.run else manifest.seed or 0
        draw = Draw(sample, seed, self.step, self._processes.rank)
        kept = {name: step.thinned(draw, manifest.layers[name]) for name, step in layers.items()}
        for step in layers.values():
            for rows in step.rows:
                rows.give_back(self._pool)
        return kept

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
