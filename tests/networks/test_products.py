"""Matrices that a module of the user's own multiplies with: stacks of experts above all, each recorded per example."""

import pytest
import torch
import torch.nn.functional as F
from runs import adam, assert_adds_up_exactly, assert_all_recorded, column, run, sgd, turn
from torch import nn

D, E, B, L = 4, 3, 5, 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, D, D) / 2)

    def routed(self, x):
        rows = x.reshape(-1, D)
        return rows, (rows[:, 0] > 0).long() + (rows[:, 1] > 0)


class Chosen(Experts):
    """Each token by its expert: `x[chosen] @ w[e]`."""

    def forward(self, x):
        rows, expert = self.routed(x)
        y = torch.zeros_like(rows)
        for e in range(E):
            chosen = (expert == e).nonzero()[:, 0]
            y = y.index_add(0, chosen, rows[chosen] @ self.w[e])
        return y.view_as(x)


class Linear(Experts):
    def forward(self, x):
        rows, expert = self.routed(x)
        y = torch.zeros_like(rows)
        for e, weight in enumerate(self.w):
            chosen = (expert == e).nonzero()[:, 0]
            y = y.index_add(0, chosen, F.silu(F.linear(rows[chosen], weight)))
        return y.view_as(x)


class Grouped(Experts):
    """Tokens sorted by expert: `grouped_mm`."""

    def forward(self, x):
        rows, expert = self.routed(x)
        order = expert.argsort(stable=True)
        ends = torch.bincount(expert, minlength=E).cumsum(0).int()
        y = F.grouped_mm(rows[order], self.w, offs=ends)
        return torch.zeros_like(rows).index_add(0, order, y).view_as(x)


class Gathered(Experts):
    """A copy of the expert's matrix for each token: `bmm`."""

    def forward(self, x):
        rows, expert = self.routed(x)
        weights = self.w[expert]
        return torch.bmm(weights, rows.unsqueeze(-1)).squeeze(-1).view_as(x)


class Dense(Experts):
    """Every expert sees every token."""

    def forward(self, x):
        gates = x[..., :E].softmax(dim=-1)
        return torch.einsum("ble,bleo->blo", gates, torch.einsum("...d,edo->...eo", x, self.w))


class Batched(Experts):
    def forward(self, x):
        return torch.matmul(x.flatten(0, 1), self.w).sum(dim=0).view_as(x)


class Single(nn.Module):
    """Matrices without a stack, one of them the other way round."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.randn(D, 2))

    def forward(self, x):
        return x + torch.tanh(x @ self.down) @ self.up.T


class Penalised(Experts):
    """A use that no adapter understands, beside a product: the gradient is recorded as it is."""

    def forward(self, x):
        return x @ self.w[0] + torch.einsum("eio,eio->o", self.w, self.w)


GROUPED = pytest.param(
    Grouped, marks=pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no F.grouped_mm")
)
KINDS = [Chosen, Linear, GROUPED, Gathered, Dense, Batched, Single]


def network(kind):
    return nn.Sequential(nn.Linear(D, D), kind(), nn.Flatten(), nn.Linear(D * L, 3))


def recorded(kind, path, make=None, *, flat=False, **options):
    torch.manual_seed(0)
    model = network(kind)
    inputs, labels = torch.randn(9, L, D), torch.randint(3, (9,))

    def step(model, optimizer, recorder, number):
        ids = torch.randperm(9)[:B]
        recorder.batch(example=ids)
        turn(optimizer, F.cross_entropy(model(inputs[ids]), labels[ids]))

    return run(model, make or adam(), path, step, compare=True, **options), inputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_with_a_parameter_is_recorded_per_example(tmp_path, kind):
    done, inputs = recorded(kind, tmp_path / "m")
    assert_all_recorded(done)
    layers = [name for name, layer in done.memory.layers.items() if layer.kind == "product"]
    assert layers == (["1.down", "1.up"] if kind is Single else [f"1.w.{e}" for e in range(E)])
    assert not [name for name, layer in done.memory.layers.items() if layer.kind == "parameter"]
    for name in layers:
        assert None not in column(done.memory, name), f"{name}: whose rows are they?"
    history = done.memory.attend(done.model, inputs[:2]).history(1)
    assert history.exact


@pytest.mark.parametrize("kind", [Chosen, GROUPED, Gathered, Dense])
def test_slots_of_an_expert_are_the_rows_of_their_examples(tmp_path, kind):
    """With the slots of one example, a stack of experts is what this example alone would have made of it."""
    done, inputs = recorded(kind, tmp_path / "m", sgd(), steps=1)
    torch.manual_seed(0)
    start, _, labels = network(kind), torch.randn(9, L, D), torch.randint(3, (9,))
    example = int(torch.randperm(9)[:B][1])
    F.cross_entropy(start(inputs[[example]]), labels[[example]]).backward()
    alone = done.memory.where(example=example).primal(done.model)[1].w
    torch.testing.assert_close(alone, start[1].w - 0.1 * start[1].w.grad / B, rtol=1e-4, atol=1e-6)


def test_an_unknown_use_is_recorded_by_its_gradient(tmp_path):
    done, _ = recorded(Penalised, tmp_path / "m")
    assert_all_recorded(done)
    assert set(column(done.memory, "1.w.1")) == {None}


def test_an_expert_that_answers_is_exact(tmp_path):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.Parameter(torch.randn(2, D, 3))

        def forward(self, x):
            return x @ self.heads[1]

    torch.manual_seed(0)
    model, inputs, labels = Head(), torch.randn(9, D), torch.randint(3, (9,))

    def step(model, optimizer, recorder, number):
        recorder.batch(example=torch.arange(9))
        turn(optimizer, F.cross_entropy(model(inputs), labels))

    done = run(model, adam(), tmp_path / "m", step)
    spot = done.memory.attend(model, inputs[:2])
    assert_adds_up_exactly(spot["head.heads.1"].contributions(2), spot.output[:, 2])


def test_a_mistake_of_ours_in_the_middle_of_a_call_leaves_training_alone(tmp_path, monkeypatch):
    """Recording stops with a warning, and nothing of it stays behind in torch."""
    from spotlights.layers.products import calls

    monkeypatch.setattr(calls, "product_of", lambda *args: 1 / 0)
    done, _ = recorded(Chosen, tmp_path / "m")
    assert "ZeroDivisionError" in done.heard
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_call_that_fails_leaves_nothing_behind(tmp_path):
    class Failing(Experts):
        def forward(self, x):
            y = x @ self.w[0]
            if self.fails:
                raise RuntimeError("the user's own")
            return y

    model = Failing()
    inputs = torch.randn(B, D)

    def step(model, optimizer, recorder, number):
        recorder.batch(example=torch.arange(B))
        model.fails = number == 1
        try:
            turn(optimizer, model(inputs).square().sum())
        except RuntimeError:
            model.fails = False
            turn(optimizer, model(inputs).square().sum())

    done = run(model, sgd(0.01), tmp_path / "m", step)
    assert torch.overrides._len_torch_function_stack() == 0
    assert done.memory.verify(model).ok
