"""What a memory is: its layers, its run and its files, as tables and as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotlights.attention.measure import View
from spotlights.attention.tables import Printable, build
from spotlights.memory.reader import MemoryReader
from spotlights.memory.step_log import unexplained_steps
from spotlights.optimizers import rule_named


@dataclass(frozen=True, repr=False)
class LayerInfo(Printable):
    """What is known of a recorded layer."""

    name: str
    kind: str
    in_features: int
    out_features: int
    bias: bool
    slots: int
    distinct_keys: int
    trained: list[str]
    storage: str
    unexplained_steps: int

    def table(self) -> Any:
        return build(self.name, ["", ""], vars(self).items(), None)


def layer_infos(reader: MemoryReader) -> dict[str, LayerInfo]:
    """What is known of each recorded layer."""
    return {
        name: LayerInfo(
            name,
            layer.entry.kind,
            layer.entry.in_features,
            layer.entry.out_features,
            layer.entry.bias,
            layer.slots,
            layer.distinct_keys,
            layer.entry.trained,
            layer.entry.storage,
            0 if layer.folded else len(unexplained_steps(reader.log(name).residual, layer.entry)),
        )
        for name, layer in reader.layers.items()
    }


class MemoryInfo(Printable):
    """What a memory is, as a table."""

    def __init__(self, view: View) -> None:
        self._view = view

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        reader = self._view.reader
        manifest = reader.manifest
        return {
            "path": str(reader.directory),
            "status": manifest.status,
            "created": manifest.created,
            "steps": reader.steps,
            "slots": self._view.slots,
            "bytes": reader.nbytes,
            "optimizer": manifest.optimizer,
            "folded": None if manifest.fold is None else f"by {manifest.fold.by} over {manifest.fold.span}",
            "sampled": None if manifest.sample is None else str(manifest.sample),
            "exact": rule_named(manifest.rule) is not None and manifest.errors and manifest.sample is None,
            "columns": {name: entry.kind for name, entry in manifest.columns.items()},
            "not recorded": manifest.uncovered,
            "recorded parameters": manifest.covered_numbers,
            "trained parameters": manifest.trained_numbers,
            "layers": {name: vars(info) for name, info in layer_infos(reader).items()},
            "seed": manifest.seed,
            "git revision": manifest.git_revision,
            "written by": f"spotlights {manifest.spotlights}, torch {manifest.torch}",
        }

    def table(self) -> Any:
        known = self.as_dict()
        rows = []
        for layer in layer_infos(self._view.reader).values():
            keys = f"{layer.distinct_keys:,}" if layer.distinct_keys != layer.slots else "–"
            shape = f"{layer.in_features} → {layer.out_features}"
            state = ", ".join(layer.trained) or "frozen"
            rows.append([layer.name, layer.kind, shape, f"{layer.slots:,}", keys, layer.storage, state])
        names = ["layer", "kind", "shape", "slots", "distinct keys", "stored as", "trained"]
        exact = "contributions are exact" if known["exact"] else "scores only"
        if known["sampled"]:
            rule = rule_named(self._view.reader.manifest.rule)
            exact = "contributions are estimates" if rule is not None and rule.scalar else "scores only"
        note = (
            f"{known['status']} · {known['steps']:,} steps of {known['optimizer']} ({exact}) · "
            f"{known['bytes'] / 1e6:,.0f} MB · columns: {', '.join(known['columns']) or 'none'}"
        )
        if known["folded"]:
            note += f"\nfolded {known['folded']}: a slot is the sum of its visits' keys"
        if known["sampled"]:
            note += f"\na sample: {known['sampled']} were kept; totals are estimates with a standard error"
        covered, trained = known["recorded parameters"], known["trained parameters"]
        if trained:
            share = 1000 * covered // trained / 10  # rounded down: 100 % only if it is all
            note += f"\nrecorded: {share:g} % of {trained:,} trained parameters"
        if known["not recorded"]:
            note += f"\nnot recorded: {', '.join(known['not recorded'])}"
        return build(known["path"], names, rows, note)
