"""A recipe is as good as its slots: what is computed again is what a full recording has kept, bit for bit."""

import copy
import random
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import spotlights as sl
from test_history import LOOPS, TASKS, Loop, Run, Task
from test_history import train as train_task
from training import (
    CLASSES,
    EXACT,
    FEATURES,
    assert_exact,
    elsewhere,
    examples,
    kill_at_call,
    network,
    same,
    sgd,
    state,
    train,
)

EVERY = 3
"""Steps between two checkpoints: a run has several stretches."""
RECIPE: dict[str, Any] = {"keep": "recipe", "checkpoint_every": EVERY}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """That of `training.train`."""
    inputs, labels = examples(next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs[ids]), labels[ids])


def both(task: Task, loop: Loop) -> tuple[Run, Run, sl.Memory]:
    """The same training, recorded whole and as a recipe; and the recipe's memory with slots."""
    full, recipe = train_task(task, loop), train_task(task, loop, **RECIPE)
    assert same(state(full.model), state(recipe.model)), "recording a recipe has changed the training"

    def again(model: nn.Module, ids: Tensor) -> Tensor:
        return task.loss(model(task.inputs[ids]), ids)

    return full, recipe, sl.open(recipe.memory.path, model=copy.deepcopy(recipe.networks[0]), recompute=again)


def record(path: Path, model: nn.Module | None = None, steps: int = 8, **options: Any) -> nn.Module:
    model = network() if model is None else model
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    with sl.record(model, optimizer, path, **{**RECIPE, **options}) as recorder:
        train(model, optimizer, steps, recorder)
    return model


def answers(memory: sl.Memory, run: Run) -> list[np.ndarray]:
    """Questions of all kinds, as numbers."""
    found = []
    spots = memory.attend(run.model, run.queries)
    for spot in spots.values():
        found += [np.asarray(spot.top(10).values), spot.totals("label").numpy()]
    found.append(np.asarray([check.relative_error < EXACT for check in memory.verify(run.model).values()]))
    history = spots.history(run.task.target)
    found += [history.totals("example").numpy(), np.asarray(history.curve().values), np.asarray(history.decay)]
    return found


PAIRS = list(zip(TASKS, (*LOOPS, "sgd with everything"), strict=True))


@pytest.mark.parametrize(("task", "loop"), PAIRS)
def test_a_recipe_answers_as_the_full_memory(task: str, loop: str) -> None:
    full, recipe, memory = both(TASKS[task], LOOPS[loop])
    assert "recipe" in str(recipe.memory.info), "whatever its layers are, it can be looked at without a loss"
    assert memory.recomputed == 0.0, "the slots were not computed again bit for bit"
    for one, other in zip(answers(memory, full), answers(full.memory, full), strict=True):
        np.testing.assert_allclose(one, other, rtol=EXACT, atol=EXACT)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    every=st.integers(1, 7),
    accumulate=st.integers(1, 3),
    clip=st.sampled_from([None, 0.05]),
    dropout=st.sampled_from([0.0, 0.4]),
    adam=st.booleans(),
    emptied=st.sampled_from(["before", "after", "to zero"]),
    looked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_loop_is_computed_again_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    every: int,
    accumulate: int,
    clip: float | None,
    dropout: float,
    adam: bool,
    emptied: str,
    looked: bool,
    dtype: torch.dtype,
) -> None:
    path = tmp_path_factory.mktemp("any") / "run.memory"
    torch.manual_seed(5)
    model = network(dropout=dropout, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if adam else sgd(model, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    inputs, labels = examples(dtype)
    with sl.record(model, optimizer, path, keep="recipe", checkpoint_every=every) as recorder:
        for _ in range(7):
            if emptied != "after":
                optimizer.zero_grad(set_to_none=emptied == "before")
            for _ in range(accumulate):
                ids = torch.randint(len(labels), (3,))
                recorder.batch(example=ids)
                (F.cross_entropy(model(inputs[ids]), labels[ids]) / accumulate).backward()
            if looked:  # a pass whose gradients nobody uses
                with recorder.paused():
                    model(inputs[:2])
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            if emptied == "after":
                optimizer.zero_grad()

    def again(network: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(network(inputs[ids]), labels[ids]) / accumulate

    memory = sl.open(path, model=network(dropout=dropout, dtype=dtype), recompute=again)
    assert memory.recomputed == 0.0
    assert len(memory) == 7 * accumulate * 3
    assert memory.verify(model).ok


def test_materialise_makes_the_memory_of_a_full_recording(tmp_path: Path) -> None:
    model = record(tmp_path / "recipe.memory")
    record(tmp_path / "full.memory", keep="slots", checkpoint_every="auto")
    recipe = sl.open(tmp_path / "recipe.memory", model=network(), recompute=loss)
    memory = recipe.materialise(tmp_path / "made.memory")
    assert_exact(tmp_path / "made.memory", model)
    assert memory.recomputed == 0.0
    (made,), (full,) = (list((tmp_path / name / "segments").iterdir()) for name in ("made.memory", "full.memory"))
    ours, theirs = load_file(made), load_file(full)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].nan_to_num(), tensor.nan_to_num()), name


def test_materialise_makes_a_part(tmp_path: Path) -> None:
    record(tmp_path / "run.memory")
    recipe = sl.open(tmp_path / "run.memory", model=network(), recompute=loss)
    part = recipe.materialise(tmp_path / "part.memory", steps=range(4, 7))
    assert part.steps == 3
    assert [part.visits(int(e)).steps[0] for e in part.distinct("example")] == [
        min(s - 4 for s in recipe.visits(int(e)).steps if 4 <= s < 7) for e in part.distinct("example")
    ]
    with pytest.raises(sl.SettingError, match="within 0 to 8"):
        recipe.materialise(tmp_path / "other.memory", steps=range(4, 9))
    with pytest.raises(sl.SettingError, match="has its slots already"):
        part.materialise(tmp_path / "other.memory")


def test_materialise_overwrites_no_memory_unasked_and_never_the_recipe(tmp_path: Path) -> None:
    model = record(tmp_path / "run.memory")
    other = record(tmp_path / "other.memory", network(5, 4, 3), keep="slots", checkpoint_every="auto")
    recipe = sl.open(tmp_path / "run.memory", model=network(), recompute=loss)
    with pytest.raises(sl.MemoryExistsError, match="already holds a memory"):
        recipe.materialise(tmp_path / "other.memory")
    assert_exact(tmp_path / "other.memory", other)
    for overwrite in (False, True):
        with pytest.raises(sl.SettingError, match="is the recipe itself"):
            recipe.materialise(tmp_path / "run.memory", overwrite=overwrite)
    recipe.materialise(tmp_path / "other.memory", overwrite=True)
    assert_exact(tmp_path / "other.memory", model)


def test_a_recipe_without_steps_says_so(tmp_path: Path) -> None:
    record(tmp_path / "run.memory", steps=0)
    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=loss)
    with pytest.raises(sl.UnsupportedError, match="has no slots yet"):
        len(memory)


def test_what_goes_wrong_in_the_loss_is_told_with_its_step(tmp_path: Path) -> None:
    record(tmp_path / "run.memory")

    def failing(model: nn.Module, ids: Tensor) -> Tensor:
        raise IndexError("no such example")

    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=failing)
    with pytest.raises(sl.SettingError, match=r"recompute= failed at step 0 .*IndexError: no such example"):
        len(memory)


# -- damage -----------------------------------------------------------------------------------


def _flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_damaged_recipe_is_not_computed_from(tmp_path: Path) -> None:
    record(tmp_path / "run.memory")
    for segment in (tmp_path / "run.memory" / "segments").iterdir():
        _flip(segment)
    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=loss)
    with pytest.raises(sl.MemoryFormatError, match="has checksum"):
        len(memory)


def test_damage_in_the_cache_is_found_or_computed_again(tmp_path: Path) -> None:
    model = record(tmp_path / "run.memory")

    def opened() -> sl.Memory:
        return sl.open(tmp_path / "run.memory", model=network(), recompute=loss)

    assert opened().verify(model).ok
    stretch = min((tmp_path / "cache" / "recipes").iterdir())
    _flip(stretch / "memory.json", 40)
    assert opened().verify(model).ok
    _flip(next((stretch / "segments").iterdir()))
    verified = opened().verify(model)
    assert not verified.ok
    assert "delete it" in verified.damaged[0].lower()
    for name in ("segments/000000-rank0.safetensors", "initial.safetensors"):
        (stretch / name).unlink()
    assert opened().verify(model).ok


def test_the_cache_deletes_nothing_of_others(tmp_path: Path) -> None:
    """A memory of the user's own lies where the cache keeps its stretches."""
    mine = tmp_path / "cache" / "recipes" / "mine.memory"
    other = record(mine, keep="slots", checkpoint_every="auto", dtype="float64")
    record(tmp_path / "run.memory")
    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=loss, cache=tmp_path / "cache", cache_bytes=1)
    memory.materialise()
    assert_exact(mine, other)


def test_without_its_loss_a_recipe_says_what_is_missing(tmp_path: Path) -> None:
    model = record(tmp_path / "run.memory")
    memory = sl.open(tmp_path / "run.memory")
    assert memory.steps == 8
    assert "recipe" in str(memory)
    assert "recipe" in str(memory.info)
    spot = memory.attend(model, examples()[0][:2])
    for ask in (
        lambda: spot["0"].top(3),
        lambda: spot["0"].totals("label"),
        lambda: spot.history(1),
        lambda: memory.verify(model),
        lambda: memory.suspects(),
        lambda: memory.visits(1),
        lambda: len(memory),
        lambda: memory.materialise(tmp_path / "full.memory"),
    ):
        with pytest.raises(sl.UnsupportedError, match=r"recompute=loss"):
            ask()
    with pytest.raises(sl.SettingError, match="both"):
        sl.open(tmp_path / "run.memory", model=model)


def test_a_loss_that_does_not_fit_is_named(tmp_path: Path) -> None:
    record(tmp_path / "run.memory")

    def other_data(model: nn.Module, ids: Tensor) -> Tensor:
        return loss(model, (ids + 1) % 24)

    with pytest.raises(sl.UnsupportedError, match=r"not the loss that .* at step 0 .* \"[02]\.(weight|bias)\" differs"):
        len(sl.open(tmp_path / "run.memory", model=network(), recompute=other_data))
    with pytest.raises(sl.SettingError, match="must return a loss"):
        len(sl.open(tmp_path / "run.memory", model=network(), recompute=lambda model, ids: torch.zeros(1)))
    with pytest.raises(sl.SettingError, match="differs in"):
        len(sl.open(tmp_path / "run.memory", model=network(FEATURES, 7, CLASSES), recompute=loss))


def test_slots_that_are_a_little_off_say_so(tmp_path: Path) -> None:
    model = record(tmp_path / "run.memory")

    def rounded(model: nn.Module, ids: Tensor) -> Tensor:
        return loss(model, ids) + 1e-7 * sum(p.square().sum() for p in model.parameters())

    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=rounded)
    with pytest.warns(sl.SpotlightsWarning, match="could not be computed again bit for bit"):
        top = memory.attend(model, examples()[0][:2])["2"].top(3)
    assert memory.recomputed is not None
    assert 1e-12 < memory.recomputed < 1e-5
    assert "computed again" in str(top.note)


def test_one_loss_for_each_example_will_do(tmp_path: Path) -> None:
    model = record(tmp_path / "run.memory")

    def each(model: nn.Module, ids: Tensor) -> Tensor:
        inputs, labels = examples(next(model.parameters()).dtype)
        return F.cross_entropy(model(inputs[ids]), labels[ids], reduction="none")

    assert sl.open(tmp_path / "run.memory", model=network(), recompute=each).verify(model).ok


def test_examples_may_be_named(tmp_path: Path) -> None:
    model, (inputs, labels) = network(), examples()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "run.memory", **RECIPE) as recorder:
        for step in range(4):
            recorder.batch(example=[f"image {step}", "image 7"])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[[step, 7]]), labels[[step, 7]]).backward()
            optimizer.step()

    def named(model: nn.Module, ids: list[str]) -> Tensor:
        numbers = [int(name.removeprefix("image ")) for name in ids]
        return F.cross_entropy(model(inputs[numbers]), labels[numbers])

    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=named)
    assert memory.recomputed == 0.0
    assert set(memory.distinct("example")) == {f"image {number}" for number in (0, 1, 2, 3, 7)}


def test_weights_that_the_loop_changes_itself_are_kept(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model, momentum=0.9)

    def halve(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                model[0].weight.mul_(0.5)

    def run() -> None:
        with sl.record(model, optimizer, tmp_path / "run.memory", keep="recipe", checkpoint_every=100) as recorder:
            train(model, optimizer, 8, recorder, after_step=halve)

    with pytest.warns(sl.SpotlightsWarning, match="changed outside"):
        run()
    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=loss)
    assert memory.attend(model, examples()[0][:2]).history(1).total().isfinite().all()
    assert memory.verify(model)["0"].moved_steps == [4]
    assert memory.recomputed == 0.0


@pytest.mark.parametrize("announced", [3, 0])
def test_a_step_that_no_batch_explains_ends_the_recipe_and_not_the_training(tmp_path: Path, announced: int) -> None:
    model, alone = network(), network()
    optimizer = sgd(model)
    train(alone, sgd(alone), 6)
    with sl.record(model, optimizer, tmp_path / "run.memory", **RECIPE) as recorder:
        train(model, optimizer, announced, recorder)
        with pytest.warns(sl.SpotlightsWarning, match=r"recorder\.batch\(example=ids\)"):
            train(model, optimizer, range(announced, 6))
    assert same(state(model), state(alone))
    if announced:
        memory = sl.open(tmp_path / "run.memory", model=network(), recompute=loss)
        assert memory.steps == 3
        assert memory.recomputed == 0.0


def test_the_users_network_and_random_numbers_stay_as_they_are(tmp_path: Path) -> None:
    record(tmp_path / "run.memory", network(dropout=0.2))
    model = network(dropout=0.2).eval()
    before, random_state = state(model), torch.get_rng_state()
    assert len(sl.open(tmp_path / "run.memory", model=model, recompute=loss)) == 32
    assert same(state(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        self.calls += 1
        return loss(model, ids)


def test_a_second_question_computes_nothing(tmp_path: Path) -> None:
    model, counted = record(tmp_path / "run.memory"), Counted()
    for _ in range(2):  # the second time as if by another process
        memory = sl.open(tmp_path / "run.memory", model=network(), recompute=counted)
        assert counted.calls in (0, 8)
        memory.attend(model, examples()[0][:2])["0"].top(3)
        memory.attend(model, examples()[0][:2])["2"].totals("label")
    assert counted.calls == 8


def test_a_full_cache_makes_room_and_answers_stay(tmp_path: Path) -> None:
    model = record(tmp_path / "run.memory")
    full = record(tmp_path / "full.memory", keep="slots", checkpoint_every="auto")
    counted = Counted()
    limit = 20_000
    few: dict[str, Any] = {"cache": tmp_path / "c", "cache_bytes": limit}
    memory = sl.open(tmp_path / "run.memory", model=network(), recompute=counted, **few)
    kept = sl.open(tmp_path / "full.memory").attend(full, examples()[0][:2])["0"].totals("label").numpy()
    for _ in range(2):
        found = memory.attend(model, examples()[0][:2])["0"].totals("label").numpy()
        np.testing.assert_allclose(found, kept, rtol=EXACT)
        sizes = [file.stat().st_size for file in (tmp_path / "c").rglob("segments/*")]
        assert sum(sizes) <= limit
    assert counted.calls > 8, "this limit would show nothing"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "nothing"}, 'give "slots"'),
        ({"checkpoint_every": 0}, "a number of steps"),
        ({"keep": "slots"}, "belongs to keep"),
        ({"fold": "example"}, "stores no slots"),
        ({"sample": 0.5}, "stores no slots"),
    ],
)
def test_settings_that_do_not_go_with_a_recipe_are_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    model = network()
    with pytest.raises(sl.SettingError, match=said):
        sl.record(model, sgd(model), tmp_path / "run.memory", **{**RECIPE, **options})


# -- kills ------------------------------------------------------------------------------------

STEPS = 24


def _record_and_die(path: Path, start: int, call: int) -> None:
    kill_at_call(call)
    _resumed(path, start)


def _resumed(path: Path, start: int) -> nn.Module:
    model = network()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    train(model, optimizer, start)
    with sl.record(model, optimizer, path, **RECIPE, resume=True, segment_bytes=2000) as recorder:
        assert recorder.step == start
        train(model, optimizer, range(start, STEPS), recorder)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_a_recipe_killed_at_random_moments_opens_verifies_and_resumes(tmp_path: Path, seed: int) -> None:
    path, draw, start = tmp_path / "run.memory", random.Random(seed), 0
    for _ in range(3):
        with pytest.raises(BrokenProcessPool):
            elsewhere(_record_and_die, path, start, draw.randint(2, 30))
        try:
            memory = sl.open(path, model=network(), recompute=loss)
        except sl.MemoryFormatError:
            assert start == 0
            continue
        assert memory.steps >= start
        start = memory.steps
        if start:
            assert memory.recomputed == 0.0
            assert memory.verify().ok
    model = _resumed(path, start)
    memory = sl.open(path, model=network(), recompute=loss)
    assert memory.steps == STEPS
    assert memory.recomputed == 0.0
    assert memory.verify(model).ok
    assert len(memory) == 4 * STEPS


class Mixed(nn.Module):
    """Multiplies with a gate and a matrix: modules that adapters know, or parameters that none knows."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        gate, matrix = nn.Conv1d(6, 6, 1, groups=6, bias=False), nn.Linear(6, 6, bias=False)
        self.known = known
        self.gate = gate if known else nn.Parameter(gate.weight.detach().flatten())
        self.matrix = matrix if known else nn.Parameter(matrix.weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        gated = self.gate(x[..., None])[..., 0] if self.known else x * self.gate
        return self.head(torch.tanh(self.matrix(gated) if self.known else gated @ self.matrix))


@pytest.mark.parametrize("adam", [False, True])
def test_a_history_through_parameters_without_an_adapter_names_the_examples(tmp_path: Path, adam: bool) -> None:
    """As through modules that have an adapter, to 1e-9; a loss for each example has to be given."""
    x, y = examples()
    ids = torch.randint(len(x), (12, 2, 4), generator=torch.Generator().manual_seed(5))
    found = []
    for known in (True, False):
        model = Mixed(known).double()
        optimizer = torch.optim.AdamW(model.parameters()) if adam else sgd(model, momentum=0.9)
        with sl.record(model, optimizer, tmp_path / str(known), **({} if known else RECIPE)) as recorder:
            for step in ids:
                optimizer.zero_grad()
                for batch in step:
                    recorder.batch(example=batch, label=y[batch])
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        for one_each in [None] if known else [range(len(ids)), range(0), range(1, len(ids))]:
            alone = [] if one_each is None else [batch for step in one_each for batch in ids[step]]

            def loss(model: nn.Module, ids: Tensor, alone: list[Tensor] = alone) -> Tensor:
                each = any(torch.equal(ids, batch) for batch in alone)
                return F.cross_entropy(model(x[ids]), y[ids], reduction="none" if each else "mean")

            again = {} if known else {"model": model, "recompute": loss}
            memory = sl.open(tmp_path / str(known), **again)
            history = memory.attend(model, x[:2]).history({"1": 1, "2-0": "2-0"})
            assert float(history.error.max()) < 1e-9
            if one_each is not None and len(one_each) < len(ids):
                assert "no example's" in str(history.note)
                assert None in history.totals("example").groups
                continue
            found.append(history)
            view = memory.where(label=int(y[ids[0, 0, 0]])).attend(model, x[:2]).history("2-0")
            assert float(view.error.max()) < 1e-9
            found.append(view)
    known, known_view, unknown, unknown_view = found
    for one, other in ((known, unknown), (known_view, unknown_view)):
        expected, made = one.totals("example"), other.totals("example")
        for group, values in zip(expected.groups, expected.values.T, strict=True):
            assert torch.allclose(made.values[:, made.groups.index(group)], values, rtol=1e-9, atol=1e-12), group
        assert torch.allclose(one.total(), other.total(), rtol=1e-9, atol=1e-12)
    assert "parameters without an adapter" in unknown.by_layer().groups
    assert [row["example"] for row in unknown.top(3).rows(0)] == [row["example"] for row in known.top(3).rows(0)]
