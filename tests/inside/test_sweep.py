"""The sweep under Adam: what masks mean there, and the checkpoints that it starts from."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import spotlights as sl
from spotlights.optimizers import rule_named
from spotlights.query import sweep
from spotlights.query.coefficients import StepMatrices
from training import chosen, examples, network
from update_rules import EXACT, Circumstances, UpdateRuleContract


class Adam(UpdateRuleContract):
    rule = rule_named("adam")
    optimizer = torch.optim.Adam


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


def test_a_sweep_starts_at_the_last_checkpoint_it_needs(monkeypatch: pytest.MonkeyPatch):
    run = Adam().run({"lr": 0.05}, Circumstances(), steps=20)
    reader = run.memory.view.reader
    kept = sorted(reader.checkpoints("2", "weight"))
    assert len(kept) > 2
    read = []
    whole = sweep.StepBlocks.block
    monkeypatch.setattr(sweep.StepBlocks, "block", lambda self, a, b: read.append(a) or whole(self, a, b))
    next(iter(StepMatrices(20).sweep(reader, "2").steps(run.memory.view.selection)))
    assert min(read) == kept[-1]


def test_checkpoints_of_the_state_add_at_most_a_quarter_to_what_is_written():
    for options in ({}, {"weight_decay": 0.1, "amsgrad": True}):
        run = Adam().run({"lr": 0.05, **options}, Circumstances(), steps=30)
        state_bytes = slot_bytes = 0
        for segment in run.memory.view.reader.segments:
            for name, placed in segment.layout.items():
                size = math.prod(placed.shape) * placed.dtype.itemsize
                if name.startswith("/state/"):
                    state_bytes += size
                elif not name.startswith("/log/"):
                    slot_bytes += size
        assert 0 < state_bytes <= slot_bytes / 4
