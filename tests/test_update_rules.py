"""What every update rule keeps: the memory is the network as of any step, in parts that add up."""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
import spotlights.attention.sweep as sweep
from spotlights.optimizers import RULES, UpdateRule, exact_optimizers, rule_for, rule_named
from training import chosen, examples, network, state

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STEPS = 7
Options = st.SearchStrategy[dict[str, Any]]


@dataclass(frozen=True)
class Circumstances:
    """What may happen around an optimizer."""

    clip: float | None = None
    accumulate: int = 1
    two_groups: bool = False
    schedule: bool = False
    no_gradient_at: frozenset[int] = frozenset()
    """Steps at which the first layer has no gradient."""
    steps_before: int = 0
    """Steps that the optimizer took before recording began."""
    chunk_bytes: int = 1 << 20

    @classmethod
    def any(cls) -> st.SearchStrategy["Circumstances"]:
        return st.builds(
            cls,
            clip=st.sampled_from([None, 0.2]),
            accumulate=st.integers(1, 2),
            two_groups=st.booleans(),
            schedule=st.booleans(),
            no_gradient_at=st.frozensets(st.integers(0, STEPS - 1), max_size=3),
            steps_before=st.sampled_from([0, 2]),
            chunk_bytes=st.sampled_from([1, 1 << 20]),
        )


@dataclass
class Run:
    """A recorded training run and the network after each of its steps."""

    model: nn.Module
    memory: sl.Memory
    after: list[dict[str, Tensor]] = field(default_factory=list)


class UpdateRuleContract:
    """One class for all rules; a rule says which optimizer it is about and what options that has."""

    rule: UpdateRule
    optimizer: Callable[..., torch.optim.Optimizer]
    options: Options = st.just({})

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Those that such an optimizer takes."""
        return list(module.parameters())

    def make(self, model: nn.Sequential, options: dict[str, Any], two_groups: bool) -> torch.optim.Optimizer:
        if not two_groups:
            return self.optimizer(self.parameters(model), **options)
        other = {"lr": 0.3 * options["lr"], "weight_decay": 0.2}
        groups = [{"params": self.parameters(model[0])}, {"params": self.parameters(model[2]), **other}]
        return self.optimizer(groups, **options)

    def run(self, options: dict[str, Any], around: Circumstances, steps: int = STEPS) -> Run:
        model = network()
        optimizer = self.make(model, options, around.two_groups)
        self.take(model, optimizer, range(-around.steps_before, 0), around, None, [])
        path = Path(tempfile.mkdtemp()) / "run.memory"
        after = [state(model)]
        with sl.record(model, optimizer, path, dtype="float64", segment_bytes=1500) as recorder:
            self.take(model, optimizer, range(steps), around, recorder, after)
        return Run(model, sl.open(path), after)

    def take(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: range,
        around: Circumstances,
        recorder: sl.Recorder | None,
        after: list[dict[str, Tensor]],
    ) -> None:
        """Steps of an ordinary loop."""
        inputs, labels = examples()
        for step in steps:
            optimizer.zero_grad()
            for part in range(around.accumulate):
                ids = chosen(100 + 10 * step + part)
                if recorder is not None:
                    recorder.batch(example=ids, label=labels[ids])
                F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            if around.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), around.clip)
            if step in around.no_gradient_at:
                for parameter in model[0].parameters():
                    parameter.grad = None
            if around.schedule:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
            optimizer.step()
            after.append(state(model))

    # -- the promises ------------------------------------------------------------------------

    @settings(
        max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors]
    )
    @given(data=st.data(), around=Circumstances.any())
    def test_the_memory_is_the_network_in_parts_that_add_up(self, data: st.DataObject, around: Circumstances):
        options = {"lr": 0.05, **data.draw(self.options, label="options")}
        run = self.run(options, around)
        with chunks_of(around.chunk_bytes):
            self.assert_exact(run)

    def assert_exact(self, run: Run) -> None:
        for step in (len(run.after) - 1, len(run.after) // 2):
            memory = run.memory.as_of(step)
            for layer in ("0", "2"):
                for name, made in memory.parameters(layer).items():
                    torch.testing.assert_close(made, run.after[step][f"{layer}.{name}"], **EXACT, msg=f"step {step}")
        inputs = examples()[0][:3]
        attention, logits = run.memory.attend(run.model, inputs)["2"], run.model(inputs).detach()
        contributions = attention.contributions(target=1)
        every = torch.from_numpy(contributions.numpy())
        assert contributions.exact
        torch.testing.assert_close(contributions.initial + every.sum(dim=1), logits[:, 1], **EXACT)
        self.assert_a_mask_leaves_out_its_slots(run, every, contributions.initial)

    def assert_a_mask_leaves_out_its_slots(self, run: Run, every: Tensor, initial: Tensor) -> None:
        masked, inputs = run.memory.without(label=0), examples()[0][:3]
        attention = masked.attend(run.model, inputs)["2"]
        some = torch.from_numpy(attention.contributions(target=1).numpy())
        slots = run.memory.layers["2"].slots
        kept = sorted(row["slot"] for row in attention.top(slots).rows(0))
        torch.testing.assert_close(some, every[:, kept], **EXACT)
        parameters = masked.parameters("2")
        made = attention.queries @ parameters["weight"][1] + parameters["bias"][1]
        torch.testing.assert_close(initial + some.sum(dim=1), made, **EXACT)

    def test_the_dual_network_is_the_trained_one(self):
        run = self.run({"lr": 0.05}, Circumstances(schedule=True))
        inputs = examples()[0][:3]
        torch.testing.assert_close(run.memory.dual(run.model)(inputs), run.model(inputs).detach(), **EXACT)
        assert run.memory.verify(run.model).ok

    def test_a_resumed_run_is_one_run(self, tmp_path: Path):
        for keeps_state in (True, False):  # a user may forget to load the optimizer's state
            model, path = network(), tmp_path / f"{keeps_state}.memory"
            optimizer, around, after = self.make(model, {"lr": 0.05}, False), Circumstances(), [state(model)]
            with sl.record(model, optimizer, path, dtype="float64", segment_bytes=1500) as recorder:
                self.take(model, optimizer, range(4), around, recorder, after)
            again = self.make(model, {"lr": 0.05}, False)
            if keeps_state:
                again.load_state_dict(optimizer.state_dict())
            with sl.record(model, again, path, dtype="float64", resume=True, segment_bytes=1500) as recorder:
                self.take(model, again, range(4, 8), around, recorder, after)
            self.assert_exact(Run(model, sl.open(path), after))

    def test_it_is_registered_and_found(self):
        assert self.rule in RULES
        assert rule_named(self.rule.name) is self.rule
        assert self.rule.name.upper() in exact_optimizers()
        parameter = nn.Parameter(torch.zeros(2, 2))
        optimizer = self.optimizer([parameter], lr=0.1)
        assert rule_for(optimizer) is self.rule
        row = self.rule.log(optimizer.param_groups[0], optimizer.state.get(parameter, {}), True)
        assert len(row) == len(self.rule.fields)


class chunks_of:  # noqa: N801
    """Sweeps in chunks of that many bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._kept, sweep.CHUNK_BYTES = sweep.CHUNK_BYTES, self._size

    def __exit__(self, *error: object) -> None:
        sweep.CHUNK_BYTES = self._kept


# -- the rules ----------------------------------------------------------------------------------

decays = st.sampled_from([0.0, 0.1])
betas = st.sampled_from([(0.9, 0.999), (0.5, 0.8), (0.0, 0.9)])


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
        lambda o: st.sampled_from([{}, {"foreach": True}, {"fused": True}, {"decoupled_weight_decay": True}]).map(
            lambda other: o | other
        )
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


# -- what masks mean --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "amsgrad": True}])
def test_masked_slots_drop_out_given_the_second_moments_that_the_run_had(tmp_path: Path, options: dict):
    model, (inputs, labels) = network(5, 3), examples()
    layer = model[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, **options)
    weights, moment = layer.weight.detach().clone(), torch.zeros(3, 5, dtype=torch.float64)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", segment_bytes=600) as recorder:
        for step in range(9):
            ids = chosen(step)
            recorder.batch(label=labels[ids])
            optimizer.zero_grad()
            logits = model(inputs[ids])
            F.cross_entropy(logits, labels[ids]).backward()
            optimizer.step()
            errors = (logits.detach().softmax(1) - F.one_hot(labels[ids], 3)) / len(ids)
            errors = errors * (labels[ids] != 2)[:, None]  # without label 2
            gradient = errors.T @ inputs[ids] + options.get("weight_decay", 0.0) * weights
            moment = 0.9 * moment + 0.1 * gradient
            held = optimizer.state[layer.weight]
            second = held["max_exp_avg_sq" if "amsgrad" in options else "exp_avg_sq"]
            size = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            weights = weights - 0.05 / (1 - 0.9 ** (step + 1)) * moment / size
    torch.testing.assert_close(sl.open(tmp_path / "m").without(label=2).weights("0"), weights, **EXACT)


# -- checkpoints ------------------------------------------------------------------------------


def test_a_sweep_starts_at_the_last_checkpoint_it_needs(monkeypatch: pytest.MonkeyPatch):
    run = TestAdam().run({"lr": 0.05}, Circumstances(), steps=20)
    reader = run.memory._view.reader
    kept = sorted(reader.checkpoints("2", "weight"))
    assert len(kept) > 2
    read = []
    whole = sweep.StepBlocks.block
    monkeypatch.setattr(sweep.StepBlocks, "block", lambda self, a, b: read.append(a) or whole(self, a, b))
    next(iter(run.memory._view.unrolled("2")._sweep.chunks(run.memory._view.selection)))
    assert min(read) == kept[-1]


def test_checkpoints_of_the_state_add_at_most_a_quarter_to_what_is_written():
    for options in ({}, {"weight_decay": 0.1, "amsgrad": True}):
        run = TestAdam().run({"lr": 0.05, **options}, Circumstances(), steps=30)
        state_bytes = slot_bytes = 0
        for segment in run.memory._view.reader.segments:
            for name, placed in segment.layout.items():
                size = math.prod(placed.shape) * placed.dtype.itemsize
                if name.startswith("/state/"):
                    state_bytes += size
                elif not name.startswith("/log/"):
                    slot_bytes += size
        assert 0 < state_bytes <= slot_bytes / 4


# -- optimizers without a rule -----------------------------------------------------------------


def test_optimizers_without_a_rule_have_none():
    class OwnSgd(torch.optim.SGD):
        """May do anything in its step."""

    parameter = [nn.Parameter(torch.zeros(2))]
    assert rule_for(torch.optim.Rprop(parameter)) is None
    assert rule_for(OwnSgd(parameter, lr=0.1)) is None, "a subclass may do something else than its name says"
    assert rule_named(None) is None
    assert rule_named("sdg") is None


class Own(torch.optim.Optimizer):
    """Nobody has a rule for it: the step is as long as the gradient's norm says."""

    def __init__(self, params: Any, lr: float = 0.1, power: int = 1) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["power"], int)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    p.add_(p.grad * p.grad.norm() ** group["power"], alpha=-group["lr"] / self.state[p]["step"])


class TestReplayed(UpdateRuleContract):
    """Without a rule, `verify` runs the optimizer's own class again; nothing else is promised."""

    rule = None

    @pytest.mark.parametrize("optimizer", [torch.optim.Rprop, torch.optim.ASGD, Own])
    def test_the_memory_is_the_network_in_parts_that_add_up(self, optimizer: Any):
        self.optimizer = optimizer
        around = Circumstances(clip=0.2, accumulate=2, schedule=True, no_gradient_at=frozenset({1, 4}))
        run = self.run({"lr": 0.05}, around)
        cls = {"optimizer": Own} if optimizer is Own else {}
        checked = run.memory.verify(run.model, **cls)
        assert checked.ok
        assert max(check.relative_error for check in checked.values()) < 1e-10
        assert optimizer.__name__ in str(checked)
        assert run.memory.as_of(3).verify(**cls).ok
        assert "scores only" in str(run.memory.info)

    test_the_dual_network_is_the_trained_one = None
    test_a_resumed_run_is_one_run = None
    test_it_is_registered_and_found = None

    def test_what_cannot_be_replayed_is_refused_in_a_sentence(self):
        self.optimizer = Own
        run = self.run({"lr": 0.05}, Circumstances())
        with pytest.raises(sl.UnsupportedError, match="give its class: memory"):
            run.memory.verify(run.model)
        with pytest.raises(sl.UnsupportedError, match="cannot be run again"):
            run.memory.verify(run.model, optimizer=torch.optim.LBFGS)
        with pytest.raises(sl.UnsupportedError, match="not a part of it"):
            run.memory.where(label=1).verify(run.model, optimizer=Own)
        with pytest.raises(sl.UnsupportedError, match="contributions, weights and masks need one of"):
            run.memory.weights("0")
        started = self.run({"lr": 0.05}, Circumstances(steps_before=2))
        with pytest.raises(sl.UnsupportedError, match="before recording began"):
            started.memory.verify(started.model, optimizer=Own)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_keeps_the_contract(rule: UpdateRule):
    tested = {contract.rule.name for contract in UpdateRuleContract.__subclasses__() if contract.rule}
    assert rule.name in tested, "write a contract test for the new rule: one small class here"
