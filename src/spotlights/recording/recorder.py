"""`sl.record`: one `with` line around the user's training loop.

Hooks listen to the layers, to the gradients and to the optimizer; the loop, its results and its random
numbers stay what they are. If the memory can no longer be written, recording stops and training goes on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from spotlights.errors import (
    RecordingStoppedWarning,
    SettingError,
    SpotlightsWarning,
    UnsupportedError,
)
from spotlights.layers.untraced import Untraced, compiled_graphs
from spotlights.layers.wrappers import unwrapped
from spotlights.memory.columns import Batch, ColumnTable
from spotlights.memory.sampling import Draw, Sample
from spotlights.memory.slots import LayerStep, StepRecord
from spotlights.memory.storage import BufferPool
from spotlights.memory.writer import SEGMENT_BYTES, MemoryWriter
from spotlights.optimizers import rule_for
from spotlights.optimizers.replayed import ReplayedRule
from spotlights.recording.checkpoints import Checkpoints
from spotlights.recording.finding import find_layers
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.listening import Handle
from spotlights.recording.passes import Passes
from spotlights.recording.processes import Processes
from spotlights.recording.settings import Settings, checked
from spotlights.recording.starting import Start


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | Path,
    *,
    layers: str | Sequence[str] | None = None,
    dtype: str = "float32",
    errors: bool = True,
    fold: str | None = None,
    fold_from: int = 0,
    sample: float = 1.0,
    sample_steps: float = 1.0,
    resume: bool = False,
    overwrite: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> Recorder:
    """Records a training run as a memory: `with sl.record(model, optimizer, "run.memory") as recorder:`.

    Args:
        model: the network; its layers are recorded, as far as they are of a known kind (docs/layers.md). Trained
            parameters of other layers are listed in one warning, and in `memory.info`.
        optimizer: the one optimizer that trains it.
        path: the directory to write.
        layers: names or patterns (`"layers.*"`) of the layers to record; all of them by default.
        dtype: how keys and errors are kept: "float32" (exact for a float32 network), "float64",
            "float16" or "int8" (one scale per row; answers are then approximate and say so).
        errors: False keeps keys only: scores work, contributions and masks do not.
        fold: "example" keeps one running sum of keys for each example (and position) instead of every visit, and no
            errors: totals of scores are the same, at the size of one epoch. Needs `recorder.batch(example=…)`; for a
            text, the position of each token: shape (B, L). The sums are held in main memory until they are written.
        fold_from: the first optimizer step (counted from 0) whose visits are folded: of a run of `steps` steps,
            `steps - 1000` leaves the last 1,000. Early visits come from an untrained network.
        sample: the probability with which each slot (a token, a position of a convolution) is kept, for runs too large
            to keep whole: 0.1 keeps a tenth. Totals, contributions and influence are then estimates, with standard
            errors; weights, masks and verify need all slots. Contributions under sampling need SGD.
        sample_steps: the same for whole steps; the step log is kept of all.
        resume: go on with the memory at `path`. The model must hold the weights of one of its steps (its
            last one, or those of an earlier checkpoint: later steps are then dropped). Starts a new
            memory if there is none.
        overwrite: replace the memory at `path`.
        segment_bytes: how much is collected before it is written. A crash loses at most this much.
    """
    settings = checked(
        layers=layers,
        dtype=dtype,
        errors=errors,
        fold=fold,
        fold_from=fold_from,
        sample=sample,
        sample_steps=sample_steps,
        resume=resume,
        overwrite=overwrite,
        segment_bytes=segment_bytes,
    )
    return Recorder(model, optimizer, Path(path), settings)


class Recorder:
    """Records while its `with` block runs; made by `record`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, settings: Settings) -> None:
        self.path = path
        self.step = 0
        """How many optimizer steps the memory has."""
        self._model = unwrapped(model)
        self._processes = Processes.of(model)
        if settings.fold is not None and self._processes.count > 1:
            raise SettingError("fold: visits cannot be added up over several processes. Record without fold.")
        self._optimizer = optimizer
        self._rule = rule_for(optimizer) or ReplayedRule(optimizer)
        self._errors = settings.errors
        self._folded = settings.fold is not None
        self._sample = settings.sample
        self._first_step = settings.first_step
        self._pool = BufferPool(max_bytes=4 * settings.segment_bytes)
        self._layers, self._listeners = find_layers(self._model, optimizer, settings, pool=self._pool)
        self._checkpoints = Checkpoints(self._layers, optimizer, self._rule)
        self._start = Start(path, self._model, self._checkpoints, settings, self._processes, self._pool)
        self._passes = Passes(self._layers.values())
        self._handles: list[Handle] = []
        self._writer: MemoryWriter | None = None
        self._columns = ColumnTable()
        self._batch = Batch(fold=self._folded)
        self._paused = 0
        self._was_paused = False
        self._warned = False
        self._warned_unseen = False
        self._seen = False
        """A slot has been recorded."""
        self._staged: dict[str, LayerStep] = {}
        """The step that the optimizer is about to take."""
        self._state: dict[str, Tensor] = {}

    # -- what users call -------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self.step, self._writer = self._start.open_writer(self.step)
        self._columns = self._writer.columns
        if not self._folded:
            self._columns.declare("step", "int")
        for listener in self._listeners:
            self._handles += listener.start(self._columns, self._current_batch, self._passes)
        self._handles.append(self._optimizer.register_step_pre_hook(Untraced(self._on_step)))
        self._handles.append(self._optimizer.register_step_post_hook(Untraced(self._after_step)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unhook()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            final = {} if self._processes.rank else self._checkpoints.parameters()
            writer.close(final, interrupted=kind is not None)
            if kind is None:
                self._processes.meet()  # who leaves the block may open the whole memory
            if writer.failure is not None:
                self._warn_stopped(writer.failure)

    def batch(self, **columns: Any) -> None:
        """Says who is in the next batch: `recorder.batch(example=ids, label=labels, source="mnist")`.

        Each column is one value for the whole batch, one per example (B,), or one per position (B, L);
        numbers, strings or tensors. It holds until the next call, at most until the optimizer steps.
        """
        if self._writer is None and not self._warned:
            raise SettingError("recorder.batch(…) was called outside its `with` block.")
        encoded = {name: self._columns.encode(name, values) for name, values in columns.items()}
        self._batch = Batch(encoded, fold=self._folded)

    def flush(self) -> None:
        """Waits until all steps so far are on disk; call it just before you save a checkpoint.

        A folded memory, which writes all of its sums for this, can be resumed from such steps alone.
        """
        if self._writer is not None:
            self._writer.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded inside: `with recorder.paused(): …`."""
        self._paused += 1
        self._was_paused = True
        try:
            yield
        finally:
            self._paused -= 1

    # -- hooks ---------------------------------------------------------------------------------

    def _current_batch(self) -> Batch | None:
        return None if self._paused or self.step < self._first_step else self._batch

    def _on_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # With a closure, the gradients that count are those it leaves behind.
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._then_stage(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._then_stage(kwargs["closure"])}
        self._stage()
        return None

    def _then_stage(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            result = closure()
            self._stage()
            return result

        return wrapped

    def _stage(self) -> None:
        """Takes the slots whose gradients the optimizer is about to use, and what it will do with them."""
        groups = {id(p): g for g in self._optimizer.param_groups for p in g["params"]}
        scale = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale by themselves
        loss_scale = 1.0 if scale is None else float(scale)
        self._staged = {}
        self._passes.clear()
        unseen: list[RecordedLayer] = []
        with torch.no_grad():
            for name, layer in self._layers.items():
                rows, gradients = layer.take(loss_scale)
                rule = {}
                for parameter_name in layer.trained:
                    parameter = layer.parameters[parameter_name]
                    rule[parameter_name] = self._rule.log(
                        groups[id(parameter)],
                        self._optimizer.state.get(parameter, {}),
                        parameter.grad is not None,
                    )
                if not rows and gradients is not None:
                    unseen.append(layer)
                compared = gradients if gradients is not None and self._errors else {}
                self._staged[name] = LayerStep(rows, compared, layer.moved(), rule)
            self._state = self._due_state()
        self._seen |= any(staged.rows for staged in self._staged.values())
        if unseen:
            self._note_unseen(unseen)

    def _note_unseen(self, layers: list[RecordedLayer]) -> None:
        if self._was_paused or self.step < self._first_step:
            return
        if not self._seen and self._in_training and compiled_graphs():
            self._stop(
                "torch.compile has compiled the model without its hooks, before recording began. Start recording "
                "before the first training step, or call torch.compiler.reset() as it starts"
            )
        elif not self._warned_unseen:
            self._warn_unseen(layers[0])

    def _stop(self, reason: str) -> None:
        """Ends the recording; training goes on."""
        assert self._writer is not None
        self._staged = {}
        self._unhook()
        self._writer.flush()
        self._writer.failure = UnsupportedError(reason)
        self._warn_stopped(self._writer.failure)

    @property
    def _in_training(self) -> bool:
        return any(module.training for module in self._model.modules())

    def _due_state(self) -> dict[str, Tensor]:
        """A checkpoint of what the rule needs of the optimizer's state, now and then."""
        assert self._writer is not None
        if not self.step or self._processes.rank or not self._writer.starts_segment or self._sample:
            return {}  # of a sample, P cannot be found again
        return self._checkpoints.before_step(self._staged, self._writer.wants)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        skipped = getattr(optimizer, "found_inf", None)  # a fused optimizer's own skipped step
        if not self._staged or (skipped is not None and float(skipped) != 0.0):
            self._staged = {}
            return
        layers = self._staged
        with torch.no_grad():
            for name, staged in layers.items():
                staged.samples = self._layers[name].settle()
        if self._sample is not None:
            layers = self._thinned(layers, self._sample)
        state, self._staged, self._state = self._state, {}, {}
        self._batch = Batch(fold=self._folded)
        self._was_paused = self._paused > 0
        assert self._writer is not None
        self._writer.add(StepRecord(self.step, layers, state))
        self.step += 1
        if self._writer.failure is not None:
            self._unhook()
            self._warn_stopped(self._writer.failure)

    def _thinned(self, layers: dict[str, LayerStep], sample: Sample) -> dict[str, LayerStep]:
        """What a sample keeps of a step."""
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

    # -- warnings --------------------------------------------------------------------------------

    def _warn_stopped(self, failure: BaseException) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"Recording to {self.path} has stopped: {failure}. Training goes on unrecorded; the steps "
            "committed so far can be opened.",
            RecordingStoppedWarning,
            stacklevel=3,
        )

    def _warn_unseen(self, layer: RecordedLayer) -> None:
        self._warned_unseen = True
        reason = (
            "its forward hooks saw no training pass (is its weight used outside its module?)"
            if self._in_training
            else "the model is in eval mode, in which nothing is recorded (call model.train())"
        )
        warnings.warn(
            f'At step {self.step} layer "{layer.name}" got a gradient but no slots: {reason}. '
            "The step log notes such steps, and verify will report them.",
            SpotlightsWarning,
            stacklevel=4,
        )
