"""An opened memory: where every question starts.

A `Memory` is a view: some slots (all of them at first) as of some step (the last one at first). Views cost
nothing, and compose: `memory.as_of(3000).where(source="mnist").without(label=3)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.attention import Attention, Spotlights
from spotlights.attention.attention import KERNELS
from spotlights.attention.forward import ForwardPass, parameters_of
from spotlights.attention.measure import View
from spotlights.attention.replay import is_replayed, replay
from spotlights.attention.suspects import Suspects, find_suspects
from spotlights.attention.tables import Printable, build
from spotlights.dual import dual_model, primal_model, view_parameters
from spotlights.errors import MemoryFormatError, SettingError, SpotlightsError, UnknownNameError, UnsupportedError
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Between, Everything, OneOf, Selection
from spotlights.memory.slots import sample_slice
from spotlights.optimizers import UpdateRule, rule_named
from spotlights.optimizers.replayed import MakeOptimizer

if TYPE_CHECKING:
    from spotlights.web import Served

UNEXPLAINED = 1e-3
"""A step whose gradient differs by more than this share from its slots is reported."""


def open(path: str | Path) -> Memory:
    """Opens a memory that `record` wrote, also while it is still being recorded."""
    reader = MemoryReader(Path(path))
    return Memory(View(reader, _as_of(Everything(), reader.steps, reader), reader.steps))


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


@dataclass(frozen=True)
class Check:
    """How well a layer's memory meets its weights."""

    relative_error: float
    """‖dual − trained‖ / ‖trained‖, over weight and bias."""
    change_error: float
    """The same difference, relative to what training changed."""
    compared_with: str
    unexplained_steps: list[int]
    """Steps whose gradient the slots do not explain."""
    worst_residual: float
    moved_steps: list[int]
    """Steps before which somebody else than the optimizer changed the weights."""
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance


class Verification(Mapping[str, Check], Printable):
    """`{layer: check}`, which prints as a table."""

    def __init__(self, checks: dict[str, Check], damaged: list[str], note: str | None = None) -> None:
        self._checks = checks
        self._note = note
        self.damaged = damaged
        """Files whose content is not what was written, in sentences."""

    def __getitem__(self, layer: str) -> Check:
        return self._checks[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def ok(self) -> bool:
        return not self.damaged and all(check.ok for check in self.values())

    def table(self) -> Any:
        rows, notes = [], [*self.damaged, *([self._note] if self._note else [])]
        for name, check in self.items():
            verdict = "yes" if check.ok else "NO"
            rows.append(
                [
                    name,
                    verdict,
                    f"{check.relative_error:.1e}",
                    f"{check.change_error:.1e}",
                    check.compared_with,
                ]
            )
            for steps, what in (
                (check.unexplained_steps, "gradients that the recorded slots do not explain"),
                (check.moved_steps, "weights changed outside the optimizer"),
            ):
                if steps:
                    first = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
                    notes.append(f"{name}: {what} at {len(steps)} steps ({first})")
            if check.unexplained_steps:
                notes[-1] += f"; at worst {check.worst_residual:.0%} of the gradient"
        names = ["layer", "exact", "relative error", "of the change", "compared with"]
        return build("does the memory equal the network?", names, rows, "\n".join(notes) or None)

    __str__ = Printable.__str__
    __repr__ = Printable.__repr__
    __hash__ = None  # type: ignore[assignment]


class Memory:
    """A memory, or a view of one: some of its slots, as of some step."""

    def __init__(self, view: View) -> None:
        self._view = view

    # -- what is in it -------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._view.reader.directory

    @property
    def steps(self) -> int:
        """How many optimizer steps the view looks back on."""
        return self._view.until

    @property
    def columns(self) -> list[str]:
        """What is known of a slot."""
        return list(self._view.reader.manifest.columns)

    @property
    def layers(self) -> dict[str, LayerInfo]:
        """What is known of each recorded layer (of the whole memory, not of the view)."""
        reader = self._view.reader
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
                0 if layer.folded else len(_large(reader.log(name).residual, layer.entry)),
            )
            for name, layer in reader.layers.items()
        }

    def __len__(self) -> int:
        """The number of slots of the view, in the layer that has most of them."""
        return max((self._count(layer) for layer in self._view.reader.layers), default=0)

    def _count(self, layer: str) -> int:
        reader = self._view.reader.layer(layer)
        if isinstance(self._view.selection, Everything):
            return reader.slots
        return reader.count(self._view.selection)

    @property
    def info(self) -> MemoryInfo:
        """What the memory is, as a table."""
        return MemoryInfo(self)

    def __repr__(self) -> str:
        layers = ", ".join(self._view.reader.layers)
        return f"Memory({self.path}: {self._view.selection}, {self.steps:,} steps, layers {layers})"

    # -- views ---------------------------------------------------------------------------------

    def where(self, **conditions: Any) -> Memory:
        """Only the slots that meet all conditions: a value, a list of values, or a range per column."""
        return self._with(self._select(conditions))

    def without(self, **conditions: Any) -> Memory:
        """Only the slots that do not meet all conditions: what if it had never seen these?"""
        return self._with(~self._select(conditions))

    def __invert__(self) -> Memory:
        view = self._view
        every = _as_of(Everything(), view.until, view.reader)
        return Memory(View(view.reader, every & ~view.selection, view.until))

    def as_of(self, step: int) -> Memory:
        """The network as it was after `step` optimizer steps; `as_of(0)` is the initial one."""
        if not 0 <= step <= self.steps:
            raise SettingError(f"as_of({step}): this view has steps 0 to {self.steps}.")
        if step != self.steps:
            self._view.reader.need_visits("what came before a step and what after", "Ask about the whole of it")
        view = self._view
        return Memory(View(view.reader, _as_of(view.selection, step, view.reader), step))

    def _with(self, selection: Selection) -> Memory:
        view = self._view
        return Memory(View(view.reader, view.selection & selection, view.until))

    def _select(self, conditions: dict[str, Any]) -> Selection:
        if not conditions:
            raise SettingError('Give at least one condition, such as where(label=3) or where(source="mnist").')
        selected: Selection = Everything()
        for column, wanted in conditions.items():
            selected = selected & self._condition(column, wanted)
        return selected

    def _condition(self, column: str, wanted: Any) -> Selection:
        kind = self._view.reader.column_kind(column)
        if isinstance(wanted, range) and kind != "string":
            return Between(column, wanted if wanted.step > 0 else wanted[::-1])
        if isinstance(wanted, Tensor | np.ndarray):
            wanted = wanted.tolist()
        several = isinstance(wanted, Sequence | set | frozenset | range) and not isinstance(wanted, str)
        items: list[Any] = list(wanted) if several else [wanted]
        items = [item.item() if isinstance(item, Tensor | np.generic) else item for item in items]
        shown = str(wanted) if len(items) <= 8 else f"one of {len(items):,} values"
        if kind != "string":
            if not all(isinstance(item, int | float) for item in items):
                raise SettingError(f'The column "{column}" holds numbers; {shown} cannot be one of them.')
            if kind == "int":
                items = [item for item in items if float(item).is_integer()]  # 2.5 is no label
            return OneOf(column, tuple(items), shown)
        strings = self._view.strings(column)
        for item in items:
            if item not in strings:
                raise UnknownNameError(f"No slot has {column}={item!r}. The column has: {', '.join(strings[:20])}.")
        return OneOf(column, tuple(strings.index(item) for item in items), shown)

    # -- questions -----------------------------------------------------------------------------

    def attend(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        layers: Sequence[str] | None = None,
        kernel: str = "dot",
        part: str | None = None,
    ) -> Spotlights:
        """Runs the model once on the inputs; gives each layer's attention over the slots of this view.

        Args:
            model: the trained network. It is run in eval mode and left as it was.
            inputs: a batch (a tensor), or a tuple or dict of the model's arguments.
            layers: only these; a convolution has a query for each position of each input, so many inputs fill the
                main memory.
            kernel: "dot" is what the network computes; the others are for looking. "cosine" takes no account of how
                large a key is, "cosine-parts" adds up the cosines of the parts of a key that is put together of several
                (`[x; h]` of a recurrent layer), "softmax" is that of transformers.
            part: of such a key, one part alone ("h"), under any kernel; layers without that part are left out.
        """
        if kernel not in KERNELS:
            raise SettingError(f"Unknown kernel {kernel!r}. There are: {', '.join(KERNELS)}.")
        reader = self._view.reader
        parts = {name: entry.parts for name, entry in reader.manifest.layers.items() if entry.parts}
        if part is not None and not any(part in of_layer for of_layer in parts.values()):
            raise UnknownNameError(f'No layer has keys with a part "{part}". There are: {parts or "no parts at all"}.')
        entries = reader.manifest.layers
        if layers is not None:
            entries = {name: entry for name, entry in entries.items() if name in layers or entry.turned}
        forward = ForwardPass(model, inputs, entries)
        for name in layers or ():
            if name not in forward.turned:
                reader.layer(name)  # an unknown one gets its error here
        attentions = {
            name: Attention(self._view, reader.layers[name], forward, kernel, part=part)
            for name, entry in entries.items()
            if forward.calls[name].queries and (part is None or part in entry.parts)
        }
        for use, name in forward.turned.items():
            if forward.calls[use].queries and part is None:
                attentions[use] = Attention(self._view, reader.layers[name], forward, kernel, use=use)
        if layers is not None:
            attentions = {name: attention for name, attention in attentions.items() if name in layers}
        return Spotlights(attentions, forward.output)

    def explore(self, model: nn.Module, inputs: Any, **options: Any) -> Served:
        """Opens the web explorer on this memory; in a notebook, inline. Arguments as for `sl.explore`."""
        from spotlights.web import explore

        return explore(self, model, inputs, **options)

    def suspects(self, k: int = 100, *, layer: str | None = None) -> Suspects:
        """The k training examples of this view that look most mislabelled, with the class the network says instead.

        Ranks by the sum over visits of the norm of the last layer's error (docs/truth.md has how well). Works
        while training still runs.

        Args:
            k: how many.
            layer: the layer that gives the answer; the last one that was recorded by default.
        """
        return find_suspects(self._view, k, layer)

    def parameters(self, layer: str) -> dict[str, Tensor]:
        """Weight and bias that the slots of this view, with the initial part, make up; in float64.

        The weight is the matrix that acts on keys. `primal` gives a network with weights in their own shapes. A layer
        made of several parameters, as an LSTM's is, has these by their names.
        """
        return view_parameters(self._view, layer)

    def weights(self, layer: str) -> Float[Tensor, "out_features in_group"]:
        """The weight matrix that the slots of this view, with the initial part, make up; in float64."""
        found = self.parameters(layer)
        return torch.cat([found[name] for name in self._view.reader.layer(layer).entry.weight_columns], dim=1)

    def final_parameters(self) -> dict[str, dict[str, Tensor]] | None:
        """The weights that the closed recording left, by layer; None while it is still open."""
        reader = self._view.reader
        if reader.final is None or self._view.until != reader.manifest.steps:
            return None
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in reader.final.items():
            layer, parameter = name.rsplit("/", 1)
            found.setdefault(layer, {})[parameter] = value
        return found

    def dual(self, model: nn.Module) -> nn.Module:
        """A copy of the model that computes in dual form from the slots of this view: it attends."""
        return dual_model(self._view, model)

    def primal(self, model: nn.Module, *, layers: Sequence[str] | None = None) -> nn.Module:
        """A copy of the model with the weights of this view: the same answers as `dual`, for many inputs.

        Args:
            model: the trained network.
            layers: only in these layers; the others keep the model's weights.
        """
        chosen = list(self._view.reader.layers) if layers is None else layers
        parameters = {name: self.parameters(name) for name in chosen}
        return primal_model(self._view, model, parameters)

    def verify(
        self,
        model: nn.Module | None = None,
        *,
        files: bool = True,
        parameters: Mapping[str, dict[str, Tensor]] | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> Verification:
        """Compares `a·W_0 + Σ v⊗k` with the trained weights, layer by layer.

        Without a model: with the weights that the closed recording left; for a run that was killed, or as of
        an earlier step, with the entries of the weights that the step log keeps for every step.

        Args:
            model: the trained network.
            files: also read every file and compare it with its checksum.
            parameters: what `parameters(layer)` gave for each layer, if it has been added up already.
            optimizer: for a run whose optimizer has no exact rule: its class, which is then run again on the
                recorded gradients. One of torch's own need not be given.
        """
        reader = self._view.reader
        with _damage_named(reader):
            if reader.manifest.fold is not None or reader.manifest.sample is not None:
                self._refuse_to_verify(files)
            replayed = self._replayed(optimizer) if is_replayed(reader) else None
            for layer in reader.layers if replayed is None else ():
                self._view.unrolled(layer)  # refuses before the long part, if it must
            damaged = reader.damaged() if files else []
            made = replayed or parameters or {name: self.parameters(name) for name in reader.layers}
            checks = {
                name: self._check(name, entry, model, dict(made[name]))
                for name, entry in reader.manifest.layers.items()
            }
        if replayed is not None:
            return Verification(checks, damaged, f"{reader.manifest.optimizer} was run again on the recorded gradients")
        rule = rule_named(reader.manifest.rule)
        return Verification(checks, damaged, None if rule is None else rule.note)

    def _refuse_to_verify(self, files: bool) -> None:
        reader = self._view.reader
        damaged = reader.damaged() if files else []
        if damaged:
            raise MemoryFormatError(" ".join(damaged))
        reader.need_visits(
            "the errors that the weights could be verified by",
            "Its files are what was written: ask for scores, top or totals"
            if files
            else "Ask for scores, top or totals",
        )
        reader.need_all_slots(
            "To verify the weights takes",
            ("Its files are what was written, and memory.layers" if files else "memory.layers")
            + " says at how many steps all slots did not explain the gradients (it was compared as they were recorded)",
        )

    def _replayed(self, optimizer: MakeOptimizer | None) -> dict[str, dict[str, Tensor]]:
        view = self._view
        if view.selection != _as_of(Everything(), view.until, view.reader):
            raise UnsupportedError(
                f"{view.reader.directory} was trained with {view.reader.manifest.optimizer}, which has no exact update "
                "rule: only the whole memory can be verified, not a part of it."
            )
        return replay(view.reader, view.until, optimizer)

    def _check(self, name: str, entry: LayerEntry, model: nn.Module | None, found: dict[str, Tensor]) -> Check:
        reader = self._view.reader
        log, until = reader.log(name), self._view.until
        initial = {p: reader.initial[f"{name}/{p}"].double() for p in found}
        if model is not None:
            held = parameters_of(model, entry)
            truth = {p: held[p].double().cpu() for p in found}
            source = "the model"
        elif reader.final is not None and until == reader.manifest.steps:
            truth = {p: reader.final[f"{name}/{p}"].double() for p in found}
            source = "final weights"
        else:
            source = f"samples at step {until}"
            truth = dict(initial)
            for parameter in entry.trained:
                kept = sample_slice(initial[parameter].numel())
                found[parameter] = found[parameter].reshape(-1)[kept]
                initial[parameter] = initial[parameter].reshape(-1)[kept]
                logged = log.samples[parameter][until - 1 : until]
                truth[parameter] = logged[0].double() if until else initial[parameter]

        def joined(tensors: dict[str, Tensor]) -> Tensor:
            return torch.cat([tensors[p].reshape(-1) for p in sorted(found)])

        difference = (joined(found) - joined(truth)).norm()
        change = (joined(truth) - joined(initial)).norm()
        residual = log.residual[:until]
        return Check(
            relative_error=_ratio(difference, joined(truth).norm()),
            change_error=_ratio(difference, change),
            compared_with=source,
            unexplained_steps=_large(residual, entry),
            worst_residual=float(residual.max()) if len(residual) else 0.0,
            moved_steps=log.moved[:until].nonzero().flatten().tolist(),
            tolerance=_tolerance(entry, rule_named(reader.manifest.rule)),
        )


@contextlib.contextmanager
def _damage_named(reader: MemoryReader) -> Iterator[None]:
    """Damaged numbers can fail anywhere: then the damaged file is the error."""
    try:
        yield
    except SpotlightsError:
        raise
    except Exception as error:
        damaged = reader.damaged()
        if not damaged:
            raise
        raise MemoryFormatError(" ".join(damaged)) from error


def _ratio(difference: Tensor, norm: Tensor) -> float:
    return 0.0 if difference == 0 else float(difference / norm)


def _large(residual: Float[Tensor, "steps"], entry: LayerEntry) -> list[int]:
    """The steps at which more is unexplained than the rounding of the stored numbers can be."""
    threshold = max(UNEXPLAINED, 8 * entry.rounding)
    return (~(residual <= threshold)).nonzero().flatten().tolist()


def _tolerance(entry: LayerEntry, rule: UpdateRule | None) -> float:
    """What rounding allows: of the network's own arithmetic, of the storage type, and of the optimizer."""
    own = 1e-10 if entry.dtype == "float64" and entry.storage == "float64" else 1e-4
    return max(own, 16 * entry.rounding, 0.0 if rule is None else rule.rounding)


def _as_of(selection: Selection, step: int, reader: MemoryReader) -> Selection:
    return selection if step == reader.manifest.steps else selection & Between("step", range(step))


class MemoryInfo(Printable):
    """What a memory is, as a table."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        reader = self._memory._view.reader
        manifest = reader.manifest
        return {
            "path": str(reader.directory),
            "status": manifest.status,
            "created": manifest.created,
            "steps": reader.steps,
            "slots": len(self._memory),
            "bytes": reader.nbytes,
            "optimizer": manifest.optimizer,
            "folded": None if manifest.fold is None else f"by {manifest.fold.by} over {manifest.fold.span}",
            "sampled": None if manifest.sample is None else str(manifest.sample),
            "exact": rule_named(manifest.rule) is not None and manifest.errors and manifest.sample is None,
            "columns": {name: entry.kind for name, entry in manifest.columns.items()},
            "not recorded": manifest.uncovered,
            "recorded parameters": manifest.covered_numbers,
            "trained parameters": manifest.trained_numbers,
            "layers": {name: vars(info) for name, info in self._memory.layers.items()},
            "seed": manifest.seed,
            "git revision": manifest.git_revision,
            "written by": f"spotlights {manifest.spotlights}, torch {manifest.torch}",
        }

    def table(self) -> Any:
        known = self.as_dict()
        rows = []
        for layer in self._memory.layers.values():
            keys = f"{layer.distinct_keys:,}" if layer.distinct_keys != layer.slots else "–"
            shape = f"{layer.in_features} → {layer.out_features}"
            state = ", ".join(layer.trained) or "frozen"
            rows.append([layer.name, layer.kind, shape, f"{layer.slots:,}", keys, layer.storage, state])
        names = ["layer", "kind", "shape", "slots", "distinct keys", "stored as", "trained"]
        exact = "contributions are exact" if known["exact"] else "scores only"
        if known["sampled"]:
            rule = rule_named(self._memory._view.reader.manifest.rule)
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
