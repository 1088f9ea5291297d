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
from spotlights.attention.attention import Attention, Contributions
from spotlights.attention.influence import DAMPING
from spotlights.attention.per_input import PerInput
from spotlights.attention.unrolled import unroll_plainly
from spotlights.attention.whitening import key_moments, whitened
from spotlights.experiments.truth.ground_truth import halves, retrained
from spotlights.experiments.truth.recorded import ask_about, in_order, margin_of, record
from spotlights.experiments.truth.scoring import lds, predictions, redrawn, score_of
from spotlights.experiments.truth.settings import Data, prepare, setting_named
from spotlights.memory.selection import Everything

DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ERROR_DAMPINGS = (0.1, 1.0, 10.0)


class Transformed(Contributions):
    """Contributions for queries, and a 1 of the bias, of one's own making."""

    def __init__(self, attention: Attention, queries: Tensor, ones: Tensor, directions: Tensor) -> None:
        steps = unroll_plainly(attention.view.reader, attention.layer.name, attention.view.until)
        super().__init__(attention.view, attention.layer, queries, directions, exact=False, unrolled=steps)
        self._bias_queries = ones


@dataclass(frozen=True, eq=False)
class Asked:
    """One layer of one memory, and the number of interest."""

    attention: Attention
    data: Data

    @property
    def moment(self) -> Tensor:
        return key_moments(self.attention.view.reader)[self.attention.layer.name]

    def directions(self) -> Tensor:
        return self.attention._forward.directions(self.attention.layer.name, margin_of(self.data))

    def totals(self, queries: Tensor, ones: Tensor, directions: Tensor) -> Tensor:
        part = Transformed(self.attention, queries, ones, directions)
        owners, inputs = self.attention.owners(margin_of(self.data))
        return in_order(PerInput([part], [owners], inputs=inputs).totals("example"), self.data)

    # -- the variants of one layer -----------------------------------------------------------

    def plain(self, damping: float = DAMPING) -> Tensor:
        queries, ones = whitened(self.attention.queries, self.moment, damping=damping, bias=True)
        return self.totals(queries, ones, self.directions())

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
        size = self.attention.layer.entry.out_features
        moment = torch.zeros(size, size, dtype=torch.float64)
        for block in self.attention.layer.blocks(Everything(), 32768):
            for rows in block.errors():
                moment += (rows.rows.T @ rows.rows).double()
        moment /= moment.diagonal().mean()
        damped = moment + damping * torch.eye(size, dtype=torch.float64)
        directions = torch.linalg.solve(damped, self.directions().double().T).T.float() * (1 + damping)
        queries, ones = whitened(self.attention.queries, self.moment, damping=DAMPING, bias=True)
        return self.totals(queries, ones, directions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", help="mnist-mlp, fashion-mlp, …")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"), help="as given to spotlights evaluate truth")
    parser.add_argument("--retrains", type=int, default=100, help="how many halves to compare with")
    options = parser.parse_args()
    setting = setting_named(options.setting)
    data = prepare(setting)
    folder = options.out / setting.name
    recorded = record(setting, data, folder)
    spot = ask_about(data, recorded)

    def kept(name: str, compute: Callable[[], Tensor]) -> Tensor:
        path = folder / "variants" / f"{name}.npy"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, compute().float().numpy())
            print(f"computed {name}", flush=True)
        return torch.from_numpy(np.load(path))

    def every(name: str, compute: Callable[[Asked], Tensor], asked: sl.attention.Spotlights = spot) -> list[Tensor]:
        return [kept(f"{name}-{layer}", lambda a=a: compute(Asked(a, data))) for layer, a in asked.items()]

    def steps(first: int, end: int) -> Tensor:
        view = recorded.memory.where(step=range(first, end)).attend(recorded.model, data.test_inputs)
        return sum(every(f"steps-{first}-{end}", Asked.plain, view))

    def stored_as(dtype: str) -> Tensor:
        other = record(replace(setting, dtype=dtype), data, folder / "variants" / dtype)
        return sum(every(f"stored-{dtype}", Asked.plain, other.memory.attend(recorded.model, data.test_inputs)))

    by_damping = {d: every(f"damping-{d:g}", lambda asked, d=d: asked.plain(d)) for d in DAMPINGS}
    plain, last = by_damping[DAMPING], recorded.memory.steps
    sizes = [float(Asked(a, data).moment.diagonal()[:-1].mean()) for a in spot.values()]
    variants = {f"λ = {d:g}": sum(parts) for d, parts in by_damping.items() if d != DAMPING}
    variants |= {f"{layer} alone": part for layer, part in zip(spot, plain, strict=True)}
    variants["the first layer alone, λ = 1"] = by_damping[1.0][0]
    small = [0.3 * part for part in by_damping[0.03][1:]]
    variants["the first layer with λ = 1, the others with λ = 0.03 and weight 0.3"] = sum(small, by_damping[1.0][0])
    variants["layers scaled to the same mean(diag C)"] = sum(p * s for p, s in zip(plain, sizes, strict=True))
    variants["layers scaled to the same norm"] = sum(part / part.norm() for part in plain)
    variants["centred keys"] = sum(every("centred", Asked.centred))
    for d in ERROR_DAMPINGS:
        variants[f"errors whitened too, λ = {d:g}"] = sum(every(f"errors-{d:g}", lambda a, d=d: a.errors_too(d)))
    for first, end in ((0, last // 10), (0, last // 2), (last // 10, last), (last // 2, last)):
        variants[f"steps {first:,} to {end:,} of {last:,}"] = steps(first, end)
    for dtype in ("float16", "int8"):
        variants[f"stored as {dtype}"] = stored_as(dtype)

    truth = retrained(folder, setting, data, kind="fresh", count=options.retrains)
    members = halves(options.retrains, len(data))
    tests, subsets = truth.shape[1] // 2, len(truth) // 2
    rule = redrawn(predictions(sum(plain), members), truth)
    print("variant; for choosing; held out; more than the plain rule, paired")
    for name, scores in {f"the plain rule, λ = {DAMPING:g}": sum(plain), **variants}.items():
        chosen = lds(scores[:tests], members[:subsets], truth[:subsets, :tests], draws=2).mean
        rest = lds(scores[tests:], members[subsets:], truth[subsets:, tests:], draws=2).mean
        more = score_of(redrawn(predictions(scores, members), truth) - rule)
        print(f"{name}; {chosen:.3f}; {rest:.3f}; {more.mean:+.3f} ± {more.error:.3f}", flush=True)


if __name__ == "__main__":
    main()
