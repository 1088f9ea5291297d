"""Golden answers: what the library answered at the commit that wrote them; a change of an answer must be on purpose.

Each subject trains a tiny network, records it, and asks through the public names alone. Its answers are plain numbers,
strings, lists and dicts. `answers.json` holds those that were written last:

    python tests/golden/answers.py --write            # all subjects
    python tests/golden/answers.py --write lstm gpt   # some of them; the others stay as they are

Networks start from weights and inputs that are the same on every processor, train in float64 where possible and for few
steps, so that processors differ by rounding alone. `tests/test_golden.py` compares, within each subject's tolerance.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from golden_runs import (
    EXAMPLES,
    INPUTS,
    LABELS,
    PROMPT,
    QUERIES,
    TARGET,
    TEXT,
    Gpt,
    Picture,
    Recurrent,
    batches,
    drawn,
    fill,
    last_letter,
    letters,
    mlp,
    record,
    sgd,
    sgd_run,
    uniform,
    windows,
)
from plain import (
    Plain,
    about,
    contributions_of,
    influence_of,
    numbers,
    parameters,
    passages,
    scores_of,
    suspects,
    top,
    totals,
    trained,
    verified,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import spotlights as sl

STORED = Path(__file__).with_name("answers.json")


# -- subjects: optimizers ----------------------------------------------------------------------


def of_sgd(folder: Path) -> Plain:
    memory, model = sgd_run(folder)
    spot = memory.attend(model, QUERIES)
    return {
        **trained(memory, model, QUERIES, TARGET),
        "scores": {name: scores_of(each) for name, each in spot.items()},
        "several targets": contributions_of(spot["4"], torch.tensor([0, 3, 1])),
        "a margin": contributions_of(spot["2"], lambda output: output[:, 1] - output[:, 0]),
        "verified without the model": verified(memory),
    }


def of_nesterov(folder: Path) -> Plain:
    model = mlp(bias=False)
    optimizer = sgd(model, nesterov=True)
    memory = record(folder / "nesterov.memory", model, optimizer, batches(12), clip=0.4)
    found = memory.attend(model, QUERIES)
    dampened = mlp()
    other = record(folder / "dampened.memory", dampened, sgd(dampened, dampening=0.3, momentum=0.5), batches(10))
    return {
        "weights": weights_of(memory),
        "contributions": contributions_of(found["4"], TARGET),
        "verified": verified(memory, model),
        "dampened": contributions_of(other.attend(dampened, QUERIES)["0"], TARGET),
        "dampened weights": weights_of(other),
    }


def of_adam(folder: Path) -> Plain:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.02)
    memory = record(folder / "adam.memory", model, optimizer, batches(14))
    return {
        **trained(memory, model, QUERIES, TARGET),
        "influence": influence_of(memory.attend(model, QUERIES).influence(TARGET, rule="whitened", balance=False)),
        "masked": masked(memory, model),
        "as of step 6": weights_of(memory.as_of(6)),
    }


def of_adamw(folder: Path) -> Plain:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    cosine = lambda step: 0.5 + 0.5 * math.cos(step / 14 * math.pi)  # noqa: E731
    memory = record(folder / "adamw.memory", model, optimizer, batches(14), clip=0.5, schedule=cosine)
    return {
        **trained(memory, model, QUERIES, TARGET),
        "masked": masked(memory, model),
        "influence": influence_of(memory.attend(model, QUERIES).influence(TARGET, rule="whitened", balance=False)),
    }


OTHER_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, momentum=0.5, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, lr_decay=0.01),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.5),
}


def of_other_optimizers(folder: Path) -> Plain:
    answers: dict[str, Plain] = {}
    for name, make in OTHER_OPTIMIZERS.items():
        model = mlp()
        memory = record(folder / f"{name}.memory", model, make(model.parameters()), batches(8))
        found = memory.attend(model, QUERIES)["2"].contributions(TARGET)
        answers[name] = {
            "verified": verified(memory, model),
            "weights": weights_of(memory),
            "contributions": numbers(found.numpy()),
            "totals by label": totals(found.totals("label")),
        }
    model = mlp()  # an optimizer without an exact rule is run again
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no exact rule")
        memory = record(folder / "rprop.memory", model, torch.optim.Rprop(model.parameters(), lr=0.001), batches(6))
    found = memory.attend(model, QUERIES)["2"]
    return {**answers, "Rprop": {"verified": verified(memory, model), "totals": totals(found.totals("label"))}}


def of_muon(folder: Path) -> Plain:
    model = mlp(bias=False)
    memory = record(folder / "muon.memory", model, torch.optim.Muon(model.parameters(), lr=0.01), batches(6))
    spot = memory.attend(model, QUERIES)
    return {
        "about": about(memory),
        "verified": verified(memory, model, within=0.1),
        "weights": weights_of(memory),
        "scores": totals(spot["4"].totals("label")),
        "contributions": totals(spot["4"].contributions(TARGET).totals("label")),
        "hidden contributions": totals(spot["2"].contributions(TARGET).totals("label")),
        "masked": parameters(memory.without(label=1).parameters("4")),
    }


# -- subjects: what is asked -------------------------------------------------------------------


@torch.no_grad()
def masked(memory: sl.Memory, model: nn.Module, **conditions: Any) -> Plain:
    """The network without some slots, in both forms, and with nothing but them."""
    conditions = conditions or {"label": 1}
    without, only = memory.without(**conditions), memory.where(**conditions)
    last = list(memory.layers)[-1]
    return {
        "slots": [len(without), len(only)],
        "parameters": {name: parameters(without.parameters(name)) for name in memory.layers},
        "primal": numbers(without.primal(model)(QUERIES)),
        "primal in one layer": numbers(without.primal(model, layers=[last])(QUERIES)),
        "dual": numbers(without.dual(model)(QUERIES)),
        "nothing but them": numbers(only.dual(model)(QUERIES)),
    }


def of_views(folder: Path) -> Plain:
    memory, model = sgd_run(folder)
    views = {
        "a string": memory.where(source="mnist"),
        "several strings": memory.where(source=["mnist", "kanji"]),
        "not a string": memory.without(source="mnist"),
        "labels": memory.where(label=[0, 2]),
        "a range of steps": memory.where(step=range(4, 11)),
        "composed": memory.where(step=range(2, 15)).without(label=3).where(source=["fashion", "mnist"]),
        "as of step 9": memory.as_of(9),
        "as of step 9, without": memory.as_of(9).without(label=1),
        "the rest": ~memory.where(label=2),
        "examples": memory.without(example=[3, 53, 103]),
    }
    answers: dict[str, Plain] = {}
    for name, view in views.items():
        spot = view.attend(model, QUERIES)
        found = spot["2"].contributions(TARGET)
        answers[name] = {
            "slots": len(view),
            "steps": view.steps,
            "weights": {layer: numbers(view.weights(layer)) for layer in view.layers},
            "scores": numbers(spot["2"].scores()),
            "top": top(spot["2"].top(3)),
            "totals": totals(spot["4"].totals("label")),
            "contributions": totals(found.totals("label")),
            "contributions by example": top(found.top(3, by="example")),
        }
    answers["masked"] = masked(memory, model)
    answers["masked by source"] = masked(memory, model, source=["mnist", "fashion"])
    answers["masked by steps"] = masked(memory, model, step=range(5, 12))
    answers["dual of everything"] = numbers(memory.dual(model)(QUERIES))
    final = memory.final_parameters() or {}
    answers["final parameters"] = {layer: parameters(found) for layer, found in final.items()}
    answers["verified as of step 9"] = verified(memory.as_of(9))
    return answers


def of_columns(folder: Path) -> Plain:
    """Strings, numbers with a fraction, and values that were not given."""
    memory, model = sgd_run(folder)
    spot = memory.attend(model, QUERIES)
    answers: dict[str, Plain] = {}
    for layer, measure in (("0", spot["0"]), ("2", spot["2"]), ("4", spot["4"].contributions(TARGET))):
        answers[layer] = {
            **{f"totals by {name}": totals(measure.totals(name)) for name in ("source", "name", "rating", "step")},
            "rating in bins": totals(measure.totals("rating", bins=3)),
            "example in bins": totals(measure.totals("example", bins=5)),
            "sizes in bins of steps": totals(measure.totals("step", bins=3, absolute=True)),
            "per source": top(measure.top(3, per="source")),
            "per name": top(measure.top(2, per="name")),
            "by source": top(measure.top(4, by="source")),
            "by name": top(measure.top(5, by="name")),
            "many": top(measure.top(12)),
        }
    return answers


def of_many_queries(folder: Path) -> Plain:
    """So many that totals are found from sums of keys; in a layer whose keys come again, and in one whose do not."""
    memory, model = sgd_run(folder)
    inputs = uniform(20, 5, seed=21)
    positive = uniform(18, 5, seed=22).abs()
    spot, view = memory.attend(model, inputs), memory.without(label=1).attend(model, inputs)
    answers: dict[str, Plain] = {}
    for layer in spot:
        answers[layer] = {
            "totals by label": totals(spot[layer].totals("label")),
            "totals by source": totals(spot[layer].totals("source")),
            "totals over steps": totals(spot[layer].totals("step", bins=5)),
            "sizes by label": totals(spot[layer].totals("label", absolute=True)),
            "sizes of positive queries": totals(
                memory.attend(model, positive)[layer].totals("label", absolute=True),
            ),
            "totals of a view": totals(view[layer].totals("label")),
            "by example": top(spot[layer].top(3, by="example")),
            "contributions": totals(spot[layer].contributions(TARGET).totals("label")),
            "top contributions": top(spot[layer].contributions(TARGET).top(3)),
            "query 19": top(spot[layer].at(19).top(3)),
            "queries 17 and 4": numbers(spot[layer].at([17, 4]).scores()),
            "contributions of queries 17 and 4": numbers(spot[layer].at([17, 4]).contributions(TARGET).numpy()),
        }
    answers["influence"] = influence_of(spot.influence(TARGET, rule="whitened", balance=False))
    return answers


def of_kernels(folder: Path) -> Plain:
    memory, model = sgd_run(folder)
    answers: dict[str, Plain] = {}
    for kernel in ("cosine", "softmax", "cosine-parts"):
        spot = memory.attend(model, QUERIES, kernel=kernel, layers=["0", "4"])
        answers[kernel] = {name: scores_of(each) for name, each in spot.items()}
    return answers


def of_influence(folder: Path) -> Plain:
    memory, model = sgd_run(folder)
    spot = memory.attend(model, QUERIES)
    return {
        "all layers": influence_of(spot.influence(TARGET, rule="whitened", balance=False)),
        "of a loss": influence_of(
            spot.influence(
                lambda output: F.cross_entropy(output, LABELS[:3], reduction="none"), rule="whitened", balance=False
            )
        ),
        "damped": influence_of(spot.influence(TARGET, rule="whitened", damping=0.05, balance=False)),
        **{f"layer {name}": influence_of(each.influence(TARGET, balance=False)) for name, each in spot.items()},
        "of a view": influence_of(
            memory.where(label=[0, 2]).attend(model, QUERIES).influence(TARGET, rule="whitened", balance=False)
        ),
        "as of step 9": influence_of(
            memory.as_of(9).attend(model, QUERIES).influence(TARGET, rule="whitened", balance=False)
        ),
        "by source": totals(spot.influence(TARGET, rule="whitened", balance=False).totals("source")),
        "top sources": top(spot.influence(TARGET, rule="whitened", balance=False).top(3, by="source")),
    }


def of_suspects(folder: Path) -> Plain:
    memory, _ = sgd_run(folder)
    return {
        "all": suspects(memory.suspects(EXAMPLES)),
        "few": suspects(memory.suspects(4)),
        "of a view": suspects(memory.without(label=1).suspects(6)),
        "as of step 9": suspects(memory.as_of(9).suspects(6)),
        "by a hidden layer": suspects(memory.suspects(5, layer="2")),
    }


# -- subjects: how it is recorded --------------------------------------------------------------


def of_folded(folder: Path) -> Plain:
    data = [batch for batch in batches() if batch[2]]
    answers: dict[str, Plain] = {}
    for name, options in {"all": {}, "from step 5": {"fold_from": 5}}.items():
        model = mlp()
        memory = record(folder / f"{name}.memory", model, sgd(model), data, fold="example", **options)
        spot = memory.attend(model, QUERIES)
        many = memory.attend(model, uniform(20, 5, seed=21))
        cosine = memory.attend(model, QUERIES, kernel="cosine")
        answers[name] = {
            "about": about(memory),
            **{
                layer: {
                    "scores": numbers(each.scores()),
                    "top": top(each.top(4)),
                    "by label": top(each.top(3, by="label")),
                    "per label": top(each.top(2, per="label")),
                    "totals by label": totals(each.totals("label")),
                    "totals by example": totals(each.totals("example")),
                    "many totals": totals(many[layer].totals("label")),
                    "cosine": numbers(cosine[layer].scores()),
                    "of a view": totals(memory.without(label=1).attend(model, QUERIES)[layer].totals("label")),
                }
                for layer, each in spot.items()
            },
        }
    return answers


def of_sampled(folder: Path) -> Plain:
    answers: dict[str, Plain] = {}
    data = [batch for batch in batches() if batch[2]]
    for name, options in {"slots": {"sample": 0.7}, "slots and steps": {"sample": 0.8, "sample_steps": 0.8}}.items():
        model = mlp()
        memory = record(folder / f"{name}.memory", model, sgd(model), data, clip=0.5, **options)
        spot = memory.attend(model, QUERIES)
        many = memory.attend(model, uniform(20, 5, seed=21))
        answers[name] = {
            "about": about(memory),
            "scores": scores_of(spot["0"]),
            "contributions": {layer: contributions_of(spot[layer], TARGET) for layer in ("2", "4")},
            "many totals": totals(many["2"].totals("label")),
            "influence": totals(spot.influence(TARGET, rule="whitened", balance=False).totals("example")),
            "influence through one layer": influence_of(spot["4"].influence(TARGET, balance=False)),
            "of a view": totals(memory.without(label=1).attend(model, QUERIES)["4"].totals("label")),
        }
    return answers


def stored_as(dtype: str, trained_in: torch.dtype) -> Callable[[Path], Plain]:
    def answers(folder: Path) -> Plain:
        memory, model = sgd_run(folder, trained_in, dtype=dtype)
        queries = QUERIES.to(trained_in)
        spot = memory.attend(model, queries)
        many = memory.attend(model, uniform(20, 5, seed=21).to(trained_in))
        return {
            "about": about(memory),
            "weights": weights_of(memory),
            "scores": {name: scores_of(spot[name]) for name in ("0", "4")},
            "contributions": {name: contributions_of(spot[name], TARGET) for name in ("0", "4")},
            "many totals": {name: totals(each.totals("label")) for name, each in many.items()},
            "cosine": scores_of(memory.attend(model, queries, kernel="cosine")["2"]),
            "influence": influence_of(spot.influence(TARGET, rule="whitened", balance=False)),
            "suspects": suspects(memory.suspects(5)),
            "without": weights_of(memory.without(label=1)),
        }

    return answers


def of_keys_alone(folder: Path) -> Plain:
    """Recorded without errors, and only some layers."""
    model = mlp()
    memory = record(folder / "keys.memory", model, sgd(model), batches(), errors=False, layers=["0", "2"])
    found = memory.attend(model, QUERIES)
    return {"about": about(memory), "scores": {name: scores_of(each) for name, each in found.items()}}


def _one_rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    model = mlp()
    data = []
    for step in range(10):
        ids = drawn(step, 4 * ranks)[rank::ranks]
        sources = [("even", "odd")[number % 2] if number % 5 else "fifth" for number in ids.tolist()]
        data.append((INPUTS[ids], LABELS[ids], {"example": ids, "label": LABELS[ids], "source": sources}))
    record(folder / "ranks.memory", DistributedDataParallel(model), sgd(model), data, clip=0.3, segment_bytes=3000)
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.destroy_process_group()


def of_ranks(folder: Path, ranks: int = 2) -> Plain:
    """Two processes that train one network, each with its share of every batch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "spotlights.api", "spotlights.recording"])
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        started = [pool.submit(_one_rank, rank, ranks, folder) for rank in range(ranks)]
        for each in started:
            each.result(timeout=120)
    model = mlp()
    model.load_state_dict(torch.load(folder / "model.pt"))
    memory = sl.open(folder / "ranks.memory")
    return {
        **trained(memory, model, QUERIES, TARGET),
        "scores": {name: scores_of(each) for name, each in memory.attend(model, QUERIES).items()},
        "by source": totals(memory.attend(model, QUERIES)["4"].totals("source")),
        "masked": masked(memory, model),
        "as of step 4": weights_of(memory.as_of(4)),
        "influence": influence_of(memory.attend(model, QUERIES).influence(TARGET, rule="whitened", balance=False)),
        "suspects": suspects(memory.suspects(5)),
    }


# -- subjects: other networks ------------------------------------------------------------------


def of_lstm(folder: Path) -> Plain:
    model, sequences, labels = fill(Recurrent()), uniform(10, 5, 3, seed=31), torch.arange(10) % 3
    data = []
    for step in range(10):
        ids = drawn(step, 4, examples=10)
        data.append((sequences[ids], labels[ids], {"example": ids, "label": labels[ids]}))
    memory = record(folder / "lstm.memory", model, sgd(model), data, clip=0.5)
    queries = uniform(2, 5, 3, seed=32)
    kernels: dict[str, Plain] = {}
    for kernel in ("cosine", "cosine-parts", "softmax"):
        spot = memory.attend(model, queries, kernel=kernel)
        kernels[kernel] = {name: totals(each.totals("label")) for name, each in spot.items()}
        kernels[f"{kernel}, top"] = {name: top(each.top(3, by="example")) for name, each in spot.items()}
    for part in ("x", "h"):
        for kernel in ("dot", "cosine"):
            spot = memory.attend(model, queries, kernel=kernel, part=part)
            kernels[f"{kernel} of {part}"] = {
                name: {
                    "scores": numbers(each.scores()),
                    "top": top(each.top(3)),
                    "totals": totals(each.totals("label")),
                }
                for name, each in spot.items()
            }
    one = memory.attend(model, queries[:1])
    return {
        **trained(memory, model, queries, 1),
        "scores": {name: scores_of(each) for name, each in memory.attend(model, queries).items()},
        "kernels": kernels,
        "whole scores": {name: totals(each.whole().totals("label")) for name, each in one.items()},
        "whole contributions": {
            name: totals(each.contributions(1).whole().totals("label")) for name, each in one.items()
        },
        "influence": influence_of(memory.attend(model, queries).influence(1, rule="whitened", balance=False)),
        "primal": numbers(memory.without(label=1).primal(model)(queries)),
        "dual": numbers(memory.without(label=1).dual(model)(queries)),
        "positions": totals(one[next(iter(one))].totals("position")),
    }


def of_convolution(folder: Path) -> Plain:
    images, labels = uniform(12, 1, 8, 8, seed=41), torch.arange(12) % 3
    queries = uniform(16, 1, 8, 8, seed=42)
    answers: dict[str, Plain] = {}
    optimizers = {"SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "AdamW": torch.optim.AdamW}
    for optimizer, make in optimizers.items():
        model, data = fill(Picture()), []
        for step in range(8):
            ids = drawn(step, 4, examples=12)
            data.append((images[ids], labels[ids], {"example": ids, "label": labels[ids]}))
        path = folder / f"{optimizer}.memory"
        memory = record(path, model, make(model.parameters()), data, segment_bytes=100_000)
        one, many = memory.attend(model, queries[:1]), memory.attend(model, queries)
        answers[optimizer] = {
            "about": about(memory),
            "verified": verified(memory, model),
            "weights": weights_of(memory),
            "whole scores": {
                name: {"top": top(each.whole().top(3)), "totals": totals(each.whole().totals("label"))}
                for name, each in one.items()
                if name != "norm"
            },
            "whole cosine": totals(
                memory.attend(model, queries[:1], kernel="cosine")["strokes"].whole().totals("label"),
            ),
            "whole": {name: contributions_of(each.contributions(1).whole(), 1) for name, each in one.items()},
            "rows": {name: totals(each.contributions(1, rows=True).totals("label")) for name, each in one.items()},
            "positions": totals(one["strokes"].totals("position", bins=6)),
            "influence": influence_of(many.influence(1, rule="whitened", balance=False)),
            "influence through one layer": influence_of(many["strokes"].influence(1, balance=False)),
            "primal": numbers(memory.without(label=1).primal(model)(queries)),
            "dual": numbers(memory.without(label=1).dual(model)(queries[:2])),
        }
    return answers


def of_gpt(folder: Path) -> Plain:
    """Tied weights, AdamW with decay for matrices alone, a warm-up, clipping."""
    model = fill(Gpt())
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.005)
    path, warm_up = folder / "gpt.memory", lambda step: min(1.0, (step + 1) / 5)
    memory = record(path, model, optimizer, windows(3), clip=1.0, schedule=warm_up, segment_bytes=100_000)
    prompt = letters(PROMPT)[None]
    spot = memory.attend(model, prompt)
    answers: dict[str, Plain] = {
        "about": about(memory),
        "verified": verified(memory, model),
        "weights": weights_of(memory),
        "output": numbers(spot.output),
        "masked weights": weights_of(memory.without(parity="odd")),
        "masked primal": numbers(memory.without(parity="odd").primal(model)(prompt)),
        "masked dual": numbers(memory.without(parity="odd").dual(model)(prompt)),
        "as of step 5": weights_of(memory.as_of(5)),
        "influence": influence_of(spot.influence(last_letter, rule="whitened", balance=False), label="parity"),
    }
    for name, each in spot.items():
        found = each.contributions(last_letter, rows=True)
        answers[name] = {
            "totals": totals(each.totals("parity")),
            "top": top(each.at(len(PROMPT) - 1).top(3)),
            "exact": found.adds_up,
            "initial": numbers(found.initial),
            "contributions by parity": totals(found.totals("parity")),
            "whole by example": top(found.whole().top(3, by="example")),
            "bottom": top(found.whole().bottom(3, by="example")),
        }
    for name in ("head", "block.grow"):
        answers[f"passages of {name}"] = passages(spot[name].passages(TEXT, prompt=PROMPT, k=3, target=last_letter))
    answers["suspects"] = suspects(memory.suspects(5, layer="norm"))
    return answers


def of_text(folder: Path) -> Plain:
    """Passages of a text, folded and not."""
    answers: dict[str, Plain] = {}
    for fold in (None, "example"):
        model = fill(Gpt())
        path, layers = folder / f"{fold}.memory", ["block.grow", "block.mix"]
        options = {"fold": fold, "layers": layers, "segment_bytes": 100_000}
        memory = record(path, model, torch.optim.SGD(model.parameters(), lr=0.05), windows(3), **options)
        prompt = letters(PROMPT)[None]
        spot, cosine = memory.attend(model, prompt), memory.attend(model, prompt, kernel="cosine")
        found: dict[str, Plain] = {"about": about(memory)}
        for name in layers:
            found[name] = {
                "the last letter": passages(spot[name].passages(TEXT, prompt=PROMPT, k=4)),
                "several letters": passages(spot[name].passages(TEXT, tokens=[-1, -2, 3], k=3, around=8)),
                "words": passages(spot[name].passages(list(TEXT), k=2, around=5)),
                "cosine": passages(cosine[name].passages(TEXT, k=3)),
                "totals": totals(spot[name].totals("parity")),
                "positions": top(spot[name].at(10).top(4, by="example")),
            }
        if fold is None:
            contributed = spot["block.grow"].passages(TEXT, k=3, target=last_letter, tokens=[-1, -4])
            found["contributions"] = passages(contributed)
        answers[str(fold)] = found
    return answers


# -- all of them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Something to ask about, and how far an answer may be off, relative to the largest number beside it."""

    answers: Callable[[Path], Plain]
    tolerance: float = 1e-6
    needs: str | None = None
    """A name of `torch.optim` that older versions of torch do not have."""

    @property
    def missing(self) -> bool:
        return self.needs is not None and not hasattr(torch.optim, self.needs)


SUBJECTS: dict[str, Subject] = {
    "sgd": Subject(of_sgd),
    "nesterov": Subject(of_nesterov),
    "adam": Subject(of_adam),
    "adamw": Subject(of_adamw),
    "other optimizers": Subject(of_other_optimizers),
    "muon": Subject(of_muon, tolerance=1e-2, needs="Muon"),
    "views": Subject(of_views),
    "columns": Subject(of_columns),
    "many queries": Subject(of_many_queries),
    "kernels": Subject(of_kernels),
    "influence": Subject(of_influence),
    "suspects": Subject(of_suspects),
    "folded": Subject(of_folded),
    "sampled": Subject(of_sampled),
    "float32": Subject(stored_as("float32", torch.float32), tolerance=1e-4),
    "float16": Subject(stored_as("float16", torch.float64), tolerance=1e-4),
    "int8": Subject(stored_as("int8", torch.float64), tolerance=1e-4),
    "keys alone": Subject(of_keys_alone),
    "ranks": Subject(of_ranks),
    "lstm": Subject(of_lstm),
    "convolution": Subject(of_convolution),
    "gpt": Subject(of_gpt),
    "text": Subject(of_text),
}


def write(names: Sequence[str]) -> None:
    """Stores the answers of some subjects; those of the others stay as they are."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for name in names or SUBJECTS:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            stored[name] = SUBJECTS[name].answers(Path(folder))
        print(f"{name}: {len(_line(stored[name])) / 1000:.0f} kB, {time.perf_counter() - started:.1f} s")
    lines = [f"{json.dumps(name)}:{_line(stored[name])}" for name in SUBJECTS if name in stored]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _line(answers: Plain) -> str:
    return json.dumps(answers, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or set(sys.argv[2:]) - SUBJECTS.keys():
        sys.exit(f"usage: python {sys.argv[0]} --write [subject …]\nsubjects: {', '.join(SUBJECTS)}")
    write(sys.argv[2:])
