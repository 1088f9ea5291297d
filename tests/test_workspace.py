"""What torch's LSTM kernel leaves behind: read where it is found, the same numbers as computed beside it."""

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import spotlights as sl
import spotlights.layers.recurrent as recurrent
import spotlights.layers.workspace as workspace
from spotlights.dual_form import outer_sum
from spotlights.layers import adapter_for
from spotlights.layers.adapter import tensors_of
from spotlights.layers.recurrent import RecurrentCall
from spotlights.memory.blocks import in_blocks
from spotlights.recording.passes import Returned
from training import elsewhere, fill, same, state

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without the kernel")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
VARIANTS: dict[str, Callable[[], nn.LSTM]] = {
    "plain": lambda: nn.LSTM(20, 64),
    "dropout, batch first": lambda: nn.LSTM(20, 64, 3, batch_first=True, dropout=0.4),
    "both ways": lambda: nn.LSTM(20, 64, 2, bidirectional=True, bias=False),
}


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """Nothing is known of any shape, as in a new process."""
    workspace._searches.clear()
    yield
    workspace._searches.clear()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever errors are computed beside the kernel."""
    count: list[int] = []
    computed = recurrent.lstm_errors

    def counted(*args: Any, **options: Any) -> Tensor:
        count.append(1)
        return computed(*args, **options)

    monkeypatch.setattr(recurrent, "lstm_errors", counted)
    return count


def inputs(module: nn.LSTM, step: int = 0, steps: int = 17, sequences: int = 16) -> Tensor:
    lead = (sequences, steps) if module.batch_first else (steps, sequences)
    return torch.randn(*lead, module.input_size, generator=torch.Generator().manual_seed(step))


def loss(output: Any) -> Tensor:
    """Something that no two numbers of an output mean the same for."""
    found = torch.zeros(())
    for n, tensor in enumerate(tensors_of(output)):
        weights = torch.linspace(-1, 1, tensor.numel()).cos().reshape(tensor.shape).to(tensor)
        found = found + (n + 1) * (tensor * weights).sum() + tensor.square().sum()
    return found


def train(module: nn.LSTM, optimizer: torch.optim.Optimizer, steps: int) -> list[Any]:
    after = [state(module)]
    for step in range(steps):
        optimizer.zero_grad()
        loss(module(inputs(module, step))).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        after.append(state(module))
    return after


def momentum(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def explained(memory: sl.Memory, module: nn.Module) -> bool:
    verified = memory.verify(module)
    return verified.ok and not any(check.unexplained_steps for check in verified.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_calls_of_a_shape_are_computed_and_all_others_read(variant: str, beside: list[int], tmp_path: Path):
    torch.manual_seed(0)
    module = fill(VARIANTS[variant]())
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        train(module, optimizer, 2)
        first = len(beside)
        assert first == 2 * len(adapter_for(module).maps(module))
        after = train(module, optimizer, 4)
        assert len(beside) == first, "computed beside the kernel although a call was found in its workspace"
    memory = sl.open(tmp_path / "m")
    for check in memory.verify(module).values():
        assert check.relative_error <= 1e-5
        assert not check.unexplained_steps
    for name, linear in adapter_for(module).maps(module).items():
        made = memory.as_of(4).parameters(f"lstm.{name}")
        own = {id(parameter): own for own, parameter in module.named_parameters()}
        for kept, part in linear.parameters.items():
            torch.testing.assert_close(made[kept].float(), after[2][own[id(part.parameter)]], **CLOSE)


@st.composite
def modules(draw: st.DrawFn) -> tuple[nn.LSTM, tuple[Any, ...]]:
    """Any LSTM that the kernel runs, and what its forward takes."""
    layers, both = draw(st.integers(1, 3), label="layers"), draw(st.booleans(), label="both ways")
    torch.manual_seed(draw(st.integers(0, 9), label="seed"))
    module = nn.LSTM(
        draw(st.integers(1, 40)),
        draw(st.integers(1, 70), label="hidden"),
        layers,
        bias=draw(st.booleans(), label="bias"),
        bidirectional=both,
        batch_first=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.5])) if layers > 1 else 0.0,
    )
    sequences = draw(st.integers(1, 9), label="sequences")
    given_to = inputs(module, steps=draw(st.integers(1, 12), label="steps"), sequences=sequences)
    start = torch.randn(layers * (2 if both else 1), sequences, module.hidden_size)
    return module, (given_to, (start, -start)) if draw(st.booleans(), label="start") else (given_to,)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=modules())
def test_keys_and_errors_are_the_gradients_for_any_shape_and_options(drawn: tuple[nn.LSTM, tuple[Any, ...]]):
    module, args = drawn
    read = []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(workspace, "SMALLEST", 0)
        errors_of = workspace.Workspace.errors
        patch.setattr(workspace.Workspace, "errors", lambda self: read.append(1) or errors_of(self))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        with sl.record(module, optimizer, Path(folder) / "m"):
            for _ in range(3):
                optimizer.zero_grad()
                loss(module(*args)).backward()
                optimizer.step()
        event("read" if read else "computed")
        steps = len(args[0]) if not module.batch_first else args[0].shape[1]
        if steps > 2 and module.hidden_size > 8 and not module.dropout:
            assert len(read) == len(adapter_for(module).maps(module)), "not found in the workspace"
        view = sl.open(Path(folder) / "m").where(step=2)._view
        for name, linear in adapter_for(module).maps(module).items():
            if not any(part.parameter.grad.any() for part in linear.parameters.values()):
                continue  # a gradient of zeros, all inputs dropped: such a step leaves no slots
            (block,) = in_blocks(view.reader.layer(f"lstm.{name}"), view.selection, 10_000)
            keys, errors = (torch.cat([part.rows for part in of()]) for of in (block.keys, block.errors))
            made = outer_sum(errors, keys, 1).split(list(linear.columns.values()), dim=1)
            for part, of_weight in zip(linear.weights.values(), made, strict=True):
                scale = float(part.parameter.grad.abs().max())
                torch.testing.assert_close(of_weight, part.parameter.grad, rtol=0, atol=1e-5 * scale + 1e-30)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_read_is_what_is_computed(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Error by error, also of the last states; the two ways differ by rounding alone."""
    torch.manual_seed(0)
    module, compared = fill(VARIANTS[variant]()), []
    errors_of = RecurrentCall.errors

    def both(self: RecurrentCall, gradients: Any) -> Any:
        made = errors_of(self, gradients)
        if self._workspaces is not None and self._all_workspaces[0].is_readable:
            held, self._workspaces = self._workspaces, None
            compared.append((made, errors_of(self, gradients)))
            self._workspaces = held
        return made

    monkeypatch.setattr(RecurrentCall, "errors", both)
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        train(module, optimizer, 4)
    assert len(compared) == 3, "of the second call both are computed: it is searched"
    for read, computed in compared[1:]:
        assert read.keys() == computed.keys()
        for name, errors in read.items():
            assert float((errors - computed[name]).abs().max()) <= 1e-5 * float(computed[name].abs().max())


def test_training_is_bit_identical():
    for variant, plain, recorded in elsewhere(_each_twice):
        assert same(recorded, plain), f"{variant}: weights differ"


def _each_twice() -> list[tuple[str, Any, Any]]:
    return [(variant, _run(variant, record=False), _run(variant, record=True)) for variant in VARIANTS]


def _run(variant: str, *, record: bool) -> Any:
    torch.manual_seed(0)
    module = fill(VARIANTS[variant]())
    optimizer = momentum(module)
    if not record:
        return train(module, optimizer, 4)[-1]
    with tempfile.TemporaryDirectory() as folder, sl.record(module, optimizer, Path(folder) / "m"):
        after = train(module, optimizer, 4)[-1]
        known = [search.places is not None for search in workspace._searches.values()]
        assert known, "no workspace"
        assert all(known), "nothing was read"
    return after


def test_a_workspace_that_is_laid_out_in_an_unknown_way_is_left_alone(
    beside: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    searched: list[int] = []
    monkeypatch.setattr(workspace, "_find", lambda memory, wanted: searched.append(1))
    module = fill(VARIANTS["plain"]())
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        train(module, optimizer, 6)
    assert len(beside) == 6
    assert len(searched) == 5 * workspace._TRIES, "searched for ever"
    assert explained(sl.open(tmp_path / "m"), module)


def test_a_kernel_that_changes_its_ways_is_told_by_the_step_log(tmp_path: Path):
    module = fill(VARIANTS["plain"]())
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        train(module, optimizer, 3)
        (search,) = workspace._searches.values()
        search.places = workspace._Places(**{**vars(search.places), "cells": search.places.states_from_next})
        train(module, optimizer, 1)
    assert sl.open(tmp_path / "m").verify(module)["lstm.l0"].unexplained_steps == [3]


@pytest.mark.parametrize("early", [False, True])
def test_any_pass_is_recorded_whatever_it_reaches_and_however_often(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`early`: copied as soon as may be, before the pass ends."""
    if early:
        monkeypatch.setattr("spotlights.recording.passes._HELD_BYTES", 0)
    module = fill(nn.LSTM(20, 64, 2))
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        train(module, optimizer, 2)
        for which in (0, 1):
            optimizer.zero_grad()
            module(inputs(module))[1][which].square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        output, (states, cells) = module(inputs(module))
        (output.sum() + states.sum() + cells.sum()).backward(retain_graph=True)
        (output.square().sum() - states.sum() + 2 * cells.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        output, _ = module(inputs(module))
        (gradient,) = torch.autograd.grad(output.square().sum(), output)
        output.backward(gradient)  # in two passes, of which the first only comes up to the layer
        optimizer.step()
        optimizer.zero_grad()
        upper = [parameter for name, parameter in module.named_parameters() if name.endswith("l1")]
        module(inputs(module))[0].square().sum().backward(inputs=upper)
        optimizer.step()
    memory = sl.open(tmp_path / "m")
    assert explained(memory, module), str(memory.verify(module))
    assert memory.layers["lstm.l1"].slots == (2 + 2 + 2 + 1 + 1) * 17 * 16
    assert memory.layers["lstm.l0"].slots == (2 + 2 + 2 + 1) * 17 * 16


@pytest.mark.parametrize("alike", ["sequences", "steps", "gradients"])
def test_calls_that_are_searched_may_hold_the_same_many_times(alike: str, tmp_path: Path):
    """What they are alike in tells nothing of where the next call's are."""
    module = fill(VARIANTS["plain"]())
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        for step in range(3):
            optimizer.zero_grad()
            given_to = inputs(module, step)
            if alike != "gradients":
                given_to = (given_to[:, :1] if alike == "sequences" else given_to[:1]).expand_as(given_to)
            output, _ = module(given_to)
            (output if alike == "gradients" else output.square()).sum().backward()
            optimizer.step()
        train(module, optimizer, 3)
    memory = sl.open(tmp_path / "m")
    assert explained(memory, module), str(memory.verify(module))


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_that_go_on_from_each_others_states_are_told_apart(variant: str, beside: list[int], tmp_path: Path):
    torch.manual_seed(0)
    module = fill(VARIANTS[variant]())
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        for step in range(3):
            optimizer.zero_grad()
            states, total = None, torch.zeros(())
            for part in range(3):
                output, states = module(inputs(module, 3 * step + part), states)
                total = total + loss(output)
            total.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    assert len(beside) < 9 * len(adapter_for(module).maps(module)), "nothing was read"
    assert explained(sl.open(tmp_path / "m"), module), str(sl.open(tmp_path / "m").verify(module))


@pytest.mark.parametrize("case", ["checkpoint", "checkpoint, reentrant", "saved elsewhere"])
def test_saved_tensors_may_be_recomputed_or_kept_elsewhere(case: str, tmp_path: Path):
    module = fill(nn.LSTM(20, 64))
    optimizer = momentum(module)

    def output() -> Tensor:
        wanting = inputs(module).requires_grad_()
        if case == "saved elsewhere":
            with save_on_cpu():
                return module(wanting)[0]
        return checkpoint(lambda given_to: module(given_to)[0], wanting, use_reentrant="reentrant" in case)

    with sl.record(module, optimizer, tmp_path / "m"):
        train(module, optimizer, 3)  # whose layout is known
        for _ in range(2):
            optimizer.zero_grad()
            output().square().sum().backward()
            optimizer.step()
    memory = sl.open(tmp_path / "m")
    assert memory.layers["lstm.l0"].slots == 5 * 17 * 16
    assert explained(memory, module), str(memory.verify(module))


@pytest.mark.parametrize("kind", ["lstm", "linear"])
def test_a_loss_that_is_kept_keeps_nothing_of_what_was_recorded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in `total += loss`: of a used graph torch keeps next to nothing, and neither do we."""
    calls: list[weakref.ref[Any]] = []

    def returned(call: Any, *others: Any) -> Returned:
        calls.append(weakref.ref(call))
        return Returned(call, *others)

    monkeypatch.setattr("spotlights.recording.listening.Returned", returned)
    module = fill(nn.LSTM(20, 64) if kind == "lstm" else nn.Linear(20, 4))
    optimizer = momentum(module)
    with sl.record(module, optimizer, tmp_path / "m"):
        total = torch.zeros(())
        for _ in range(3):
            one = loss(module(torch.randn(17, 16, 20)))
            assert calls[-1]() is not None
            one.backward()
            optimizer.step()
            total = total + one
        gc.collect()
        assert [call() for call in calls] == [None] * 3
        assert total.grad_fn is not None
