"""One forward pass of the user's model on the inputs that are asked about.

Keeps each recorded layer's inputs (the queries) and, with the autograd graph, its outputs, so that the
way from a layer to any number of interest can be asked for later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spotlights.errors import SettingError, ShapeMismatchError, UnknownNameError, UnsupportedError
from spotlights.layers import Call, FunctionalAdapter, LinearMap, ModuleAdapter, adapter_named
from spotlights.layers.adapter import tensors_of
from spotlights.layers.functional import Use, watch
from spotlights.layers.wrappers import plainly, unwrapped
from spotlights.memory.manifest import LayerEntry

Target = int | Sequence[int] | Tensor | Callable[[Any], Tensor]


class Calls:
    """The calls of one layer during the pass."""

    def __init__(self, map_name: str) -> None:
        self._map_name = map_name
        self.recorded_whole = True
        """The memory has all of the map. Not so if a module has a bias of its own beside a shared weight."""
        self._calls: list[Call] = []
        self.queries: list[Float[Tensor, "*lead in_features"]] = []
        self.outputs: list[list[Tensor]] = []
        """What each call returned."""

    def add(self, call: Call, queries: Float[Tensor, "*lead in_features"], outputs: list[Tensor]) -> None:
        self._calls.append(call)
        self.queries.append(queries)
        self.outputs.append(outputs)

    @property
    def rows(self) -> Float[Tensor, "queries in_features"]:
        return torch.cat([q.reshape(-1, q.shape[-1]) for q in self.queries])

    @property
    def shared(self) -> bool:
        """Whether some call was on what is the same for all inputs."""
        return any(call.shared for call in self._calls)

    def places(self) -> Iterator[tuple[Int64[Tensor, "rows"], int]]:
        """Of each call: the places of its rows in the shape that the module was given, and how many that has."""
        for call in self._calls:
            count = math.prod(call.leads()[self._map_name])
            yield torch.arange(count) if call.chosen is None else call.chosen, count

    def is_all_of(self, output: Tensor) -> bool:
        """Whether the layer was called once, the memory has all of it, and it gave this: as it is, or row by row."""
        if not (self.recorded_whole and len(self._calls) == 1 and self._calls[0].returns(self._map_name)):
            return False
        own = self.outputs[0][0]
        same_size = own.numel() == output.numel()
        return same_size and any(torch.equal(o.reshape(-1), output.reshape(-1)) for o in (own, self.output_rows([own])))

    def output_rows(self, outputs: Sequence[Tensor]) -> Float[Tensor, "queries out_features"]:
        """What has the shapes of all that the calls returned, with one row for each query."""
        rows, taken = [], 0
        for call, own in zip(self._calls, self.outputs, strict=True):
            made = call.errors(outputs[taken : taken + len(own)])[self._map_name]
            rows.append(made.reshape(-1, made.shape[-1]))
            taken += len(own)
        return torch.cat(rows)


class ForwardPass:
    """Runs the model once, in eval mode, and leaves it as it was."""

    def __init__(self, model: nn.Module, inputs: Any, layers: Mapping[str, LayerEntry]) -> None:
        model = unwrapped(model)
        self.calls = {name: Calls(entry.map) for name, entry in layers.items()}
        self.turned: dict[str, str] = {}
        """Uses of a layer's weight the other way round, by name: whose weight it is."""
        users: dict[nn.Module, tuple[ModuleAdapter, dict[str, Calls]]] = {}
        for name, entry in layers.items():
            for path in entry.modules:
                module, linear = find_map(model, path, entry)
                users.setdefault(module, (_adapter(name, entry), {}))[1][entry.map] = self.calls[name]
                self.calls[name].recorded_whole &= len(linear.biases) == len(entry.bias_names)
            for path in entry.turned:
                module, adapter, map_name = find_turned(model, path, entry)
                use = f"{path}.{map_name}" if map_name else path
                self.turned[use], self.calls[use] = name, Calls(map_name)
                users.setdefault(module, (adapter, {}))[1][map_name] = self.calls[use]
        handles: list[Any] = []
        modes = {module: module.training for module in model.modules()}
        try:
            for module, (adapter, maps) in users.items():
                if isinstance(adapter, FunctionalAdapter):
                    handles += [
                        watch(adapter.weights(module)[name][0], _use(adapter, module, name, calls))
                        for name, calls in maps.items()
                    ]
                else:
                    handles.append(module.register_forward_hook(_hook(adapter, maps), with_kwargs=True))
            model.eval()
            with torch.enable_grad(), plainly():
                self.output = _call(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
            for module, training in modes.items():
                module.training = training

    def is_output(self, layer: str) -> bool:
        """Whether the layer's output is the model's: contributions are then exact."""
        return isinstance(self.output, Tensor) and self.calls[layer].is_all_of(self.output)

    def adds_up(self, layer: str, target: Target, directions: Float[Tensor, "queries out_features"]) -> bool:
        """Whether the number of interest is g·y and no more than that: contributions are then exact."""
        if not self.is_output(layer):
            return False
        if not callable(target):
            return True
        with torch.no_grad():
            chosen = self._numbers_of_interest(target).double()
            made = (directions * self.calls[layer].output_rows(self.calls[layer].outputs[0])).double()
            if len(chosen) == 0 or len(made) % len(chosen):
                return False
            rounding = 64 * torch.finfo(directions.dtype).eps * made.abs().sum(dim=1)
            difference = (made.sum(dim=1).reshape(len(chosen), -1).sum(dim=1) - chosen).abs()
            return bool((difference <= rounding.reshape(len(chosen), -1).sum(dim=1)).all())

    def directions(self, layer: str, target: Target) -> Float[Tensor, "queries out_features"]:
        """∂f/∂y for each row of a layer's output, f being the number of interest."""
        with torch.enable_grad():
            chosen = self._numbers_of_interest(target).sum()
        outputs = [tensor for own in self.calls[layer].outputs for tensor in own]
        gradients = torch.autograd.grad(chosen, outputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        return self.calls[layer].output_rows(gradients)

    def inputs_of(self, layer: str, target: Target) -> tuple[Int64[Tensor, "queries"], int]:
        """Which input each query of a layer belongs to, and how many inputs there are."""
        count = len(self._numbers_of_interest(target))
        owners = []
        for places, rows in self.calls[layer].places():
            if count == 0 or rows % count or (count > 1 and rows != count and self.calls[layer].shared):
                raise ShapeMismatchError(
                    f'Layer "{layer}" has {rows} rows for {count} inputs, so it cannot be said which row belongs to '
                    "which input. Give the inputs batch first, and a target with one number for each input; ask about "
                    "one input at a time where a layer's rows are those of all (an embedding of positions)."
                )
            owners.append(places // (rows // count))
        return torch.cat(owners), count

    def _numbers_of_interest(self, target: Target) -> Float[Tensor, "inputs"]:
        if callable(target):
            chosen = target(self.output)
            if not isinstance(chosen, Tensor) or chosen.ndim != 1:
                kind = f"shape {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else repr(chosen)
                raise ShapeMismatchError(
                    f"The function given as target returned {kind}. It must return one number for each input."
                )
            return chosen
        if not isinstance(self.output, Tensor) or self.output.ndim != 2:
            kind = tuple(self.output.shape) if isinstance(self.output, Tensor) else type(self.output).__name__
            raise SettingError(
                f"The model's output is {kind}. target=6 needs an output of shape (inputs, classes); give a "
                "function of the output instead: target=lambda output: output[:, -1, 6]."
            )
        count, classes = self.output.shape
        index = torch.as_tensor(target, device=self.output.device)
        if index.is_floating_point() or index.dtype == torch.bool:
            raise SettingError(f"target={target}: a class is a whole number.")
        if index.ndim > 1 or (index.ndim == 1 and len(index) != count):
            raise ShapeMismatchError(
                f"target has shape {tuple(index.shape)}, but there are {count} inputs. "
                "Give one class, or one for each input."
            )
        if (index < 0).any() or (index >= classes).any():
            raise SettingError(f"target={target}: the model's output has classes 0 to {classes - 1}.")
        return self.output.gather(1, index.expand(count)[:, None])[:, 0]


def _hook(adapter: ModuleAdapter, maps: Mapping[str, Calls]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        outputs = tensors_of(output)
        for tensor in outputs:
            if not tensor.requires_grad:
                tensor.requires_grad_()  # a frozen network: the way to its output is still asked for
        call = adapter.call(module, args, kwargs, output, None)
        with torch.no_grad():
            queries = call.keys()
        for name, calls in maps.items():
            calls.add(call, queries[name].clone(), outputs)
        return _copied(output)

    return hook


def _use(adapter: FunctionalAdapter, module: nn.Module, name: str, calls: Calls) -> Use:
    def use(input: Tensor, output: Tensor, rows: slice) -> Tensor:
        if not output.requires_grad:
            output.requires_grad_()
        call = adapter.use(module, name, input, rows)
        calls.add(call, call.keys()[name].clone(), [output])
        return output.clone()

    return use


def _copied(output: Any) -> Any:
    """What a module returned, for what follows: that may work in place, as nn.ReLU(inplace=True) does."""
    if isinstance(output, Tensor):
        return output.clone() if output.is_floating_point() else output
    if isinstance(output, tuple | list):
        items = [_copied(item) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


def find_map(model: nn.Module, path: str, entry: LayerEntry) -> tuple[nn.Module, LinearMap]:
    """The module of that name and the recorded map in it, checked against the recorded shape."""
    model = unwrapped(model)
    modules = dict(model.named_modules())
    module = modules.get(path)
    adapter = _adapter(path, entry)
    if module is None and adapter.handles(model):
        module = model  # recorded as the model itself, which has no name
    if module is None or not adapter.handles(module):
        known = ", ".join(name for name in modules if name) or type(model).__name__
        raise UnknownNameError(f'The model has no {entry.kind} layer "{path}". It has: {known}.')
    linear = adapter.maps(module).get(entry.map)
    if linear is None:
        raise ShapeMismatchError(
            f'Layer "{path}" has no part "{entry.map}", but the memory was recorded with one. '
            "Is this the model that was recorded?"
        )
    found, groups = linear.own_shape, linear.groups
    recorded = tuple(entry.weight_shape or entry.matrix_shape)
    if (found, groups) != (recorded, entry.groups):
        in_groups = "" if groups == entry.groups == 1 else f" in {groups} groups, not {entry.groups}"
        raise ShapeMismatchError(
            f'Layer "{path}" has a weight of shape {found}{in_groups}, but the memory was recorded with '
            f"{recorded}. Is this the model that was recorded?"
        )
    return module, linear


def find_turned(model: nn.Module, path: str, entry: LayerEntry) -> tuple[nn.Module, ModuleAdapter, str]:
    """A module that uses a recorded weight the other way round, its adapter, and the name of that use in it."""
    _, linear = find_map(model, entry.modules[0], entry)
    module = dict(unwrapped(model).named_modules()).get(path)
    adapter = adapter_named(entry.turned[path])
    for name, own in {} if module is None or adapter is None else adapter.maps(module).items():
        if own.identity == linear.identity:
            assert module is not None
            assert adapter is not None
            return module, adapter, name
    raise UnknownNameError(
        f'The memory was recorded with a "{path}" that shares the weight of "{entry.modules[0]}"; this model has none.'
    )


def parameters_of(model: nn.Module, entry: LayerEntry) -> dict[str, Float[Tensor, "..."]]:
    """The parameters of a recorded layer as the memory has them."""
    _, linear = find_map(model, entry.modules[0], entry)
    return {name: linear.kept(name, part.parameter.detach()) for name, part in linear.parameters.items()}


def _adapter(name: str, entry: LayerEntry) -> ModuleAdapter:
    adapter = adapter_named(entry.kind)
    if adapter is None:
        raise UnsupportedError(
            f'Layer "{name}" is of kind "{entry.kind}", which is unknown here. If it is one of your own, make its '
            "adapter known first: spotlights.register_layer(…)."
        )
    return adapter


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)
