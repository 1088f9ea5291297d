"""The explorer: a memory with its network, opened, and what is prepared and kept for its answers.

One scan runs at a time (it takes all cores anyway); masks and whatever is kept need no scan. A memory that is
still being recorded is looked at as it was when it was opened, until somebody asks for the newer steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import spotlights as sl
from spotlights import interrupts
from spotlights.errors import SpotlightsError
from spotlights.explorer.jobs import BackgroundJob, Preparing
from spotlights.explorer.queries import Query, output_layer, read_query

if TYPE_CHECKING:
    from spotlights.subject import Subject

FOLDED = (
    "To leave something out, one must know what each visit added to the weights. This memory is folded: it keeps a sum "
    "of keys for each example, for scores. Record without fold= to see contributions and masks."
)
KEPT = 320 << 20
"""Bytes of what was computed lately: values of all slots, and answers."""
_PATIENT = 0.2
"""Seconds between two looks whether somebody who waits for a scan is still there."""


class Kept:
    """What was computed lately, up to some size in total; the longest unused goes first. Any thread may ask."""

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._results: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        with self._lock:
            _, replaced = self._results.pop(key, (None, 0))
            self._results[key] = value, size
            self._bytes += size - replaced
            while self._bytes > self._limit and len(self._results) > 1:
                _, (_, dropped) = self._results.popitem(last=False)
                self._bytes -= dropped


@dataclass(eq=False)
class Opened:
    """A memory as it was when it was opened, and what was computed about it since."""

    memory: sl.Memory
    model: nn.Module
    groups: dict[str, list[Any]]
    """The columns that divide the slots into few groups, and their values."""
    layers: dict[str, Any]
    """What is known of each recorded layer."""
    kept: Kept = field(default_factory=Kept)
    masks: Any = None
    """What `memory.masks` gave; None if the memory cannot be masked."""
    no_masks: str | None = None
    """Why this memory cannot be masked."""
    verification: Mapping[str, Any] | None = None
    """What `memory.verify` gave, once it is there."""
    influence: BackgroundJob[None] | None = None
    """Once somebody has asked for influence."""
    histories: dict[Any, Any] = field(default_factory=dict)
    """The sweep for a history that is under way, or the last one."""
    replaced: bool = False
    """The memory was opened again since: what is still being prepared for this one stops."""


class Turns:
    """One scan at a time, each with as many threads as there were at the start; who is gone does not wait.

    A thread that first meets torch while another one scans is told that there is a single one, and keeps to that:
    without this, whatever it is asked later would take twice as long.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._threads = torch.get_num_threads()

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=_PATIENT):
            interrupts.check()
        try:
            interrupts.check()
        except BaseException:
            self._lock.release()
            raise
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Explorer:
    """What every answer to the page stands on (`data`, `spotlight`)."""

    def __init__(self, subject: Subject, *, prepare: bool = True, other: Explorer | None = None) -> None:
        """
        Args:
            subject: what is explored.
            prepare: add up the group weights in the background, which masks and the verdict need.
            other: another memory to compare the answers with.
        """
        self.subject = subject
        self.other = other
        self.inputs = subject.inputs  # what is missing is said here, before anything starts
        self.scanning = Turns()
        self.starting = threading.Lock()
        self._prepare = prepare
        self.opened = self._open(subject.open())
        if (subject.example_input is None or subject.show_example is None) and self._sees_inputs():
            self.subject = subject.with_examples(self._rebuilt)

    def _sees_inputs(self) -> bool:
        """Whether the first layer's keys are the network's inputs, as those of the first test input are."""
        opened, data = self.opened, self.inputs.data
        layer = next(iter(opened.layers), None)
        if layer is None or opened.memory.folded or "example" not in opened.memory.columns:
            return False
        if not isinstance(data, torch.Tensor) or not data.is_floating_point():
            return False
        if data[0].numel() != opened.layers[layer].in_features:
            return False
        spot = self.attend(read_query(self.subject, f"test:{self.inputs.ids[0]}"))
        seen = spot[layer].queries if layer in spot else None
        return isinstance(seen, torch.Tensor) and torch.equal(seen.flatten(), data[0].flatten().to(seen.dtype))

    def _rebuilt(self, example: int) -> torch.Tensor:
        """A training example as the network takes it: the key of one of its slots in the first layer."""
        memory, layer = self.opened.memory, next(iter(self.opened.layers))
        like = self.inputs.batch([0])[0]

        def places() -> dict[Any, int]:
            slots = memory.first_slots("example", layer=layer).tolist()
            return dict(zip(memory.distinct("example", layer=layer), slots, strict=True))

        place = self.kept("first slots", places, 1 << 20).get(example)
        if place is None:
            raise sl.UnknownNameError(f"No training example {example}.")
        return memory.keys([place], layer=layer)[0].reshape(like.shape).to(like.dtype)

    def _open(self, memory: sl.Memory) -> Opened:
        model = self.subject.network(memory).eval()
        opened = Opened(memory, model, memory.groups(), memory.layers)
        try:
            opened.masks = memory.masks(model, list(opened.groups))
        except SpotlightsError as error:
            why = str(error).replace(memory.info.as_dict()["path"], "This memory")
            opened.no_masks = FOLDED if memory.folded else why
        if self._prepare:
            threading.Thread(target=self.prepare, args=(opened,), daemon=True).start()
        return opened

    def prepare(self, opened: Opened) -> None:
        """Prepares masks, then the verdict, which follows from the same sums."""
        try:
            if opened.masks is not None:
                opened.masks.build(turn=lambda: self._turn(opened))
                parameters = opened.masks.whole()
                with self.scanning:
                    opened.verification = opened.memory.verify(opened.model, files=False, parameters=parameters)
        except SpotlightsError as error:
            opened.masks, opened.no_masks = None, str(error)

    def _turn(self, opened: Opened) -> Turns:
        """What a preparation holds during each stretch."""
        if opened.replaced:
            raise sl.UnsupportedError("The memory was opened again meanwhile.")
        return self.scanning

    def refresh(self) -> None:
        """Opens the memory again, to see the steps that came since; nothing happens if none came."""
        with self.scanning:
            memory = self.subject.open()
            if memory.info.as_dict() == self.opened.memory.info.as_dict():
                return
            opened, self.opened = self.opened, self._open(memory)
            opened.replaced = True

    # -- queries -------------------------------------------------------------------------------

    def attend(self, query: Query) -> sl.Spotlights:
        """The forward pass of a query; kept."""

        def attend() -> sl.Spotlights:
            return self.opened.memory.attend(self.opened.model, query.batch, kernel=self.subject.kernel)

        return self.kept(("attend", query.name, query.position), attend, 1 << 20)

    def answer(self, query: Query) -> dict[str, Any]:
        """A query and what the network says to it."""
        spot, layers = self.attend(query), self.opened.layers
        return {**query.described(spot.output), "layers": list(spot), "layer": output_layer(layers, query, spot)}

    def kept(self, key: Hashable, compute: Callable[[], Any], size: int | Callable[[Any], int] = 200_000) -> Any:
        """What was computed before, or is now: one scan at a time. `size` is in bytes."""
        if (value := self.opened.kept.get(key)) is None:
            with self.scanning:  # nobody opens the memory again meanwhile
                kept = self.opened.kept
                if (value := kept.get(key)) is None:
                    value = compute()
                    kept.put(key, value, size if isinstance(size, int) else size(value))
        return value

    def prepare_influence(self) -> None:
        """Prepares what influence needs, once somebody asks for influence; raises `Preparing` while that takes long."""
        opened = self.opened
        if opened.memory.influence_is_prepared:
            return
        with self.starting:
            prepare, turn = opened.memory.prepare_influence, partial(self._turn, opened)
            opened.influence = opened.influence or BackgroundJob(lambda note: prepare(turn=turn, progress=note))
        opened.influence.result()

    # -- masks ---------------------------------------------------------------------------------

    def masks(self) -> Any:
        """The networks under masks, prepared since the start; raises `Preparing` until they are there."""
        opened = self.opened
        if opened.masks is None:
            raise sl.UnsupportedError(opened.no_masks or "This memory cannot be masked.")
        if not opened.masks.ready:
            raise Preparing(opened.masks.progress)
        return opened.masks

    def answering_layer(self, query: Query | None = None) -> str:
        """The layer that answers a query, or the first test input."""
        asked = query or read_query(self.subject, f"test:{self.inputs.ids[0]}")
        return output_layer(self.opened.layers, asked, self.attend(asked))
