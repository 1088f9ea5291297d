"""One forward pass of the user's model on the inputs that are asked about, and whether the model is the recorded one.

Keeps each recorded layer's inputs (the queries) and, with the autograd graph, its outputs, so that the
way from a layer to any number of interest can be asked for later.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from spotlights.errors import SettingError, ShapeMismatchError, UnknownNameError, UnsupportedError
from spotlights.layers import Call, LinearMap, ModuleAdapter, Report, WatchingAdapter, adapter_named, parameter_call
from spotlights.layers.adapter import class_of, plainly, tensors_of, unwrapped
from spotlights.layers.functional import watch_outside
from spotlights.memory.format.columns import example_axis
from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.format.names import probed_entries
from spotlights.memory.reader import MemoryReader
from spotlights.sparse_rows import Numbers, joined

if TYPE_CHECKING:
    from spotlights.query.engine import View

Target = int | str | Sequence[int] | Tensor | Callable[[Any], Tensor]
"""A class, "7-9" for a difference of two classes, one class for each input, or a function of the model's output."""


MOST_INPUTS = 256
"""Up to so many inputs' gradients are computed one by one, where a row of a layer is not of one input alone."""


class Calls:
    """The calls of one layer during the pass."""

    def __init__(self, map_name: str) -> None:
        self._map_name = map_name
        self.recorded_whole = True
        """The memory has all of the map. Not so if a module has a bias of its own beside a shared weight."""
        self._calls: list[Call] = []
        self.queries: list[Numbers] = []
        self.outputs: list[list[Tensor]] = []
        """What each call returned."""

    def add(self, call: Call, queries: Numbers, outputs: list[Tensor]) -> None:
        self._calls.append(call)
        self.queries.append(queries)
        self.outputs.append(outputs)

    @property
    def rows(self) -> Numbers:
        """The queries, one for each row."""
        rows = [queries.reshape(-1, queries.shape[-1]) for queries in self.queries]
        return rows[0] if len(rows) == 1 else joined(rows)

    def owners(self, count: int) -> Iterator[list[Int64[Tensor, "rows"]]]:
        """Of each call: which of the `count` inputs its rows may belong to, by their shape; likely ones first."""
        for call in self._calls:
            lead, rows, inputs = call.lead, math.prod(call.lead), torch.arange(count)
            likely = [] if count == 0 or rows % count else [inputs.repeat_interleave(rows // count)]
            if len(lead) > 1 and lead[1] == count:  # sequence first
                likely.append(inputs.repeat_interleave(math.prod(lead[2:])).repeat(lead[0]))
                if example_axis(lead, count, call.axes) == 1:
                    likely.reverse()
            yield likely if call.row_places is None else [owners[call.row_places] for owners in likely]

    def is_all_of(self, output: Tensor) -> bool:
        """Whether the layer was called once, the memory has all of it, and it gave this: as it is, or row by row."""
        if not (self.recorded_whole and len(self._calls) == 1 and self._calls[0].returns_rows):
            return False
        own = self.outputs[0][0]
        same_size = own.numel() == output.numel()
        return same_size and any(torch.equal(o.reshape(-1), output.reshape(-1)) for o in (own, self.output_rows([own])))

    def output_rows(self, outputs: Sequence[Tensor]) -> Float[Tensor, "queries out_features"]:
        """Tensors in the shapes of the calls' outputs, as one row for each query."""
        rows, taken = [], 0
        for call, own in zip(self._calls, self.outputs, strict=True):
            of_call = call.errors(outputs[taken : taken + len(own)])[self._map_name]
            rows.append(of_call.reshape(-1, of_call.shape[-1]))
            taken += len(own)
        return torch.cat(rows)


class ForwardPass:
    """Runs the model once, in eval mode, and leaves it as it was."""

    def __init__(self, model: nn.Module, inputs: Any, layers: Mapping[str, LayerEntry]) -> None:
        model = unwrapped(model)
        self.calls = {name: Calls(entry.map) for name, entry in layers.items()}
        self.transposed_uses: dict[str, str] = {}
        """Modules that use the transposed weight of a layer, by name, each with the name of that layer."""
        self._maps: dict[str, LinearMap] = {}
        users: dict[nn.Module, tuple[ModuleAdapter, dict[str, Calls]]] = {}
        for name, entry in layers.items():
            for path in entry.modules:
                module, linear = find_map(model, path, entry)
                self._maps.setdefault(name, linear)
                if _adapter(name, entry).last_resort:
                    parameter = linear.weights["weight"].parameter
                    if parameter.requires_grad:
                        call = parameter_call(entry.map, parameter)
                        self.calls[name].add(call, call.keys()[entry.map], [parameter])
                    continue
                users.setdefault(module, (_adapter(name, entry), {}))[1][entry.map] = self.calls[name]
                self.calls[name].recorded_whole &= len(linear.biases) == len(entry.bias_names)
            for path in entry.turned:
                module, adapter, map_name = find_transposed_use(model, path, entry)
                use = f"{path}.{map_name}" if map_name else path
                self.transposed_uses[use], self.calls[use] = name, Calls(map_name)
                users.setdefault(module, (adapter, {}))[1][map_name] = self.calls[use]
        handles: list[Any] = []
        thread, running = threading.get_ident(), [True]

        def within() -> bool:
            """Other threads run the model, too; and a copy of it that was made meanwhile keeps the hooks."""
            return bool(running) and threading.get_ident() == thread

        try:
            for module, (adapter, maps) in users.items():
                if isinstance(adapter, WatchingAdapter):
                    handles += adapter.watched(module, maps, _report(maps, within), _as_is, _as_is)
                    continue
                hook = _hook(adapter, maps, within)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
                if adapter.used_outside:
                    handles.append(watch_outside(module, partial(_outside, hook, module)))
            with _evaluating(model), torch.enable_grad(), plainly():
                self.output = call_model(model, inputs)
        finally:
            running.clear()
            for handle in handles:
                handle.remove()

    def parameters(self, layer: str) -> dict[str, Float[Tensor, "..."]]:
        """The model's parameters of a recorded layer as the memory has them."""
        return _kept(self._maps[layer])

    def gives(self, layer: str, outputs: Iterable[Tensor]) -> bool:
        """Whether one of some outputs of the model is the layer's."""
        return any(self.calls[layer].is_all_of(output) for output in outputs)

    def adds_up(self, layer: str, target: Target | None, rows: InputRows) -> bool:
        """Whether the number of interest is g·y and no more than that: contributions are then exact."""
        if target is None:  # a unit of the layer
            return self.calls[layer].recorded_whole
        outputs = parts_of(self.output).values() if callable(target) else [logits_of(self.output, target)]
        if not self.gives(layer, outputs):
            return False
        if not callable(target):
            return True
        with torch.no_grad():
            numbers = numbers_of_interest(self.output, target).double()
            own = self.calls[layer].output_rows(self.calls[layer].outputs[0])[rows.rows].cpu()
            products, numbers = (rows.directions * own).double(), numbers.cpu()
            none = numbers.new_zeros(rows.inputs)
            rounding = 64 * torch.finfo(own.dtype).eps * none.index_add(0, rows.owners, products.abs().sum(dim=1))
            return bool(((none.index_add(0, rows.owners, products.sum(dim=1)) - numbers).abs() <= rounding).all())

    def directions(self, layer: str, target: Target | None, unit: int | None) -> Float[Tensor, "queries out_features"]:
        """∂f/∂y for each row of a layer's output, f being one unit, or the numbers of interest added up."""
        if unit is not None:
            return self._direction_of_unit(layer, unit)
        assert target is not None, "one of the two"
        with torch.enable_grad():
            return self._gradient(layer, numbers_of_interest(self.output, target).sum())

    def _gradient(self, layer: str, number: Float[Tensor, ""]) -> Float[Tensor, "queries out_features"]:
        outputs = [tensor for own in self.calls[layer].outputs for tensor in own]
        gradients = torch.autograd.grad(number, outputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        return self.calls[layer].output_rows(gradients)

    def _direction_of_unit(self, layer: str, unit: int) -> Float[Tensor, "queries out_features"]:
        """The direction of one unit of a layer's output, for each row."""
        rows = self.calls[layer].output_rows([tensor for own in self.calls[layer].outputs for tensor in own])
        if not 0 <= unit < rows.shape[1]:
            raise SettingError(f'unit={unit}: the output of layer "{layer}" has units 0 to {rows.shape[1] - 1}.')
        directions = torch.zeros_like(rows, requires_grad=False)
        directions[:, unit] = 1.0
        return directions

    def rows_of_inputs(self, layer: str, target: Target | None, *, unit: int | None = None) -> InputRows:
        """Which rows of a layer each input's number of interest depends on, and how; or which rows, for a unit.

        The gradients of the numbers tell: the inputs' numbers with other weights have the gradients of their rows with
        these weights. Where that is not so (positions that all inputs share, nodes of one graph, tokens sent to
        experts), the numbers' gradients are computed one by one.
        """
        with torch.enable_grad():
            numbers = self._any_numbers() if target is None else numbers_of_interest(self.output, target)
            together = self._gradient(layer, numbers.sum())
            count, every = len(numbers), torch.arange(len(together))
            if count == 1:
                owners: Tensor | None = torch.zeros_like(every)
            else:
                weights = (2.0 ** (torch.randperm(count, generator=torch.Generator().manual_seed(0)) % 4)).to(numbers)
                owners = self._owners(layer, together, self._gradient(layer, (weights * numbers).sum()), weights)
            pairs = [(every, together)]
            if owners is None:
                if count > MOST_INPUTS:
                    raise ShapeMismatchError(
                        f'The {len(every)} rows of layer "{layer}" are not {count} inputs one after the other, and to '
                        f"find out which rows an input depends on takes a backward pass for each. Ask about at most "
                        f"{MOST_INPUTS} inputs at a time."
                    )
                pairs = [_used_rows(self._gradient(layer, number)) for number in numbers]
                owners = torch.arange(count).repeat_interleave(torch.tensor([len(rows) for rows, _ in pairs]))
        rows, directions = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if unit is not None:
            directions = self._direction_of_unit(layer, unit)[rows]
        return InputRows(rows, owners, directions.detach().cpu(), count)

    def _any_numbers(self) -> Float[Tensor, "inputs"]:
        """A number for each input that depends on all of its output."""
        outputs = list(parts_of(self.output).values())
        output = next((tensor for tensor in outputs if tensor.ndim), None)
        output = outputs[0].reshape(1) if output is None else output
        flat = output.reshape(len(output), -1)
        return flat @ torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(0)).to(flat)

    def _owners(self, layer: str, together: Tensor, weighted: Tensor, weights: Tensor) -> Int64[Tensor, "rows"] | None:
        """The inputs that the rows belong to; None if a row belongs to several, or to none that its place tells."""
        of_calls, done = list[Tensor](), 0
        eps = float(torch.finfo(together.dtype).eps)  # powers of two as weights add no rounding
        least = eps * float(together.abs().max()) if together.numel() else 0.0
        for likely in self.calls[layer].owners(len(weights)):
            for owners in likely:
                here = slice(done, done + len(owners))
                expected = weights[owners.to(weights.device), None] * together[here]
                far = (weighted[here] - expected).abs().amax(dim=1) > min(1e3 * eps, 0.05) * expected.abs().amax(
                    dim=1
                ) + least
                if not far.any():
                    of_calls.append(owners)
                    done += len(owners)
                    break
            else:
                return None
        return torch.cat(of_calls)


@dataclass(frozen=True)
class InputRows:
    """The rows of a layer that some inputs' numbers of interest depend on: one pair of an input and a row each."""

    rows: Int64[Tensor, "pairs"]
    owners: Int64[Tensor, "pairs"]
    """The input of each pair."""
    directions: Float[Tensor, "pairs out_features"]
    inputs: int
    """How many inputs there are."""

    def by_input(self) -> tuple[InputRows, tuple[int, ...] | None]:
        """The same sorted by input, and how many rows each input has; None if each input is a row."""
        if torch.equal(self.owners, torch.arange(self.inputs)):
            return self, None
        order = self.owners.argsort(stable=True)
        asked = InputRows(self.rows[order], self.owners[order], self.directions[order], self.inputs)
        return asked, tuple(torch.bincount(self.owners, minlength=self.inputs).tolist())


def _used_rows(gradient: Float[Tensor, "rows out_features"]) -> tuple[Int64[Tensor, "used"], Tensor]:
    """The rows with a gradient, at least one."""
    used = (gradient != 0).any(dim=1)
    used[:1] |= ~used.any()
    return used.nonzero().flatten().cpu(), gradient[used]


def parts_of(output: Any, name: str = "output") -> dict[str, Tensor]:
    """The tensors of numbers in a model's output, by the expressions that give them."""
    if isinstance(output, Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        items = {f'{name}["{key}"]': value for key, value in output.items()}
    elif isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        items = {f"{name}[{number}]": value for number, value in enumerate(output)}
    else:
        fields = getattr(output, "_asdict", lambda: getattr(output, "__dict__", {}))()
        items = {f"{name}.{key}": value for key, value in fields.items()}
    return {where: tensor for own, value in items.items() for where, tensor in parts_of(value, own).items()}


def logits_of(output: Any, target: Any) -> Float[Tensor, "inputs classes"]:
    """The logits in a model's output, where there is no doubt about them: else the error says how to choose.

    They are the output itself; its `logits`; the first of a tuple; the one tensor that there is.
    """
    parts = parts_of(output)
    named = [name for name in ('output["logits"]', "output.logits", "output[0]") if name in parts]
    name = "output" if "output" in parts else named[0] if named else next(iter(parts), "") if len(parts) == 1 else ""
    if name and parts[name].ndim == 2:
        return parts[name]
    shapes = ", ".join(f"{where} of shape {tuple(tensor.shape)}" for where, tensor in parts.items())
    deep = [where for where in ([name] if name else []) + list(parts) if parts[where].ndim >= 2]
    deep.sort(key=lambda where: where != name and parts[where].ndim != 2)
    wanted = next(iter(deep), "output")
    places = "-1, " * (parts[wanted].ndim - 2) if wanted in parts else ""
    output_class = target if isinstance(target, int) else 0
    raise SettingError(
        f"target={target} needs an output of shape (inputs, classes), and the model's output is a "
        f"{type(output).__name__}: {shapes or 'no tensor of numbers'}. Give a function of the output instead, such as "
        f"target=lambda output: {wanted}[:, {places}{output_class}]."
    )


def numbers_of_interest(output: Any, target: Target) -> Float[Tensor, "inputs"]:
    """The number that a target chooses from a model's output, for each input."""
    if isinstance(target, str):
        classes = target.split("-")
        if len(classes) > 2 or not all(part.strip().isdecimal() for part in classes):
            raise SettingError(f'target="{target}": write a class, "7", or the difference of two, "7-9".')
        first, *second = (numbers_of_interest(output, int(part)) for part in classes)
        return first - second[0] if second else first
    if callable(target):
        numbers = target(output)
        if not isinstance(numbers, Tensor) or numbers.ndim != 1:
            kind = f"shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else repr(numbers)
            raise ShapeMismatchError(
                f"The function given as target returned {kind}. It must return one number for each input."
            )
        return numbers
    output = logits_of(output, target)
    count, classes = output.shape
    try:
        index = torch.as_tensor(target, device=output.device)
    except (TypeError, ValueError, RuntimeError):
        raise SettingError(
            f'target={target!r}: give a class, one class for each input, a difference such as "7-9", or a function.'
        ) from None
    if index.is_floating_point() or index.dtype == torch.bool:
        raise SettingError(f"target={target}: a class is a whole number.")
    if index.ndim > 1 or (index.ndim == 1 and len(index) != count):
        raise ShapeMismatchError(
            f"target has shape {tuple(index.shape)}, but there are {count} inputs. "
            "Give one class, or one for each input."
        )
    if (index < 0).any() or (index >= classes).any():
        raise SettingError(f"target={target}: the model's output has classes 0 to {classes - 1}.")
    return output.gather(1, index.expand(count)[:, None])[:, 0]


def _hook(adapter: ModuleAdapter, maps: Mapping[str, Calls], within: Callable[[], bool]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not within():
            return output
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


def _outside(hook: Callable[..., Any], module: nn.Module, input: Tensor, output: Tensor, rows: slice) -> Tensor:
    return hook(module, (input,), {}, output)


def _as_is(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


def _report(maps: Mapping[str, Calls], within: Callable[[], bool]) -> Report:
    def report(name: str, call: Call | None, output: Tensor) -> Tensor | None:
        if call is None or name not in maps or not within():
            return None
        if not output.requires_grad:
            output.requires_grad_()
        maps[name].add(call, call.keys()[name].clone(), [output])
        return output.clone()

    return report


def _copied(output: Any) -> Any:
    """A copy of a module's output for the modules after it, which may change it in place (`nn.ReLU(inplace=True)`)."""
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
        known = ", ".join(name for name in modules if name) or class_of(model).__name__
        raise UnknownNameError(f'The model has no {entry.kind} layer "{path}". It has: {known}.')
    linear = adapter.maps(module).get(entry.map)
    if linear is None:
        raise ShapeMismatchError(
            f'Layer "{path}" has no part "{entry.map}", but the memory was recorded with one. '
            "Is this the model that was recorded?"
        )
    shape, groups = linear.own_shape, linear.channel_groups
    recorded = tuple(entry.weight_shape or entry.matrix_shape)
    if (shape, groups) != (recorded, entry.groups):
        in_groups = "" if groups == entry.groups == 1 else f" in {groups} groups, not {entry.groups}"
        raise ShapeMismatchError(
            f'Layer "{path}" has a weight of shape {shape}{in_groups}, but the memory was recorded with '
            f"{recorded}. Is this the model that was recorded?"
        )
    return module, linear


def find_transposed_use(model: nn.Module, path: str, entry: LayerEntry) -> tuple[nn.Module, ModuleAdapter, str]:
    """A module that uses the transposed recorded weight, its adapter, and the name of the map in it."""
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
    return _kept(linear)


def _kept(linear: LinearMap) -> dict[str, Float[Tensor, "..."]]:
    return {name: linear.kept(name, part.parameter.detach()) for name, part in linear.parameters.items()}


def _adapter(name: str, entry: LayerEntry) -> ModuleAdapter:
    adapter = adapter_named(entry.kind)
    if adapter is None:
        raise UnsupportedError(
            f'Layer "{name}" is of kind "{entry.kind}", which is unknown here. If it is one of your own, make its '
            "adapter known first: spotlights.register_layer(…)."
        )
    return adapter


def answer(model: nn.Module, inputs: Any, target: Target) -> Float[Tensor, "inputs"]:
    """The number of interest of each input, by a model that is run in eval mode and left as it was."""
    with _evaluating(model):
        return numbers_of_interest(call_model(model, inputs), target)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode for this long."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a batch, or for a tuple or dict of its arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


# -- is it the recorded network? -----------------------------------------------------------------


def same(a: Float[Tensor, "entries"], b: Float[Tensor, "entries"]) -> bool:
    """Equal, up to the rounding of the coarser of two types."""
    return bool(_alike(a, b).all())


def _alike(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return torch.isclose(a.double(), b.double(), rtol=2 * eps, atol=0.0, equal_nan=True)


def what_differs(
    view: View, of_model: Callable[[str], Mapping[str, Float[Tensor, "..."]]], layers: Sequence[str]
) -> str | None:
    """Whether a model has other weights than the memory after the view's last step; of which step, if it has.

    Compares the probed entries alone; `of_model` gives the model's parameters of a layer.
    """
    reader, until = view.reader, view.until
    if reader.manifest.fold is not None:
        return None
    own, recorded = {}, {}
    for layer in layers:
        parameters, probed = of_model(layer), partial(probed_after, reader, layer, until)
        for name, (place, entries) in reader.layers[layer].last("entries", until, probed).items():
            own[layer, name] = parameters[name].reshape(-1)[place].to(entries)
            recorded[layer, name] = entries
    different = [key for key, entries in own.items() if not same(entries, recorded[key])]
    if not different:
        return None
    step = _last_step_with(reader, own)
    if step is not None:
        return f"the model differs from the memory: it has the weights of step {step}: use memory.as_of({step})"
    far = max(float((own[key].double() - recorded[key].double()).norm() / own[key].double().norm()) for key in own)
    named = ", ".join(dict.fromkeys(layer for layer, _ in different))
    return (
        f"the model differs from the memory, whose weights are those after step {until}: by up to "
        f"{f'{far:.1%}' if far > 1e-3 else f'{far:.0e} of their size'} in {named}"
    )


def _last_step_with(reader: MemoryReader, own: Mapping[tuple[str, str], Float[Tensor, "entries"]]) -> int | None:
    """The last step after which the probed entries were these, of all steps of the run."""
    steps = torch.arange(reader.steps)
    for (layer, name), entries in own.items():
        probed = reader.log(layer).probed[name]
        for at, entry in enumerate(entries):  # the first one leaves few steps for the others
            steps = steps[_alike(entry, probed[steps, at])] if len(steps) else steps
    if len(steps):
        return int(steps[-1]) + 1
    untrained = all(same(entries, probed_after(reader, key[0], 0)[key[1]][1]) for key, entries in own.items())
    return 0 if untrained else None


def probed_after(reader: MemoryReader, layer: str, step: int) -> dict[str, tuple[slice, Float[Tensor, "entries"]]]:
    """Which entries of each trained parameter the step log has, and what they were after a step."""
    found = {}
    for name in reader.manifest.layers[layer].trained:
        initial = reader.initial[f"{layer}/{name}"].reshape(-1)
        place = probed_entries(initial.numel())
        found[name] = place, reader.log(layer).probed[name][step - 1] if step else initial[place]
    return found
