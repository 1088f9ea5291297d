"""How keys and errors are kept: once where they repeat, and smaller where that is asked for."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import spotlights as sl
from spotlights.memory.buffers import BufferPool, joined
from spotlights.memory.format.storage import storage_named
from training import CLASSES, FEATURES, assert_exact, column, examples, fill, network, sgd, state, train

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "int8": 0.5 / 127}
BYTES = {"float64": 8, "float32": 4, "float16": 2, "int8": 1}


def _tensors(memory: sl.Memory) -> dict[str, list[torch.Tensor]]:
    """Every tensor of every segment, read with the plain library."""
    found: dict[str, list[torch.Tensor]] = {}
    for path in sorted((memory.path / "segments").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found.setdefault(name, []).append(file.get_tensor(name))
    return found


def _recorded(path, model, dtype: str, **options) -> sl.Memory:
    optimizer = sgd(model, momentum=0.9)
    with sl.record(model, optimizer, path, dtype=dtype, **options) as recorder:
        train(model, optimizer, 10, recorder)
    return sl.open(path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_smaller_types_meet_the_network_within_their_rounding(tmp_path, dtype):
    model = network(dtype=torch.float32)
    memory = _recorded(tmp_path / "m", model, dtype)
    verified = memory.verify(model)
    assert verified.ok, str(verified)
    for name, check in verified.items():
        bound = max(16 * ROUNDING[dtype], 1e-6)
        assert check.relative_error < bound, f"{name} is off by {check.relative_error:.1e} in {dtype}"
    x = examples(torch.float32)[0]
    torch.testing.assert_close(memory.dual(model)(x), model(x), atol=16 * ROUNDING[dtype] + 1e-5, rtol=0.0)


@pytest.mark.parametrize("dtype", list(BYTES))
def test_keys_and_errors_take_the_bytes_of_their_type(tmp_path, dtype):
    memory = _recorded(tmp_path / "m", network(FEATURES, 64, 64, CLASSES, dtype=torch.float32), dtype)
    tensors = _tensors(memory)
    for what, width in (("keys", 64), ("errors", 64)):
        assert sum(t.nbytes for t in tensors[f"2/{what}"]) == 40 * width * BYTES[dtype]
    scaled = dtype in ("float16", "int8")
    assert ("2/key_scale" in tensors) == scaled
    assert memory.layers["2"].storage == dtype


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("factor", [1e-8, 1e-20, 1e8])
def test_tiny_and_huge_errors_survive_small_types(tmp_path, dtype, factor):
    """A mean over a large batch makes errors that float16 alone would round to zero."""
    model = network(dtype=torch.float32)
    x, y = examples(torch.float32)
    optimizer = sgd(model, lr=0.1 / factor)
    with sl.record(model, optimizer, tmp_path / "m", dtype=dtype):
        for _ in range(5):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * factor).backward()
            optimizer.step()
    for check in sl.open(tmp_path / "m").verify(model).values():
        assert check.change_error < 16 * ROUNDING[dtype]


def test_rows_of_zeros_are_kept_in_every_type(tmp_path):
    for dtype in BYTES:
        model = fill(nn.Sequential(nn.Linear(5, 3)))
        optimizer = sgd(model)
        with sl.record(model, optimizer, tmp_path / dtype, dtype=dtype):
            model(torch.zeros(2, 5)).square().sum().backward()
            optimizer.step()
        check = sl.open(tmp_path / dtype).verify(model)["0"]
        assert check.relative_error < 16 * ROUNDING[dtype] + 1e-6


@pytest.mark.parametrize("dtype", list(BYTES))
def test_input_keys_are_kept_once_per_distinct_row(tmp_path, dtype):
    model = network(dtype=torch.float64)
    memory = _recorded(tmp_path / "m", model, dtype, segment_bytes=1000)
    visited = set(column(memory, model, "0", examples()[0][:1], "example"))
    assert len(visited) < 40, "the run must repeat examples"
    assert memory.layers["0"].slots == 40
    assert memory.layers["0"].distinct_keys == len(visited)
    assert memory.layers["2"].distinct_keys == memory.layers["2"].slots == 40
    assert sum(len(t) for t in _tensors(memory)["0/keys"]) == len(visited)
    assert len(_tensors(memory)["0/keys"]) > 1, "keys must be found again in earlier segments"


def test_keys_kept_once_give_the_same_answers(tmp_path):
    """A first layer that does not change makes the keys of the second one repeat, or not, as it is frozen."""

    def run(name: str, frozen: bool) -> tuple[sl.Memory, nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.1
        )
        model[0].requires_grad_(not frozen)
        with sl.record(model, optimizer, tmp_path / name, dtype="float64", segment_bytes=1500) as recorder:
            train(model, optimizer, 12, recorder)
        return assert_exact(tmp_path / name, model), model

    (once, model), (each, _) = run("once", True), run("each", False)
    assert once.layers["2"].distinct_keys < each.layers["2"].distinct_keys == 48
    x = examples()[0]
    a, b = once.attend(model, x)["2"], each.attend(model, x)["2"]
    torch.testing.assert_close(a.scores(), b.scores())
    torch.testing.assert_close(a.top(5).values, b.top(5).values)
    torch.testing.assert_close(a.totals("label").values, b.totals("label").values)
    torch.testing.assert_close(a.totals("label", absolute=True).values, b.totals("label", absolute=True).values)
    contributions = [m.contributions(target=1) for m in (a, b)]
    torch.testing.assert_close(contributions[0].top(5).values, contributions[1].top(5).values)
    masked = [memory.without(label=1).weights("2") for memory in (once, each)]
    torch.testing.assert_close(*masked)


def test_repeated_keys_are_found_again_after_resuming(tmp_path):
    model = network()
    optimizer = sgd(model, momentum=0.9)
    for start in (0, 5, 10):
        with sl.record(model, optimizer, tmp_path / "m", dtype="float64", resume=True) as recorder:
            train(model, optimizer, range(start, start + 5), recorder)
    memory = assert_exact(tmp_path / "m", model)
    visited = set(column(memory, model, "0", examples()[0][:1], "example"))
    assert memory.layers["0"].distinct_keys == len(visited)


def test_keys_of_a_dropped_part_are_not_counted_on(tmp_path):
    """Resuming before a layer's first slot of a segment: its keys there are gone with their slots."""
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        model[0].requires_grad_(False)
        train(model, optimizer, 3, recorder)
        checkpoint = state(model)
        model[0].requires_grad_(True)
        train(model, optimizer, range(3, 6), recorder)
    model.load_state_dict(checkpoint)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", resume=True) as recorder:
        assert recorder.step == 3
        train(model, optimizer, range(3, 8), recorder)
    assert_exact(tmp_path / "m", model)


@pytest.mark.parametrize("before", [1e-20, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize("now", [0.0, 1e-35, 1e-20, 1e-6, 1e-3, 0.05, 1.0, 30.0, 1e4, 1e9, 1e37])
def test_float16_keeps_its_digits_when_the_size_of_the_numbers_changes(before, now):
    storage, pool = storage_named("float16"), BufferPool(1 << 20)
    rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    _, scale = storage.encode(rows * before, pool)
    assert scale is not None
    stored, scale = storage.encode(rows * now, pool, like=float(scale[0]))
    assert scale is not None
    found = stored.float() * scale[:, None]
    torch.testing.assert_close(found, rows * now, rtol=2.0**-11, atol=float((rows * now).abs().max()) * 2.0**-22)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_smaller_types_do_not_depend_on_the_default_type_of_torch(tmp_path, dtype):
    torch.set_default_dtype(torch.float64)
    try:
        model = network(dtype=torch.float64)
        memory = _recorded(tmp_path / "m", model, dtype)
        assert memory.verify(model).ok
        totals = memory.attend(model, examples()[0][:2])["2"].contributions(target=1).totals("example")
        assert totals.values.isfinite().all()
    finally:
        torch.set_default_dtype(torch.float32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([1, 128, 2048])), max_size=40), st.randoms())
def test_rows_taken_from_the_pool_are_the_same_when_joined(takes, chance):
    pool = BufferPool(1 << 20)
    for _ in range(3):
        taken = {"a": [], "b": []}
        for use, rows in takes:
            block = pool.take(torch.Size((rows, 8)), torch.float32, use)
            assert rows < 2048 or block.data_ptr() % 4096 == 0
            taken[use].append(block.copy_(torch.full((rows, 8), chance.random())))
        for blocks in taken.values():
            pieces = joined(blocks)
            assert len(pieces) <= len(blocks)
            if blocks:
                torch.testing.assert_close(torch.cat(pieces), torch.cat(blocks), rtol=0, atol=0)
        for blocks in taken.values():
            for block in blocks:
                pool.give(block)


def test_rows_of_steps_that_are_alike_become_one_piece():
    pool = BufferPool(1 << 20)
    for _ in range(4):  # the pool learns how many there are
        blocks = [pool.take(torch.Size((128, 8)), torch.float32, "errors") for _ in range(16)]
        for block in blocks:
            pool.give(block)
    assert len(joined([pool.take(torch.Size((128, 8)), torch.float32, "errors") for _ in range(16)])) <= 6
