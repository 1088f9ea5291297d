"""What every update rule keeps: the memory is the network as of any step, in parts that add up."""

import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from spotlights.optimizers import RULES, UpdateRule, rule_for, rule_named
from update_rules import EXACT, Circumstances, UpdateRuleContract, chunks_of

decays = st.sampled_from([0.0, 0.1])
betas = st.sampled_from([(0.9, 0.999), (0.5, 0.8), (0.0, 0.9)])

# An option of torch.optim.Adam since torch 2.7.
DECOUPLED = [{"decoupled_weight_decay": True}] * ("decoupled_weight_decay" in signature(torch.optim.Adam).parameters)


class TestSgd(UpdateRuleContract):
    rule = rule_named("sgd")
    optimizer = torch.optim.SGD
    options = st.fixed_dictionaries(
        {"weight_decay": decays, "maximize": st.booleans()},
    ).flatmap(
        lambda o: st.sampled_from(
            [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.4}, {"momentum": 0.9, "nesterov": True}]
        ).map(lambda momentum: o | momentum)
    )


class TestAdam(UpdateRuleContract):
    rule = rule_named("adam")
    optimizer = torch.optim.Adam
    options = st.fixed_dictionaries(
        {
            "betas": betas,
            "weight_decay": decays,
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
            "eps": st.sampled_from([1e-8, 1e-2]),
        }
    ).flatmap(
        lambda o: st.sampled_from([{}, {"foreach": True}, {"fused": True}, *DECOUPLED]).map(lambda other: o | other)
    )


class TestAdamW(UpdateRuleContract):
    rule = rule_named("adamw")
    optimizer = torch.optim.AdamW
    options = st.fixed_dictionaries(
        {"betas": betas, "weight_decay": decays, "amsgrad": st.booleans(), "maximize": st.booleans()}
    )


class TestNAdam(UpdateRuleContract):
    rule = rule_named("nadam")
    optimizer = torch.optim.NAdam
    options = st.fixed_dictionaries(
        {
            "betas": betas,
            "weight_decay": decays,
            "momentum_decay": st.sampled_from([4e-3, 0.3]),
            "decoupled_weight_decay": st.booleans(),
            "maximize": st.booleans(),
        }
    )


class TestRAdam(UpdateRuleContract):
    rule = rule_named("radam")
    optimizer = torch.optim.RAdam
    options = st.fixed_dictionaries(
        {
            "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
            "weight_decay": decays,
            "decoupled_weight_decay": st.booleans(),
            "maximize": st.booleans(),
        }
    )


class TestAdamax(UpdateRuleContract):
    rule = rule_named("adamax")
    optimizer = torch.optim.Adamax
    options = st.fixed_dictionaries({"betas": betas, "weight_decay": decays, "maximize": st.booleans()})


class TestRmsprop(UpdateRuleContract):
    rule = rule_named("rmsprop")
    optimizer = torch.optim.RMSprop
    options = st.fixed_dictionaries(
        {
            "alpha": st.sampled_from([0.99, 0.5]),
            "weight_decay": decays,
            "momentum": st.sampled_from([0.0, 0.9]),
            "centered": st.booleans(),
            "maximize": st.booleans(),
            "eps": st.just(1e-4),  # centered, the root of a difference: rounding counts for more with a smaller one
        }
    )


class TestAdagrad(UpdateRuleContract):
    rule = rule_named("adagrad")
    optimizer = torch.optim.Adagrad
    options = st.fixed_dictionaries(
        {
            "lr_decay": st.sampled_from([0.0, 0.1]),
            "weight_decay": decays,
            "initial_accumulator_value": st.sampled_from([0.0, 0.2]),
            "maximize": st.booleans(),
        }
    )


class TestAdadelta(UpdateRuleContract):
    rule = rule_named("adadelta")
    optimizer = torch.optim.Adadelta
    options = st.fixed_dictionaries(
        {"rho": st.sampled_from([0.9, 0.5]), "weight_decay": decays, "maximize": st.booleans()}
    )


class Lion(torch.optim.Optimizer):
    """Lion as it was published."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((beta1 * average + (1 - beta1) * p.grad).sign(), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class TestLion(UpdateRuleContract):
    rule = rule_named("lion")
    optimizer = Lion
    options = st.fixed_dictionaries({"betas": betas, "weight_decay": decays})

    def test_a_class_that_is_only_called_lion_is_not_taken_for_it(self):
        class Cub(Lion):
            def step(self, closure: None = None) -> None:
                super().step()
                super().step()

        Cub.__name__ = "Lion"
        assert rule_for(Cub([nn.Parameter(torch.zeros(2))], lr=0.1)) is None


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
class TestMuon(UpdateRuleContract):
    """In float64: torch's own Newton–Schulz is in bfloat16 (see the test below)."""

    rule = rule_named("muon")
    optimizer = getattr(torch.optim, "Muon", None)
    options = st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.95, 0.5]),
            "weight_decay": decays,
            "nesterov": st.booleans(),
            "adjust_lr_fn": st.sampled_from(["original", "match_rms_adamw"]),
            "ns_steps": st.sampled_from([1, 5]),
        }
    )

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.ndim == 2]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _in_float64(cls) -> Iterator[None]:
        patch = pytest.MonkeyPatch()
        patch.setattr(sys.modules["torch.optim._muon"], "_zeropower_via_newtonschulz", newton_schulz)
        yield
        patch.undo()


def newton_schulz(grad: Tensor, ns_coefficients: tuple[float, ...], ns_steps: int, eps: float) -> Tensor:
    """The published iteration, in the type of the gradient."""
    a, b, c = ns_coefficients
    X = grad.T if len(grad) > grad.shape[1] else grad
    X = X / X.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = X @ X.T
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.T if len(grad) > grad.shape[1] else X


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_what_torchs_bfloat16_leaves_of_muon_is_within_what_verify_allows():
    run = TestMuon().run({"lr": 0.02}, Circumstances())
    checked = run.memory.verify(run.model)
    assert checked.ok
    for check in checked.values():
        assert 1e-4 < check.change_error < 0.1, "rounding of an update in bfloat16"
    assert "bfloat16" in str(checked)


class _Crossed(nn.Module):
    """Queries, keys and values from different inputs: each uses its own rows of the one packed matrix."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes)
        self.value = sizes.get("vdim", 4)

    def forward(self, x: Tensor) -> Tensor:
        key = torch.cat([x, x.flip(1).square()], dim=1)
        return self.attention(x, key, key.cos()[..., : self.value], need_weights=False)[0]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("sizes", [{}, {"vdim": 3}], ids=["packed", "apart"])
def test_attentions_packed_projection_is_one_matrix_to_muon(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Muon makes all of `in_proj_weight` orthogonal at once, whatever rows of it a use has."""
    monkeypatch.setattr(sys.modules["torch.optim._muon"], "_zeropower_via_newtonschulz", newton_schulz)
    torch.manual_seed(0)
    model = _Crossed(**sizes).double()
    inputs = torch.randn(8, 3, 4).double()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    trainer = torch.optim.Muon(matrices, lr=0.02)
    with sl.record(model, trainer, tmp_path / "run.memory", dtype="float64"):
        for step in range(6):
            trainer.zero_grad()
            model(inputs[step : step + 2]).sin().sum().backward()
            trainer.step()
    verified = sl.open(tmp_path / "run.memory").verify(model)
    assert max(check.relative_error for check in verified.values()) < 1e-12, str(verified)
    assert not any(check.unexplained_steps for check in verified.values())


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_adam_leaves_tokens_alone_that_a_step_does_not_use(kind, steps_before, tmp_path):
    """It takes sparse gradients alone, so it has a test instead of the contract."""
    torch.manual_seed(0)
    tokens = torch.randint(40, (9, 3, 4))
    model = nn.Sequential(kind(40, 3, sparse=True), nn.ReLU()).double()
    model[0].weight.data[:4] = -1.0  # tokens whose gradients are zero are used all the same
    trainer = torch.optim.SparseAdam(model.parameters(), lr=0.05, betas=(0.7, 0.9))

    def step(number: int) -> None:
        trainer.zero_grad()
        model(tokens[number]).square().sum().backward()
        trainer.step()

    for number in range(steps_before):
        step(number)
    after = []
    with sl.record(model, trainer, tmp_path / "run.memory", segment_bytes=900):
        for number in range(steps_before, 9):
            step(number)
            after.append(model[0].weight.detach().clone())
    memory = sl.open(tmp_path / "run.memory")
    with chunks_of(1):
        for number, weight in enumerate(after, start=1):
            torch.testing.assert_close(memory.as_of(number).parameters("0")["weight"].T, weight, **EXACT)
    wanted = model(tokens[8]).detach().flatten(0, -2)[:, 1]
    parts = memory.attend(model[:1], tokens[8])["0"].contributions(target=lambda output: output.flatten(0, -2)[:, 1])
    torch.testing.assert_close((parts.initial + parts.total()).relu(), wanted, **EXACT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_keeps_the_contract(rule: UpdateRule):
    tested = {contract.rule.name for contract in UpdateRuleContract.__subclasses__() if contract.rule}
    tested.add("sparse-adam")  # the test above
    assert rule.name in tested, "write a contract test for the new rule: one small class here"
