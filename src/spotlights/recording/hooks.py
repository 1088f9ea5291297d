"""The hooks on modules and on what they return. They change neither the modules, nor their outputs, nor the graph.

A forward hook describes each call of a module; where a module uses its weights by `F.linear`, the uses of the weights
are watched instead. During a backward pass, hooks on the outputs only note gradients. Keys and errors of all layers are
computed and copied when the pass ends: between the large matrix products of a training step, the same code takes
several times as long (measured: a third of the cost of recording). Of a pass that raises an error,
nothing is recorded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spotlights import torch_internals
from spotlights.errors import UnsupportedError
from spotlights.layers import Call, ModuleAdapter, WatchingAdapter
from spotlights.layers.adapter import tensors_of
from spotlights.layers.functional import watch_outside
from spotlights.memory.format.columns import Batch, ColumnTable
from spotlights.memory.slots import Rows
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.shards import WholeParameters
from spotlights.torch_internals import Untraced

MODULE = "module"
"""The column with the module of a slot, where several kinds of modules share a weight."""
_MAX_BYTES = 32 << 20
"""When noted tensors hold more memory than this, they are copied before the pass ends."""


class RecordedMap(NamedTuple):
    """A map of a module that is recorded, and the layer that it belongs to."""

    layer: RecordedLayer
    path: str
    transposed: bool
    """The module uses the transposed weight of the layer, so keys and errors swap roles."""


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, held by the hooks on the tensors that it returned."""

    call: Call | None
    """None once a pass has freed the graph. A user who keeps the loss would keep the call otherwise."""
    outputs: int
    """How many tensors the module returned."""
    maps: list[tuple[str, RecordedMap, Mapping[str, np.ndarray]]]
    """The recorded maps by name, with the columns of their rows in this call."""
    number: int
    """Calls are numbered in the order of the forward passes."""


@dataclass
class ModuleHooks:
    """The hooks on one module."""

    module: nn.Module
    adapter: ModuleAdapter
    axes: tuple[int, ...] | None
    """Which axes of rows may count the examples (see `Call`), where the surrounding network determines it."""
    in_eval: bool
    """Whether calls in eval mode are recorded too."""
    maps: dict[str, RecordedMap] = field(default_factory=dict)

    @property
    def _is_on(self) -> bool:
        return (self.module.training or self.in_eval) and torch.is_grad_enabled()

    def register(
        self, columns: ColumnTable, current_batch: Callable[[], Batch | None], passes: BackwardPasses, guard: Guard
    ) -> list[Any]:
        """Registers the hooks; returns their handles.

        Args:
            columns: of the memory.
            current_batch: returns the columns of the current batch, or None while nothing is recorded.
            passes: collects what the backward pass brings to each call.
            guard: keeps errors of the hooks away from training.
        """
        codes = {name: columns.code(MODULE, own.path) for name, own in self.maps.items() if own.layer.several_kinds}

        def batch_to_record(outputs: list[Tensor]) -> Batch | None:
            if not self._is_on or torch_internals.in_functorch():
                return None
            for tensor in outputs:
                if tensor.requires_grad:
                    return current_batch()
            return None

        def record(call: Call, batch: Batch, outputs: list[Tensor], names: Iterable[str]) -> None:
            places = None if call.row_places is None else call.row_places.numpy()
            axes = self.axes if call.axes is None else call.axes
            maps = []
            for name in names:
                own = self.maps[name]
                rows = batch.rows(call.lead, own.layer.name, shared=call.shared, axes=axes)
                if name in codes:
                    rows = {**rows, MODULE: np.full(math.prod(call.lead), codes[name])}
                if places is not None:
                    rows = {column: values[places] for column, values in rows.items()}
                maps.append((name, own, rows))
            passes.watch(call, maps, outputs)

        adapter = self.adapter
        if isinstance(adapter, WatchingAdapter):

            def report(name: str, call: Call | None, output: Tensor) -> None:
                if call is None:
                    for own, to in self.maps.items():
                        if own.split(".")[0] == name:
                            to.layer.by_gradient |= self._is_on
                    return
                batch = batch_to_record([output])
                if batch is not None and name in self.maps:
                    record(call, batch, [output], [name])

            def watched() -> list[Any]:
                return adapter.watched(self.module, self.maps, report, guard, _ModelHook)

            return self._on_whole_parameters(guard, watched) if self._sharded else watched()

        state_before: list[Any] = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            recorded = self._is_on and current_batch() is not None
            state_before[:] = [adapter.before(module)] if recorded else []

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            guard.called = True
            outputs = tensors_of(output)
            batch = batch_to_record(outputs)
            if batch is not None:
                call = adapter.call(module, args, kwargs, output, state_before.pop() if state_before else None)
                record(call, batch, outputs, self.maps)

        # Before the hook of `fully_shard`, which takes the whole parameters away and may cast the output.
        hook = _ModelHook(guard(after))
        handles: list[Any] = [self.module.register_forward_hook(hook, with_kwargs=True, prepend=self._sharded)]
        if self._sharded:
            handles += self._on_whole_parameters(guard, list)
        if type(adapter).before is not ModuleAdapter.before:
            handles.append(self.module.register_forward_pre_hook(_ModelHook(guard(before))))
        if adapter.used_outside and not torch_internals.compiled_graphs():  # these would be compiled anew
            note = guard(after)

            def use_outside(input: Tensor, output: Tensor, rows: slice) -> Tensor:
                note(self.module, (input,), {}, output)
                return output

            handles.append(watch_outside(self.module, use_outside))
        return [*handles, *adapter.begin()]

    @property
    def _sharded(self) -> bool:
        return any(own.layer.shards for own in self.maps.values())

    def _on_whole_parameters(self, guard: Guard, use: Callable[[], list[Any]]) -> list[Any]:
        """Hooks for a module whose parameters are whole during its calls only. They tell which passes train it."""

        def added(layer: RecordedLayer, parameter: Tensor) -> None:
            layer.trained_by_pass = True

        def meet() -> list[Any]:
            linear = self.adapter.maps(self.module)
            return [
                *use(),
                *(
                    part.parameter.register_post_accumulate_grad_hook(partial(added, own.layer))
                    for name, own in self.maps.items()
                    for part in linear[name].parameters.values()
                    if part.parameter.requires_grad
                ),
            ]

        parameters = WholeParameters(self.module, meet)
        return [self.module.register_forward_pre_hook(_ModelHook(guard(parameters.meet))), parameters]


class Guard:
    """Keeps every error of a hook away from the user's training loop: recording stops instead."""

    def __init__(self, stop: Callable[[Exception], None], tell_forked: Callable[[], None]) -> None:
        self._stop, self._tell_forked = stop, tell_forked
        self._process = os.getpid()
        self.stopped = False
        """Whether recording has stopped. Hooks do nothing then."""
        self.called = False
        """Whether a hook on a module has run: not so if the model was compiled before it had hooks."""

    def __call__(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            if self.stopped or self.forked():
                return None
            try:
                return hook(*args)
            except Warning:  # a user who turns warnings into errors wants this one
                raise
            except Exception as error:
                self._stop(error)
                return None

        return guarded

    def forked(self) -> bool:
        """Whether this process was forked from the one that records, which alone has the writer's thread; says so."""
        if os.getpid() == self._process:
            return False
        self._tell_forked()
        return True

    def watch_calls(self, model: nn.Module) -> Any:
        """Sets `called` when the model is called, with recorded layers or without; returns a handle."""

        def note(*args: Any) -> None:
            self.called = True

        return model.register_forward_pre_hook(_ModelHook(note))


class _ModelHook(Untraced):
    """A hook that stays with its model: copies of the model, deep or pickled, are not recorded."""

    def __reduce__(self) -> tuple[type[NotRecorded], tuple[()]]:
        return NotRecorded, ()


class NotRecorded:
    """The hook that a copy of a recorded model has."""

    def __call__(self, *args: Any) -> None:
        pass


class BackwardPass:
    """One running backward pass."""

    def __init__(self, layers: Iterable[RecordedLayer], *, keeps_errors: bool) -> None:
        self._gradients_before = {layer: layer.before_pass() for layer in layers}
        self._keeps_errors = keeps_errors
        self._waiting: dict[ModuleCall, tuple[Call, list[Tensor | None]]] = {}
        """With the gradients of the tensors that the module returned; None where the pass has not reached one."""
        self._reached: list[ModuleCall] = []
        self._rows: dict[RecordedLayer, list[Rows]] = {}
        self._held_bytes = 0

    def note(self, module_call: ModuleCall, call: Call, output: int, gradient: Tensor) -> None:
        """Notes the gradient of one output."""
        self._held_bytes += gradient.nbytes
        waiting = self._waiting.get(module_call)
        if waiting is None:
            waiting = self._waiting[module_call] = call, [None] * module_call.outputs
            self._reached.append(module_call)
            self._held_bytes += call.nbytes
        waiting[1][output] = gradient
        if self._held_bytes > _MAX_BYTES:
            self._held_bytes = 0
            with torch.no_grad():
                self._copy(ended=False)

    def _copy(self, *, ended: bool) -> None:
        """Copies the slots of noted calls; before the pass ends, only those of calls with a gradient at each output."""
        due = [noted for noted, (_, gradients) in self._waiting.items() if ended or None not in gradients]
        for module_call in due:  # one by one: each frees what it held
            call, gradients = self._waiting.pop(module_call)
            keys = call.keys()
            errors = call.errors(gradients) if self._keeps_errors else {}
            for name, (layer, _, transposed), columns in module_call.maps:
                error = errors.get(name)
                rows = layer.encode(keys[name], error, columns, may_repeat=call.may_repeat, transposed=transposed)
                self._rows.setdefault(layer, []).append(rows)

    def end(self) -> None:
        self._copy(ended=True)
        trained = {layer for layer, rows in self._rows.items() if layer.after_pass(self._gradients_before[layer], rows)}
        for module_call in self._reached:
            layers = [own.layer for _, own, _ in module_call.maps if own.layer in trained]
            for layer in layers:
                layer.called = max(layer.called, module_call.number)
            if layers and not torch_internals.graph_is_kept():
                module_call.call, module_call.maps = None, []


class BackwardPasses:
    """The running backward passes."""

    def __init__(
        self, layers: Iterable[RecordedLayer], guard: Guard, begins: Callable[[], None], *, keeps_errors: bool
    ) -> None:
        """
        Args:
            layers: all that are recorded.
            guard: keeps errors of the hooks away from training.
            begins: called when a backward pass begins.
            keeps_errors: whether the memory has errors.
        """
        if not torch_internals.passes_are_known():
            raise UnsupportedError(f"torch {torch.__version__} cannot be recorded. Install a version from 2.6 to 2.15.")
        self._layers = list(layers)
        self._begins = begins
        self._keeps_errors = keeps_errors
        self._running: dict[int, BackwardPass] = {}
        self._calls = 0
        self._note_hook, self._end_hook = Untraced(guard(self._note)), Untraced(guard(self._end))
        self._last_hook = Untraced(guard(partial(self._end, again=False)))

    def watch(self, described: Call, maps: list[Any], outputs: Sequence[Tensor]) -> None:
        """Notes the gradients of what a module returned, in every backward pass that reaches them."""
        self._calls += 1
        call = ModuleCall(described, len(outputs), maps, self._calls)
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note_hook, call, index))

    def clear(self) -> None:
        """Forgets passes that never ended."""
        self._running.clear()

    def _note(self, module_call: ModuleCall, output: int, gradient: Tensor | None) -> None:
        call = module_call.call
        if gradient is None or call is None:
            return
        number = torch_internals.current_pass()
        running = self._running.get(number)
        if running is None:
            self._begins()
            running = self._running[number] = BackwardPass(self._layers, keeps_errors=self._keeps_errors)
            torch_internals.at_end_of_pass(partial(self._end_hook, number))
        running.note(module_call, call, output, gradient)

    def _end(self, number: int, *, again: bool = True) -> None:
        if again and any(layer.shards for layer in self._layers):
            # `fully_shard` may set gradients in a callback of its own, which may come after this one.
            torch_internals.at_end_of_pass(partial(self._last_hook, number))
            return
        running = self._running.pop(number, None)
        if running is not None:
            with torch.no_grad():
                running.end()
