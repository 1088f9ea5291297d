"""What should influence be on a language model? Variants on two small GPTs, on which the rule was chosen.

    python benchmarks/language_variants.py wiki-letters fable-words --out runs/language

The rule for language models was chosen here, before `letter-gpt` was scored with it. Each example's gradient is kept
for each epoch's visit and for the final weights, layer by layer; that of the number of interest for the networks after
each quarter of the epochs. Printed: the linear datamodeling score of each variant and of the library's influence, and
how much less it is than EK-FAC's with final gradients and sampled labels, paired.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlights_paper.datasets import load_text
from spotlights_paper.experiments.truth.data import Data, passages_of
from spotlights_paper.experiments.truth.margins import Margins
from spotlights_paper.experiments.truth.recorded import ask, record, words
from spotlights_paper.experiments.truth.retraining import halves, retrained
from spotlights_paper.experiments.truth.scoring import score_of
from spotlights_paper.experiments.truth.settings import Setting, SmallGPT, epoch_orders, initial_network

HALVES = 60
Matrices = dict[str, Tensor]
"""By layer."""


def wiki_letters() -> Data:
    """Letters of WikiText-2, 32 at a time."""
    text = " ".join(load_text("wikitext-2").train.tokens[300_000:360_000]).lower()
    known = [" ", *(letter for letter, _ in sorted(Counter(text).most_common(60)))]
    return _of(list(text), known, 32, 600, 660, seed=3, between="")


def fable_words() -> Data:
    """Words of Æsop's fables, 24 at a time."""
    found = [word.strip(".,;:!?\"'()_") for word in "".join(load_text("aesop").train.tokens).lower().split()]
    found = [word for word in found if word][1500 : 1500 + 25 * 860]
    known = ["<unk>", *(word for word, _ in Counter(found).most_common(599))]
    return _of(found, known, 24, 800, 860, seed=4, between=" ")


def _of(
    tokens: Sequence[str], known: Sequence[str], length: int, train: int, count: int, *, seed: int, between: str
) -> Data:
    number = {token: place for place, token in enumerate(known)}
    encoded = torch.tensor([number.get(token, 0) for token in tokens])
    starts = torch.randperm(len(encoded) // (length + 1), generator=torch.Generator().manual_seed(seed))[:count]
    return passages_of(encoded, length, starts, train, lambda row: between.join(known[i] for i in row.tolist()))


SETTINGS: dict[str, tuple[Setting, Callable[[], Data]]] = {
    "wiki-letters": (
        Setting(
            name="wiki-letters",
            data="",
            network=partial(SmallGPT, 61, 32, width=24, heads=3, blocks=1),
            optimizer="adamw",
            lr=3e-3,
            batch=24,
            epochs=12,
        ),
        wiki_letters,
    ),
    "fable-words": (
        Setting(
            name="fable-words",
            data="",
            network=partial(SmallGPT, 600, 24, width=32, heads=4, blocks=2),
            optimizer="adamw",
            lr=2e-3,
            batch=16,
            epochs=8,
            at_once=10,
        ),
        fable_words,
    ),
}


# -- gradients of each example -------------------------------------------------------------------


@dataclass(eq=False)
class Gradients:
    """Σ δ⊗[k; 1] of each example, and the moments of keys and errors over all rows."""

    examples: Matrices
    keys: Matrices
    errors: Matrices

    def __add__(self, other: Gradients) -> Gradients:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Gradients(*({name: a[name] + b[name] for name in a} for a, b in pairs))


class Watched:
    """The linear layers of a network; what came in, and the gradient of what went out."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Any]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(partial(self._hook, name))

    def _hook(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen[name] = [args[0].detach(), None]
        if output.requires_grad:
            output.register_hook(lambda gradient: self.seen[name].__setitem__(1, gradient))

    def take(self, *, times: int) -> Gradients:
        """After a backward pass of a loss that was divided by `times`."""
        made = Gradients({}, {}, {})
        for name, (keys, errors) in self.seen.items():
            k, e = torch.cat([keys, torch.ones(*keys.shape[:-1], 1)], dim=-1), errors * times
            made.examples[name] = torch.einsum("bto,bti->boi", e, k)
            made.keys[name] = torch.einsum("bti,btj->ij", k, k).double()
            made.errors[name] = torch.einsum("bto,btp->op", e, e).double()
        return made


def together(parts: Sequence[Gradients], order: Tensor) -> Gradients:
    """Of several batches, in the order of the examples."""
    back = order.argsort()
    total = Gradients({name: torch.cat([p.examples[name] for p in parts])[back] for name in parts[0].examples}, {}, {})
    for part in parts:
        for side in ("keys", "errors"):
            for name, moment in getattr(part, side).items():
                getattr(total, side)[name] = getattr(total, side).get(name, 0.0) + moment
    return total


def all_gradients(setting: Setting, data: Data) -> tuple[list[Gradients], Gradients, Gradients, list[Matrices]]:
    """Of each epoch's visits, of the final weights, of the final weights with sampled labels; and of the tests."""
    model = initial_network(setting, 0)
    optimizer, watched, epochs = setting.make_optimizer(model.parameters()), Watched(model), []
    quarters = [round(setting.epochs * quarter / 4) for quarter in (1, 2, 3, 4)]
    tests = []
    for number, order in enumerate(epoch_orders(len(data.train), setting.epochs, 0), start=1):
        parts = []
        for batch in order.split(setting.batch):
            optimizer.zero_grad()
            data.loss(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
            parts.append(watched.take(times=len(batch)))
            optimizer.step()
        epochs.append(together(parts, order))
        if number in quarters:
            data.number(model(data.test.inputs), data.test.labels).sum().backward()
            tests.append(watched.take(times=1).examples)
    everyone, generator = torch.arange(len(data.train)), torch.Generator().manual_seed(1)

    def final(*, sampled: bool) -> Gradients:
        parts = []
        for batch in everyone.split(50):
            output, labels = model(data.train.inputs[batch]), data.train.labels[batch]
            if sampled:
                shares = output.detach().flatten(0, 1).softmax(dim=-1)
                labels = torch.multinomial(shares, 1, generator=generator).view_as(labels)
            data.loss(output, labels).backward()
            parts.append(watched.take(times=len(batch)))
        return together(parts, everyone)

    now, drawn = final(sampled=False), final(sampled=True)
    return epochs, now, drawn, tests


# -- variants ------------------------------------------------------------------------------------

Solve = Callable[[str, Tensor], Tensor]
"""What a layer's curvature makes of the gradients of the tests."""


def damped(moment: Tensor, damping: float) -> Tensor:
    return moment + damping * moment.diagonal().mean() * torch.eye(len(moment)).double()


def whitened(g: Gradients, damping: float) -> Solve:
    return lambda name, f: f.double() @ damped(g.keys[name], damping).inverse() / g.errors[name].diagonal().mean()


def kfac(g: Gradients, damping: float) -> Solve:
    return lambda n, f: damped(g.errors[n], damping).inverse() @ f.double() @ damped(g.keys[n], damping).inverse()


def ekfac(g: Gradients, damping: float) -> Solve:
    def solve(name: str, f: Tensor) -> Tensor:
        left, right = torch.linalg.eigh(g.errors[name])[1], torch.linalg.eigh(g.keys[name])[1]
        values = (left.T @ g.examples[name].double() @ right).square().mean(dim=0)
        return left @ (left.T @ f.double() @ right / (values + damping * values.mean())) @ right.T

    return solve


def scores(examples: Matrices, tests: Matrices, solve: Solve = lambda name, f: f.double()) -> Tensor:
    parts = [solve(n, tests[n]).flatten(1) @ examples[n].double().flatten(1).T for n in tests]
    return -torch.stack(parts).sum(dim=0)


def joint(examples: Matrices, tests: Matrices, damping: float = 1.0) -> Tensor:
    sizes = {name: g.double().square().sum(dim=(1, 2)).mean().sqrt() for name, g in examples.items()}
    a, f = (torch.cat([x[n].double().flatten(1) / sizes[n] for n in sizes], dim=1) for x in (examples, tests))
    return -torch.linalg.solve(damped(a @ a.T, damping), a @ f.T).T


def variants(setting: Setting, data: Data) -> dict[str, Tensor]:
    epochs, now, drawn, tests = all_gradients(setting, data)
    last = tests[-1]
    mean = {name: torch.stack([some[name] for some in tests]).mean(dim=0) for name in last}
    every = sum(epochs[1:], start=epochs[0])
    found = {"EK-FAC, final gradients, sampled labels, λ = 0.01": scores(now.examples, last, ekfac(drawn, 0.01))}
    for name, g in (("final gradients", now), ("all visits", every)):
        found[f"plain products, {name}"] = scores(g.examples, last)
        found[f"whitened keys, {name}, λ = 0.3"] = scores(g.examples, last, whitened(g, 0.3))
        found[f"joint, {name}"] = joint(g.examples, last)
    found["K-FAC, final gradients, λ = 0.02"] = scores(now.examples, last, kfac(now, 0.02))
    found["K-FAC, final gradients, λ = 0.02, quarters"] = scores(now.examples, mean, kfac(now, 0.02))
    for share in (0.25, 0.5, 1.0):
        some = epochs[-max(1, round(share * len(epochs))) :]
        g = sum(some[1:], start=some[0])
        found[f"K-FAC, last {share:.0%} of visits, λ = 0.02"] = scores(g.examples, last, kfac(g, 0.02))
        found[f"K-FAC, last {share:.0%} of visits, λ = 0.02, quarters"] = scores(g.examples, mean, kfac(g, 0.02))
        found[f"EK-FAC, last {share:.0%} of visits, λ = 0.01, quarters"] = scores(g.examples, mean, ekfac(g, 0.01))
    return found | {"TF-IDF": words(data), "BM25": words(data, bm25=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("runs/language"))
    options = parser.parse_args()
    for name in options.settings:
        setting, load = SETTINGS[name]
        data = load()
        truth = retrained(options.out / name, setting, data, kind="fresh", count=HALVES)
        margins = Margins(name, halves(HALVES, len(data.train)), truth)
        numbers = variants(setting, data)
        numbers["the library's influence"] = ask("influence", data, record(setting, data, options.out / name)).scores
        drawn = {variant: margins.drawn(own) for variant, own in numbers.items()}
        first = next(iter(drawn.values()))
        for variant, own in sorted(drawn.items(), key=lambda pair: -float(pair[1][0])):
            print(f"{name}; {variant}; {score_of(own)}; {score_of(first - own)} less than EK-FAC", flush=True)


if __name__ == "__main__":
    main()
