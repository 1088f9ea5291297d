"""The joint estimate from landmarks beside the exact inverse, where both can be computed.

    python benchmarks/landmarks.py mnist-mlp --margins docs/truth/mnist-mlp.npz --out runs/truth

Beyond 10,000 examples the inverse is approximated from 2,000 of them (Nyström). Printed for some numbers of landmarks:
how far the estimate is off, relative to the exact one; the rank correlation of the two over the training examples, mean
over test inputs; and the linear datamodeling score of each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from torch import Tensor

import spotlights as sl
from spotlights.query.joint import answering_layer, find_joint
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.margins import Margins
from spotlights_paper.experiments.truth.recorded import ask_about, in_order, margin_of, record
from spotlights_paper.experiments.truth.scoring import spearman
from spotlights_paper.experiments.truth.settings import prepare, setting_named


def joint(data: Data, spot: sl.Spotlights, landmarks: int | None) -> tuple[Tensor, float]:
    """The estimate for all test inputs, and the seconds for the matrix of examples."""
    view, target = spot.asked.view, margin_of(data)
    layers = {name: spot[name].layer_queries(spot[name].rows_of_inputs(target)) for name in spot.influence_layers()[0]}
    answering = answering_layer(view.reader, [name for name, each in spot.items() if each.gives_output])
    started = time.perf_counter()
    found = find_joint(view, list(layers), answering, None, landmarks=landmarks)
    part = sl.Influence([found.influence(view, [layers], damping=None)])
    seconds = time.perf_counter() - started
    return in_order(part.totals("example"), data), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", help="as given to spotlights evaluate truth")
    parser.add_argument("--margins", type=Path, required=True, help="of the setting, as in docs/truth")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"), help="as given to spotlights evaluate truth")
    parser.add_argument("--landmarks", type=int, nargs="*", default=[500, 1000, 2000, 4000])
    options = parser.parse_args()
    setting = setting_named(options.setting)
    data, margins = prepare(setting), Margins.load(options.margins)
    spot = ask_about(data, record(setting, data, options.out / setting.name))
    exact, seconds = joint(data, spot, None)
    print(f"{len(data.train):,} examples, exact: LDS {margins.lds(exact)}, {seconds:.1f} s")
    for landmarks in options.landmarks:
        scores, seconds = joint(data, spot, landmarks)
        off = float((scores - exact).norm() / exact.norm())
        alike = float(spearman(scores.T, exact.T).mean())
        print(
            f"{landmarks:,} landmarks: {off:.1%} off, rank correlation {alike:.4f}, LDS {margins.lds(scores)}, "
            f"{seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
