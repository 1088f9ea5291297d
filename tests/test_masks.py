"""Views: masks of slots, and the network as it was. Nothing is retrained, and the parts add up."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import spotlights as sl
from memories import LAYERS, SOURCES, Slot, mlp, sequence, train, twice, whole_numbers
from spotlights.memory.blocks import in_blocks
from spotlights.memory.layer_reader import LayerReader
from spotlights.query import engine

EXACT = {"rtol": 1e-10, "atol": 1e-10}
few = settings(max_examples=8, deadline=None)


def assert_weights(memory: sl.Memory, layer: str, expected: dict[str, torch.Tensor]) -> None:
    found = memory.parameters(layer)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **EXACT)


# -- all and nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_masking_nothing_gives_the_trained_network(layer: str):
    run = mlp()
    assert_weights(run.memory, layer, dict(run.model.get_submodule(layer).state_dict()))


@pytest.mark.parametrize("layer", LAYERS)
def test_masking_everything_gives_the_initial_network_shrunk_by_weight_decay(layer: str):
    run = mlp()
    nothing = run.memory.without(step=range(1000))
    assert len(nothing) == 0
    shrunk = run.replay(layer, lambda slot: False)
    assert_weights(nothing, layer, shrunk)
    start = run.checkpoints[0][f"{layer}.weight"]
    share = float((shrunk["weight"] / start).mean())
    assert 0 < share < 1
    torch.testing.assert_close(nothing.weights(layer), start * share, **EXACT)


def test_masking_everything_without_weight_decay_gives_the_initial_network_itself():
    torch.manual_seed(1)
    inputs = whole_numbers(6, 5)
    run = train(nn.Sequential(nn.Linear(5, 4)).double(), [(inputs, torch.arange(6) % 4, {})] * 3,
                options={"lr": 0.1, "momentum": 0.5})  # fmt: skip
    assert torch.equal(run.memory.without(step=range(3)).weights("0"), run.checkpoints[0]["0.weight"])


# -- parts of a partition ---------------------------------------------------------------------


@few
@given(data=st.data(), column=st.sampled_from(["example", "label", "step", "source"]))
def test_the_parts_of_any_partition_add_up_to_the_whole(data: st.DataObject, column: str):
    run = mlp()
    values = sorted({v for v in run.column("4", column) if v is not None})
    group_of = {value: data.draw(st.integers(0, 2), label=str(value)) for value in values}
    chosen = [[v for v in values if group_of[v] == group] for group in range(3)]
    rest = run.memory.without(**{column: values})  # slots that have no such value
    parts = [run.memory.where(**{column: some}) for some in chosen] + [rest]
    assert sum(map(len, parts)) == len(run.memory)
    for layer in ("0", "4"):
        initial = run.memory.without(step=range(1000)).parameters(layer)
        for name, whole in run.memory.parameters(layer).items():
            total = initial[name] + sum(part.parameters(layer)[name] - initial[name] for part in parts)
            torch.testing.assert_close(total, whole, **EXACT)


@few
@given(label=st.integers(0, 3), steps=st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_a_view_is_what_the_optimizer_would_have_made_of_its_slots(label: int, steps: tuple[int, int]):
    run = mlp()
    between = range(min(steps), max(steps))

    def kept(slot: Slot) -> bool:
        return slot.columns.get("label") != label and slot.step in between

    view = run.memory.where(step=between).without(label=label)
    for layer in ("0", "4"):
        assert_weights(view, layer, run.replay(layer, kept))


# -- set algebra ------------------------------------------------------------------------------

CONDITIONS = st.one_of(
    st.integers(0, 4).map(lambda value: ("label", value)),
    st.lists(st.integers(0, 3), max_size=3).map(lambda values: ("label", values)),
    st.sampled_from(SOURCES).map(lambda value: ("source", value)),
    st.lists(st.sampled_from(SOURCES), min_size=1, max_size=2).map(lambda values: ("source", values)),
    st.builds(range, st.integers(-2, 31), st.integers(-2, 31), st.sampled_from([1, 3, -1, -2])).map(
        lambda value: ("step", value)
    ),
    st.lists(st.integers(0, 24).map(lambda number: 10 * number + 3), max_size=6).map(
        lambda values: ("example", values)
    ),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("where"), st.lists(CONDITIONS, min_size=1, max_size=2)),
        st.tuples(st.just("without"), st.lists(CONDITIONS, min_size=1, max_size=2)),
        st.tuples(st.just("invert"), st.just([])),
        st.tuples(st.just("as_of"), st.integers(0, 30)),
    ),
    max_size=5,
)


def meets(slot: Slot, conditions: list) -> bool:
    held = {**slot.columns, "step": slot.step}
    return all(
        held.get(column) in (wanted if isinstance(wanted, list | range) else [wanted])
        for column, wanted in dict(conditions).items()
    )


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS)
def test_where_without_and_not_compose_like_sets(operations: list):
    run = mlp()
    slots = run.slots["2"]
    view, kept, until = run.memory, set(range(len(slots))), 30
    for kind, argument in operations:
        if kind == "as_of":
            until = min(until, argument)
            view = view.as_of(until)
            kept = {n for n in kept if slots[n].step < until}
        elif kind == "invert":
            view = ~view
            kept = {n for n in range(len(slots)) if slots[n].step < until} - kept
        elif kind == "where":
            view = view.where(**dict(argument))
            kept = {n for n in kept if meets(slots[n], argument)}
        else:
            view = view.without(**dict(argument))
            kept = {n for n in kept if not meets(slots[n], argument)}
    assert len(view) == len(kept)
    reader = view.view.reader.layer("2")
    found = [int(n) for block in in_blocks(reader, view.view.selection, 50) for n in block.slots]
    assert found == sorted(kept), f"{view} has other slots than the set of the same name"


@pytest.mark.parametrize(
    "wanted",
    [3, [3], (3,), {3}, np.int64(3), np.array([3]), torch.tensor(3), torch.tensor([3]), [np.int64(3)],
     [torch.tensor(3)], 3.0, range(3, 4), [2.5, 3]],
    ids=repr,
)  # fmt: skip
def test_a_condition_is_a_value_or_several_of_any_kind(wanted):
    run = mlp()
    expected = sum(label == 3 for label in run.column("2", "label"))
    assert len(run.memory.where(label=wanted)) == expected


def test_conditions_on_floats_compare_values():
    run = mlp()
    ratings = [value for value in run.column("2", "rating") if value is not None]
    assert len(run.memory.where(rating=ratings[0])) == ratings.count(ratings[0])
    assert len(run.memory.where(rating=ratings[:2])) == sum(r in ratings[:2] for r in ratings)


def test_views_of_views_print_what_they_are():
    view = mlp().memory.where(source="mnist").without(label=[1, 2]).as_of(10)
    assert "source=mnist and not (label=[1, 2])" in repr(view)
    assert "10 steps" in repr(view)


def test_conditions_that_make_no_sense_are_refused_with_what_there_is():
    memory = mlp().memory
    with pytest.raises(sl.UnknownNameError, match=r'No column "colour".*example, label, source, rating'):
        memory.where(colour="red")
    with pytest.raises(sl.UnknownNameError, match=r"source='mnsit'.*mnist, fashion, kanji"):
        memory.without(source="mnsit")
    with pytest.raises(sl.SettingError, match='"label" holds numbers'):
        memory.where(label="three")
    with pytest.raises(sl.SettingError, match="at least one condition"):
        memory.where()
    with pytest.raises(sl.SettingError, match=r"as_of\(31\).*0 to 30"):
        memory.as_of(31)
    with pytest.raises(sl.SettingError, match=r"as_of\(-1\)"):
        memory.as_of(-1)
    with pytest.raises(sl.SettingError, match=r"as_of\(20\).*0 to 10"):
        memory.as_of(10).as_of(20)


# -- as of a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 7, 29, 30])
@pytest.mark.parametrize("layer", ["0", "4"])
def test_as_of_is_the_network_as_it_was_at_that_step(step: int, layer: str):
    run = mlp()
    truth = {name: run.checkpoints[step][f"{layer}.{name}"] for name in ("weight", "bias")}
    assert_weights(run.memory.as_of(step), layer, truth)


@few
@given(step=st.integers(0, 30))
def test_the_dual_network_as_of_any_step_is_the_checkpoint_of_that_step(step: int):
    run = mlp()
    view = run.memory.as_of(step)
    primal = view.primal(run.model)
    for name, value in run.checkpoints[step].items():
        torch.testing.assert_close(primal.state_dict()[name], value, **EXACT)
    torch.testing.assert_close(view.dual(run.model)(run.queries), primal(run.queries), **EXACT)
    assert view.steps == step


def test_a_masked_network_as_of_a_step_is_what_the_optimizer_had_made_by_then():
    run = mlp()
    view = run.memory.without(label=1).as_of(12)
    assert_weights(view, "4", run.replay("4", lambda slot: slot.columns.get("label") != 1, until=12))


# -- dual and primal --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [mlp, sequence, twice], ids=lambda training: training.__name__)
def test_dual_equals_primal_equals_trained(training):
    run = training()
    trained = run.model(run.queries).detach()
    torch.testing.assert_close(run.memory.dual(run.model)(run.queries), trained, **EXACT)
    torch.testing.assert_close(run.memory.primal(run.model)(run.queries).detach(), trained, **EXACT)


@few
@given(label=st.integers(0, 3), source=st.sampled_from(SOURCES), step=st.integers(0, 30))
def test_dual_equals_primal_for_every_view(label: int, source: str, step: int):
    run = mlp()
    view = (~run.memory.where(label=label)).without(source=source).as_of(step)
    dual, primal = view.dual(run.model)(run.queries), view.primal(run.model)(run.queries)
    torch.testing.assert_close(dual, primal.detach(), **EXACT)


@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-4), ("float16", 5e-3), ("int8", 6e-2)])
def test_dual_meets_the_trained_network_within_the_rounding_of_the_storage_type(storage: str, tolerance: float):
    run = mlp(storage, torch.float32)
    trained, dual = run.model(run.queries).detach(), run.memory.dual(run.model)(run.queries)
    assert dual.dtype == torch.float32
    assert (dual - trained).norm() <= tolerance * trained.norm()


def test_a_dual_layer_takes_any_leading_shape_and_is_the_layer():
    run = mlp()
    dual = run.memory.dual(run.model)
    assert all(isinstance(dual[number], sl.DualLinear) for number in (0, 2, 4))
    assert "180 slots" in repr(dual[0])
    for lead in ((), (0,), (2, 3), (2, 1, 3)):
        x = torch.randn(*lead, 7, dtype=torch.float64)
        torch.testing.assert_close(dual[2](x), run.model[2](x).detach(), **EXACT)


def test_dual_and_primal_leave_the_model_as_it_was():
    run = mlp()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.memory.without(label=1).dual(run.model)
    run.memory.without(label=1).primal(run.model)
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert isinstance(run.model[0], nn.Linear)


def test_a_model_that_is_itself_a_layer_has_a_dual():
    torch.manual_seed(1)
    model = nn.Linear(5, 4).double()
    inputs = whole_numbers(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_path = str(mlp().memory.path.parent / "itself.memory")
    with sl.record(model, optimizer, run_path, dtype="float64", overwrite=True):
        nn.functional.cross_entropy(model(inputs), torch.arange(6) % 4).backward()
        optimizer.step()
    memory = sl.open(run_path)
    torch.testing.assert_close(memory.dual(model)(inputs), model(inputs).detach(), **EXACT)
    assert memory.verify(model).ok


# -- verify -----------------------------------------------------------------------------------


def test_verify_finds_the_trained_network_exact_and_a_masked_one_not():
    run = mlp()
    checks = run.memory.verify(run.model)
    assert checks.ok
    assert list(checks) == list(LAYERS)
    assert all(check.relative_error <= 1e-10 for check in checks.values())
    assert not run.memory.without(label=1).verify(run.model).ok
    assert run.memory.as_of(11).verify().ok


# -- views are cheap --------------------------------------------------------------------------


def test_making_views_reads_no_slots(monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    reads = []

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (reads.append(name), original(*args, **kwargs))[1])

    count(engine, "in_blocks")
    count(LayerReader, "column_at")
    view = run.memory
    for label, source in itertools.product(range(4), SOURCES):
        view = ~view.where(label=label).without(source=source)
    view = view.as_of(20)
    assert reads == [], "a view must cost nothing until it is asked"
    view.weights("4")
    assert reads == ["in_blocks"], "one question is one scan"
