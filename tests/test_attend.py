"""`memory.attend`: what it takes and refuses, and that the model stays as it was."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from memories import mlp, train, whole_numbers
from training import chosen, examples, network, sgd


def test_unknown_names_are_refused_with_a_list_of_what_there_is():
    run = mlp()
    spots = run.memory.attend(run.model, run.queries)
    with pytest.raises(sl.UnknownNameError, match=r'No layer "fc9".*It has: 0, 2, 4'):
        spots["fc9"]
    with pytest.raises(sl.UnknownNameError, match=r'No layer "fc9".*It has: 0, 2, 4'):
        run.memory.weights("fc9")
    for ask in (spots["0"].totals, lambda column: spots["0"].top(3, by=column),
                lambda column: spots["0"].top(3, per=column)):  # fmt: skip
        with pytest.raises(sl.UnknownNameError, match=r'No column "colour".*example, label'):
            ask("colour")
    with pytest.raises(sl.SettingError, match=r"'rbf'.*dot, cosine, cosine-parts, softmax"):
        run.memory.attend(run.model, run.queries, kernel="rbf")


def test_attend_with_another_model_is_refused_with_both_shapes():
    run = mlp()
    other = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    with pytest.raises(sl.ShapeMismatchError, match=r'"0" has a weight of shape \(8, 5\).*\(7, 5\)'):
        run.memory.attend(other, run.queries)
    with pytest.raises(sl.UnknownNameError, match=r'no linear layer "2".*It has: 0, 1'):
        run.memory.attend(nn.Sequential(nn.Linear(5, 7), nn.ReLU()).double(), run.queries)


# -- the model stays as it was ----------------------------------------------------------------


def state_of(model: nn.Module) -> list:
    return [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_attend_leaves_mode_hooks_and_gradients_as_they_were(training: bool):
    run = mlp()
    model = copy.deepcopy(run.model).train(training)
    model[1].train(not training)
    before = state_of(model)
    run.memory.attend(model, run.queries)["0"].contributions(target=1).top(2)
    assert state_of(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attend_leaves_the_model_as_it_was_when_its_forward_fails():
    run = mlp()
    model = copy.deepcopy(run.model).train()
    before = state_of(model)
    with pytest.raises(RuntimeError):
        run.memory.attend(model, torch.zeros(2, 99).double())
    model[4] = nn.Linear(1, 1)
    with pytest.raises(sl.ShapeMismatchError):
        run.memory.attend(model, run.queries)
    assert state_of(model) == before


def test_attend_runs_the_model_in_eval_mode():
    run = mlp()
    model = nn.Sequential(*copy.deepcopy(run.model), nn.Dropout(0.9)).train()
    output = run.memory.attend(model, run.queries).output
    assert torch.equal(output, run.model(run.queries))


class Arguments(nn.Module):
    """The network of `mlp`, with two arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for name, module in inner.named_children():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, y: torch.Tensor | None = None) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x * scale if y is None else x + y


def test_inputs_may_be_a_tensor_a_tuple_or_a_dict():
    run = mlp()
    model = Arguments(run.model)
    expected = run.memory.attend(run.model, run.queries)["2"].scores()
    for inputs in (run.queries, (run.queries,), {"x": run.queries, "scale": 3.0}):
        assert torch.equal(run.memory.attend(model, inputs)["2"].scores(), expected)
    assert torch.equal(run.memory.attend(model, {"x": run.queries, "scale": 3.0}).output, 3.0 * run.model(run.queries))


def test_queries_are_kept_as_they_were_when_the_layer_saw_them():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            if not self.training:
                x.zero_()
            return y

    inputs = whole_numbers(6, 5)
    run = train(Overwrites().double(), [(inputs, torch.zeros(6, dtype=torch.int64), {})])
    for parameter in run.model.parameters():
        parameter.requires_grad_(False)
    scores = run.memory.attend(run.model, inputs.clone())["fc"].scores()
    assert torch.equal(scores, inputs @ inputs.T), "queries share memory with a tensor the model overwrites"


class Meanwhile(nn.Module):
    """Does something in the middle of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.do: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.do()
        return x


@pytest.mark.parametrize("way", ["a copy, later", "another thread"])
def test_a_pass_sees_no_other_pass_through_the_network_or_a_copy_of_it(tmp_path, way):
    model = nn.Sequential(nn.Linear(3, 4), Meanwhile(), nn.Linear(4, 2)).double()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 3, dtype=torch.float64)
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        recorder.batch(example=range(6))
        F.cross_entropy(model(x), torch.arange(6) % 2).backward()
        optimizer.step()
    memory = sl.open(tmp_path / "a.memory")
    right = memory.attend(model, x[:1])["0"].contributions(target=1).totals("example").values
    copies: list[nn.Module] = []

    def meanwhile() -> None:
        model[1].do = lambda: None
        if way == "another thread":
            thread = threading.Thread(target=lambda: model(x))
            thread.start()
            thread.join()
        else:
            copies.append(copy.deepcopy(model))

    model[1].do = meanwhile
    spot = memory.attend(model, x[:1])
    for other in copies:
        other(x)
    assert len(spot["0"].queries) == 1
    assert torch.equal(spot["0"].contributions(target=1).totals("example").values, right)


@pytest.mark.parametrize("name", ["entries", "unrolled", "log", "keys"])
def test_a_column_may_be_called_whatever_the_library_calls_things_of_its_own(tmp_path, name):
    model = network()
    optimizer, (x, y) = sgd(model), examples()
    with sl.record(model, optimizer, tmp_path / "m") as recorder:
        for step in range(3):
            recorder.batch(**{name: y[chosen(step)]})
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen(step)]), y[chosen(step)]).backward()
            optimizer.step()
    attention = sl.open(tmp_path / "m").attend(model, x[:2])["0"]
    attention.contributions(target=1).top(3)
    groups = {row[name] for row in attention.totals(name).rows(0)}
    assert groups == {int(label) for step in range(3) for label in y[chosen(step)]}
