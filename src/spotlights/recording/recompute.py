"""Slots computed again from a recipe: a network is trained again under the hooks of an ordinary recording.

The slots of each stretch between two checkpoints are kept in a cache, so that a second question computes nothing.
"""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from spotlights.errors import ResumeError, SettingError, SpotlightsWarning, UnsupportedError, warn
from spotlights.memory.files import Committed, read_manifest
from spotlights.memory.format.columns import ColumnTable
from spotlights.memory.reader import MemoryReader, Part
from spotlights.memory.store import CACHE_BYTES, Cache, LocalStore, Store
from spotlights.memory.stretches import StretchCache, StretchReader, StretchStore, finished
from spotlights.optimizers.replayed import MakeOptimizer
from spotlights.recording.adjoint import ExampleDerivatives, sweep_back
from spotlights.recording.recorder import Recorder
from spotlights.recording.rerun import Loss, Rerun, Source, relative_difference
from spotlights.recording.settings import RecordingSettings

Told = Callable[[float], object]
"""Called with the share of the work that is done."""
Each = Callable[[Callable[[range], object], Sequence[range]], Iterable[object]]
"""Runs a task for each of some stretches, here or elsewhere."""


def _difference(source: Source, again: MemoryReader, steps: range) -> float:
    """How far the entries of the weights that both step logs have are apart, relative to them, at most."""
    if again.manifest.status != "closed":
        raise UnsupportedError(f"The slots of a recipe could not be recorded again: {again.manifest.status}.")
    pairs = (
        (probed, source.reader.log(layer).probed[name][steps.start : steps.stop])
        for layer in again.layers
        for name, probed in again.log(layer).probed.items()
    )
    return max((relative_difference(own, kept) for own, kept in pairs), default=0.0)


def _note(store: Store, off: float) -> None:
    """Enters in a recorded memory how far off its weights are."""
    manifest, version = read_manifest(store)
    release = store.lock()
    try:
        Committed(store, manifest, version, release).replace(recomputed=off)
    finally:
        release()


@contextmanager
def as_recorded(threads: int) -> Iterator[None]:
    """Computes with as many threads as the run had, since sums depend on them; leaves random numbers as they were."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


class Recomputation:
    """The slots of a recipe, computed when they are asked for, in a bounded cache."""

    def __init__(self, source: Source, cache: Cache | None) -> None:
        self.source = source
        if cache is None:
            self._folder = tempfile.TemporaryDirectory(prefix="spotlights-")
            cache = Cache(Path(self._folder.name), CACHE_BYTES)
        self._cache = StretchCache(cache.root, cache.limit)
        self._lock = threading.RLock()
        self._run: Rerun | None = None
        """The network at the checkpoint that was needed last."""

    def __reduce__(self) -> Any:
        """So that a process elsewhere can compute stretches into the same cache."""
        source, cache = self.source, self._cache
        return _elsewhere, (source.reader.store, source.model, source.loss, source.make, cache.root, cache.limit)

    def reader(self, told: Told = lambda share: None, each: Each = map) -> StretchReader:
        """All slots as one memory; computes the stretches that have never been computed, by `each`."""
        stretches = list(starmap(range, pairwise(self.source.bounds)))
        missing = [stretch for stretch in stretches if not self._is_there(stretch)]
        for done, _ in enumerate(each(self._make, missing), start=1):
            told(done / len(missing))
        parts = []
        for stretch in stretches:
            if not self._is_there(stretch):  # computed where nobody sees this cache
                self._make(stretch)
            store = StretchStore(self._path(stretch), make=partial(self._make, stretch))
            parts.append(Part(store, read_manifest(store)[0], stretch.start))
        reader = StretchReader(self.source.reader, parts)
        reader.passes = self._passes
        off = reader.manifest.recomputed
        if off:
            warn(
                f"The slots of {reader.address} could not be computed again bit for bit: at checkpoints, weights were "
                f"off by up to {off:.1e}, relative to them. Answers hold for the recomputed run."
            )
        return reader

    @contextmanager
    def _passes(self, step: int) -> Iterator[tuple[nn.Module, Iterator[tuple[Any, Tensor]]]]:
        """As in `MemoryReader.passes`; the network has the weights of some step of the stretch."""
        start = max(checkpoint for checkpoint in self.source.checkpoints if checkpoint <= step)
        if self._run is None or self._run.step != start:
            self._run = Rerun(self.source, start)
        run = self._run
        batches = ((batch, batch.columns["example"]) for batch in self.source.step(step).batches)
        with self._lock, as_recorded(run.threads):
            yield run.model, ((ids, run.losses_of(step, batch, ids)) for batch, ids in batches)

    def record(self, store: Store, steps: range, told: Told = lambda share: None, *, overwrite: bool = True) -> None:
        """Records some steps as a memory of their own, which counts from 0."""
        source = self.source
        if store.is_same_place(source.reader.store):
            raise SettingError(f"{store} is the recipe itself. Choose another path for its slots.")
        entry = source.reader.manifest.recipe
        assert entry is not None
        settings = RecordingSettings(
            layers=entry.layers or None,
            dtype=entry.dtype or None,
            errors=source.reader.manifest.errors,
            overwrite=overwrite,
        )
        with self._lock, warnings.catch_warnings():
            run = Rerun(source, max(step for step in source.checkpoints if step <= steps.start))
            warnings.simplefilter("ignore", SpotlightsWarning)  # said when the recipe was recorded
            with as_recorded(run.threads):
                for step in range(run.step, steps.start):
                    run.take(step)
                columns = ColumnTable(source.reader.manifest.columns)
                recorder = Recorder(run.model, run.optimizer, store, settings, columns)
                with ExitStack() as stack:
                    with source.readable(run.step):  # its first files hold the optimizer's state of the recipe
                        stack.enter_context(recorder)
                    for step in steps:
                        run.take(step, recorder)
                        told((step + 1 - steps.start) / len(steps))
                run.compare(steps.stop)
            with source.readable(steps.start):
                off = max(run.off, _difference(source, MemoryReader(store), steps))
            _note(store, off)

    def sweep_back(
        self, answer: Callable[[nn.Module], Tensor], told: Told
    ) -> tuple[ExampleDerivatives, Sequence[str] | None]:
        """The derivative of some numbers with respect to each example's weight; and the names of examples."""
        run_threads = Rerun(self.source, self.source.checkpoints[0]).threads
        with self._lock, as_recorded(run_threads):
            return sweep_back(self.source, answer, told), self.source.names

    @property
    def steps(self) -> int:
        return self.source.reader.steps

    def _is_there(self, stretch: range) -> bool:
        """Whether a stretch has been computed; its segments may be gone."""
        return finished(LocalStore(self._path(stretch)), len(stretch)) is not None

    def _path(self, stretch: range) -> Path:
        """The same as long as the recipe's files of the stretch are."""
        entries = [segment.entry for segment in self.source.reader.segments]
        checksums = [e.checksum for e in entries if e.first_step < stretch.stop and e.end_step > stretch.start]
        return self._cache.path(xxhash.xxh3_128_hexdigest(" ".join([*checksums, str(stretch)]).encode()))

    def _make(self, stretch: range) -> None:
        path = self._path(stretch)
        with self._lock:
            while True:
                try:
                    self.record(LocalStore(path), stretch)
                    break
                except ResumeError:  # another process computes this stretch
                    time.sleep(1.0)
                    if self._is_there(stretch) and any((path / "segments").glob("*")):
                        break
            self._cache.make_room(path)


def _elsewhere(
    store: Store, model: nn.Module, loss: Loss, make: MakeOptimizer | None, root: Path, limit: int
) -> Recomputation:
    """A recomputation in another process."""
    return Recomputation(Source(MemoryReader(store), model, loss, make), Cache(root, limit))
