"""The explorer: a memory with its network, opened, and what is prepared and kept for its answers.

One scan runs at a time (it takes all cores anyway); masks and whatever is kept need no scan. A memory that is
still being recorded is looked at as it was when it was opened, until somebody asks for the newer steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import spotlights as sl
from spotlights.attention import Spotlights
from spotlights.attention.group_weights import Cells
from spotlights.attention.grouping import column_values
from spotlights.attention.results import Label
from spotlights.attention.whitening import key_moments
from spotlights.errors import SpotlightsError
from spotlights.memory.columns import FIRST_STEP, LAST_STEP, VISITS
from spotlights.verification import Verification
from spotlights.web.masks import Mask, Masks
from spotlights.web.measures import Kept
from spotlights.web.queries import Query, described, outputs_of, read_query
from spotlights.web.subject import Subject

MAX_GROUPS = 64
"""A column with more values than this is not offered as a group."""
FOLDED = (
    "To leave something out, one must know what each visit added to the weights. This memory is folded: it keeps a sum "
    "of keys for each example, for scores. Record without fold= to see contributions and masks."
)
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


class Turns:
    """One scan at a time, each with as many threads as there were at the start.

    A thread that first meets torch while another one scans is told that there is a single one, and keeps to that:
    without this, whatever it is asked later would take twice as long.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._threads = torch.get_num_threads()

    def __enter__(self) -> None:
        self._lock.acquire()
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Explorer:
    """What every answer to the page stands on (`overview`, `data`, `spotlight`, `audit`, `effects`, `snippets`)."""

    def __init__(self, subject: Subject, *, prepare: bool = True) -> None:
        """`prepare`: add up the group weights in the background, which masks and the verdict need."""
        self.subject = subject
        self.scanning = Turns()
        self._starting = threading.Lock()
        self._prepare = prepare
        self._count = 0
        self.opened = self._open()

    def _open(self) -> Opened:
        memory = self.subject.reopen()
        model = self.subject.network(memory).eval()
        self._count += 1
        opened = Opened(memory, model, groups_of(memory), self._count)
        try:
            cells = _cells(memory, list(opened.groups))
            opened.masks = Masks(memory, model, list(opened.groups), cells)
        except SpotlightsError as error:
            opened.no_masks = FOLDED if memory._view.reader.manifest.fold else str(error)
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
                found = opened.memory.attend(opened.model, query.batch, kernel=self.subject.kernel)
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


def groups_of(memory: sl.Memory) -> dict[str, list[Label]]:
    """Columns of few values, the labels first."""
    layers = list(memory._view.reader.layers.values())
    if not layers or not layers[-1].slots:
        return {}
    layer, entries = layers[-1], memory._view.reader.manifest.columns
    no_groups = ("step", "example", "position", VISITS, FIRST_STEP, LAST_STEP)
    names = [name for name in entries if name not in no_groups and entries[name].kind != "float"]
    found = {}
    for name in sorted(names, key=("label", "source").__contains__, reverse=True):
        values = layer.distinct(name)
        if 0 < len(values) <= MAX_GROUPS and not any(_alike(memory, name, other) for other in found):
            labels = column_values(torch.from_numpy(values), entries[name].kind, entries[name].strings)
            if labels != [None]:
                found[name] = sorted(labels, key=str) if entries[name].kind == "string" else labels
    return found


def _alike(memory: sl.Memory, column: str, other: str) -> bool:
    """Whether two columns divide the slots into the same groups, under other names."""
    layer = list(memory._view.reader.layers.values())[-1]
    sizes = {len(layer.distinct(name)) for name in (column, other)}
    return sizes == {len(Cells(memory._view, layer, [column, other]))}


def _cells(memory: sl.Memory, columns: list[str]) -> int:
    view = memory._view
    return max((len(Cells(view, layer, columns)) for layer in view.reader.layers.values()), default=0)
