"""The contract of an update rule, and the runs that it is tested in."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from spotlights.optimizers import RULES, UpdateRule, exact_optimizers, rule_for, rule_named
from spotlights.query import sweep
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


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Sweeps in chunks of that many bytes."""
    kept, sweep.CHUNK_BYTES = sweep.CHUNK_BYTES, size
    try:
        yield
    finally:
        sweep.CHUNK_BYTES = kept
