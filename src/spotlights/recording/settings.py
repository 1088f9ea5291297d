"""How a run is recorded: the options of `record`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotlights.errors import SettingError
from spotlights.memory.manifest import FoldEntry
from spotlights.memory.sampling import Sample


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is recorded."""

    patterns: Sequence[str] | None
    """Of the names of the layers to record; None for all."""
    dtype: str
    errors: bool
    fold: FoldEntry | None
    sample: Sample | None
    resume: bool
    overwrite: bool
    segment_bytes: int

    @property
    def first_step(self) -> int:
        """The first step whose slots are recorded."""
        return 0 if self.fold is None else self.fold.from_step

    @property
    def encoded_as(self) -> str:
        """The type of rows as they are handed over; running sums are rounded only when they are written."""
        return "float32" if self.fold is not None and self.dtype == "float16" else self.dtype


def checked(
    *,
    layers: str | Sequence[str] | None,
    dtype: str,
    errors: bool,
    fold: str | None,
    fold_from: int,
    sample: float,
    sample_steps: float,
    resume: bool,
    overwrite: bool,
    segment_bytes: int,
) -> Settings:
    """The options of `record` as settings; those that do not go together get their error here."""
    if resume and overwrite:
        raise SettingError("Give resume=True or overwrite=True, not both.")
    if fold not in (None, "example"):
        raise SettingError(f'fold={fold!r}: visits can be added up by "example", or not at all (None).')
    if fold_from < 0 or (fold_from and fold is None):
        raise SettingError(f'fold_from={fold_from}: give a step, from 0 on, together with fold="example".')
    if fold and dtype == "int8":
        raise SettingError('Running sums are kept as "float32", "float64" or "float16": choose one of these as dtype.')
    for name, share in (("sample", sample), ("sample_steps", sample_steps)):
        if not 0 < share <= 1:
            raise SettingError(f"{name}={share}: give a probability above 0; 1 keeps all.")
    sampled = None if sample == sample_steps == 1 else Sample(float(sample), float(sample_steps))
    if fold and sampled:
        raise SettingError("Running sums are made of all visits: give fold= or sample=, not both.")
    return Settings(
        patterns=[layers] if isinstance(layers, str) else layers,
        dtype=dtype,
        errors=errors and fold is None,
        fold=None if fold is None else FoldEntry(fold, fold_from),
        sample=sampled,
        resume=resume,
        overwrite=overwrite,
        segment_bytes=segment_bytes,
    )
