"""One verdict everywhere: `verify`, `info` and every result say "exact" where that is so, and else what is missing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import (
    OF_THE_CHANGE,
    Run,
    adam,
    assert_adds_up,
    assert_adds_up_exactly,
    assert_honest,
    listening,
    parts_of,
    run,
    sgd,
    turn,
    words,
)
from torch import Tensor, nn

import spotlights as sl

D, L, CLASSES = 5, 6, 3
X, LABELS = torch.randn(16, D, generator=torch.Generator().manual_seed(1)), torch.arange(16) % CLASSES
TEXTS = torch.randint(9, (16, L), generator=torch.Generator().manual_seed(2))
IDS = torch.tensor([3, 1, 4, 7, 9, 12, 0, 5])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X[IDS]), LABELS[IDS])


def ordinary(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS, label=LABELS[IDS])
    turn(optimizer, loss_of(model))


def with_penalty(penalty: Callable[[nn.Module], Tensor]) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        turn(optimizer, loss_of(model) + penalty(model))

    return step


def l1(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([p.abs().sum() for p in model.parameters()]).sum()


def l2(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def gradient_penalty(model: nn.Module) -> Tensor:
    x = X[IDS].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


# -- verify judges the change ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [l1, l2, gradient_penalty])
def test_verify_says_no_when_a_penalty_made_part_of_a_small_change(penalty, tmp_path):
    done = run(mlp(), sgd(1e-5), tmp_path / "m", with_penalty(penalty))
    assert_honest(done)


def test_verify_judges_the_change_under_bfloat16_autocast(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model) + 0.1 * model[0].weight.square().sum()  # type: ignore[index]
        turn(optimizer, loss)

    done = run(mlp(), sgd(1e-5), tmp_path / "m", step)
    check = done.memory.verify(done.model)["0"]
    assert check.change_error > 0.01, "the penalty is no part of the slots"
    assert not check.ok


def test_contributions_of_a_run_under_bfloat16_autocast_say_how_much_is_missing(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        turn(optimizer, loss)

    done = run(mlp(), sgd(), tmp_path / "m", step)
    assert done.memory.verify(done.model).ok
    parts = done.memory.attend(done.model, X[:1])["2"].contributions(target=1)
    assert not parts.exact
    assert 1e-4 < parts.missing.share < 0.03
    assert "gradients were computed in bfloat16" in parts.note
    assert not done.memory.info.as_dict()["exact"]
    assert not done.heard.warnings


class Around(nn.Module):
    """The module `inner` is never called, so that it has no slots."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh((x[:, None] * self.inner.weight).sum(-1) + self.inner.bias))


def test_verify_says_no_for_a_layer_without_slots_however_small_the_change(tmp_path):
    done = run(Around(), adam(1e-6, weight_decay=0.0), tmp_path / "m", ordinary)
    if done.memory.layers["inner"].slots == 0:
        assert not done.memory.verify(done.model)["inner"].ok
    assert_honest(done)


def test_a_layer_that_did_not_change_is_verified(tmp_path):
    done = run(mlp(), sgd(0.0), tmp_path / "m", ordinary)
    assert done.memory.verify(done.model).ok


# -- what the result says ----------------------------------------------------------------------------------------------


def clamped(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    ordinary(model, optimizer, recorder, number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


def clipped_by_value(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    optimizer.zero_grad()
    loss_of(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    optimizer.step()


def noisy(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    optimizer.zero_grad()
    loss_of(model).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += 0.01 * torch.randn_like(parameter.grad)
    optimizer.step()


UNEXPLAINED: dict[str, tuple[Callable[..., None], str]] = {
    "an L1 penalty": (with_penalty(l1), "penalty"),
    "a gradient penalty": (with_penalty(gradient_penalty), "penalty"),
    "clamped weights": (clamped, "outside the optimizer"),
    "clip_grad_value_": (clipped_by_value, "clip"),
    "noise on the gradient": (noisy, "gradient"),
}


@pytest.mark.parametrize("case", UNEXPLAINED)
def test_contributions_add_up_or_say_how_much_is_missing(case, tmp_path):
    done = run(mlp(), sgd(momentum=0.9), tmp_path / "m", UNEXPLAINED[case][0])
    spot = done.memory.attend(done.model, X[:2])
    assert_adds_up(spot["2"].contributions(target=1), done.model(X[:2])[:, 1])
    assert_honest(done)


@pytest.mark.parametrize("case", UNEXPLAINED)
def test_the_first_unexplained_step_warns_with_the_likely_cause(case, tmp_path):
    step, cause = UNEXPLAINED[case]
    done = run(mlp(), sgd(), tmp_path / "m", step)
    if done.memory.verify(done.model).ok:
        assert not done.heard.warnings
        return
    assert len(done.heard.warnings) == 1, done.heard.warnings
    assert "step" in done.heard.warnings[0]
    assert cause in done.heard.warnings[0]


def test_values_clipped_one_by_one_are_exact_or_marked(tmp_path):
    """A factor per entry is a sign and a bound; marked where that is not recorded (the tests above)."""
    done = run(mlp(), sgd(), tmp_path / "m", clipped_by_value)
    if done.memory.info.as_dict()["exact"]:
        assert done.memory.verify(done.model).ok


# -- other weights than those of the last step -------------------------------------------------------------------------


def stopped_early(tmp_path) -> Run:
    """Six steps; the weights of the third are restored at the end, as early stopping does."""
    kept: dict[str, Any] = {}

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        ordinary(model, optimizer, recorder, number)
        if number == 2:
            kept.update(copy.deepcopy(model.state_dict()))

    return run(mlp(), sgd(), tmp_path / "m", step, steps=6, after=lambda model: model.load_state_dict(kept))


def test_a_restored_checkpoint_is_recognised_as_the_weights_of_its_step(tmp_path):
    done = stopped_early(tmp_path)
    with listening() as heard:
        parts = done.memory.attend(done.model, X[:1])["2"].contributions(target=1)
    assert "as_of(3)" in heard or "as_of(3)" in (parts.note or ""), (heard, parts.note)
    assert_adds_up(parts, done.model(X[:1])[:, 1])
    as_of = done.memory.as_of(3).attend(done.model, X[:1])["2"].contributions(target=1)
    assert_adds_up_exactly(as_of, done.model(X[:1])[:, 1])


def test_verify_says_of_which_step_the_weights_are(tmp_path):
    done = stopped_early(tmp_path)
    for check in done.memory.verify(done.model).values():
        assert "it has the weights of step 3: use memory.as_of(3)" in words(check.reasons)
    assert done.memory.as_of(3).verify(done.model).ok
    assert "At step 6" in done.heard, "the weights were changed before the recording ended"
    for check in done.memory.verify(done.memory.as_of(0).primal(mlp())).values():
        assert "it has the weights of step 0: use memory.as_of(0)" in words(check.reasons)
    with torch.no_grad():
        done.model[2].bias[-1] += 1.0
    for check in done.memory.verify(done.model).values():
        assert "whose weights are those after step 6: by up to" in words(check.reasons)


def test_a_moving_average_of_the_weights_is_not_called_exact(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(model := mlp(), avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        ordinary(model, optimizer, recorder, number)
        average.update_parameters(model)

    done = run(model, sgd(), tmp_path / "m", step)
    with listening() as heard:
        parts = done.memory.attend(average, X[:1])["2"].contributions(target=1)
    assert not parts.exact
    assert "differ" in f"{parts.note} {heard}", "that these are not the recorded weights"
    assert_adds_up(parts, average.module(X[:1])[:, 1])


def test_the_trained_model_is_attended_to_without_a_word(tmp_path):
    done = run(mlp(), sgd(), tmp_path / "m", ordinary)
    with listening() as heard:
        parts = done.memory.attend(done.model, X[:1])["2"].contributions(target=1)
    assert_adds_up_exactly(parts, done.model(X[:1])[:, 1])
    assert not heard.warnings


# -- no example taught rounding ----------------------------------------------------------------------------------------


def before_batch_norm(*, bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


class NormConvNorm(nn.Module):
    """BN → 1×1 convolution → BN: MobileNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1)
        self.second, self.head = nn.BatchNorm2d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :4, None, None] * torch.arange(1.0, 5.0).view(2, 2)
        return self.head(F.relu(self.second(self.conv(self.first(x)))).mean(dim=(2, 3)))


class Attending(nn.Module):
    """The bias of the keys adds one constant to all attention logits of a query; softmax ignores it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.head = nn.Linear(D, 6), nn.Linear(D, 6), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None] * torch.arange(1.0, 4.0)[:, None]
        attention = (self.query(rows) @ self.key(rows).transpose(1, 2)).softmax(-1)
        return self.head((attention @ rows).mean(dim=1))


ROUNDED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a bias before a batch norm": (lambda: before_batch_norm(bias=True), "0"),
    "a batch norm before a convolution before a batch norm": (NormConvNorm, "first"),
    "the bias of attention's keys": (Attending, "key"),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_movement_by_rounding_is_a_part_of_its_own_and_sums_stay_exact(case, tmp_path):
    make, layer = ROUNDED[case]
    done = run(make(), adam(0.01), tmp_path / "m", ordinary, steps=30)
    check = done.memory.verify(done.model)[layer]
    assert check.ok, f"NO without a reason: {words(done.memory.verify(done.model))}"
    parts = done.memory.attend(done.model, X[:1])[layer].contributions(unit=0)
    assert isinstance(parts.rounding, Tensor)
    own: list[Tensor] = []
    handle = done.model.get_submodule(layer).register_forward_hook(lambda *given: own.append(given[2]))
    done.model.eval()(X[:1])
    handle.remove()
    wanted = own[0][..., 0].sum() if own[0].ndim < 4 else own[0][:, 0].sum()  # over the rows of the input
    torch.testing.assert_close(parts_of(parts).sum(), wanted.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in ROUNDED if "attention" not in case])  # no answer depends on that
def test_without_one_example_the_answer_stays_within_reason(case, tmp_path):
    make, _ = ROUNDED[case]
    done = run(make(), adam(0.01), tmp_path / "m", ordinary, steps=60)
    done.model.eval()
    with torch.no_grad():
        answer = done.model(X)
        without = done.memory.without(example=3).primal(done.model)(X)
    largest = float(answer.abs().max())
    assert float(without.abs().max()) < 20 * largest, f"{without[0].tolist()} beside {answer[0].tolist()}"


# -- κ -----------------------------------------------------------------------------------------------------------------


def test_a_sum_knows_its_cancellation(tmp_path):
    done = run(mlp(), sgd(), tmp_path / "m", ordinary, steps=10)
    parts = done.memory.attend(done.model, X[:2])["2"].contributions(target=1)
    magnitudes = parts.totals("step", bins=1, absolute=True).values.sum(dim=1)
    torch.testing.assert_close(parts.kappa, magnitudes / parts.total().abs(), rtol=1e-6, atol=0)


def cancelling(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    """Examples 0 and 1 pull with great force in opposite directions."""
    recorder.batch(example=torch.tensor([0, 1]))
    outputs = model(X[:1].expand(2, -1))
    turn(optimizer, 1e4 * (outputs[0] - outputs[1]).sum() + outputs.square().sum() * 1e-3)


def test_a_large_cancellation_is_printed(tmp_path):
    done = run(nn.Sequential(nn.Linear(D, CLASSES)), sgd(0.01), tmp_path / "m", cancelling)
    parts = done.memory.attend(done.model, X[:1])["0"].contributions(target=1)
    assert float(parts.kappa.max()) > 1e4
    assert "κ" in words(parts.top(2, by="example"))


def test_a_mask_far_outside_what_the_network_computed_warns_once(tmp_path):
    done = run(nn.Sequential(nn.Linear(D, CLASSES)), sgd(0.01), tmp_path / "m", cancelling)
    for kind in ("primal", "dual"):
        with listening() as heard:
            masked = getattr(done.memory.without(example=0), kind)(done.model)
            masked(X[:1])
            masked(X[:1])
        assert len(heard.warnings) == 1, f"{kind}: {masked(X[:1]).tolist()} without a word"


# -- the layer that answers --------------------------------------------------------------------------------------------


class HeadFirst(nn.Module):
    """The layer that answers is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, CLASSES), nn.Linear(D, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_suspects_use_the_layer_that_answers(tmp_path):
    done = run(HeadFirst(), sgd(), tmp_path / "m", ordinary)
    assert done.memory.suspects(3).layer == "head"
    assert done.memory.suspects(3).examples == done.memory.suspects(3, layer="head").examples


class TiedGpt(nn.Module):
    """Token and position embeddings, a norm, and the output layer with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(9, 8), nn.Embedding(L, 8)
        self.mlp, self.ln_f = nn.Linear(8, 8), nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 9, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, texts: Tensor) -> Tensor:
        x = self.wte(texts) + self.wpe(torch.arange(texts.shape[1]))
        return self.lm_head(self.ln_f(x + torch.tanh(self.mlp(x))))


def next_token(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
    recorder.batch(example=IDS)
    logits = model(TEXTS[IDS, :-1])
    logits = getattr(logits, "logits", logits)
    turn(optimizer, F.cross_entropy(logits.flatten(0, 1), TEXTS[IDS, 1:].flatten()))


def test_a_look_at_a_part_of_the_network_does_not_change_which_layer_answers(tmp_path):
    torch.manual_seed(0)
    model, inputs, labels = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(9, 4), torch.randint(3, (9,))

    def step(model, optimizer, recorder, number):
        recorder.batch(example=torch.arange(9))
        loss = F.cross_entropy(model(inputs), labels)
        model[0](inputs)  # for a plot, say
        turn(optimizer, loss)

    memory = run(model, sgd(), tmp_path / "m", step).memory
    assert memory.suspects(3).layer == "1"


def test_suspects_of_a_tied_language_model_use_its_output_layer(tmp_path):
    done = run(TiedGpt(), adam(), tmp_path / "m", next_token)
    suspects = done.memory.suspects(3)
    assert suspects.layer in ("lm_head", "wte"), "not the norm, which was registered last"
    assert suspects.examples == done.memory.suspects(3, layer=suspects.layer).examples


# -- what the model returns --------------------------------------------------------------------------------------------


@dataclass
class ModelOutput:
    """As Hugging Face's."""

    logits: Tensor
    hidden_states: Tensor


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.head = nn.Linear(D, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        if self.kind == "tuple":
            return logits, hidden
        if self.kind == "logits":
            return ModelOutput(logits, hidden)
        return {"scores": logits, "hidden": hidden}


CHOOSE: dict[str, Callable[[Any], Tensor]] = {
    "tuple": lambda output: output[0][:, 1],
    "logits": lambda output: output.logits[:, 1],
    "dict": lambda output: output["scores"][:, 1],
}


def returned(kind: str, tmp_path) -> Run:
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=IDS)
        output = model(X[IDS])
        logits = output[0] if kind == "tuple" else output.logits if kind == "logits" else output["scores"]
        turn(optimizer, F.cross_entropy(logits, LABELS[IDS]))

    return run(Returns(kind), sgd(), tmp_path / "m", step)


@pytest.mark.parametrize("kind", CHOOSE)
def test_contributions_in_the_last_layer_are_exact_whatever_the_model_returns(kind, tmp_path):
    done = returned(kind, tmp_path)
    parts = done.memory.attend(done.model, X[:2])["head"].contributions(CHOOSE[kind])
    assert_adds_up_exactly(parts, CHOOSE[kind](done.model(X[:2])))
    assert "first order" not in (parts.note or "")


@pytest.mark.parametrize("kind", ["tuple", "logits"])
def test_a_class_is_a_target_wherever_the_logits_are_unambiguous(kind, tmp_path):
    done = returned(kind, tmp_path)
    parts = done.memory.attend(done.model, X[:2])["head"].contributions(1)
    assert_adds_up_exactly(parts, CHOOSE[kind](done.model(X[:2])))


def test_an_ambiguous_output_is_refused_with_its_structure_and_an_expression_that_fits(tmp_path):
    done = returned("dict", tmp_path)
    with pytest.raises(sl.SettingError) as refused:
        done.memory.attend(done.model, X[:2])["head"].contributions(1)
    assert "scores" in str(refused.value)
    assert "(2, 3)" in str(refused.value)
    assert 'lambda output: output["scores"][:, 1]' in str(refused.value)


def test_the_expression_that_fits_passes_over_a_loss(tmp_path):
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(D, CLASSES)

        def forward(self, x: Tensor) -> Any:
            logits = self.head(x)
            return logits.square().mean(), logits

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        turn(optimizer, F.cross_entropy(model(X[IDS])[1], LABELS[IDS]))

    done = run(WithLoss(), sgd(), tmp_path / "m", step)
    with pytest.raises(sl.SettingError, match=r"lambda output: output\[1\]\[:, 2\]"):
        done.memory.attend(done.model, X[:2]).influence(2)


# -- units of a layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adam()], ids=["SGD", "AdamW"])
def test_a_hidden_layer_can_be_asked_for_its_own_output_unit(optimizer, tmp_path):
    done = run(mlp(), optimizer, tmp_path / "m", ordinary)
    parts = done.memory.attend(done.model, X[:2])["0"].contributions(unit=3)
    assert_adds_up_exactly(parts, done.model[0](X[:2])[:, 3])  # type: ignore[index]


# -- whole inputs ------------------------------------------------------------------------------------------------------


def last_token_is_7(output: Tensor) -> Tensor:
    """The logit of token 7 after the last token."""
    return output[:, -1, 7]


def test_the_answer_is_about_whole_inputs_unless_rows_are_asked_for(tmp_path):
    done = run(TiedGpt(), sgd(), tmp_path / "m", next_token)
    attention = done.memory.attend(done.model, TEXTS[:2])["mlp"]
    whole, rows = attention.contributions(last_token_is_7), attention.contributions(last_token_is_7, rows=True)
    assert len(whole) == 2, "two inputs"
    assert len(rows) == 2 * L, "two inputs of six rows"
    torch.testing.assert_close(whole.total(), rows.total().view(2, L).sum(dim=1))
    torch.testing.assert_close(whole.initial, rows.initial.view(2, L).sum(dim=1))
    top = done.memory.attend(done.model, TEXTS[:1])["mlp"].contributions(last_token_is_7).top(3, by="example")
    assert len(top) == 1
    assert float(top.values.abs().max()) > 0, "query 0 of six is not the input"


def test_slots_without_an_example_are_shown_as_what_they_are(tmp_path):
    done = run(TiedGpt(), sgd(), tmp_path / "m", next_token)
    spot = done.memory.attend(done.model, TEXTS[:1, :-1])
    shown = words(spot["wpe"].contributions(last_token_is_7).top(30, by="example"))
    assert "position 4, all examples" in shown, shown


# -- influence ---------------------------------------------------------------------------------------------------------


def test_influence_goes_through_layers_whose_slots_have_no_example(tmp_path):
    done = run(TiedGpt(), sgd(), tmp_path / "m", next_token)
    influence = done.memory.attend(done.model, TEXTS[:1]).influence(last_token_is_7)
    assert len(list(influence.top(3).rows(0))) == 3
    assert set(influence.totals("example").groups) - {None} == set(IDS.tolist())


def test_influence_works_where_the_layer_that_answers_is_frozen(tmp_path):
    model = mlp()
    model[2].requires_grad_(False)  # type: ignore[index]
    done = run(model, lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1), tmp_path / "m", ordinary)  # type: ignore[index]
    spot = done.memory.attend(done.model, X[:2])
    assert {row["example"] for row in spot.influence(1).top(4).rows(1)} <= {*IDS.tolist()}
    with pytest.raises(sl.UnsupportedError, match='No slot of "2" belongs to an example'):
        spot.influence(1, rule="joint")


def test_influence_works_beside_a_layer_without_any_slots(tmp_path):
    """A frozen first layer, as with LoRA."""
    model = mlp()
    model[0].requires_grad_(False)
    done = run(model, lambda model: torch.optim.SGD(model[2].parameters(), lr=0.1), tmp_path / "m", ordinary)
    influence = done.memory.attend(done.model, X[:1]).influence(1)
    assert len(list(influence.top(3).rows(0))) == 3
    assert len(list(influence.bottom(3).rows(0))) == 3


def test_influence_as_of_a_step_before_a_layer_was_thawed(tmp_path):
    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        model[0].requires_grad_(number >= 2)  # type: ignore[index]
        ordinary(model, optimizer, recorder, number)

    done = run(mlp(), sgd(), tmp_path / "m", step)
    influence = done.memory.as_of(1).attend(done.model, X[:1]).influence(1)
    assert len(list(influence.top(3).rows(0))) == 3


def test_influence_can_be_asked_for_through_some_layers(tmp_path):
    done = run(mlp(), sgd(), tmp_path / "m", ordinary)
    spot = done.memory.attend(done.model, X[:1])
    alone = spot.influence(1, rule="whitened", layers=["2"]).totals("example").values
    torch.testing.assert_close(alone, spot["2"].influence(1).totals("example").values)
    with pytest.raises(sl.UnknownNameError, match="fc9"):
        spot.influence(1, layers=["fc9"])
    for pattern in ("2", "[2-9]*"):
        again = spot.influence(1, rule="whitened", layers=pattern).totals("example").values
        torch.testing.assert_close(again, alone)


class Scaled(nn.Module):
    """A hidden layer whose weights are small and whose output is multiplied: the same function for every scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.body, self.head = nn.Linear(D, 6, bias=False), nn.Linear(6, CLASSES)
        with torch.no_grad():
            self.body.weight /= scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale * self.body(x)))


def test_influence_does_not_depend_on_the_scale_of_a_layer(tmp_path):
    """With Adam and the rate divided by the scale, both runs are the same function after every step."""
    answers = {}
    for scale in (1.0, 50.0):
        torch.manual_seed(0)
        model = Scaled(scale).double()

        def make(model: nn.Module, scale: float = scale) -> torch.optim.Optimizer:
            assert isinstance(model, Scaled)
            groups = [{"params": model.body.parameters(), "lr": 0.01 / scale}, {"params": model.head.parameters()}]
            return torch.optim.Adam(groups, lr=0.01, eps=1e-30)

        def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
            ids = IDS.roll(3 * number)[:4]
            recorder.batch(example=ids)
            turn(optimizer, F.cross_entropy(model(X[ids].double()), LABELS[ids]))

        done = run(model, make, tmp_path / f"{scale}", step, steps=8, dtype="float64")
        totals = done.memory.attend(done.model, X[:1].double()).influence(1).totals("example")
        answers[scale] = (done.model(X.double()), totals.values[0])
    torch.testing.assert_close(answers[1.0][0], answers[50.0][0])
    alike = torch.corrcoef(torch.stack([answers[1.0][1], answers[50.0][1]]))[0, 1]
    assert alike > 0.99, f"the same function, and the influences correlate by {alike:.2f}"


def test_influence_through_a_wide_convolution_does_not_take_seconds(tmp_path):
    """4,608 numbers in a key and few slots, as in the last stage of a ResNet-18: 26 s and more for all its layers."""
    images = torch.randn(4, 512, 2, 2)
    model = nn.Sequential(nn.Conv2d(512, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))

    def step(model: nn.Module, optimizer: Any, recorder: Any, number: int) -> None:
        recorder.batch(example=torch.arange(4))
        turn(optimizer, F.cross_entropy(model(images), LABELS[:4]))

    done = run(model, sgd(), tmp_path / "m", step, steps=2)
    start = time.process_time()  # whatever else the machine does
    done.memory.attend(done.model, images[:1]).influence(1).top(3)
    took = time.process_time() - start
    assert took < 4, f"{took:.1f} s of a processor"


def test_what_counts_as_exact(tmp_path):
    """A plain run: verify, info and the result agree."""
    done = run(mlp(), adam(), tmp_path / "m", ordinary)
    assert done.memory.info.as_dict()["exact"]
    assert all(check.change_error <= OF_THE_CHANGE for check in done.memory.verify(done.model).values())
    assert_adds_up_exactly(done.memory.attend(done.model, X[:2])["2"].contributions(target=1), done.model(X[:2])[:, 1])
