"""What else could influence be? Variants of it against the same retrained networks, each with a paired error.

    spotlights evaluate truth mnist-mlp --out runs/truth      # the truth
    python benchmarks/truth_variants.py mnist-mlp --out runs/truth

For each variant: LDS on the half of tests and subsets that was for choosing, on the other half, and how much more it
is than the plain rule on everything, with the standard error of that difference (halves drawn anew, the same ones for
both). What has been computed is kept in `OUT/SETTING/variants/` and not computed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import spotlights as sl
from spotlights.memory.blocks import Everything, in_blocks
from spotlights.memory.layer_reader import ROWS
from spotlights.query.attention import Attention
from spotlights.query.coefficients import unroll, unroll_plainly
from spotlights.query.contraction import DirectedQueries
from spotlights.query.contributions import Contributions
from spotlights.query.influence import DAMPING, Influence
from spotlights.query.whitening import key_moments, whitened
from spotlights_paper.experiments.images import Prepared
from spotlights_paper.experiments.truth.recorded import Recorded, ask_about, in_order, margin_of, record
from spotlights_paper.experiments.truth.retraining import halves, retrained
from spotlights_paper.experiments.truth.scoring import predictions, redrawn, score_of, spearman
from spotlights_paper.experiments.truth.settings import Setting, prepare, setting_named

PLAIN = f"the plain rule, λ = {DAMPING:g}"
DAMPINGS = (0.03, 0.1, 1.0, 3.0, 10.0)
ERROR_DAMPINGS = (0.1, 1.0, 10.0)


@dataclass(frozen=True, eq=False)
class Asked:
    """One layer of one memory, and the number of interest."""

    attention: Attention
    data: Prepared

    @property
    def moment(self) -> Tensor:
        return key_moments(self.attention.view)[self.attention.layer]

    def directions(self) -> Tensor:
        return self.attention._forward.directions(self.attention.layer, margin_of(self.data))

    @property
    def rows(self) -> float:
        """For each input."""
        return len(self.attention.queries) / len(self.data.test.labels)

    @property
    def size(self) -> float:
        return float(self.moment.diagonal()[:-1].mean())

    def totals(self, queries: Tensor, ones: Tensor, directions: Tensor, *, preconditioned: bool = False) -> Tensor:
        view, recorded = self.attention.view, self.attention.recorded
        steps = (unroll if preconditioned else unroll_plainly)(view.reader, recorded.name, view.until)
        of_inputs, inputs = self.attention.rows_of_inputs(margin_of(self.data)).by_input()
        rows = of_inputs.rows
        asked = DirectedQueries(queries[rows], directions[rows], ones[rows])
        part = Contributions(view, recorded, asked, adds_up=False, unrolled=steps, inputs=inputs)
        return in_order(Influence([part]).totals("example"), self.data)

    # -- the variants of one layer -----------------------------------------------------------

    def plain(self, damping: float = DAMPING) -> Tensor:
        queries, ones = whitened(self.attention.queries, self.moment, damping=damping, bias=True, rows=self.rows)
        return self.totals(queries, ones, self.directions())

    def preconditioned(self) -> Tensor:
        """Through what the optimizer really did: the contributions of whitened queries."""
        queries, ones = whitened(self.attention.queries, self.moment, damping=DAMPING, bias=True, rows=self.rows)
        return self.totals(queries, ones, self.directions(), preconditioned=True)

    def centred(self) -> Tensor:
        """Keys and queries without their mean, whitened by their covariance; the 1 of the bias by itself."""
        count, sums = self.moment[-1, -1], self.moment[:-1, -1]
        mean = sums / count
        middle = self.moment.clone()
        middle[:-1, :-1] -= torch.outer(sums, sums) / count
        queries, _ = whitened((self.attention.queries - mean).float(), middle, damping=DAMPING, bias=False)
        strength = DAMPING * middle[:-1, :-1].diagonal().mean() / count
        ones = 1.0 / (1.0 + strength) - queries.double() @ mean
        return self.totals(queries, ones.float(), self.directions())

    def errors_too(self, damping: float) -> Tensor:
        """The error's side of the curvature divided out as well."""
        size = self.attention.recorded.entry.out_features
        moment = torch.zeros(size, size, dtype=torch.float64)
        for block in in_blocks(self.attention.recorded, Everything(), ROWS):
            for rows in block.errors():
                moment += (rows.rows.T @ rows.rows).double()
        moment /= moment.diagonal().mean()
        damped = moment + damping * torch.eye(size, dtype=torch.float64)
        directions = torch.linalg.solve(damped, self.directions().double().T).T.float() * (1 + damping)
        queries, ones = whitened(self.attention.queries, self.moment, damping=DAMPING, bias=True, rows=self.rows)
        return self.totals(queries, ones, directions)


@dataclass(frozen=True, eq=False)
class Variants:
    """Everything that was tried; each layer's numbers are computed once and kept."""

    setting: Setting
    data: Prepared
    recorded: Recorded
    kept: Path

    def all(self) -> dict[str, Callable[[], Tensor]]:
        """How to compute each variant, by its name."""
        layers, last = list(self.recorded.memory.layers), self.recorded.memory.steps
        found: dict[str, Callable[[], Tensor]] = {PLAIN: lambda: sum(self.plain())}
        for d in DAMPINGS:
            found[f"λ = {d:g}"] = lambda d=d: sum(self.plain(d))
        for index, layer in enumerate(layers):
            found[f"{layer} alone"] = lambda index=index: self.plain()[index]
        found["the first layer alone, λ = 1"] = lambda: self.plain(1.0)[0]
        found["the first layer with λ = 1, the others with λ = 0.03 and weight 0.3"] = lambda: (
            self.plain(1.0)[0] + 0.3 * sum(self.plain(0.03)[1:])
        )
        found["layers scaled to the same mean(diag C)"] = lambda: sum(
            part * Asked(a, self.data).size for part, a in zip(self.plain(), self.spot().values(), strict=True)
        )
        found["layers scaled to the same norm"] = lambda: sum(part / part.norm() for part in self.plain())
        found["centred keys"] = lambda: sum(self.every("centred", Asked.centred))
        for d in ERROR_DAMPINGS:
            found[f"errors whitened too, λ = {d:g}"] = lambda d=d: sum(
                self.every(f"errors-{d:g}", lambda asked: asked.errors_too(d))
            )
        for first, end in ((0, last // 10), (0, last // 2), (last // 10, last), (last // 2, last)):
            found[f"steps {first:,} to {end:,} of {last:,}"] = lambda first=first, end=end: self.steps(first, end)
        for dtype in ("float16", "int8"):
            found[f"stored as {dtype}"] = lambda dtype=dtype: self.stored_as(dtype)
        if self.setting.optimizer != "sgd":
            found["through the optimizer's preconditioner"] = lambda: sum(
                self.every("preconditioned", Asked.preconditioned)
            )
        return found

    def spot(self) -> sl.Spotlights:
        return ask_about(self.data, self.recorded)

    def every(self, name: str, compute: Callable[[Asked], Tensor], memory: sl.Memory | None = None) -> list[Tensor]:
        """Each layer's numbers."""
        found = []
        for layer in self.recorded.memory.layers:
            path = self.kept / f"{name}-{layer}.npy"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                asked = (memory or self.recorded.memory).attend(self.recorded.model, self.data.test.inputs)[layer]
                np.save(path, compute(Asked(asked, self.data)).float().numpy())
            found.append(torch.from_numpy(np.load(path)))
        return found

    def plain(self, damping: float = DAMPING) -> list[Tensor]:
        return self.every(f"damping-{damping:g}", lambda asked: asked.plain(damping))

    def steps(self, first: int, end: int) -> Tensor:
        return sum(self.every(f"steps-{first}-{end}", Asked.plain, self.recorded.memory.where(step=range(first, end))))

    def stored_as(self, dtype: str) -> Tensor:
        other = record(replace(self.setting, dtype=dtype), self.data, self.kept.parent / dtype)
        return sum(self.every(f"stored-{dtype}", Asked.plain, other.memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", help="mnist-mlp, fashion-mlp, …")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"), help="as given to spotlights evaluate truth")
    parser.add_argument("--retrains", type=int, default=100, help="how many halves to compare with")
    parser.add_argument("--tests", type=int, default=500, help="how many test images to ask about")
    parser.add_argument("--kind", choices=["fresh", "same"], default="fresh", help="same: the run's own seed and order")
    parser.add_argument("--only", nargs="*", default=[""], help="variants whose names contain one of these words")
    options = parser.parse_args()
    setting = setting_named(options.setting)
    data = prepare(setting)
    folder = options.out / setting.name
    recorded = record(setting, data, folder)
    truth = retrained(folder, setting, data, kind=options.kind, count=options.retrains)[:, : options.tests]
    data = replace(data, test=data.test.first(options.tests))
    kept = folder / "variants" / str(len(data.test.labels))
    variants = Variants(setting, data, recorded, kept).all()

    members = halves(options.retrains, len(data.train))
    tests, subsets = truth.shape[1] // 2, len(truth) // 2
    rule = redrawn(predictions(variants[PLAIN](), members), truth)
    print("variant; for choosing; held out; more than the plain rule, paired")
    for name, compute in variants.items():
        if name != PLAIN and not any(word in name for word in options.only):
            continue
        scores = compute()
        chosen = spearman(predictions(scores[:tests], members[:subsets]), truth[:subsets, :tests]).mean()
        rest = spearman(predictions(scores[tests:], members[subsets:]), truth[subsets:, tests:]).mean()
        more = score_of(redrawn(predictions(scores, members), truth) - rule)
        print(f"{name}; {chosen:.3f}; {rest:.3f}; {more.mean:+.3f} ± {more.error:.3f}", flush=True)


if __name__ == "__main__":
    main()
