"""Draws which package imports which, from the code: docs/images/imports.png.

    python docs/imports.py

Boxes are the packages and top-level modules of `spotlights`, in the layers that pyproject.toml sets, with their lines.
An arrow is an import, deferred ones included; its width grows with the number of importing modules. All may import
`errors`, so it is left out.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import grimp
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
PAPER = "spotlights_paper"
WIDTH, HEIGHT, GAP = 2.6, 0.62, 0.55


def rows() -> list[list[str]]:
    """The layers, top first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in settings["tool"]["importlinter"]["contracts"] if c.get("containers") == ["spotlights"]]
    layers = [[name.strip(" ()") for name in layer.split("|")] for layer in contract["layers"]]
    there = [[name for name in layer if name != "errors" and lines_of(name)] for layer in layers]
    return [[PAPER], *(layer for layer in there if layer)]


def lines_of(name: str) -> int:
    place = ROOT / "src" / (name if name == PAPER else f"spotlights/{name}")
    files = list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files if file.exists())


def imports() -> Counter[tuple[str, str]]:
    """How many modules of one package import from another."""
    graph = grimp.build_graph("spotlights", PAPER, exclude_type_checking_imports=True)
    found = {
        (source, package_of(target))
        for source in graph.modules
        for target in graph.find_modules_directly_imported_by(source)
    }
    return Counter((package_of(source), target) for source, target in found if package_of(source) != target)


def package_of(module: str) -> str:
    root, *rest = module.split(".")
    return root if root == PAPER or not rest else rest[0]


def main() -> None:
    layers = rows()
    place: dict[str, tuple[float, float]] = {}
    for height, layer in enumerate(reversed(layers)):
        for number, name in enumerate(layer):
            place[name] = ((number - (len(layer) - 1) / 2) * (WIDTH + 0.5), height * (HEIGHT + GAP))
    figure, axes = plt.subplots(figsize=(8, 10), layout="constrained")
    for (source, target), count in imports().items():
        if source in place and target in place:
            (x, y), (to_x, to_y) = place[source], place[target]
            arrow = {"arrowstyle": "-|>", "color": "#5b7083", "alpha": 0.6, "lw": 0.6 + 0.25 * min(count, 12) ** 0.5}
            axes.annotate("", (to_x, to_y + HEIGHT), (x, y), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0})
    for name, (x, y) in place.items():
        box = FancyBboxPatch(
            (x - WIDTH / 2, y), WIDTH, HEIGHT, boxstyle="round,pad=0.03", fc="#f4f7fa", ec="#33475b", zorder=3
        )
        axes.add_patch(box)
        axes.text(x, y + HEIGHT / 2, f"{name}  {lines_of(name):,}", ha="center", va="center", fontsize=10, zorder=4)
    axes.set_xlim(min(x for x, _ in place.values()) - WIDTH, max(x for x, _ in place.values()) + WIDTH)
    axes.set_ylim(-0.2, max(y for _, y in place.values()) + HEIGHT + 0.2)
    axes.axis("off")
    figure.savefig(ROOT / "docs/images/imports.png", dpi=110)


if __name__ == "__main__":
    main()
