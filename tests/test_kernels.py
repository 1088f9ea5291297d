"""Kernels for looking: the parts of a key that is put together of several, alone or normalised apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl
from spotlights.layers import ADAPTERS


class _Joined(nn.Linear):
    """A layer whose key is [x; h]."""

    def forward(self, both: Tensor) -> Tensor:
        return super().forward(both)


class _JoinedAdapter(sl.LayerAdapter):
    kind = "joined"

    def handles(self, module: nn.Module) -> bool:
        return isinstance(module, _Joined)

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        return inputs

    def key_parts(self, module: nn.Module) -> dict[str, int]:
        return {"x": 2, "h": 3}


@pytest.fixture
def joined(tmp_path, monkeypatch) -> tuple[sl.Memory, nn.Module, Tensor]:
    """A memory of one layer with keys in parts, its model, and its keys."""
    monkeypatch.setattr("spotlights.layers.adapter.ADAPTERS", [_JoinedAdapter(), *ADAPTERS])
    torch.manual_seed(6)
    model = nn.Sequential(_Joined(5, 3), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = torch.randn(40, 5).double()
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", segment_bytes=500) as recorder:
        for start in range(0, 40, 8):
            recorder.batch(example=torch.arange(start, start + 8))
            optimizer.zero_grad()
            model(keys[start : start + 8]).square().sum().backward()
            optimizer.step()
    return sl.open(tmp_path / "m"), model, keys


def test_the_scores_of_a_keys_parts_add_up(joined):
    memory, model, keys = joined
    queries = torch.randn(3, 5).double()
    whole = memory.attend(model, queries)["0"].scores()
    parts = [memory.attend(model, queries, part=part) for part in ("x", "h")]
    assert [list(part) for part in parts] == [["0"], ["0"]], "a layer without the part is left out"
    torch.testing.assert_close(sum(part["0"].scores() for part in parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts[1]["0"].scores(), queries[:, 2:] @ keys[:, 2:].T, rtol=1e-12, atol=1e-12)
    totals = parts[1]["0"].totals("example").values  # through the quick way or not
    torch.testing.assert_close(totals, queries[:, 2:] @ keys[:, 2:].T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_parts_can_be_normalised_apart(joined, count):
    memory, model, keys = joined
    queries = torch.randn(count, 5).double()
    x, h = (F.cosine_similarity(queries[:, None, p], keys[None, :, p], dim=2) for p in (slice(0, 2), slice(2, 5)))
    found = memory.attend(model, queries, kernel="cosine-parts")["0"]
    torch.testing.assert_close(found.scores(), x + h, rtol=1e-12, atol=1e-12)
    alone = memory.attend(model, queries, kernel="cosine", part="h")["0"]
    torch.testing.assert_close(alone.at(0).scores(), h[:1], rtol=1e-12, atol=1e-12)
    assert "for looking" in found.note
    assert 'part "h"' in alone.note
    one = memory.attend(model, queries, kernel="cosine-parts")["1"]
    same = memory.attend(model, queries, kernel="cosine")["1"]
    assert torch.equal(one.scores(), same.scores()), "a key in one piece is one part"


def test_parts_are_for_scores_and_must_exist(joined):
    memory, model, keys = joined
    with pytest.raises(sl.UnsupportedError, match='whole key, not about part="h"'):
        memory.attend(model, keys[:1], part="h")["0"].contributions(target=0)
    with pytest.raises(sl.UnknownNameError, match=r'part "c".*\'x\': 2, \'h\': 3'):
        memory.attend(model, keys[:1], part="c")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_cosine_of_a_folded_memory_is_that_of_the_sum_of_keys(tmp_path, monkeypatch, dtype):
    """Lengths are kept with the sums, for each part of a key; whatever the storage type."""
    monkeypatch.setattr("spotlights.layers.adapter.ADAPTERS", [_JoinedAdapter(), *ADAPTERS])
    torch.manual_seed(6)
    model = nn.Sequential(_Joined(5, 3), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys, sums = 100 * torch.randn(30, 5).double(), torch.zeros(10, 5).double()
    options = {"dtype": dtype, "segment_bytes": 300, "fold": "example"}
    with sl.record(model, optimizer, tmp_path / "m", **options) as recorder:
        for row, key in enumerate(keys):
            recorder.batch(example=[row % 10])
            optimizer.zero_grad()
            model(key[None]).square().mean().backward()
            optimizer.step()
            sums[row % 10] += key
    memory = sl.open(tmp_path / "m")
    query = torch.randn(1, 5).double()
    x, h = (F.cosine_similarity(query[:, p], sums[:, p]) for p in (slice(0, 2), slice(2, 5)))
    wanted = {
        ("cosine", None): F.cosine_similarity(query, sums),
        ("cosine", "x"): x,
        ("cosine", "h"): h,
        ("cosine-parts", None): x + h,
    }
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}[dtype]
    for (kernel, part), scores in wanted.items():
        found = memory.attend(model, query, kernel=kernel, part=part)["0"].scores()[0]
        torch.testing.assert_close(found.double(), scores, rtol=0, atol=tolerance)
