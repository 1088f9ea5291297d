"""Contributions: what each slot adds to a number of interest. They add up, or say they are first order."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spotlights as sl
from memories import EVERYTHING, Run, brute_totals, mlp, sequence, train, twice, whole_numbers


def contributions(run: Run, layer: str, target=1) -> sl.Contributions:
    return run.memory.attend(run.model, run.queries)[layer].contributions(target=target)


def gradient_of(run: Run, layer: str, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's output y and ∂logit/∂y, found by an independent hook."""
    seen = []
    hook = run.model.get_submodule(layer).register_forward_hook(lambda module, args, out: seen.append(out))
    logits = run.model(run.queries)
    hook.remove()
    return seen[0].detach(), torch.autograd.grad(logits[:, target].sum(), seen[0])[0]


# -- they add up ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_contributions_of_the_last_layer_and_the_initial_part_are_the_logit(target: int, bias: bool):
    run = mlp(bias=bias)
    c = contributions(run, "4", target)
    logit = run.model(run.queries)[:, target].detach()
    torch.testing.assert_close(c.initial + c.total(), logit, rtol=0, atol=1e-10)
    everything = torch.from_numpy(c.numpy()).sum(dim=1)
    torch.testing.assert_close(c.initial + everything, logit, rtol=0, atol=1e-10)
    assert c.exact
    assert c.note is None


@pytest.mark.parametrize("layer", ["0", "2"])
def test_contributions_of_a_hidden_layer_add_up_to_the_linear_form_and_say_first_order(layer: str):
    run = mlp()
    c = contributions(run, layer)
    output, gradient = gradient_of(run, layer, 1)
    linear_form = (output * gradient).sum(dim=1)
    torch.testing.assert_close(c.initial + c.total(), linear_form, rtol=0, atol=1e-10)
    assert not c.exact
    assert "first order" in str(c.note)
    assert "first order" in " ".join(str(c.top(3)).split())
    assert "first order" in " ".join(str(c.totals("label")).split())


@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-5), ("float16", 5e-3), ("int8", 5e-2)])
def test_contributions_add_up_within_the_rounding_of_the_storage_type(storage: str, tolerance: float):
    run = mlp(storage, torch.float32)
    c = contributions(run, "4")
    logit = run.model(run.queries)[:, 1].detach().double()
    size = torch.from_numpy(c.numpy()).abs().sum(dim=1)
    assert ((c.initial + c.total() - logit).abs() <= tolerance * size).all()


def test_contributions_over_several_rows_per_input_add_up():
    run = sequence()
    c = run.memory.attend(run.model, run.queries)["2"].contributions(lambda output: output[:, -1, 2], rows=True)
    truth = torch.zeros(2, 2, dtype=torch.float64)
    truth[:, -1] = run.model(run.queries)[:, -1, 2].detach()
    torch.testing.assert_close(c.initial + c.total(), truth.reshape(-1), rtol=0, atol=1e-10)
    assert c.exact


def test_contributions_over_several_calls_add_up_to_the_linear_form_of_both():
    run = twice()
    c = run.memory.attend(run.model, run.queries)["inner"].contributions(1, rows=True)
    seen = []
    hook = run.model.inner.register_forward_hook(lambda module, args, output: seen.append(output))
    logits = run.model(run.queries)
    hook.remove()
    gradients = torch.autograd.grad(logits[:, 1].sum(), seen)
    truth = torch.cat([(y.detach() * g).sum(dim=1) for y, g in zip(seen, gradients, strict=True)])
    torch.testing.assert_close(c.initial + c.total(), truth, rtol=0, atol=1e-10)
    assert not c.exact


# -- each of them -----------------------------------------------------------------------------


def test_each_contribution_is_what_the_optimizer_made_of_that_slot_alone():
    run = mlp()
    found = contributions(run, "4", 2).numpy()
    queries = run.memory.attend(run.model, run.queries)["4"].queries
    nothing = run.replay("4", lambda slot: False)
    for number in (0, 50, 101, 179):
        slot = run.slots["4"][number]
        alone = run.replay("4", lambda other, slot=slot: other is slot)
        made = queries @ (alone["weight"] - nothing["weight"])[2] + (alone["bias"] - nothing["bias"])[2]
        torch.testing.assert_close(torch.from_numpy(found[:, number]), made, rtol=1e-9, atol=1e-12)


def test_hidden_contributions_meet_finite_differences():
    run = mlp()
    found = contributions(run, "2", 3)
    part = run.memory.where(label=2)
    share = part.attend(run.model, run.queries)["2"].contributions(target=3).total()
    without = run.memory.without(label=2).parameters("2")
    small = 1e-6
    logits = []
    for sign in (1, -1):  # the layer with a little more, and a little less, of that part
        moved = copy.deepcopy(run.model)
        with torch.no_grad():
            for name, parameter in moved[2].named_parameters():
                parameter += sign * small * (parameter - without[name])
            logits.append(moved(run.queries)[:, 3])
    slope = (logits[0] - logits[1]) / (2 * small)
    torch.testing.assert_close(share, slope, rtol=1e-6, atol=1e-8)
    totals = found.totals("label")
    torch.testing.assert_close(totals.values[:, totals.groups.index(2)], share, rtol=1e-10, atol=1e-12)


def test_top_bottom_and_totals_of_contributions_are_those_of_all_of_them():
    run = mlp()
    c = contributions(run, "4")
    every = c.numpy()
    top, bottom = c.top(7), c.bottom(7)
    for query in range(3):
        order = sorted(range(180), key=lambda slot: (-every[query, slot], slot))
        assert top.slots[query, 0].tolist() == order[:7]
        order = sorted(range(180), key=lambda slot: (every[query, slot], slot))
        assert bottom.slots[query, 0].tolist() == order[:7]
    for column in ("label", "source"):
        expected = brute_totals(torch.from_numpy(every), run.column("4", column))
        totals = c.totals(column)
        for number, group in enumerate(totals.groups):
            torch.testing.assert_close(totals.values[:, number], expected[group], rtol=1e-10, atol=1e-12)


def test_bottom_by_example_and_per_label_are_the_smallest_ones():
    run = mlp()
    c = contributions(run, "4")
    sums = brute_totals(torch.from_numpy(c.numpy()), run.column("4", "example"))
    expected = sorted(sums, key=lambda example: float(sums[example][0]))[:5]
    assert [row["example"] for row in c.bottom(5, by="example").rows(0)] == expected
    per, every = c.bottom(1, per="label"), c.numpy()
    for number, group in enumerate(per.groups):
        members = [slot for slot, label in enumerate(run.column("4", "label")) if label == group]
        assert per.values[0, number, 0] == min(every[0, slot] for slot in members)


def test_contributions_of_a_view_are_those_of_its_slots():
    run = mlp()
    kept = [number for number, slot in enumerate(run.slots["4"]) if slot.columns.get("label") == 3]
    view = run.memory.where(label=3).attend(run.model, run.queries)["4"].contributions(target=1)
    assert view.numpy().tolist() == contributions(run, "4").numpy()[:, kept].tolist()
    empty = run.memory.where(label=3).where(label=2).attend(run.model, run.queries)["4"]
    assert not empty.contributions(target=1).total().any()


def test_the_initial_part_is_shrunk_by_weight_decay():
    torch.manual_seed(5)
    inputs, labels = whole_numbers(8, 5), torch.randint(0, 4, (8,))
    run = train(
        nn.Sequential(nn.Linear(5, 4)).double(),
        [(inputs, labels, {})] * 6,
        options={"lr": 0.1, "weight_decay": 0.5},
    )
    c = run.memory.attend(run.model, inputs)["0"].contributions(target=0)
    start = run.checkpoints[0]
    first = inputs @ start["0.weight"][0] + start["0.bias"][0]
    torch.testing.assert_close(c.initial, first * (1 - 0.1 * 0.5) ** 6, rtol=1e-12, atol=1e-12)


# -- the number of interest -------------------------------------------------------------------


def test_a_target_may_be_a_class_one_for_each_input_or_a_function():
    run = mlp()
    for target in ([2, 0, 1], (2, 0, 1), torch.tensor([2, 0, 1]), lambda out: out[range(3), [2, 0, 1]]):
        c = contributions(run, "4", target)
        logits = run.model(run.queries).detach()[range(3), [2, 0, 1]]
        torch.testing.assert_close(c.initial + c.total(), logits, rtol=0, atol=1e-10)
        assert c.exact
    same = contributions(run, "2", torch.tensor(2)).numpy() == contributions(run, "2", 2).numpy()
    assert same.all()


def test_a_linear_function_of_the_logits_is_exact_and_a_bent_one_says_first_order():
    run = mlp()
    margin = contributions(run, "4", lambda output: output[:, 2] - output[:, 0])
    logits = run.model(run.queries).detach()
    torch.testing.assert_close(margin.initial + margin.total(), logits[:, 2] - logits[:, 0], rtol=0, atol=1e-10)
    assert margin.exact
    bent = contributions(run, "4", lambda output: F.log_softmax(output, dim=1)[:, 2])
    difference = bent.initial + bent.total() - F.log_softmax(logits, dim=1)[:, 2]
    assert difference.abs().max() > 1e-3
    assert not bent.exact, "the sum is not the log-probability, so it must not be called exact"
    assert "first order" in str(bent.note)


@pytest.mark.parametrize("target", [4, -1, [0, 1, 4]])
def test_a_class_that_the_output_does_not_have_is_refused(target):
    with pytest.raises(sl.SettingError, match="classes 0 to 3"):
        contributions(mlp(), "4", target)


@pytest.mark.parametrize("target", [[0, 1], torch.zeros(3, 1, dtype=torch.int64)])
def test_a_target_of_the_wrong_shape_is_refused_with_both_shapes(target):
    with pytest.raises(sl.ShapeMismatchError, match="there are 3 inputs"):
        contributions(mlp(), "4", target)


def test_a_class_that_is_no_whole_number_is_refused():
    with pytest.raises(sl.SettingError, match="whole number"):
        contributions(mlp(), "4", torch.tensor([0.0, 1.0, 2.0]))


@pytest.mark.parametrize("function", [lambda output: output, lambda output: output.sum(), lambda output: 3])
def test_a_function_must_give_one_number_for_each_input(function):
    with pytest.raises(sl.ShapeMismatchError, match="one number for each input"):
        contributions(mlp(), "4", function)


def test_a_class_needs_an_output_of_inputs_and_classes():
    run = sequence()
    with pytest.raises(sl.SettingError, match=r"\(2, 2, 4\).*function"):
        contributions(run, "2", 1)


# -- when they can and cannot be had ----------------------------------------------------------


@pytest.mark.parametrize("kernel", ["cosine", "softmax"])
def test_contributions_need_the_plain_product(kernel: str):
    run = mlp()
    with pytest.raises(sl.UnsupportedError, match=kernel):
        run.memory.attend(run.model, run.queries, kernel=kernel)["4"].contributions(target=1)


@pytest.mark.parametrize("layer", ["0", "4"])
def test_frozen_networks_and_no_grad_give_the_same_contributions(layer: str):
    run = mlp()
    frozen = copy.deepcopy(run.model).requires_grad_(False)
    expected = contributions(run, layer).numpy()
    with torch.no_grad():
        found = run.memory.attend(frozen, run.queries)[layer].contributions(target=1)
        assert (found.numpy() == expected).all()
        assert (contributions(run, layer, lambda output: output[:, 1]).numpy() == expected).all()
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_layers_that_work_in_place_do_not_change_the_contributions():
    run = mlp()
    in_place = copy.deepcopy(run.model)
    in_place[1].inplace = in_place[3].inplace = True
    for layer in ("0", "2", "4"):
        found = run.memory.attend(in_place, run.queries)[layer].contributions(target=1)
        assert (found.numpy() == contributions(run, layer).numpy()).all(), (
            "the gradient was taken at what an in-place ReLU left of the layer's output"
        )


@pytest.mark.filterwarnings("ignore:.*has no exact rule")
def test_an_optimizer_without_a_rule_still_gives_scores(tmp_path):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 4)).double()
    optimizer = torch.optim.Rprop(model.parameters())
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64"):
        F.cross_entropy(model(whole_numbers(6, 5)), torch.arange(6) % 4).backward()
        optimizer.step()
    memory = sl.open(tmp_path / "m")
    a = memory.attend(model, whole_numbers(2, 5))["0"]
    assert a.scores().shape == (2, 6)
    for ask in (lambda: a.contributions(target=1), lambda: memory.weights("0"), lambda: memory.dual(model)):
        with pytest.raises(sl.UnsupportedError, match=r"Rprop.*SGD"):
            ask()


def test_a_memory_without_errors_gives_scores_only():
    torch.manual_seed(7)
    inputs = whole_numbers(6, 5)
    model = nn.Sequential(nn.Linear(5, 4)).double()
    run = train(model, [(inputs, torch.arange(6) % 4, {})], options=EVERYTHING, errors=False)
    a = run.memory.attend(model, inputs)["0"]
    assert torch.equal(a.scores(), inputs @ inputs.T)
    with pytest.raises(sl.UnsupportedError, match="errors=False"):
        a.contributions(target=0)
