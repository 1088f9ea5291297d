"""What torch's fused LSTM kernel leaves behind: the errors are a few products of it, for all steps at once.

On a CPU, a layer of an `nn.LSTM` in float32 runs by one call of oneDNN for each direction. The way forwards keeps the
gates and cells of all steps in a *workspace*, and the way back adds what reaches the states and cells. Whoever reads
them there need not go through time again.

How a workspace is laid out is nobody's promise: it differs between processors and versions. So it is not assumed but
looked for. The first calls of each shape are computed beside the kernel, like those that have no workspace, and the
numbers that came out are searched in it. Where every one of them is found, later calls of that shape read them there;
where not, they go on as before. Should a kernel ever change its ways in between, the step log says so like of any
gradient that the slots do not explain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

from spotlights.layers.scratch import scratch
from spotlights.layers.through_time import Passed, States, Times

SMALLEST = 1 << 14
"""Numbers in the states. With fewer, going through time is as quick, and a chance match not out of the question."""
_UNSEARCHED = 1
"""So many calls of a shape are not searched: a shape that never comes again is not worth it."""
_TRIES = 3
"""So many are, before the shape is left alone. Gradients of zeros, for one, are found nowhere."""
_CHANCES, _MARGIN = 4, 4096
"""So many places that look right at first are tried; and how far apart rows may be beyond their own length."""
_CLOSE = 1e-3
"""How far numbers may be from those looked for, of the largest of a step."""
_AT_ONCE = 1 << 17
"""Numbers that are worked on together: what comes in between stays in the cache."""

_sigmoid_backward, _tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
ByStep = Float[Tensor, "steps sequences features"]


@dataclass(frozen=True)
class _Place:
    """Where the rows of all steps are, each as one piece."""

    at: int
    step: int
    row: int

    def of(self, memory: Float[Tensor, "numbers"], shape: Sequence[int]) -> ByStep:
        return memory.as_strided(shape, (self.step, self.row, 1), self.at)


@dataclass(frozen=True)
class _Places:
    """Where everything is, in the order in which the direction takes its steps."""

    gates: _Place
    cells: _Place
    """But for those of the last step."""
    from_above: _Place
    """What reaches the states from outside the layer."""
    states_from_next: _Place
    """What reaches them from the step after."""
    cells_from_next: _Place


@dataclass
class _Search:
    """What is known of the workspaces of one shape."""

    places: _Places | None = None
    calls: int = 0
    """How many were computed beside the kernel."""


_searches: dict[tuple[Any, ...], _Search] = {}


@dataclass
class Workspace:
    """What the kernel keeps of one layer in one direction."""

    memory: Float[Tensor, "numbers"]
    inputs: Float[Tensor, "rows inputs"]
    states: States
    cell_start: Float[Tensor, "sequences hidden"]
    last_cells: Float[Tensor, "sequences hidden"]
    times: Times
    _search: _Search
    _passed_in: int = -1
    """The backward pass that has been through last."""

    @classmethod
    def of(cls, node: Any) -> Workspace:
        """Of a node of the graph. Holds nothing of it, as the node will hold this."""
        inputs, states, cell_start = node._saved_input.detach(), node._saved_result0.detach(), node._saved_cx_.detach()
        memory = node._saved_result3.detach().view(-1).view(torch.float32)
        shape = (*inputs.shape, states.shape[2], node._saved_reverse, len(memory), torch.get_num_threads())
        found = cls(
            memory,
            inputs.flatten(0, 1),
            states.flatten(0, 1),
            cell_start,
            node._saved_result2.detach(),
            Times([inputs.shape[1]] * len(inputs), reverse=node._saved_reverse),
            _searches.setdefault(shape, _Search()),
        )
        node.register_hook(found._note)
        return found

    def _note(self, *gradients: Any) -> None:
        self._passed_in = torch._C._current_graph_task_id()

    @property
    def is_readable(self) -> bool:
        """It is written, and known where everything is."""
        return self._search.places is not None and self.is_written

    @property
    def is_written(self) -> bool:
        """The backward pass that is under way, or ends, has been through."""
        return self._passed_in == torch._C._current_graph_task_id()

    def errors(self) -> Float[Tensor, "rows gates"]:
        """The gradients of the gates before their nonlinearities."""
        places = self._search.places
        assert places is not None
        memory, (steps, sequences, hidden) = self.memory, self._shape
        shape = steps, sequences, hidden
        gates = places.gates.of(memory, (steps, sequences, 4 * hidden))
        cells = scratch.empty(steps + 1, sequences, hidden, like=memory)  # and those that the first step begins with
        cells[0], cells[-1] = self.cell_start, self.last_cells
        cells[1:-1] = places.cells.of(memory, (steps - 1, sequences, hidden))
        from_above, states_from_next, cells_from_next = (
            place.of(memory, shape) for place in (places.from_above, places.states_from_next, places.cells_from_next)
        )
        found = scratch.empty(*gates.shape, like=memory)
        some = max(1, _AT_ONCE // (sequences * hidden))
        for at in range(0, steps, some):
            now = slice(at, min(at + some, steps))
            i, f, g, o = gates[now].split(hidden, dim=2)
            of_i, of_f, of_g, of_o = found[now].split(hidden, dim=2)
            squashed = cells[1:][now].tanh()
            of_state = from_above[now] + states_from_next[now]
            of_cell = _tanh_backward(of_state * o, squashed).add_(cells_from_next[now])
            _sigmoid_backward.grad_input(of_cell * g, i, grad_input=of_i)
            _sigmoid_backward.grad_input(of_cell * cells[now], f, grad_input=of_f)
            _tanh_backward.grad_input(of_cell * i, g, grad_input=of_g)
            _sigmoid_backward.grad_input(of_state.mul_(squashed), o, grad_input=of_o)
        return (found.flip(0) if self.times.reverse else found).flatten(0, 1)

    # -- where everything is -----------------------------------------------------------------

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.times.sizes), self.times.sizes[0], self.states.shape[1]

    def search(
        self,
        passed: Passed,
        weight_hh: Float[Tensor, "gates hidden"],
        errors: Float[Tensor, "rows gates"],
        of_states: States,
        of_cells: States,
    ) -> None:
        """Looks for what was computed beside the kernel.

        Args:
            passed: what the pass forwards left.
            weight_hh: how the next gates depend on a state.
            errors: of the gates.
            of_states: all that reaches each state.
            of_cells: and each cell.
        """
        search, (steps, sequences, hidden) = self._search, self._shape
        if search.places is not None or not self.is_written:
            return
        search.calls += 1
        if not _UNSEARCHED < search.calls <= _UNSEARCHED + _TRIES:
            return

        def by_step(rows: Float[Tensor, "rows features"]) -> ByStep:
            found = rows.unflatten(0, (steps, sequences))
            return found.flip(0) if self.times.reverse else found

        def from_next(rows: Float[Tensor, "rows features"]) -> ByStep:
            return by_step(rows)[1:]

        states_from_next = from_next(errors) @ weight_hh
        cells_from_next = from_next(of_cells * passed.gates[:, hidden : 2 * hidden])
        wanted = (
            by_step(passed.gates),
            by_step(passed.cells)[:-1],
            by_step(of_states)[:-1] - states_from_next,
            states_from_next,
            cells_from_next,
        )
        places = [_find(self.memory, each) for each in wanted]
        if None not in places:
            search.places = _Places(*places)  # type: ignore[arg-type]


def _find(memory: Float[Tensor, "numbers"], wanted: ByStep) -> _Place | None:
    """Where these rows are: the first one anywhere, the next ones not far behind it."""
    steps, sequences, features = wanted.shape

    def behind(at: int, distance: int, row: Float[Tensor, "features"]) -> Iterable[int]:
        # Never on top of each other: sequences may be alike in one call and not in the next.
        near = memory[at + distance : at + 4 * distance + _MARGIN]
        return (distance + more for more in islice(_matches(near, row), _CHANCES))

    for at in islice(_matches(memory, wanted[0, 0]), _CHANCES):
        for row in behind(at, features, wanted[0, 1]) if sequences > 1 else [features]:
            for step in behind(at, (sequences - 1) * row + features, wanted[1, 0]) if steps > 1 else [0]:
                place = _Place(at, step, row)
                if _is_there(memory, place, wanted):
                    return place
    return None


def _matches(memory: Float[Tensor, "numbers"], row: Float[Tensor, "features"]) -> Iterator[int]:
    """Where this row begins. One that is the same all along, of zeros for instance, might begin anywhere."""
    first, *others = row.abs().argsort(descending=True).tolist()  # large numbers are few
    close = _CLOSE * abs(float(row[first]))
    ends = len(memory) - len(row) + 1
    for start in range(0, 0 if bool((row == row[0]).all()) else ends, _AT_ONCE):
        part = memory[start + first : min(start + _AT_ONCE, ends) + first]
        found = torch.nonzero((part - row[first]).abs_() <= close).flatten() + start
        for n in others:
            if not len(found):
                break
            found = found[(memory[found + n] - row[n]).abs_() <= close]
        yield from found.tolist()


def _is_there(memory: Float[Tensor, "numbers"], place: _Place, wanted: ByStep) -> bool:
    steps, sequences, features = wanted.shape
    end = place.at + (steps - 1) * place.step + (sequences - 1) * place.row + features
    if end > len(memory):
        return False
    largest = wanted.abs().amax(dim=(1, 2), keepdim=True)
    return bool(((place.of(memory, wanted.shape) - wanted).abs_() <= _CLOSE * largest).all())


# -- in the graph ----------------------------------------------------------------------------


def workspaces(output: Tensor, weights: Sequence[Tensor]) -> list[Workspace] | None:
    """Those of all layers and directions, given by their `weight_ih`; None unless the kernel ran them all."""
    if (
        not output.is_cpu
        or output.dtype != torch.float32
        or output.numel() < SMALLEST
        or _top_saved_tensors_default_hooks(False) is not None  # saved elsewhere, or not at all
    ):
        return None
    wanted = {weight.data_ptr(): n for n, weight in enumerate(weights)}
    found: dict[int, Any] = {}
    due, seen = [output.grad_fn], set()
    while due and len(seen) < 16 * len(wanted) and len(found) < len(wanted):
        node: Any = due.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        edges = node.next_functions
        if node.name() == "MkldnnRnnLayerBackward0":
            which = wanted.get(node._saved_weight0.data_ptr())
            if which is not None and len(node._saved_input) > 2:
                found[which] = node
            # By its input, to the layer below: its states may come from another call of this very module.
            edges = edges[:1]
        due += [before for before, _ in edges]
    return [Workspace.of(found[n]) for n in range(len(weights))] if len(found) == len(weights) else None
