"""An embedding of positions, called without a batch dimension: its slots are of no single example, and exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl
from training import fill

TOKENS, WIDTH, LENGTH = 7, 4, 5


class Gpt(nn.Module):
    """One block, positions as most people write them: of the length alone."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(8, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(at[None] if self.style == "one row" else at)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


def record(path: Path, style: str, batch: int, *, per_token: bool, **settings: Any) -> tuple[nn.Module, sl.Memory]:
    model = fill(Gpt(style)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    text = torch.randint(TOKENS, (200,), generator=torch.Generator().manual_seed(0))
    with sl.record(model, optimizer, path, dtype="float64", **settings) as recorder:
        for step in range(5):
            starts = torch.arange(batch) * 7 + step
            where = starts[:, None] + torch.arange(LENGTH)
            source = [str(number) for number in range(batch)]
            recorder.batch(example=where if per_token else starts, source=source, split="train")
            optimizer.zero_grad()
            F.cross_entropy(model(text[where]).flatten(0, 1), text[where + 1].flatten()).backward()
            optimizer.step()
    return model, sl.open(path)


@pytest.mark.parametrize("style", ["plain", "one row"])
@pytest.mark.parametrize(("batch", "per_token"), [(3, True), (3, False), (LENGTH, True)])
def test_a_gpt_with_positions_is_exact_and_they_are_of_no_example(
    style: str, batch: int, per_token: bool, tmp_path: Path
):
    model, memory = record(tmp_path / "run.memory", style, batch, per_token=per_token)
    verified = memory.verify(model)
    assert max(check.relative_error for check in verified.values()) < 1e-9, str(verified)
    assert not any(check.unexplained_steps for check in verified.values())
    model.eval()
    tokens = torch.randint(TOKENS, (1, LENGTH))
    rows = list(memory.attend(model, tokens)["positions"].top(100).rows(2))
    assert len(rows) == 5 * LENGTH
    assert all(row.get("example") is None and row.get("source") is None for row in rows)
    assert {row["split"] for row in rows} == {"train"}
    best = [(row["step"], row["position"]) for row in rows[:5]]
    assert sorted(best) == [(step, 2) for step in range(5)], "a position attends to itself"
    of_tokens = next(memory.attend(model, tokens)["qkv"].top(1).rows())
    assert of_tokens["example"] is not None
    assert of_tokens["source"] is not None
    contributions = memory.attend(model, tokens)["positions"].contributions(lambda output: output[:, -1, 3])
    assert contributions.totals("position").groups == list(range(LENGTH))


def test_columns_that_fit_no_other_layer_are_still_named(tmp_path: Path):
    model = Gpt("plain").double()
    optimizer = torch.optim.AdamW(model.parameters())
    with sl.record(model, optimizer, tmp_path / "run.memory") as recorder:
        recorder.batch(example=torch.arange(4))
        model(torch.zeros(3, LENGTH, dtype=torch.long)).sum().backward()
        with pytest.warns(sl.SpotlightsWarning, match="recorder.batch gave example with shape"):
            optimizer.step()


def test_an_embedding_of_all_examples_in_order_is_of_these_examples(tmp_path: Path):
    """Not all that counts up is positions: a table with one row for each example, trained as a whole."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "run.memory", dtype="float64") as recorder:
        recorder.batch(example=[10, 11, 12, 13])
        model(torch.arange(4)).sum().backward()
        optimizer.step()
    top = sl.open(tmp_path / "run.memory").attend(model, torch.tensor([2]))["0"].top(1)
    assert next(top.rows())["example"] == 12


def test_they_cannot_be_folded(tmp_path: Path):
    with pytest.warns(sl.RecordingStoppedWarning, match='"positions" is called on what is the same for all examples'):
        record(tmp_path / "run.memory", "plain", 3, per_token=True, fold="example")
