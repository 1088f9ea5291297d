"""What a memory is: its layers, its run and its files, as tables and as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotlights.memory.format import names
from spotlights.memory.format.manifest import ParameterEntry
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import unexplained_steps
from spotlights.optimizers import rule_named
from spotlights.query.accounts import has_gaps
from spotlights.query.engine import View
from spotlights.results.tables import Printable, build


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
    lossy: bool
    """Whether its numbers are stored approximately."""
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
            layer.distinct_tokens() if names.KEYS in layer.entry.tokens and layer.slots else layer.distinct_keys,
            layer.entry.trained,
            layer.entry.storage,
            layer.storage.lossy,
            0 if layer.folded else len(unexplained_steps(reader.log(name).residual, layer.entry)),
        )
        for name, layer in reader.layers.items()
    }


_PARAMETERS_SHOWN = 40


def _without_slots(reader: MemoryReader) -> dict[str, int]:
    """The parameters, with their sizes, of layers that had gradients but never a slot."""
    manifest = reader.manifest
    if not reader.steps or manifest.fold is not None or manifest.recipe is not None or not manifest.errors:
        return {}
    empty = {n for n, layer in reader.layers.items() if not layer.slots and bool((reader.log(n).residual > 0.5).any())}
    return {name: entry.numbers for name, entry in manifest.parameters.items() if entry.layer in empty}


def _state(entry: ParameterEntry, without_slots: bool) -> str:
    if without_slots:
        return "not recorded because no call of its module was seen (its weight is used outside the module)"
    return entry.reason or "recorded"


def _why_not_trained(reader: MemoryReader, layer: str) -> str:
    """Why the optimizer trains nothing of a layer."""
    modules = reader.manifest.layers[layer].modules
    own = [e for n, e in reader.manifest.parameters.items() if n.rpartition(".")[0] in modules and e.reason]
    return own[0].reason if own else "frozen"


class MemoryInfo(Printable):
    """What a memory is, as a table."""

    def __init__(self, view: View) -> None:
        self._view = view

    @property
    def _has_rules(self) -> bool:
        """Whether all optimizers of the run have an exact rule."""
        manifest = self._view.reader.manifest
        rules = [manifest.rule, *(rule for entry in manifest.layers.values() for rule in entry.rules.values())]
        return all(rule_named(rule) is not None for rule in rules)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        reader = self._view.reader
        manifest, without = reader.manifest, _without_slots(reader)
        known = self._has_rules and manifest.errors and manifest.sample is None and not manifest.observed
        checked = reader.layers if known and manifest.recipe is None else ()
        gaps = [name for name in checked if has_gaps(reader, name, reader.steps)]
        rounded = any(layer.storage.lossy for layer in reader.layers.values())
        return {
            "path": reader.address,
            "status": manifest.status,
            "created": manifest.created,
            "steps": reader.steps,
            "slots": self._view.slots if manifest.recipe is None else 0,
            "bytes": reader.nbytes,
            "optimizer": manifest.optimizer,
            "folded": None if manifest.fold is None else f"by {manifest.fold.by} over {manifest.fold.span}",
            "sampled": None if manifest.sample is None else str(manifest.sample),
            "recipe": manifest.recipe is not None,
            "recomputed": manifest.recomputed,
            "observed": manifest.observed,
            "contributions": known,
            "exact": known and not gaps and not rounded and reader.steps > 0,
            "not exact in": gaps,
            "columns": {name: entry.kind for name, entry in manifest.columns.items()},
            "not recorded": [*manifest.uncovered, *without],
            "recorded parameters": manifest.covered_numbers - sum(without.values()),
            "trained parameters": manifest.trained_numbers,
            "parameters": {n: _state(e, n in without) for n, e in manifest.parameters.items()},
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
            state = ", ".join(layer.trained) or _why_not_trained(self._view.reader, layer.name)
            rows.append([layer.name, layer.kind, shape, f"{layer.slots:,}", keys, layer.storage, state])
        names = ["layer", "kind", "shape", "slots", "distinct keys", "stored as", "trained"]
        exact = "contributions are exact" if known["contributions"] else "scores only"
        rounded = {layer["storage"] for layer in known["layers"].values() if layer["lossy"]}
        if known["contributions"] and rounded:
            exact = f"contributions are approximate: stored as {', '.join(sorted(rounded))}"
        if known["not exact in"]:
            few = ", ".join(known["not exact in"][:5]) + (" …" if len(known["not exact in"]) > 5 else "")
            exact = f"contributions are not exact in {few}: verify says why, and how much is missing"
        if not known["steps"] and known["contributions"]:
            exact = "no step was recorded"
        if known["sampled"]:
            rule = rule_named(self._view.reader.manifest.rule)
            exact = "contributions are estimates" if rule is not None and rule.scalar else "scores only"
        training = f"{known['steps']:,} steps of {known['optimizer']} ({exact})"
        if known["observed"]:
            training = self._view.reader.manifest.slots_note
        megabytes = known["bytes"] / 1e6
        note = (
            f"{known['status']} · {training} · "
            f"{megabytes:,.{1 if megabytes < 10 else 0}f} MB · columns: {', '.join(known['columns']) or 'none'}"
        )
        if known["folded"]:
            note += f"\nfolded {known['folded']}: a slot is the sum of its visits' keys"
        if known["sampled"]:
            note += f"\na sample: {known['sampled']} were kept; totals are estimates with a standard error"
        if known["recipe"]:
            note += "\na recipe: sl.open(path, model=model, recompute=loss) computes slots when a question needs them"
        if known["recomputed"] is not None:
            off = self._view.reader.manifest.slots_note
            note += f"\n{off or 'slots computed again from a recipe, bit for bit'}"
        covered, trained = known["recorded parameters"], known["trained parameters"]
        if trained:
            share = 1000 * covered // trained / 10  # rounded down: 100 % only if it is all
            note += f"\nrecorded: {share:g} % of {trained:,} trained parameters"
        lines = [f"{name}: {state}" for name, state in known["parameters"].items() if state != "recorded"]
        note += "".join(f"\n{line}" for line in lines[:_PARAMETERS_SHOWN])
        if len(lines) > _PARAMETERS_SHOWN:
            note += f"\n… and {len(lines) - _PARAMETERS_SHOWN} more (memory.info.as_dict()['parameters'])"
        return build(known["path"], names, rows, note)
