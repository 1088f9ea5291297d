"""The options of `record`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spotlights.errors import SettingError
from spotlights.memory.format.manifest import FoldEntry, RecipeEntry
from spotlights.memory.format.sampling import Sample
from spotlights.memory.format.storage import STORAGES, Storage, storage_named
from spotlights.memory.writer import SEGMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """How a run is recorded. The options are described in `record`."""

    layers: str | Sequence[str] | None = None
    dtype: str | None = None
    errors: bool = True
    fold: str | None = None
    fold_from: int = 0
    sample: float = 1.0
    sample_steps: float = 1.0
    resume: bool = False
    overwrite: bool = False
    segment_bytes: int = SEGMENT_BYTES
    keep: str = "slots"
    checkpoint_every: int | str = "auto"
    observed: int = 0
    """The sets of weights of a network that was already trained (`observe`)."""

    def __post_init__(self) -> None:
        storage = None if self.dtype is None else storage_named(self.dtype)
        if self.resume and self.overwrite:
            raise SettingError("Give resume=True or overwrite=True, not both.")
        if self.fold not in (None, "example"):
            raise SettingError(f'fold={self.fold!r}: give "example" to add up visits, or None.')
        if self.fold_from < 0 or (self.fold_from and self.fold is None):
            raise SettingError(f'fold_from={self.fold_from}: give a step, 0 or later, together with fold="example".')
        if self.fold and storage is not None and not storage.foldable:
            others = ", ".join(f'"{name}"' for name, kind in STORAGES.items() if kind.foldable)
            raise SettingError(f'Running sums cannot be stored as "{self.dtype}". Give one of: {others}.')
        for name, probability in (("sample", self.sample), ("sample_steps", self.sample_steps)):
            if not 0 < probability <= 1:
                raise SettingError(f"{name}={probability}: give a probability above 0 and at most 1.")
        if self.fold and self.sampling:
            raise SettingError("Running sums need all visits. Give fold= or sample=, not both.")
        if self.keep not in ("slots", "recipe"):
            raise SettingError(f'keep={self.keep!r}: give "slots", or "recipe" to compute them again when asked.')
        if self.is_recipe and (self.fold or self.sampling):
            raise SettingError('keep="recipe" stores no slots that fold= or sample= could make fewer. Leave these out.')
        every = self.checkpoint_every
        if every != "auto" and not (isinstance(every, int) and every > 0):
            raise SettingError(f'checkpoint_every={every!r}: give a number of steps, or "auto".')
        if every != "auto" and not self.is_recipe:
            raise SettingError('checkpoint_every= belongs to keep="recipe".')

    @property
    def is_recipe(self) -> bool:
        return self.keep == "recipe"

    @property
    def recipe_entry(self) -> RecipeEntry | None:
        return RecipeEntry(list(self.patterns or ()), self.dtype or "") if self.is_recipe else None

    @property
    def patterns(self) -> Sequence[str] | None:
        """Patterns of the names of the layers to record; None for all."""
        return [self.layers] if isinstance(self.layers, str) else self.layers

    @property
    def keeps_errors(self) -> bool:
        return self.errors and self.fold is None

    @property
    def fold_entry(self) -> FoldEntry | None:
        return None if self.fold is None else FoldEntry(self.fold, self.fold_from)

    @property
    def sampling(self) -> Sample | None:
        all_slots = self.sample == self.sample_steps == 1
        return None if all_slots else Sample(float(self.sample), float(self.sample_steps))

    def storage_of(self, weight: torch.dtype) -> Storage:
        """How a layer with weights of that type is stored."""
        # float32 represents float16 and bfloat16 exactly.
        return storage_named(self.dtype or ("float64" if weight == torch.float64 else "float32"))

    def encoding_of(self, weight: torch.dtype) -> Storage:
        """How rows are handed to the writer. Running sums are rounded to float16 only when they are written."""
        storage = self.storage_of(weight)
        return storage_named("float32") if self.fold is not None and storage.name == "float16" else storage
