"""`nn.LSTM`, `nn.RNN`, `nn.GRU` and their cells: linear maps of what comes in and of the state before.

An LSTM's layer, in one direction, is one map: the key is `[x_t; h_{t-1}]`, M is `[W_ih | W_hh]`, and the error is the
gradient of the four gates before their nonlinearities; an RNN's is the same with one gate. In a GRU the reset gate
stands between the two, so there are two maps, of `x_t` and of `h_{t-1}`.

The modules compute as ever, by their fused kernels. The keys are in their inputs and outputs; the errors are computed
beside the kernel, at the end of the backward pass (`through_time.py`). Of several layers, the outputs of the lower ones
are computed a second time, with the dropout that the call drew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, Part
from spotlights.layers.scratch import scratch
from spotlights.layers.sequence_layout import Layout
from spotlights.layers.through_time import Times, gru_errors, lstm_errors, lstm_passed, rnn_errors
from spotlights.layers.workspace import Workspace, workspaces

ByMap = Mapping[str, Float[Tensor, "rows _features"]]
"""Rows of each linear map, by its name."""


class Direction(NamedTuple):
    """The parameters of one layer in one direction."""

    suffix: str
    """What torch adds to their names."""
    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self[1:] if isinstance(parameter, nn.Parameter)]


class Reached(NamedTuple):
    """What a backward pass brings to one layer in one direction; of the state and (LSTM) of the cell."""

    times: Times
    starts: Sequence[Float[Tensor, "sequences hidden"]]
    gradients: Sequence[Float[Tensor, "rows hidden"]]
    """May be overwritten."""
    cells_are_whole: bool
    """The gradients of the cells have been through the states already."""
    workspace: Workspace | None
    """What a fused kernel left; the errors are looked for in it."""


def directions_of(module: nn.Module) -> list[list[Direction]]:
    """Layer by layer, forwards and (if there is one) backwards."""
    held = module._parameters
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    if isinstance(module, nn.RNNCellBase):
        return [[Direction("", *(held.get(name) for name in names))]]  # type: ignore[arg-type]
    assert isinstance(module, nn.RNNBase)
    found = []
    for layer in range(module.num_layers):
        suffixes = [f"_l{layer}", f"_l{layer}_reverse"][: 2 if module.bidirectional else 1]
        found.append([Direction(suffix, *(held.get(name + suffix) for name in names)) for suffix in suffixes])  # type: ignore[arg-type]
    return found


class _RecurrentAdapter(ModuleAdapter):
    """What layers of steps and single steps have in common."""

    modules: ClassVar[tuple[type[nn.Module], ...]]
    states: ClassVar[int]
    """What goes from step to step: a state, or a state and a cell."""
    kernel: Callable[..., Any]
    """What torch runs layers with."""

    def handles(self, module: nn.Module) -> bool:
        if not any(isinstance(module, kind) and type(module).forward is kind.forward for kind in self.modules):
            return False
        if not all(d.weight_ih is not None and d.weight_hh is not None for ds in directions_of(module) for d in ds):
            return False  # computed weights
        if isinstance(module, nn.RNNCellBase):
            return True
        assert isinstance(module, nn.RNNBase)
        drops = module.num_layers > 1 and module.dropout > 0
        on_cpu = next(module.parameters()).device.type == "cpu"
        return module.proj_size == 0 and (on_cpu or not drops)  # other devices draw dropout in ways of their own

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        return {name: linear for ds in directions_of(module) for d in ds for name, linear in self.of(d).items()}

    def begin(self) -> Sequence[Any]:
        return [scratch]

    def before(self, module: nn.Module) -> Any:
        drops = isinstance(module, nn.RNNBase) and module.training and module.num_layers > 1 and module.dropout > 0
        return torch.get_rng_state() if drops else None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        inputs = args[0] if args else kwargs["input"]
        start = args[1] if len(args) > 1 else kwargs.get("hx")
        return RecurrentCall(self, module, inputs, start, output, before)

    # -- what the kinds differ in ------------------------------------------------------------

    def workspaces(self, output: Tensor, layers: list[list[Direction]]) -> list[list[Workspace]] | None:
        """What a fused kernel keeps of each layer in each direction, where it is known to leave such things."""
        return None

    @abstractmethod
    def of(self, direction: Direction) -> Mapping[str, LinearMap]:
        """The linear maps of one direction."""

    @abstractmethod
    def keys(
        self,
        direction: Direction,
        times: Times,
        inputs: Float[Tensor, "rows inputs"],
        states: Float[Tensor, "rows hidden"],
        start: Float[Tensor, "sequences hidden"],
    ) -> ByMap:
        """The keys of each map, from what came in, the states of all steps and what they began with."""

    @abstractmethod
    def errors(
        self, direction: Direction, keys: ByMap, reached: Reached
    ) -> tuple[ByMap, Float[Tensor, "rows out_features"]]:
        """The errors of each map, and those that belong to `weight_ih`."""


class _JointAdapter(_RecurrentAdapter):
    """Where what comes in and the state before are mapped as one."""

    def of(self, direction: Direction) -> Mapping[str, LinearMap]:
        weights = {"weight_ih": Part(direction.weight_ih), "weight_hh": Part(direction.weight_hh)}
        biases = {"bias_ih": direction.bias_ih, "bias_hh": direction.bias_hh}
        named = {name: Part(bias) for name, bias in biases.items() if bias is not None}
        parts = {"x": direction.weight_ih.shape[1], "h": direction.weight_hh.shape[1]}
        return {direction.suffix.removeprefix("_"): LinearMap(weights, named, parts=parts)}

    def keys(
        self,
        direction: Direction,
        times: Times,
        inputs: Float[Tensor, "rows inputs"],
        states: Float[Tensor, "rows hidden"],
        start: Float[Tensor, "sequences hidden"],
    ) -> ByMap:
        return {direction.suffix.removeprefix("_"): times.beside_before(inputs, states, start)}

    def errors(
        self, direction: Direction, keys: ByMap, reached: Reached
    ) -> tuple[ByMap, Float[Tensor, "rows out_features"]]:
        ((name, key),) = keys.items()
        matrix = torch.cat([direction.weight_ih.detach(), direction.weight_hh.detach()], dim=1)
        bias = None
        if direction.bias_ih is not None and direction.bias_hh is not None:
            bias = direction.bias_ih.detach() + direction.bias_hh.detach()
        gates = scratch.empty(len(key), len(matrix), like=key)
        torch.mm(key, matrix.T, out=gates) if bias is None else torch.addmm(bias, key, matrix.T, out=gates)
        made = self.gate_errors(gates, direction.weight_hh.detach(), reached)
        return {name: made}, made

    @abstractmethod
    def gate_errors(
        self, gates: Float[Tensor, "rows gates"], weight_hh: Float[Tensor, "gates hidden"], reached: Reached
    ) -> Float[Tensor, "rows gates"]:
        """The gradients of the gates, which may be overwritten, before their nonlinearities."""


class LstmAdapter(_JointAdapter):
    kind = "lstm"
    modules = (nn.LSTM, nn.LSTMCell)
    states = 2
    kernel = staticmethod(torch.lstm)

    def gate_errors(
        self, gates: Float[Tensor, "rows gates"], weight_hh: Float[Tensor, "gates hidden"], reached: Reached
    ) -> Float[Tensor, "rows gates"]:
        times, starts, gradients, whole, workspace = reached
        passed = lstm_passed(gates, weight_hh.shape[1], times, starts[1])
        errors = lstm_errors(passed, weight_hh, times, starts[1], *gradients, cells_are_whole=whole)
        if workspace is not None:
            workspace.search(passed, weight_hh, errors, *gradients)
        return errors

    def workspaces(self, output: Tensor, layers: list[list[Direction]]) -> list[list[Workspace]] | None:
        found = workspaces(output, [direction.weight_ih for layer in layers for direction in layer])
        return None if found is None else [[found.pop(0) for _ in layer] for layer in layers]


class RnnAdapter(_JointAdapter):
    modules = (nn.RNN, nn.RNNCell)
    states = 1

    def __init__(self, nonlinearity: str) -> None:
        self.kind = f"rnn-{nonlinearity}"  # type: ignore[misc]
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[nonlinearity]
        self._nonlinearity = nonlinearity

    def handles(self, module: nn.Module) -> bool:
        return super().handles(module) and module.nonlinearity == self._nonlinearity

    def gate_errors(
        self, gates: Float[Tensor, "rows gates"], weight_hh: Float[Tensor, "gates hidden"], reached: Reached
    ) -> Float[Tensor, "rows gates"]:
        slopes = gates.tanh_().square_().neg_().add_(1) if self._nonlinearity == "tanh" else (gates > 0).to(gates)
        return rnn_errors(slopes, weight_hh, reached.times, reached.gradients[0])


class GruAdapter(_RecurrentAdapter):
    kind = "gru"
    modules = (nn.GRU, nn.GRUCell)
    states = 1
    kernel = staticmethod(torch.gru)

    def of(self, direction: Direction) -> Mapping[str, LinearMap]:
        _, weight_ih, weight_hh, bias_ih, bias_hh = direction
        halves = {"ih": (weight_ih, bias_ih), "hh": (weight_hh, bias_hh)}
        return {
            half + direction.suffix: LinearMap({"weight": Part(weight)}, {} if bias is None else {"bias": Part(bias)})
            for half, (weight, bias) in halves.items()
        }

    def keys(
        self,
        direction: Direction,
        times: Times,
        inputs: Float[Tensor, "rows inputs"],
        states: Float[Tensor, "rows hidden"],
        start: Float[Tensor, "sequences hidden"],
    ) -> ByMap:
        return {"ih" + direction.suffix: inputs, "hh" + direction.suffix: times.all_before(states, start)}

    def errors(
        self, direction: Direction, keys: ByMap, reached: Reached
    ) -> tuple[ByMap, Float[Tensor, "rows out_features"]]:
        of_ih, of_hh = "ih" + direction.suffix, "hh" + direction.suffix
        halves = ((of_ih, direction.weight_ih, direction.bias_ih), (of_hh, direction.weight_hh, direction.bias_hh))
        of_input, of_state = (
            nn.functional.linear(keys[name], weight.detach(), None if bias is None else bias.detach())
            for name, weight, bias in halves
        )
        weight_hh, gradient = direction.weight_hh.detach(), reached.gradients[0]
        made = gru_errors(of_input, of_state, weight_hh, reached.times, keys[of_hh], gradient)
        return {of_ih: made[0], of_hh: made[1]}, made[0]


# -- a call ----------------------------------------------------------------------------------


class RecurrentCall(Call):
    """One call of a recurrent module."""

    def __init__(
        self,
        adapter: _RecurrentAdapter,
        module: nn.Module,
        inputs: Tensor | PackedSequence,
        start: Tensor | tuple[Tensor, Tensor] | None,
        output: Any,
        random_state: Tensor | None,
    ) -> None:
        self._adapter = adapter
        self._module = module
        self._is_cell = isinstance(module, nn.RNNCellBase)
        self._layers = directions_of(module)
        self.layout = layout = Layout.of(module, inputs)
        self._inputs = layout.rows(inputs)
        returned = output if isinstance(output, Tensor | PackedSequence) else output[0]
        self._outputs = layout.rows(returned)
        given = () if start is None else (start,) if isinstance(start, Tensor) else start
        self._starts = [layout.states(tensor) for tensor in given]
        made: Any = output
        self._random_state = random_state
        self._cells_are_whole = self._is_cell and isinstance(output, tuple) and _comes_from(*made)
        self.chosen = layout.chosen
        by_kernel = isinstance(returned, Tensor) and not self._is_cell
        self._workspaces = adapter.workspaces(returned, self._layers) if by_kernel else None  # type: ignore[arg-type]
        self.nbytes = self._inputs.nbytes + self._outputs.nbytes

    @property
    def is_through(self) -> bool:
        return all(each.is_written for each in self._all_workspaces)

    def leads(self) -> Mapping[str, Sequence[int]]:
        return dict.fromkeys(self._adapter.maps(self._module), self.layout.lead)

    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"]]:
        every = (keys for layer in self._keys for keys in layer)
        return {name: self.layout.shaped(rows) for keys in every for name, rows in keys.items()}

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        layout, found = self.layout, {}
        if self._all_workspaces and all(each.is_readable for each in self._all_workspaces):
            names = self._adapter.maps(self._module)
            return {n: layout.shaped(each.errors()) for n, each in zip(names, self._all_workspaces, strict=True)}
        of_output = None if gradients[0] is None else layout.rows(gradients[0])
        # A cell returns its last state once, a layer twice: in its output, and as what it ends with.
        of_last = [None if g is None else layout.states(g) for g in (gradients if self._is_cell else gradients[1:])]
        if self._is_cell:
            of_last[0] = None
        for layer in reversed(range(len(self._layers))):
            below = None
            for d, direction in enumerate(self._layers[layer]):
                hidden, times = direction.weight_hh.shape[1], self._times(d)
                mine = None if of_output is None else of_output[:, d * hidden : (d + 1) * hidden]
                last = [None if each is None else each[layer * len(self._layers[layer]) + d] for each in of_last]
                like = self._outputs[:, :hidden]
                arrived = [times.from_the_end(mine if not n else None, each, like) for n, each in enumerate(last)]
                workspace = None if self._workspaces is None else self._workspaces[layer][d]
                reached = Reached(times, self._starts_of(layer, d), arrived, self._cells_are_whole, workspace)
                made, of_ih = self._adapter.errors(direction, self._keys[layer][d], reached)
                found.update({name: layout.shaped(rows) for name, rows in made.items()})
                if layer:
                    to_input = of_ih @ direction.weight_ih.detach()
                    below = to_input if below is None else below.add_(to_input)
            if layer:
                assert below is not None
                mask = self._masks[layer - 1]
                of_output = below if mask is None else below.mul_(mask)
        return found

    # -- what happened inside ----------------------------------------------------------------

    @property
    def _all_workspaces(self) -> list[Workspace]:
        return [each for layer in self._workspaces or () for each in layer]

    def _times(self, direction: int) -> Times:
        return Times(self.layout.sizes, reverse=direction == 1)

    def _starts_of(self, layer: int, direction: int) -> list[Float[Tensor, "sequences hidden"]]:
        """The state and (LSTM) the cell that all sequences begin with."""
        index = layer * len(self._layers[layer]) + direction
        if self._starts:
            return [states[index] for states in self._starts]
        hidden = self._layers[layer][direction].weight_hh.shape[1]
        return [self._outputs.new_zeros(self.layout.sizes[0], hidden) for _ in range(self._adapter.states)]

    @cached_property
    def _keys(self) -> list[list[ByMap]]:
        found = []
        for layer, (inputs, outputs) in enumerate(self._through()):
            found.append([])
            for d, direction in enumerate(self._layers[layer]):
                hidden = direction.weight_hh.shape[1]
                states = outputs[:, d * hidden : (d + 1) * hidden]
                start = self._starts_of(layer, d)[0]
                found[-1].append(self._adapter.keys(direction, self._times(d), inputs, states, start))
        return found

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        """The dropout behind each layer but the last, drawn again as the call drew it."""
        lower = self._layers[:-1]
        if self._random_state is None:
            return [None for _ in lower]
        assert isinstance(self._module, nn.RNNBase)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random_state)
            return [nn.functional.dropout(torch.ones_like(self._outputs), self._module.dropout) for _ in lower]

    def _through(self) -> Iterator[tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows features"]]]:
        """The inputs and outputs of each layer; the lower ones are computed again unless a kernel left them."""
        if self._workspaces is not None:
            for ways in self._workspaces:
                yield ways[0].inputs, torch.cat([way.states for way in ways], dim=1) if ways[1:] else ways[0].states
            return
        inputs = self._inputs
        for layer, mask in enumerate(self._masks):
            outputs = self._run(layer, inputs)
            yield inputs, outputs
            inputs = outputs if mask is None else outputs * mask
        yield inputs, self._outputs

    def _run(self, layer: int, inputs: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows features"]:
        """One layer alone, by the kernel that the module uses."""
        module, layout = self._module, self.layout
        assert isinstance(module, nn.RNNBase)
        each = [self._starts_of(layer, d) for d in range(len(self._layers[layer]))]
        starts: tuple[Tensor, ...] = tuple(torch.stack(states) for states in zip(*each, strict=True))
        start = starts if len(starts) != 1 else starts[0]
        weights = [parameter.detach() for direction in self._layers[layer] for parameter in direction.parameters]
        settings = weights, module.bias, 1, 0.0, module.training, module.bidirectional
        if layout.packed:
            return self._adapter.kernel(inputs, torch.tensor(layout.sizes), start, *settings)[0]
        stepwise = inputs.unflatten(0, (len(layout.sizes), layout.sizes[0]))
        return self._adapter.kernel(stepwise, start, *settings, False)[0].flatten(0, 1)


def _comes_from(state: Tensor, cell: Tensor) -> bool:
    """Whether the graph has the state computed from this very cell, as without a fused kernel: h = o·tanh(c).

    What reaches the cell then has all that reaches it by way of the state in it.
    """
    reached = [state.grad_fn]
    for _ in range(3):
        reached = [before for node in reached if node is not None for before, _ in node.next_functions]
        if cell.grad_fn is not None and cell.grad_fn in reached:
            return True
    return False
