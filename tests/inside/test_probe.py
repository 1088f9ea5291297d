"""The block of a gradient that is compared with its slots is found at a cost that does not depend on the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spotlights as sl
from spotlights.recording.probe import Probe


class Tied(nn.Module):
    """The output layer is used for a few words alone, as with a sampled softmax."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.output = nn.Embedding(words, 5), nn.Linear(5, words, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens).sum(dim=1)


@pytest.mark.parametrize("make", [lambda n: nn.EmbeddingBag(n, 5), lambda n: nn.Embedding(n, 5), Tied])
def test_a_gradient_of_few_tokens_is_not_searched(make, tmp_path, monkeypatch):
    def search(*_: object) -> None:
        raise AssertionError("a pass over the gradients of all tokens")

    monkeypatch.setattr(Probe, "_largest", search)
    model = make(50_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "m") as recorder:
        for step in range(20):
            recorder.batch(example=torch.arange(4))
            loss = model(torch.randint(50_000, (4, 3), generator=torch.Generator().manual_seed(step))).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert sl.open(tmp_path / "m").verify(model).ok
