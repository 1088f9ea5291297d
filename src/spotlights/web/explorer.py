"""The explorer's answers: what stands behind each address of the API, as plain Python.

One scan runs at a time (it takes all cores anyway); masks and whatever is kept need no scan. A memory that is
still being recorded is looked at as it was when it was opened, until somebody asks for the newer steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

import spotlights as sl
from spotlights.attention import Spotlights
from spotlights.attention.grouping import column_values
from spotlights.attention.results import Label
from spotlights.attention.whitening import key_moments
from spotlights.errors import SpotlightsError, UnknownNameError
from spotlights.figures import palette
from spotlights.opened import Verification
from spotlights.web.masks import Mask, Masks
from spotlights.web.measures import Kept
from spotlights.web.queries import Query, described, outputs_of, read_query
from spotlights.web.subject import Subject
from spotlights.web.views import as_json, pixels, png

MAX_GROUPS = 64
"""A column with more values than this is not offered as a group."""
BATCH = 512
PATIENCE = 1.0
"""Seconds for which an answer waits for what it needs before it is put off."""


class Preparing(Exception):  # noqa: N818 (no error, an answer for later)
    """An answer that needs something which is still being prepared: ask again."""

    def __init__(self, progress: float) -> None:
        super().__init__(progress)
        self.progress = progress
        """0 to 1."""


@dataclass(eq=False)
class Moments:
    """The moments of the keys, on their way."""

    thread: threading.Thread
    progress: float = 0.0
    problem: SpotlightsError | None = None


@dataclass(eq=False)
class Opened:
    """A memory as it was when it was opened, and all that was found out about it since."""

    memory: sl.Memory
    model: nn.Module
    groups: dict[str, list[Label]]
    """The columns that divide the slots into few groups, and their values."""
    number: int
    """Counts how often the memory was opened."""
    values: Kept = field(default_factory=Kept)
    answers: Kept = field(default_factory=lambda: Kept(64 << 20))
    masks: Masks | None = None
    no_masks: str | None = None
    """Why this memory cannot be masked."""
    verification: Verification | None = None
    moments: Moments | None = None
    """What influence needs besides the memory, once somebody has asked for it."""


class Explorer:
    """Answers everything that the page asks."""

    def __init__(self, subject: Subject, *, prepare: bool = True) -> None:
        """`prepare`: add up the group weights in the background, which masks and the verdict need."""
        self.subject = subject
        self.scanning = threading.RLock()
        self._starting = threading.Lock()
        self._prepare = prepare
        self._count = 0
        self.opened = self._open()

    def _open(self) -> Opened:
        memory = self.subject.reopen()
        memory._view.reader.need_visits(
            "the visits that the explorer shows", "Ask attend(model, inputs) for top or totals"
        )
        model = self.subject.network(memory).eval()
        self._count += 1
        opened = Opened(memory, model, groups_of(memory), self._count)
        try:
            cells = _cells(memory, list(opened.groups))
            opened.masks = Masks(memory, model, list(opened.groups), cells)
        except SpotlightsError as error:
            opened.no_masks = str(error)
        if self._prepare:
            threading.Thread(target=self._finish, args=(opened,), daemon=True).start()
        return opened

    def _finish(self, opened: Opened) -> None:
        """Masks first: the verdict then follows from the same sums."""
        try:
            if opened.masks is not None:
                opened.masks.build(lambda: self.scanning)
                parameters = opened.masks.whole()
                with self.scanning:
                    opened.verification = opened.memory.verify(opened.model, files=False, parameters=parameters)
        except SpotlightsError as error:
            opened.masks, opened.no_masks = None, str(error)

    def refresh(self) -> None:
        """Opens the memory again, to see the steps that came since."""
        with self.scanning:
            self.opened = self._open()

    # -- what is there -------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """The run: its layers, its groups, what can be asked."""
        opened, subject = self.opened, self.subject
        memory, inputs = opened.memory, subject.inputs
        known = memory.info.as_dict()
        first_source = None if inputs.sources is None else inputs.sources[0]
        groups = {}
        for column, values in opened.groups.items():
            names = [str(value) for value in values]
            several = inputs.sources is not None and len(set(inputs.sources)) > 1
            if column == "label" and subject.class_names is not None and not several:
                classes = subject.class_names(first_source)
                names = [classes[v] if isinstance(v, int) and 0 <= v < len(classes) else str(v) for v in values]
            groups[column] = [
                {"value": value, "name": name, "colour": colour}
                for value, name, colour in zip(values, names, palette.colours(column, values), strict=True)
            ]
        drawing = subject.drawing
        return {
            "title": subject.title,
            "opened": opened.number,
            "status": known["status"],
            "steps": memory.steps,
            "slots": len(memory),
            "optimizer": known["optimizer"],
            "exact": known["exact"],
            "columns": known["columns"],
            "layers": [
                {"name": name, "in": info.in_features, "out": info.out_features, "slots": info.slots}
                for name, info in memory.layers.items()
            ],
            "groups": groups,
            "inputs": len(inputs),
            "labelled": inputs.labels is not None,
            "sources": sorted(set(inputs.sources or [])),
            "classes": [] if subject.class_names is None else subject.class_names(first_source),
            "examples": "example" in memory.columns,
            "training_queries": subject.example_input is not None and "example" in memory.columns,
            "drawing": None if drawing is None else {"height": drawing.height, "width": drawing.width},
            "prompt": subject.tokenizer is not None,
            "edges": [] if opened.masks is None or opened.masks.groups is None else opened.masks.groups.edges,
            "no_masks": opened.no_masks,
            "ink": drawing is not None,
            "colours": {
                "for": palette.FOR,
                "against": palette.AGAINST,
                "ink": palette.INK,
                "quiet": palette.QUIET,
                "faint": palette.FAINT,
                "caution": palette.CAUTION,
                "classes": palette.CLASSES,
            },
            "version": sl.__version__,
        }

    def status(self) -> dict[str, Any]:
        """What is still going on: the recording, the preparation of masks, the verdict."""
        opened = self.opened
        now = self.subject.reopen() if _is_recording(opened.memory) else opened.memory
        checks = opened.verification
        return {
            "opened": opened.number,
            "recording": _is_recording(now),
            "steps": opened.memory.steps,
            "steps_now": now.steps,
            "masks": None if opened.masks is None else 1.0 if opened.masks.ready else opened.masks.progress,
            "verified": None
            if checks is None
            else {
                name: {**{k: v for k, v in asdict(check).items() if not k.endswith("_steps")}, "ok": check.ok}
                for name, check in checks.items()
            },
        }

    # -- inputs and examples -------------------------------------------------------------------

    @cached_property
    def _position(self) -> dict[int, int]:
        return {example: place for place, example in enumerate(self.subject.inputs.ids)}

    def predictions(self) -> tuple[Int64[Tensor, "inputs"], Float[Tensor, "inputs"]] | None:
        """What the network says to every test input, and how sure it is; None if it is no classifier."""
        opened = self.opened
        found = opened.answers.get("predictions")
        if found is None:
            with self.scanning:
                found = _predict(opened.model, self.subject.inputs.tensors)
            opened.answers.put("predictions", found, 0 if found is None else found[0].nbytes * 2)
        return found

    def inputs(
        self, *, only: str, label: int | None, source: str | None, order: str, seed: int, first: int, count: int
    ) -> dict[str, Any]:
        """Test inputs with what the network says to them."""
        inputs, predicted = self.subject.inputs, self.predictions()
        places = torch.arange(len(inputs))
        labels = None if inputs.labels is None else torch.tensor(inputs.labels)
        if predicted is not None and labels is not None and only != "all":
            right = predicted[0] == labels
            places = places[~right if only == "wrong" else right]
        if label is not None and labels is not None:
            places = places[labels[places] == label]
        if source is not None and inputs.sources is not None:
            places = torch.tensor([p for p in places.tolist() if inputs.sources[p] == source], dtype=torch.int64)
        if order == "random":
            places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
        elif order == "unsure" and predicted is not None:
            places = places[predicted[1][places].argsort(stable=True)]
        rows = [self.input(place) for place in places[first : first + count].tolist()]
        return {"matching": len(places), "first": first, "inputs": rows}

    def input(self, place: int) -> dict[str, Any]:
        """One test input, by its place: how it looks, and what the network says to it."""
        inputs, predicted = self.subject.inputs, self.predictions()
        shown = as_json(inputs.show(place))
        if shown["kind"] == "image":
            shown["image"] = f"api/inputs/{inputs.ids[place]}.png"
        return {
            "id": inputs.ids[place],
            "label": None if inputs.labels is None else inputs.labels[place],
            "source": None if inputs.sources is None else inputs.sources[place],
            "said": None if predicted is None else int(predicted[0][place]),
            "share": None if predicted is None else float(predicted[1][place]),
            "shown": shown,
        }

    def input_png(self, example: int) -> bytes:
        if example not in self._position:
            raise UnknownNameError(f"No test input has the id {example}.")
        return png(pixels(self.subject.inputs.show(self._position[example])))

    def example_png(self, example: int) -> bytes:
        if self.subject.show_example is None:
            raise UnknownNameError("Training examples have no pictures here.")
        return png(pixels(self.subject.show_example(example)))

    def show_example(self, example: int | None) -> dict[str, Any] | None:
        """How a training example looks; None where nobody has said."""
        if self.subject.show_example is None or example is None:
            return None
        shown = as_json(self.subject.show_example(example))
        if shown["kind"] == "image":
            shown["image"] = f"api/examples/{example}.png"
        return shown

    def example(self, example: int) -> dict[str, Any]:
        """A training example: how it looks, what is known of it, and when it was visited."""
        memory = self.opened.memory
        if "example" not in memory.columns:
            raise UnknownNameError("This memory knows no examples: it was recorded without recorder.batch(example=…).")
        layer = next(iter(memory._view.reader.layers.values()))
        selection = memory.where(example=example)._view.selection
        slots = torch.cat([torch.empty(0, dtype=torch.int64), *(b.slots for b in layer.blocks(selection, 1 << 16))])
        if not len(slots):
            raise UnknownNameError(f"No slot has example={example}.")
        entries = memory._view.reader.manifest.columns
        columns = {
            name: column_values(layer.column_at(name, slots[:1]), entry.kind, entry.strings)[0]
            for name, entry in entries.items()
            if name not in ("step", "example", "position")
        }
        steps = layer.column_at("step", slots).tolist()
        return {"example": example, "columns": columns, "steps": steps, "shown": self.show_example(example)}

    # -- queries -------------------------------------------------------------------------------

    def query(self, name: str, position: int | None) -> Query:
        return read_query(self.subject, name, position)

    def attend(self, query: Query) -> Spotlights:
        """The forward pass of a query, kept."""
        opened = self.opened
        key = "attend", query.name, query.position
        found = opened.answers.get(key)
        if found is None:
            with self.scanning:
                found = opened.memory.attend(opened.model, query.batch)
            opened.answers.put(key, found, 1 << 20)
        return found

    def answer(self, query: Query) -> dict[str, Any]:
        """A query and what the network says to it."""
        spot = self.attend(query)
        return described(self.subject, query, outputs_of(spot.output, query), spot)

    def kept(self, key: Any, compute: Callable[[], dict[str, Any]], size: int = 200_000) -> dict[str, Any]:
        """An answer that was given before, or a new one: one scan at a time."""
        opened = self.opened
        found = opened.answers.get(key)
        if found is None:
            with self.scanning:
                found = opened.answers.get(key) or compute()
            opened.answers.put(key, found, size)
        return found

    # -- influence -----------------------------------------------------------------------------

    def moments(self) -> None:
        """Sees that the moments of the keys are there; they are added up once somebody asks, in turns with others."""
        opened = self.opened
        if opened.memory._view.reader.moments:
            return
        with self._starting:
            if opened.moments is None:
                thread = threading.Thread(target=self._add_up_moments, args=(opened,), daemon=True)
                opened.moments = Moments(thread)
                thread.start()
        opened.moments.thread.join(PATIENCE)
        if opened.moments.problem is not None:
            raise opened.moments.problem
        if opened.moments.thread.is_alive():
            raise Preparing(opened.moments.progress)

    def _add_up_moments(self, opened: Opened) -> None:
        moments = opened.moments
        assert moments is not None

        def went(share: float) -> None:
            moments.progress = share

        try:
            key_moments(opened.memory._view.reader, turn=lambda: self.scanning, progress=went)
        except SpotlightsError as error:
            moments.problem = error

    # -- masks ---------------------------------------------------------------------------------

    def masks(self) -> Masks:
        """Prepared since the start."""
        opened = self.opened
        if opened.masks is None:
            raise sl.UnsupportedError(opened.no_masks or "This memory cannot be masked.")
        if not opened.masks.ready:
            raise Preparing(opened.masks.progress)
        return opened.masks

    def mask(self, query: Query, mask: Mask) -> dict[str, Any]:
        """The answer with and without what the mask leaves out."""
        masks = self.masks()
        spot = self.attend(query)
        with_all = outputs_of(spot.output, query)
        without = outputs_of(masks.network(mask)(query.batch), query) if mask else with_all
        return {
            "with": described(self.subject, query, with_all, spot),
            "without": described(self.subject, query, without, spot),
        }


@torch.no_grad()
def _predict(model: nn.Module, tensors: Tensor) -> tuple[Tensor, Tensor] | None:
    said, share = [], []
    for some in tensors.split(BATCH):
        output = model(some)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(some):
            return None
        chances = output.double().softmax(dim=1).max(dim=1)
        said.append(chances.indices.cpu())
        share.append(chances.values.cpu())
    return torch.cat(said), torch.cat(share)


def _is_recording(memory: sl.Memory) -> bool:
    return memory._view.reader.manifest.status == "recording"


def groups_of(memory: sl.Memory) -> dict[str, list[Label]]:
    """Columns of few values, the labels first."""
    layers = list(memory._view.reader.layers.values())
    if not layers or not layers[-1].slots:
        return {}
    layer, entries = layers[-1], memory._view.reader.manifest.columns
    names = [name for name in entries if name not in ("step", "example", "position") and entries[name].kind != "float"]
    found = {}
    for name in sorted(names, key=("label", "source").__contains__, reverse=True):
        values = layer.distinct(name)
        if 0 < len(values) <= MAX_GROUPS:
            found[name] = column_values(torch.from_numpy(values), entries[name].kind, entries[name].strings)
    return found


def _cells(memory: sl.Memory, columns: list[str]) -> int:
    from spotlights.attention.group_weights import Cells

    view = memory._view
    return max((len(Cells(view, layer, columns)) for layer in view.reader.layers.values()), default=0)
