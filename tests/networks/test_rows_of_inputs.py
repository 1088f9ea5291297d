"""An answer about several inputs is that about each alone, whatever the rows of a layer are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from runs import run
from torch import Tensor, nn

import spotlights as sl

INPUTS, TOKENS = 4, 11


class SequenceFirst(nn.Module):
    """As many steps as inputs: the embedding cannot tell which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rnn, self.head = nn.Embedding(TOKENS, 5), nn.GRU(5, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(tokens.T))[0].mean(dim=0))


class Positions(nn.Module):
    """A table of positions is called once for all inputs, and a class token is a parameter of all."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.start = nn.Embedding(TOKENS, 5), nn.Embedding(INPUTS, 5), Start()
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(INPUTS))
        return self.head(torch.tanh(self.start(x)).square().mean(dim=1))


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)


class Graphs(nn.Module):
    """Graphs of 1, 5, 2 and 8 nodes: 16 rows, not four for each."""

    sizes = (1, 5, 2, 8)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.nodes, self.head = nn.Embedding(TOKENS, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        owners = torch.arange(INPUTS).repeat_interleave(torch.tensor(self.sizes))
        nodes = torch.tanh(self.nodes(self.tokens(tokens.flatten())))
        return self.head(torch.zeros(INPUTS, 5).index_add(0, owners, nodes))


class Neighbours(nn.Module):
    """Every node's answer depends on the other nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.nodes, self.head = nn.Embedding(TOKENS, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        nodes = torch.tanh(self.nodes(self.tokens(tokens[:, 0])))
        return self.head(nodes + nodes.roll(1, dims=0) / 2)


class Experts(nn.Module):
    """Tokens are sent to experts: an expert's rows are of any inputs, in any number."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).flatten(0, 1)
        order = (tokens.flatten() % 3 == 0).long()
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (order == number).nonzero()[:, 0]
            y = y.index_add(0, chosen, torch.tanh(expert(x[chosen])))
        return self.head(y.view(INPUTS, -1, 5).mean(dim=1))


@pytest.mark.parametrize("make", [SequenceFirst, Positions, Graphs, Neighbours, Experts])
def test_an_answer_about_several_inputs_is_that_about_each_alone(make, tmp_path):
    torch.manual_seed(2)
    model, tokens, labels = make(), torch.randint(TOKENS, (5, INPUTS, INPUTS)), torch.randint(3, (5, INPUTS))

    def step(model, optimizer, recorder, number):
        recorder.batch(label=number)
        loss = F.cross_entropy(model(tokens[number]), labels[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    memory = run(model, lambda m: torch.optim.Adam(m.parameters(), lr=0.1), tmp_path / "a.memory", step, steps=5).memory
    spot = memory.attend(model, tokens[0])
    for name in memory.layers:
        together = spot[name].contributions(target=1).totals("step").values
        assert len(together) == INPUTS, name
        for number in range(INPUTS):
            alone = spot[name].contributions(target=lambda output, n=number: output[n : n + 1, 1]).totals("step").values
            torch.testing.assert_close(together[number], alone[0], rtol=1e-4, atol=1e-6, msg=f"{name}, input {number}")
    influence = spot.influence(target=1).totals("step").values
    assert influence.isfinite().all()


def test_what_a_unit_of_a_shared_layer_is_made_of_is_asked_for_each_input(tmp_path):
    torch.manual_seed(2)
    model = Positions()

    def step(model, optimizer, recorder, number):
        loss = F.cross_entropy(model(torch.randint(TOKENS, (INPUTS, INPUTS))), torch.randint(3, (INPUTS,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    memory = run(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tmp_path / "a.memory", step).memory
    parts = memory.attend(model, torch.randint(TOKENS, (3, INPUTS)))["positions"].contributions(unit=2)
    made = parts.initial + parts.total() + parts.rounding
    torch.testing.assert_close(made, model.positions.weight[:, 2].double().sum().expand(3), rtol=1e-5, atol=1e-6)


def test_too_many_inputs_that_share_rows_are_refused_with_what_to_do(tmp_path):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.nodes(x)) - torch.tanh(self.nodes(x)).mean(dim=0)

    def step(model, optimizer, recorder, number):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()

    model = Mixed()
    memory = run(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tmp_path / "a.memory", step).memory
    with pytest.raises(sl.SpotlightsError, match="Ask about at most 256 inputs at a time"):
        memory.attend(model, torch.randn(300, 3))["nodes"].contributions(target=1)
