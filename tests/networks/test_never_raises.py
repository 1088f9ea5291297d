"""No training loop is ever stopped or changed by recording, whatever its rows, its batches and its optimizer are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import (
    IDS,
    LABELS,
    B,
    D,
    X,
    assert_verified,
    column,
    mlp,
    ordinary,
    run,
    sgd,
    turn,
    words,
)
from torch import Tensor, nn

import spotlights as sl
from spotlights.layers import ADAPTERS

T = 6
FRAMES = torch.randn(12, T, D, generator=torch.Generator().manual_seed(2))

# -- rows that do not fit the batch ------------------------------------------------------------------------------------


class Graphs(nn.Module):
    """Four graphs of 2, 3, 4 and 2 nodes, joined: the rows of `nodes` are nodes, those of `head` are graphs."""

    owners = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3])

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.head = nn.Linear(D, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.nodes(x[:, None].expand(-1, 5, -1).flatten(0, 1)[: len(self.owners)]))
        return self.head(torch.zeros(B, 6).index_add(0, self.owners, rows))


class Experts(nn.Module):
    """Each row goes to one of two experts, so that an expert has some of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList([nn.Linear(D, 6), nn.Linear(D, 6)]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.arange(len(x)) % 4 == 0
        y = torch.zeros(len(x), 6)
        y = y.index_put((first.nonzero()[:, 0],), self.experts[0](x[first]))
        y = y.index_put(((~first).nonzero()[:, 0],), self.experts[1](x[~first]))
        return self.head(torch.tanh(y))


class OfFrames(nn.Module):
    """Each frame of a film by itself: rows are (B·T,) in one layer and (B,) in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.head = nn.Linear(D, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x[:, None].expand(-1, T, -1) * torch.arange(1, T + 1)[:, None]
        return self.head(torch.tanh(self.frame(frames.flatten(0, 1))).view(len(x), T, -1).mean(dim=1))


def two_views(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    both = model(torch.cat([X[IDS], X[IDS] + 0.1]))
    turn(optimizer, (both[:B] - both[B:]).square().sum() + both.square().sum())


def micro_batches(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    optimizer.zero_grad()
    for some in IDS.split(2):
        (F.cross_entropy(model(X[some]), LABELS[some]) / 2).backward()
    optimizer.step()


def monitoring(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    loss = F.cross_entropy(model(X[IDS]), LABELS[IDS])
    model(X[:7]).sum().backward()  # looks at gradients of other data, and forgets them
    turn(optimizer, loss)


def unbatched(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=[int(IDS[number])])
    turn(optimizer, F.cross_entropy(model(X[IDS[number]]), LABELS[IDS[number]]))


DO_NOT_FIT: dict[str, tuple[Callable[[], nn.Module], Callable[..., None], str, str]] = {
    "graphs: rows are nodes": (Graphs, ordinary, "nodes", "(11,)"),
    "experts: some of the rows": (Experts, ordinary, "experts.0", "(1,)"),
    "frames: rows are B·T": (OfFrames, ordinary, "frame", "(24,)"),
    "two views of each example": (mlp, two_views, "0", "(8,)"),
    "micro-batches": (mlp, micro_batches, "0", "(2,)"),
}


@pytest.mark.parametrize("case", DO_NOT_FIT)
def test_rows_that_do_not_fit_the_batch_have_no_example_and_are_named_once(case, tmp_path):
    make, step, layer, shape = DO_NOT_FIT[case]
    done = run(make(), sgd(), tmp_path / "m", step, compare=True)
    assert_verified(done)
    about = [text for text in done.heard.warnings if f'"{layer}"' in text]
    assert len(about) == 1, done.heard.warnings
    assert shape in about[0], "the shape of the rows"
    assert "(4,)" in about[0], "the shape that was given"
    assert "layer=" in about[0], "how to give ids per row"
    assert set(column(done.memory, layer)) == {None}


@pytest.mark.parametrize("case", [*DO_NOT_FIT, "a monitoring pass", "an unbatched row"])
def test_training_is_the_same_to_the_bit(case, tmp_path):
    more = {"a monitoring pass": (mlp, monitoring, "", ""), "an unbatched row": (mlp, unbatched, "", "")}
    make, step, *_ = (DO_NOT_FIT | more)[case]
    run(make(), sgd(momentum=0.9), tmp_path / "m", step, compare=True)


def test_an_unbatched_row_belongs_to_the_one_example_given(tmp_path):
    done = run(mlp(), sgd(), tmp_path / "m", unbatched, compare=True)
    assert column(done.memory, "0") == IDS.tolist()
    assert_verified(done)


def test_a_monitoring_pass_beside_the_batch_leaves_the_batch_its_examples(tmp_path):
    done = run(mlp(), sgd(), tmp_path / "m", monitoring)
    assert_verified(done)
    assert [e for e in column(done.memory, "0") if e is not None] == IDS.tolist() * 4


def test_ids_can_be_given_for_the_rows_of_one_layer(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        recorder.batch(example=IDS[Graphs.owners], layer="nodes")
        turn(optimizer, F.cross_entropy(model(X[IDS]), LABELS[IDS]))

    done = run(Graphs(), sgd(), tmp_path / "m", step, compare=True)
    assert not done.heard.warnings
    assert column(done.memory, "nodes") == IDS[Graphs.owners].tolist() * 4
    assert column(done.memory, "head") == IDS.tolist() * 4


def test_what_is_said_of_examples_follows_from_the_ids_of_rows(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS, label=LABELS[IDS])
        recorder.batch(example=IDS[Graphs.owners], layer="nodes")
        turn(optimizer, F.cross_entropy(model(X[IDS]), LABELS[IDS]))

    done = run(Graphs(), sgd(), tmp_path / "m", step)
    assert not done.heard.warnings
    assert column(done.memory, "nodes", "label") == LABELS[IDS[Graphs.owners]].tolist() * 4


def test_warnings_point_at_the_line_of_the_loop(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Graphs()
        optimizer = sgd()(model)
        with sl.record(model, optimizer, tmp_path / "m") as recorder:
            ordinary(model, optimizer, recorder, 0)
    (told,) = caught
    assert Path(told.filename).name == "runs.py"


def test_answers_name_the_layers_whose_slots_have_no_example(tmp_path):
    done = run(Graphs(), sgd(), tmp_path / "m", ordinary)
    spot = done.memory.attend(done.model, X[:B])
    assert "no example is known of the slots of nodes" in words(spot.influence(1).top(3))
    assert "–: slots whose example is not known" in words(spot["nodes"].contributions(1).top(3, by="example"))
    assert "not known" not in words(spot["head"].contributions(1).top(3, by="example"))


class Windows(nn.Module):
    """Images are cut to windows, and windows to rows: (B·2, 3, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.head = nn.Linear(D, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.window(x.reshape(-1, 3, D))).reshape(B, -1, 6).mean(dim=1))


def test_ids_can_be_given_for_windows_of_rows(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        if number:
            recorder.batch(example=IDS.repeat_interleave(2), layer="window")
        turn(optimizer, F.cross_entropy(model(FRAMES[IDS]), LABELS[IDS]))

    done = run(Windows(), sgd(), tmp_path / "m", step, steps=2, compare=True)
    (told,) = done.heard.warnings
    assert 'layer="window") with shape (8,) or (8, 3)' in told
    assert column(done.memory, "window") == [None] * 24 + IDS.repeat_interleave(6).tolist()


def test_ids_can_be_given_for_each_micro_batch(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        optimizer.zero_grad()
        for some in IDS.split(2):
            recorder.batch(example=some)
            F.cross_entropy(model(X[some]), LABELS[some]).backward()
        optimizer.step()

    done = run(mlp(), sgd(), tmp_path / "m", step, compare=True)
    assert not done.heard.warnings
    assert column(done.memory, "2") == IDS.tolist() * 4
    assert_verified(done)


class Odd(nn.Linear):
    """A layer whose adapter has a mistake in it."""


class _BrokenAdapter(sl.LayerAdapter):
    kind = "broken"

    def handles(self, module: nn.Module) -> bool:
        return isinstance(module, Odd)

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        raise RuntimeError("nobody foresaw this")


def test_anything_unforeseen_stops_recording_with_one_warning_and_leaves_training_alone(tmp_path):
    sl.register_layer(broken := _BrokenAdapter())
    try:
        model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), Odd(6, 3))
        done = run(model, sgd(), tmp_path / "m", ordinary, compare=True)
    finally:
        ADAPTERS.remove(broken)
    stopped = [text for text in done.heard.warnings if "has stopped" in text]
    assert len(stopped) == 1, done.heard.warnings
    assert "nobody foresaw this" in stopped[0]


# -- the right axis ----------------------------------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """torch's default: (L, B, …). The layer's own `batch_first` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][-1])


def as_many_steps_as_sequences(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    turn(optimizer, F.cross_entropy(model(FRAMES[IDS, :B].transpose(0, 1)), LABELS[IDS]))


def test_a_sequence_first_layer_with_as_many_steps_as_sequences_gives_ids_to_sequences(tmp_path):
    done = run(SequenceFirst(), sgd(), tmp_path / "m", as_many_steps_as_sequences, steps=1, compare=True)
    layer = next(name for name in done.memory.layers if name.startswith("lstm"))
    of_position: dict[int, list[int]] = {}
    for position, example in zip(column(done.memory, layer, "position"), column(done.memory, layer), strict=True):
        of_position.setdefault(position, []).append(example)
    assert all(sorted(ids) == sorted(IDS.tolist()) for ids in of_position.values()), of_position


class Attending(nn.Module):
    """The same for `nn.MultiheadAttention`, and a Linear that cannot know which axis is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.attention, self.head = nn.Linear(D, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rows(x)
        return self.head(self.attention(y, y, y, need_weights=False)[0].mean(dim=0))


class Encoded(nn.Module):
    """torch's transformer layer, sequence first or batch first."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.lstm = nn.LSTM(8, 3, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.encoder(x))[0].mean(dim=1 if self.batch_first else 0)


def test_sequence_first_layers_teach_each_example_what_batch_first_layers_do(tmp_path):
    """With as many steps as sequences: the shapes are the same, `batch_first` tells."""
    totals = {}
    sequences = torch.randn(12, B, 8, generator=torch.Generator().manual_seed(3))
    for batch_first in (True, False):
        torch.manual_seed(0)
        model = Encoded(batch_first=batch_first)

        def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
            recorder.batch(example=IDS)
            x = sequences[IDS] if batch_first else sequences[IDS].transpose(0, 1)  # noqa: B023
            turn(optimizer, F.cross_entropy(model(x), LABELS[IDS]))

        done = run(model, sgd(), tmp_path / f"m{batch_first}", step, steps=1)
        assert not done.heard.warnings
        asked = sequences[:1] if batch_first else sequences[:1].transpose(0, 1)
        spot = done.memory.attend(model, asked)
        totals[batch_first] = {name: spot[name].contributions(1).totals("example") for name in done.memory.layers}
    assert len(totals[True]) == 7
    for name, ours in totals[False].items():
        theirs = totals[True][name]
        assert ours.groups == theirs.groups == sorted(IDS.tolist())
        torch.testing.assert_close(
            torch.as_tensor(ours.values).double().sum(dim=0),
            torch.as_tensor(theirs.values).double().sum(dim=0),
            rtol=1e-3,
            atol=1e-6,
        )


def test_an_ambiguous_axis_is_asked_about_and_never_guessed_silently(tmp_path):
    done = run(Attending(), sgd(), tmp_path / "m", as_many_steps_as_sequences, steps=2, compare=True)
    about = [text for text in done.heard.warnings if '"rows"' in text]
    assert len(about) == 1, done.heard.warnings
    assert "(4, 4)" in about[0]
    assert_verified(done)


def test_influence_of_several_inputs_through_sequence_first_layers_is_that_of_each_alone(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        turn(optimizer, F.cross_entropy(model(FRAMES[IDS].transpose(0, 1)), LABELS[IDS]))

    done = run(SequenceFirst(), sgd(), tmp_path / "m", step)
    inputs = FRAMES[:3].transpose(0, 1)
    together = done.memory.attend(done.model, inputs).influence(1).totals("example")
    for number in range(3):
        alone = done.memory.attend(done.model, inputs[:, number : number + 1]).influence(1).totals("example")
        torch.testing.assert_close(together.values[number], alone.values[0], rtol=1e-4, atol=1e-6)


# -- functorch, the order of calls, torch.compile ----------------------------------------------------------------------


def test_gradients_per_example_by_torch_func_work_while_recording(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), label[None])

        per_example = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(parameters, X[IDS], LABELS[IDS])
        assert per_example["0.weight"].shape == (B, 6, D)
        ordinary(model, optimizer, recorder, number)

    done = run(mlp(), sgd(), tmp_path / "m", step, compare=True)
    assert_verified(done)
    assert column(done.memory, "0") == IDS.tolist() * 4


def test_a_batch_described_after_the_forward_pass_is_used_or_warned_of(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        loss = F.cross_entropy(model(X[IDS]), LABELS[IDS])
        recorder.batch(example=IDS)
        turn(optimizer, loss)

    done = run(mlp(), sgd(), tmp_path / "m", step, compare=True)
    if column(done.memory, "0") != IDS.tolist() * 4:
        assert len(done.heard.warnings) == 1, "nothing has an example, and no word of it"
        assert "before the forward pass" in done.heard.warnings[0]


class Around(nn.Module):
    """Uses a module's weight and never calls the module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.inner.weight.T + self.inner.bias) @ self.head.weight.T + self.head.bias


def test_torch_compile_is_not_blamed_when_something_else_was_compiled(tmp_path):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    done = run(Around(), sgd(), tmp_path / "m", ordinary, compare=True)
    assert "torch.compile" not in done.heard, done.heard.warnings
    assert done.memory.steps == 4, "recording stopped"
