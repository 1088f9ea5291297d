"""`record(…, recurrent="own")`: LSTMs computed by Spotlights are torch's to rounding, and so are their memories."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

import spotlights as sl
import spotlights.layers.recurrent as beside
from spotlights.dual_form import outer_sum
from spotlights.layers import adapter_for
from spotlights.layers.adapter import tensors_of
from spotlights.memory.blocks import in_blocks
from test_recurrent import EXACT, HIDDEN, OPTIMIZERS, STEPS, WIDTH, Language, modules, parameters_by_name, tokens, train
from training import fill

VARIANTS = {
    "plain": lambda: nn.LSTM(WIDTH, HIDDEN),
    "dropout": lambda: nn.LSTM(WIDTH, HIDDEN, 3, batch_first=True, dropout=0.4),
    "both ways": lambda: nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True, bias=False),
}


@pytest.fixture
def nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors may come from the backward pass alone."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("errors were computed beside the pass")

    monkeypatch.setattr(beside, "lstm_passed", refuse)


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, **options: Any) -> Any:
    options = {"dtype": "float64", "recurrent": "own", "segment_bytes": 20_000, **options}
    return sl.record(model, optimizer, path / "run.memory", **options)


def loss(output: Any) -> Tensor:
    """Something that no two numbers of an output mean the same for."""
    found = torch.zeros((), dtype=torch.float64)
    for n, tensor in enumerate(tensors_of(output)):
        weights = torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).cos().reshape(tensor.shape)
        found = found + (n + 1) * (tensor * weights).sum() + tensor.square().sum()
    return found


def with_gradients(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The same arguments, wanting gradients; and those that do."""
    held: list[Tensor] = []

    def wanting(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=wanting(value.data))
        if isinstance(value, tuple):
            return tuple(wanting(each) for each in value)
        held.append(value.detach().clone().requires_grad_())
        return held[-1]

    return tuple(wanting(each) for each in args), held


def slots(path: Path, layer: str) -> tuple[Tensor, Tensor]:
    """All keys and errors of a layer."""
    view = sl.open(path)._view
    blocks = list(in_blocks(view.reader.layer(layer), view.selection, 10_000))
    keys = torch.cat([part.rows for block in blocks for part in block.keys()])  # noqa: SIM118
    return keys, torch.cat([part.rows for block in blocks for part in block.errors()])


def computed_here(output: Tensor) -> bool:
    """Whether a part of the output's graph is our own."""
    seen, due = set(), [output.grad_fn]
    while due:
        node = due.pop()
        if node is not None and node not in seen:
            seen.add(node)
            due += [before for before, _ in node.next_functions]
    return any("_Through" in node.name() for node in seen)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=modules().filter(lambda drawn: isinstance(drawn[0], nn.LSTM)))
def test_states_gradients_keys_and_errors_are_those_of_torch_for_any_shape_and_options(
    drawn: tuple[nn.Module, Any], nothing_twice: None, tmp_path_factory: pytest.TempPathFactory
):
    module, args = drawn
    path = tmp_path_factory.mktemp("own")
    plain = copy.deepcopy(module)
    (own_args, own_held), (plain_args, plain_held) = with_gradients(args), with_gradients(args)
    seed = torch.get_rng_state()
    expected = plain(*plain_args)
    random_after = torch.get_rng_state()
    loss(expected).backward()
    torch.set_rng_state(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with recorded(module, optimizer, path):
        output = module(*own_args)
        assert torch.equal(torch.get_rng_state(), random_after), "other random numbers than torch's"
        assert computed_here(tensors_of(output)[0])
        loss(output).backward()
        optimizer.step()
    for mine, theirs in zip(tensors_of(output), tensors_of(expected), strict=True):
        assert mine.stride() == theirs.stride() or mine.numel() <= 1 or 1 in mine.shape
        torch.testing.assert_close(mine, theirs, **EXACT)
    for mine, theirs in zip([*own_held, *module.parameters()], [*plain_held, *plain.parameters()], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
    for name, linear in adapter_for(plain).maps(plain).items():
        if not any(part.parameter.grad.any() for part in linear.parameters.values()):
            continue  # a gradient of zeros, all inputs dropped: such a step leaves no slots
        keys, errors = slots(path / "run.memory", f"lstm.{name}")
        made = outer_sum(errors, keys, 1).split(list(linear.columns.values()), dim=1)
        for part, of_weight in zip(linear.weights.values(), made, strict=True):
            torch.testing.assert_close(of_weight, part.parameter.grad, **EXACT)
        for part in linear.biases.values():
            torch.testing.assert_close(errors.sum(dim=0), part.parameter.grad, **EXACT)


@pytest.mark.usefixtures("nothing_twice")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_memory_is_the_trained_layer(variant: str, optimizer: str, tmp_path: Path):
    torch.manual_seed(0)
    model = fill(Language(VARIANTS[variant]())).double()
    trainer = OPTIMIZERS[optimizer](model.parameters())
    with recorded(model, trainer, tmp_path) as recorder:
        after = train(model, trainer, recorder)
    memory = sl.open(tmp_path / "run.memory")
    for check in memory.verify(model).values():
        assert check.relative_error <= 1e-10
        assert not check.unexplained_steps
    for step in (STEPS, 2):
        for name, value in parameters_by_name(memory.as_of(step), model).items():
            torch.testing.assert_close(value, after[step][name], **EXACT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_that_of_torch_to_rounding(variant: str, tmp_path: Path):
    def run(*, own: bool) -> list[Any]:
        torch.manual_seed(0)
        model = fill(Language(VARIANTS[variant]())).double()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with recorded(model, optimizer, tmp_path, recurrent="own" if own else "torch", overwrite=True) as recorder:
            return train(model, optimizer, recorder)

    for mine, theirs in zip(run(own=True), run(own=False), strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], **EXACT)


def test_the_module_stays_what_it_is(tmp_path: Path):
    model = fill(Language(nn.LSTM(WIDTH, HIDDEN, 2))).double()
    optimizer, text = OPTIMIZERS["sgd"](model.parameters()), tokens(0)[:, :-1]
    held, kernel, names = dict(vars(model.recurrent)), torch._VF.lstm, list(model.state_dict())
    with recorded(model, optimizer, tmp_path) as recorder:
        assert computed_here(model(text))
        assert type(model.recurrent) is nn.LSTM
        assert "forward" not in vars(model.recurrent)
        assert list(model.state_dict()) == names
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not computed_here(twin(text)), "a copy is not recorded"
        with recorder.paused():
            assert not computed_here(model(text))
        with torch.no_grad():
            quiet = model(text)
        model.eval()
        assert not computed_here(model(text))
        assert torch.equal(quiet, model(text)), "torch's own kernel, to the bit"
        with pytest.raises(RuntimeError, match=r"input\.size"):
            model.train().recurrent(torch.zeros(2, 2, WIDTH + 1).double())  # a call that ends before the kernel
    assert torch._VF.lstm is kernel
    assert not computed_here(model(text))
    assert vars(model.recurrent).keys() == held.keys()


@pytest.mark.parametrize("case", ["frozen", "cell", "gru"])
def test_what_it_does_not_do_is_left_to_torch_and_recorded_all_the_same(case: str, tmp_path: Path):
    torch.manual_seed(0)
    make = {"frozen": nn.LSTM, "cell": nn.LSTMCell, "gru": nn.GRU}[case]
    model = fill(Language(make(WIDTH, HIDDEN))).double()
    if case == "frozen":
        model.recurrent.weight_hh_l0.requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with recorded(model, optimizer, tmp_path) as recorder:
        assert not computed_here(model(tokens(0)[:, :-1]))
        train(model, optimizer, recorder)
    verified = sl.open(tmp_path / "run.memory").verify(model)
    assert verified.ok, str(verified)


def test_autocast_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def torchs_own(*args: Any) -> None:
        raise LookupError("not every CPU has bfloat16")

    monkeypatch.setattr("spotlights.layers.own_lstm._torch_lstm", torchs_own)
    model = fill(Language(nn.LSTM(WIDTH, HIDDEN)))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with (
        recorded(model, optimizer, tmp_path),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(LookupError),
    ):
        model(tokens(0)[:, :-1])


@pytest.mark.parametrize("early", [False, True])
def test_any_pass_is_recorded_whatever_it_reaches_and_however_often(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`early`: copied as soon as the pass has reached what the module returned, before it is through the layers."""
    if early:
        monkeypatch.setattr("spotlights.recording.passes._HELD_BYTES", 0)
    model = fill(nn.LSTM(WIDTH, HIDDEN, 2)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    inputs = torch.randn(5, 2, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    with recorded(model, optimizer, tmp_path):
        for which in (0, 1):
            optimizer.zero_grad()
            model(inputs)[1][which].square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        output, (state, cell) = model(inputs)
        (output.sum() + state.sum() + cell.sum()).backward(retain_graph=True)
        (output.square().sum() - state.sum() + 2 * cell.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        upper = [parameter for name, parameter in model.named_parameters() if name.endswith("l1")]
        model(inputs)[0].square().sum().backward(inputs=upper)
        optimizer.step()
    memory = sl.open(tmp_path / "run.memory")
    verified = memory.verify(model)
    assert verified.ok, str(verified)
    assert not any(check.unexplained_steps for check in verified.values()), str(verified)


@pytest.mark.usefixtures("nothing_twice")
def test_a_checkpointed_lstm_is_recorded_once(tmp_path: Path):
    model = fill(Language(nn.LSTM(WIDTH, HIDDEN))).double()
    optimizer, text = OPTIMIZERS["sgd"](model.parameters()), tokens(0)[:, :-1]
    with recorded(model, optimizer, tmp_path):
        checkpoint(model, text, use_reentrant=False).square().sum().backward()
        optimizer.step()
    memory = sl.open(tmp_path / "run.memory")
    assert memory.layers["recurrent.l0"].slots == text.numel()
    verified = memory.verify(model)
    assert verified.ok, str(verified)
    assert not verified["recurrent.l0"].unexplained_steps, str(verified)


def test_bad_settings_are_refused(tmp_path: Path):
    model = nn.LSTM(WIDTH, HIDDEN)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(sl.SettingError, match="recurrent='mine'"):
        recorded(model, optimizer, tmp_path, recurrent="mine")
    with pytest.raises(sl.SettingError, match="for recording errors"):
        recorded(model, optimizer, tmp_path, errors=False)
