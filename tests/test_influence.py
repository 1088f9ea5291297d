"""Influence: contributions with whitened queries, added up over visits and layers; moments kept with the memory."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import spotlights as sl
from memories import LAYERS, Run, brute_totals, mlp, sequence, twice, whole_numbers
from spotlights.memory.format.names import MOMENTS
from spotlights.query import whitening
from spotlights.query.whitening import divided, key_moments


def damped(run: Run, layer: str, damping: float, bias: bool) -> Tensor:
    """(C + λ mean(diag C) I)⁻¹, from plain lists."""
    keys = run.keys(layer).double()
    if bias:
        keys = torch.cat([keys, torch.ones(len(keys), 1)], dim=1)
    moment = keys.T @ keys / len(keys)
    return torch.linalg.inv(moment + damping * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64))


def dense(run: Run, layer: str, target: int, damping: float, *, bias: bool = True) -> Tensor:
    """The influence of every slot, straight from the equation: (inputs, slots)."""
    seen = []
    hook = run.model.get_submodule(layer).register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    logits = run.model(run.queries)
    hook.remove()
    ((query, output),) = seen
    direction = torch.autograd.grad(logits[:, target].sum(), output)[0].double()
    query = query.detach().double()
    inverse = damped(run, layer, damping, bias)
    if bias:
        query = torch.cat([query, torch.ones(len(query), 1)], dim=1)
    values, coefficients = [], per_step(run)
    for slot in run.slots[layer]:
        key = torch.cat([slot.key.double(), torch.ones(1)]) if bias else slot.key.double()
        values.append(coefficients[slot.step] * (query @ inverse @ key) * (direction @ slot.error.double()))
    return torch.stack(values, dim=1)


def per_step(run: Run) -> list[float]:
    """What torch's SGD makes of a unit gradient at each step: one column of a matrix for each."""
    steps = len(run.lrs)
    held = nn.Parameter(torch.zeros(steps, dtype=torch.float64))
    optimizer = torch.optim.SGD([held], **run.options)
    for at in range(steps):
        held.grad = run.factors[at] * torch.eye(steps, dtype=torch.float64)[at]
        optimizer.param_groups[0]["lr"] = run.lrs[at]
        optimizer.step()
    return held.detach().tolist()


def by_example(run: Run, values: Tensor, layer: str) -> dict[object, Tensor]:
    return brute_totals(values, run.column(layer, "example"))


def assert_same(found: sl.results.Totals, truth: dict[object, Tensor], tolerance: float = 1e-10) -> None:
    assert set(found.groups) == set(truth)
    for index, group in enumerate(found.groups):
        torch.testing.assert_close(found.values[:, index], truth[group], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_s_influence_equals_the_dense_computation(layer: str, bias: bool):
    run = mlp(bias=bias)
    found = (
        run.memory.attend(run.model, run.queries)[layer]
        .influence(target=2, damping=0.3, balance=False)
        .totals("example")
    )
    assert_same(found, by_example(run, dense(run, layer, 2, 0.3, bias=bias), layer))


def test_influence_is_the_sum_over_layers():
    run = mlp()
    found = run.memory.attend(run.model, run.queries).influence(target=1, rule="whitened", damping=0.1, balance=False)
    truth = sum(dense(run, layer, 1, 0.1) for layer in LAYERS)
    assert_same(found.totals("example"), by_example(run, truth, "4"))
    assert_same(found.totals("label"), brute_totals(truth, run.column("4", "label")))
    torch.testing.assert_close(found.total(), truth.sum(dim=1), rtol=1e-10, atol=1e-10)
    assert found.totals("label").layer == "all layers"


def test_top_and_bottom_are_the_extremes_of_the_totals():
    run = mlp()
    influence = run.memory.attend(run.model, run.queries).influence(target=1)
    totals = influence.totals("example")
    top, bottom = influence.top(3), influence.bottom(3)
    for query in range(len(influence)):
        ordered = totals.values[query].sort()
        torch.testing.assert_close(top.values[query, 0], ordered.values.flip(0)[:3])
        torch.testing.assert_close(bottom.values[query, 0], ordered.values[:3])
        assert [row["example"] for row in top.rows(query)] == [totals.groups[i] for i in ordered.indices.flip(0)[:3]]
    assert "an estimate" in str(top.note)
    assert "influence" in next(top.rows())


def test_with_much_damping_a_layer_ranks_examples_like_contributions():
    run = mlp()
    for layer in LAYERS:
        attention = run.memory.attend(run.model, run.queries)[layer]
        found = attention.influence(target=1, damping=1e9).totals("example").values
        plain = attention.contributions(target=1).totals("example").values
        for mine, theirs in zip(found, plain, strict=True):
            taught = theirs.abs() > 1e-12  # examples that taught nothing here are all alike
            assert torch.equal(mine[taught].argsort(), theirs[taught].argsort())
        scale = (found * plain).sum() / (plain * plain).sum()
        torch.testing.assert_close(found / scale, plain, rtol=1e-6, atol=1e-9)


def test_the_influence_of_a_view_is_that_of_its_slots():
    run = mlp()
    whole = run.memory.attend(run.model, run.queries).influence(target=0).totals("label")
    part = run.memory.where(label=2).attend(run.model, run.queries).influence(target=0)
    torch.testing.assert_close(part.total(), whole.values[:, whole.groups.index(2)], rtol=1e-10, atol=1e-12)


def test_kept_influence_answers_for_any_view():
    run = mlp()
    spot = run.memory.attend(run.model, run.queries[:1])
    kept = spot.influence(target=0).keep()
    slots = [layer.slots for layer in run.memory.layers.values()]
    assert kept.nbytes == 8 * (sum(slots) + slots[-1])  # the joint estimate is that of the layer that answers
    view = run.memory.where(label=2)
    expected = view.attend(run.model, run.queries[:1]).influence(target=0)
    (totals,) = kept.within(view).ask(sl.AskTotals("example"))
    torch.testing.assert_close(totals.values, expected.totals("example").values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kept.total(), spot.influence(target=0).total(), rtol=1e-10, atol=1e-12)
    with pytest.raises(sl.UnsupportedError, match="ask for totals"):
        kept.ask(sl.AskTop(3))
    with pytest.raises(sl.SettingError, match="one at a time"):
        run.memory.attend(run.model, run.queries).influence(target=0).keep()


def test_the_sum_over_inputs_is_one_input():
    run = mlp()
    influence = run.memory.attend(run.model, run.queries).influence(target=0)
    summed = influence.summed()
    assert len(summed) == 1
    torch.testing.assert_close(
        summed.totals("example").values[0], influence.totals("example").values.sum(dim=0), rtol=1e-10, atol=1e-12
    )


def test_rows_of_one_input_are_added_up():
    run = sequence()
    target = lambda output: output[:, -1, 2]  # noqa: E731
    spot = run.memory.attend(run.model, run.queries)
    influence = spot.influence(target=target)
    assert len(influence) == 2
    alone = run.memory.attend(run.model, run.queries[1:]).influence(target=target)
    torch.testing.assert_close(
        influence.totals("example").values[1:], alone.totals("example").values, rtol=1e-10, atol=1e-12
    )
    run = twice()
    assert len(run.memory.attend(run.model, run.queries).influence(target=1)) == len(run.queries)


@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("int8", 0.3)])
def test_smaller_storage_types_give_nearly_the_same(storage: str, tolerance: float):
    run, exact = mlp(storage, torch.float32), mlp("float32", torch.float32)
    found, truth = (
        each.memory.attend(exact.model, exact.queries).influence(target=1).totals("example").values
        for each in (run, exact)
    )
    assert (found - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan")])
def test_damping_must_be_positive(damping: float):
    run = mlp()
    with pytest.raises(sl.SettingError, match="above 0"):
        run.memory.attend(run.model, run.queries).influence(target=1, damping=damping)


def test_other_kernels_are_refused():
    run = mlp()
    with pytest.raises(sl.UnsupportedError, match="plain product"):
        run.memory.attend(run.model, run.queries, kernel="cosine")["4"].influence(target=1)


def test_moments_that_are_no_numbers_are_an_error():
    with pytest.raises(sl.UnsupportedError, match=r"has no inverse.*verify"):
        divided(torch.ones(1, 2).double(), torch.full((2, 2), torch.inf).double(), damping=0.1)


# -- moments, kept with the memory ------------------------------------------------------------


def values(memory: sl.Memory, run: Run) -> Tensor:
    return memory.attend(run.model, run.queries).influence(target=1).totals("example").values


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    run = mlp()
    path = Path(shutil.copytree(run.memory.path, tmp_path / "run.memory"))
    (path / MOMENTS).unlink(missing_ok=True)
    return path


def test_moments_are_computed_once_and_kept(copied: Path, monkeypatch: pytest.MonkeyPatch):
    first = values(sl.open(copied), mlp())
    assert (copied / MOMENTS).exists()
    monkeypatch.setattr("spotlights.query.whitening.new_moments", lambda *_: pytest.fail("scanned again"))
    assert torch.equal(values(sl.open(copied), mlp()), first)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_damaged_moments_are_made_again(copied: Path, damage: bytes | None):
    first = values(sl.open(copied), mlp())
    content = (copied / MOMENTS).read_bytes()
    (copied / MOMENTS).write_bytes(content[:-8] if damage is None else damage)
    assert torch.equal(values(sl.open(copied), mlp()), first)


@pytest.mark.parametrize("place", [-1, -9, -2000])
def test_moments_with_a_flipped_bit_are_made_again(copied: Path, place: int):
    first = values(sl.open(copied), mlp())
    content = bytearray((copied / MOMENTS).read_bytes())
    content[place] ^= 64
    (copied / MOMENTS).write_bytes(content)
    assert torch.equal(values(sl.open(copied), mlp()), first)


def test_a_memory_that_cannot_be_written_to_is_still_answered(copied: Path):
    (copied / MOMENTS).mkdir()  # no file can take its place
    assert torch.equal(values(sl.open(copied), mlp()), values(mlp().memory, mlp()))
    assert not list(copied.glob("*.part"))


def test_a_resumed_memory_adds_what_is_new_to_its_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int) -> None:
        with sl.record(model, optimizer, tmp_path / "a.memory", dtype="float64", resume=True) as recorder:
            for _ in range(count):
                recorder.batch(example=torch.randint(9, (6,)))
                loss = nn.functional.cross_entropy(model(whole_numbers(6, 5)), torch.randint(3, (6,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    scanned = []
    inner = whitening.new_moments
    monkeypatch.setattr(whitening, "new_moments", lambda r, steps, *o: scanned.append(steps) or inner(r, steps, *o))
    steps(5)
    whitening.key_moments(sl.open(tmp_path / "a.memory").view)
    steps(4)
    grown = whitening.key_moments(sl.open(tmp_path / "a.memory").view)
    assert scanned == [range(5), range(5, 9)]
    (tmp_path / "a.memory" / MOMENTS).unlink()
    anew = whitening.key_moments(sl.open(tmp_path / "a.memory").view)
    for name, moment in anew.items():
        torch.testing.assert_close(grown[name], moment, rtol=1e-12, atol=1e-12)
        assert moment[-1, -1] == 9 * 6


def test_overwriting_a_memory_forgets_its_moments(tmp_path: Path):
    def memory() -> sl.Memory:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.record(model, optimizer, tmp_path / "a.memory", overwrite=True) as recorder:
            recorder.batch(example=[0, 1])
            model(torch.randn(2, 3).double()).sum().backward()
            optimizer.step()
        return sl.open(tmp_path / "a.memory")

    memory().attend(nn.Sequential(nn.Linear(3, 2)).double(), torch.ones(1, 3).double())["0"].influence(target=0).total()
    assert (tmp_path / "a.memory" / MOMENTS).exists()
    memory()
    assert not (tmp_path / "a.memory" / MOMENTS).exists()


@pytest.mark.parametrize("maximize", [False, True])
def test_under_adam_steps_count_by_their_learning_rate_alone(tmp_path: Path, maximize: bool):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, maximize=maximize)
    keys, values, examples = [], [], []
    with sl.record(model, optimizer, tmp_path / "a.memory", dtype="float64") as recorder:
        for step in range(6):
            lr = optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
            inputs, labels, ids = torch.randn(4, 3).double(), torch.randint(2, (4,)), torch.randint(5, (4,))
            recorder.batch(example=ids)
            optimizer.zero_grad()
            output = model(inputs)
            nn.functional.cross_entropy(output, labels).backward()
            optimizer.step()
            keys.append(torch.cat([inputs, torch.ones(4, 1).double()], dim=1))
            values.append((lr if maximize else -lr) * (output.softmax(dim=1)[:, 1] - labels).detach() / 4)
            examples += ids.tolist()
    key, value = torch.cat(keys), torch.cat(values)
    moment = key.T @ key / len(key)
    damped = moment + 0.3 * moment.diagonal().mean() * torch.eye(4, dtype=torch.float64)
    query = torch.randn(1, 3).double()
    white = torch.linalg.solve(damped, torch.cat([query[0], torch.ones(1).double()]))
    found = (
        sl.open(tmp_path / "a.memory").attend(model, query)["0"].influence(target=1, balance=False).totals("example")
    )
    assert_same(found, brute_totals((key @ white * value)[None], examples))


def test_layers_that_influence_is_not_estimated_through_are_named(tmp_path: Path):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "a.memory", dtype="float64") as recorder:
        recorder.batch(example=[0, 1])
        model(torch.randn(2, 3).double()).square().sum().backward()
        optimizer.step()
    influence = sl.open(tmp_path / "a.memory").attend(model, torch.randn(1, 3).double()).influence(target=0)
    for note in (influence.note, influence.summed().note, influence.totals("example").note):
        assert note is not None
        assert note.endswith("not estimated through 1")


# -- inputs with many rows --------------------------------------------------------------------


def convolutions() -> nn.Module:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2, groups=1), nn.Flatten(), nn.Linear(36, 3))
    return model.double()


def record_images(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, storage: str) -> Tensor:
    images = torch.randn(9, 1, 6, 6, generator=torch.Generator().manual_seed(7)).double()
    labels = torch.arange(9) % 3
    with sl.record(model, optimizer, path, dtype=storage) as recorder:
        for batch in (torch.arange(9).roll(3 * i)[:5] for i in range(6)):
            recorder.batch(example=batch, label=labels[batch])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return images


def test_a_layer_counts_by_its_inputs_however_many_rows_it_has_for_them(tmp_path: Path):
    model = convolutions()
    images = record_images(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "a.memory", "float64")
    memory = sl.open(tmp_path / "a.memory")
    spot = memory.attend(model, images[:4])
    for name, rows in (("0", 16), ("2", 9), ("4", 1)):
        moment = key_moments(memory.view)[name]
        visits = 30  # six batches of five
        assert moment[-1, -1] == rows * visits
        strength = 1e9 * moment.diagonal().mean() / visits
        found = spot[name].influence(1, damping=1e9, balance=False).totals("example").values * strength
        plain = spot[name].contributions(1).totals("example").values
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p)])
@pytest.mark.parametrize("storage", ["float64", "int8"])
@pytest.mark.parametrize("column", ["example", "label", "step"])
def test_sums_over_rows_and_groups_are_the_same_in_either_order(
    tmp_path: Path,
    make: Callable[..., torch.optim.Optimizer],
    storage: str,
    column: str,
    monkeypatch: pytest.MonkeyPatch,
):
    model = convolutions()
    images = record_images(model, make(model.parameters()), tmp_path / "a.memory", storage)
    spot = sl.open(tmp_path / "a.memory").where(step=range(1, 6)).attend(model, images[:4])
    found = []
    for matrices in (True, False):
        monkeypatch.setattr(sl.Contributions, "_matrices_are_cheaper", lambda *_, m=matrices, **__: m)
        asked = [*(attention.contributions(1) for attention in spot.values()), spot.influence(1)]
        found.append([each.totals(column, bins=2 if column == "step" else None) for each in asked])
    for quick, slow in zip(*found, strict=True):
        assert quick.groups == slow.groups
        assert torch.equal(quick.counts, slow.counts)
        tolerance = 1e-10 if storage == "float64" else 1e-5
        torch.testing.assert_close(
            quick.values, slow.values, rtol=tolerance, atol=tolerance * float(slow.values.abs().max())
        )


def test_layers_that_know_different_examples_are_ranked_together(tmp_path: Path):
    """Of a sampled memory, each layer keeps other slots, and so knows other examples."""
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "a.memory", sample=0.2) as recorder:
        for _ in range(6):
            ids = torch.randint(40, (6,))
            recorder.batch(example=ids)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(whole_numbers(6, 5)), ids % 3).backward()
            optimizer.step()
    memory = sl.open(tmp_path / "a.memory")
    influence = memory.attend(model, whole_numbers(1, 5)).influence(1)
    assert memory.distinct("example", layer="0") != memory.distinct("example", layer="2")
    totals = influence.totals("example")
    best, order = influence.top(5), totals.values[0].sort(descending=True).indices[:5]
    assert best.values[0, 0].tolist() == totals.values[0, order].tolist()
    assert best.columns["example"][0][0] == [totals.groups[index] for index in order.tolist()]


def test_a_layer_is_balanced_by_the_mean_square_of_its_errors():
    run = mlp()
    spot, weights = run.memory.attend(run.model, run.queries), [abs(number) for number in per_step(run)]
    for name, attention in spot.items():
        plain = attention.influence(1, balance=False).totals("example").values
        sizes = torch.stack([weights[slot.step] * slot.error.double().square().sum() for slot in run.slots[name]])
        balanced = attention.influence(1).totals("example").values
        torch.testing.assert_close(balanced * sizes.mean(), plain, rtol=1e-9, atol=1e-12)


def test_a_wide_layer_keeps_no_matrix_of_its_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An embedding of many tokens has more slots than tokens: a matrix of all pairs of slots would not fit."""
    monkeypatch.setattr("spotlights.query.whitening._WIDE", 4)
    monkeypatch.setattr("spotlights.query.whitening.whitened_by_keys", lambda *_, **__: pytest.fail("too large"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 3), nn.Flatten(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.arange(20).reshape(10, 2) % 8
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        for _ in range(3):
            recorder.batch(example=torch.arange(10))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words), torch.arange(10) % 2).backward()
            optimizer.step()
    found = sl.open(tmp_path / "a.memory").attend(model, words[:3]).influence(1, rule="whitened")
    assert found.totals("example").values.isfinite().all()


def test_the_moments_of_single_tokens_are_those_of_their_one_hot_rows(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 3), nn.Flatten(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.arange(20).reshape(10, 2) % 7
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        recorder.batch(example=torch.arange(10))
        nn.functional.cross_entropy(model(words), torch.arange(10) % 2).backward()
        optimizer.step()
    rows = nn.functional.one_hot(words.flatten(), 8).double()
    rows = torch.cat([rows, torch.ones(20, 1).double()], dim=1)
    torch.testing.assert_close(key_moments(sl.open(tmp_path / "a.memory").view)["0"], rows.T @ rows)
