"""Recurrent layers: the memory is the trained layer, in parts that add up, and training stays as it is."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import spotlights as sl
from spotlights.layers import adapter_for
from spotlights.memory.blocks import in_blocks
from training import elsewhere, fill, same, state

EXACT = {"rtol": 1e-10, "atol": 1e-10}
STEPS, TOKENS, WIDTH, HIDDEN = 5, 6, 3, 4


class Language(nn.Module):
    """Predicts the next token: an embedding, something recurrent, an output layer."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.recurrent = recurrent
        hidden = recurrent.hidden_size * (2 if getattr(recurrent, "bidirectional", False) else 1)
        self.head = nn.Linear(hidden, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(sequences, steps) → (sequences, steps, tokens)"""
        inputs = self.embedding(tokens)
        if isinstance(self.recurrent, nn.RNNCellBase):
            carried, found = None, []
            for step in inputs.unbind(1):
                carried = self.recurrent(step, carried)
                found.append(carried[0] if isinstance(carried, tuple) else carried)
            return self.head(torch.stack(found, dim=1))
        first = self.recurrent.batch_first
        states, _ = self.recurrent(inputs if first else inputs.transpose(0, 1))
        return self.head(states if first else states.transpose(0, 1))


def tokens(step: int, sequences: int = 3, steps: int = 5) -> Tensor:
    return torch.randint(TOKENS, (sequences, steps + 1), generator=torch.Generator().manual_seed(step))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
}
VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(WIDTH, HIDDEN),
    "lstm, two layers, dropout": lambda: nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, dropout=0.4),
    "lstm, both ways": lambda: nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True, bias=False),
    "lstm cell": lambda: nn.LSTMCell(WIDTH, HIDDEN),
    "gru": lambda: nn.GRU(WIDTH, HIDDEN, 2, bidirectional=True, dropout=0.4, batch_first=True),
    "gru cell": lambda: nn.GRUCell(WIDTH, HIDDEN),
    "rnn": lambda: nn.RNN(WIDTH, HIDDEN, 2, bidirectional=True, dropout=0.4, nonlinearity="relu"),
    "rnn cell": lambda: nn.RNNCell(WIDTH, HIDDEN),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, recorder: sl.Recorder | None, steps: int = STEPS
) -> list[Any]:
    """A language model on random text; its state before, and after each step."""
    after = [state(model)]
    for step in range(steps):
        text = tokens(step)
        if recorder is not None:
            recorder.batch(example=torch.arange(len(text)) + 10 * step, token=text[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        after.append(state(model))
    return after


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[sl.Memory, list[Any]]:
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path, **{"dtype": "float64", "segment_bytes": 20_000, **options}) as recorder:
        after = train(model, optimizer, recorder)
    return sl.open(path), after


def parameters_by_name(memory: sl.Memory, model: nn.Module) -> dict[str, Tensor]:
    """What the memory makes of every parameter of the recurrent module, by the model's name of it."""
    adapter, names = adapter_for(model.recurrent), {id(p): name for name, p in model.named_parameters()}
    found = {}
    for name, linear in adapter.maps(model.recurrent).items():
        made = memory.parameters(f"recurrent.{name}" if name else "recurrent")
        assert list(made) == list(linear.parameters)
        found.update({names[id(part.parameter)]: made[kept] for kept, part in linear.parameters.items()})
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_memory_is_the_trained_layer(variant: str, optimizer: str):
    torch.manual_seed(0)
    model = fill(Language(VARIANTS[variant]())).double()
    memory, after = recorded(model, OPTIMIZERS[optimizer](model.parameters()))
    verified = memory.verify(model)
    for layer, check in verified.items():
        assert check.relative_error <= 1e-10, str(verified)
        assert not check.unexplained_steps, f"{layer}: {verified}"
        assert not check.moved_steps, str(verified)
    every = {name for name, _ in model.named_parameters() if name.startswith("recurrent.")}
    for step in (STEPS, 2):
        made = parameters_by_name(memory.as_of(step), model)
        assert set(made) == every, "a parameter is in no layer, or in two"
        for name, value in made.items():
            torch.testing.assert_close(value, after[step][name], **EXACT)
    assert memory.as_of(2).verify(files=False).ok
    model.eval()
    text = tokens(99)[:, :-1]
    for network in (memory.primal(model), memory.dual(model)):
        torch.testing.assert_close(network(text), model(text).detach(), **EXACT)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_contributions_are_the_derivative_along_what_each_slot_added(variant: str, optimizer: str):
    """First order: the number's gradient by the weights, times what a slot added to them."""
    torch.manual_seed(0)
    model = fill(Language(VARIANTS[variant]())).double()
    memory, _ = recorded(model, OPTIMIZERS[optimizer](model.parameters()))
    model.eval()
    text = tokens(99)[:1, :-1]

    def one_number(output: Tensor) -> Tensor:
        return output[:, -1, 2]

    gradients = torch.autograd.grad(one_number(model(text)).sum(), list(model.parameters()))
    by_name = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    adapter, names = adapter_for(model.recurrent), {id(p): name for name, p in model.named_parameters()}
    part = memory.where(example=[0, 11, 22])
    for name, linear in adapter.maps(model.recurrent).items():
        layer = f"recurrent.{name}" if name else "recurrent"
        # All slots and a few: the weights that they add up to, with the initial part left out of both.
        expected = 0.0
        for view, sign in ((part, 1.0), (memory.where(step=range(0)), -1.0)):
            for kept, value in view.parameters(layer).items():
                expected += sign * (by_name[names[id(linear.parameters[kept].parameter)]] * value).sum()
        contributions = part.attend(model, text)[layer].contributions(target=one_number)
        assert not contributions.exact
        torch.testing.assert_close(torch.from_numpy(contributions.numpy()).sum(), expected, **EXACT)


def test_training_is_bit_identical_with_and_without_recording():
    """In a process without run-time type checks: beartype itself draws from Python's random numbers."""
    for variant, dtype, plain, recorded in elsewhere(_each_twice):
        assert same(recorded[0], plain[0]), f"{variant}, {dtype}: weights differ: a hook changed a pass"
        assert torch.equal(recorded[1], plain[1]), f"{variant}, {dtype}: recording drew from a global generator"


def _each_twice() -> list[tuple[str, torch.dtype, Any, Any]]:
    return [
        (variant, dtype, _run(variant, dtype, record=False), _run(variant, dtype, record=True))
        for variant in VARIANTS
        for dtype in (torch.float32, torch.float64)
    ]


def _run(variant: str, dtype: torch.dtype, *, record: bool) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = fill(Language(VARIANTS[variant]())).to(dtype)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if record:
        recorded(model, optimizer, dtype="float32")
    else:
        train(model, optimizer, None)
    return state(model), torch.get_rng_state()


def test_queries_are_the_input_and_the_state_before_of_every_step():
    torch.manual_seed(0)
    model = fill(Language(nn.LSTM(WIDTH, HIDDEN, batch_first=True))).double()
    memory, _ = recorded(model, OPTIMIZERS["sgd"](model.parameters()), errors=False)
    text = tokens(99)[:, :-1]
    inputs = model.embedding(text)
    states, _ = model.recurrent(inputs)
    before = torch.cat([torch.zeros(len(text), 1, HIDDEN), states[:, :-1]], dim=1)
    wanted = torch.cat([inputs, before], dim=2).flatten(0, 1).detach()
    attention = memory.attend(model, text)["recurrent.l0"]
    torch.testing.assert_close(attention.queries, wanted)
    assert len(list(attention.top(3).rows(0))) == 3


def test_columns_belong_to_the_rows_of_padded_and_packed_sequences():
    """A slot knows its example, its position and its token, whatever shape the layer is given."""
    lengths = (2, 5, 3)
    text = tokens(0)[:, :-1]
    for batch_first in (True, False):
        for pack in (True, False):
            torch.manual_seed(0)
            model = fill(nn.LSTM(WIDTH, HIDDEN, batch_first=batch_first)).double()
            vectors = torch.randn(TOKENS, WIDTH).double()
            inputs: Tensor | PackedSequence = vectors[text]
            if pack:
                inputs = pack_sequence(
                    [vectors[row[:n]] for row, n in zip(text, lengths, strict=True)], enforce_sorted=False
                )
            elif not batch_first:
                inputs = inputs.transpose(0, 1)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            path = Path(tempfile.mkdtemp()) / "run.memory"
            with sl.record(model, optimizer, path, dtype="float64") as recorder:
                recorder.batch(example=torch.tensor([7, 8, 9]), token=text)
                output = model(inputs)[0]
                (output.data if isinstance(output, PackedSequence) else output).sum().backward()
                optimizer.step()
            layer = sl.open(path).view.reader.layer("lstm.l0")
            (block,) = in_blocks(layer, sl.open(path).view.selection, 100)
            (keys,) = block.keys()
            columns = [block.column(name).tolist() for name in ("example", "position", "token")]
            seen = set(zip(*columns[:2], strict=True))
            assert seen == {(7 + n, p) for n, length in enumerate(lengths) for p in range(length if pack else 5)}
            for key, example, position, token in zip(keys.rows, *columns, strict=True):
                assert token == text[example - 7, position]
                assert torch.equal(key[:WIDTH], vectors[token])


def test_weights_of_one_matrix_may_be_trained_with_different_settings():
    model = fill(Language(nn.LSTM(WIDTH, HIDDEN))).double()
    groups = [
        {"params": [p for name, p in model.named_parameters() if "weight_hh" not in name and "bias_hh" not in name]},
        {"params": [model.recurrent.weight_hh_l0, model.recurrent.bias_hh_l0], "lr": 0.05, "weight_decay": 0.2},
    ]
    memory, after = recorded(model, OPTIMIZERS["sgd"](groups))
    assert memory.verify(model)["recurrent.l0"].relative_error <= 1e-10
    text = tokens(99)[:, :-1]
    torch.testing.assert_close(memory.dual(model)(text), model(text).detach(), **EXACT)
    made = parameters_by_name(memory.as_of(2), model)
    for name, value in made.items():
        torch.testing.assert_close(value, after[2][name], **EXACT)


def test_a_forward_pass_that_is_not_followed_by_a_backward_pass_leaves_nothing():
    model = fill(Language(nn.LSTM(WIDTH, HIDDEN))).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path, dtype="float64") as recorder:
        model(tokens(5)[:, :-1])
        train(model, optimizer, recorder)
    assert sl.open(path).layers["recurrent.l0"].slots == STEPS * 3 * 5


def test_only_the_last_state_may_be_used():
    model = fill(nn.LSTM(WIDTH, HIDDEN, 2)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path, dtype="float64"):
        for which in (0, 1):
            optimizer.zero_grad()
            model(torch.randn(5, 2, WIDTH).double())[1][which].square().sum().backward()
            optimizer.step()
    assert sl.open(path).verify(model).ok
    assert not any(check.unexplained_steps for check in sl.open(path).verify(model).values())


def test_an_lstm_with_projections_has_no_slots_of_examples():
    model = nn.Sequential(nn.LSTM(WIDTH, HIDDEN, proj_size=2))
    model.append(nn.Linear(2, 2))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path):
        pass
    assert sl.open(path).layers["0.weight_hr_l0"].kind == "parameter"
    said = pytest.warns(sl.SpotlightsWarning, match=r"not recorded: 0\.weight_ih_l0, .*0\.weight_hr_l0")
    with said, sl.record(model, optimizer, path, errors=False, overwrite=True):
        pass
    assert "0.weight_hr_l0" in sl.open(path).info.as_dict()["not recorded"]


@pytest.mark.parametrize("layers", [1, 2])
def test_calls_that_continue_from_each_others_states_are_recorded_apart(layers: int):
    torch.manual_seed(0)
    model = fill(nn.LSTM(WIDTH, HIDDEN, layers)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path):
        for _ in range(3):
            optimizer.zero_grad()
            states, total = None, torch.zeros(())
            for _ in range(3):
                output, states = model(torch.randn(5, 2, WIDTH).double(), states)
                total = total + output.square().sum()
            total.backward()
            optimizer.step()
    verified = sl.open(path).verify(model)
    assert all(check.relative_error <= 1e-10 and not check.unexplained_steps for check in verified.values()), verified


@pytest.mark.parametrize("case", ["checkpoint", "checkpoint, reentrant", "saved elsewhere"])
def test_saved_tensors_may_be_recomputed_or_kept_elsewhere(case: str):
    model = fill(nn.LSTM(WIDTH, HIDDEN)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path):
        for _ in range(2):
            optimizer.zero_grad()
            inputs = torch.randn(5, 2, WIDTH).double().requires_grad_()
            if case == "saved elsewhere":
                with save_on_cpu():
                    output = model(inputs)[0]
            else:
                output = checkpoint(lambda x: model(x)[0], inputs, use_reentrant="reentrant" in case)
            output.square().sum().backward()
            optimizer.step()
    memory = sl.open(path)
    assert memory.layers["lstm.l0"].slots == 2 * 5 * 2
    assert memory.verify(model)["lstm.l0"].relative_error <= 1e-10
