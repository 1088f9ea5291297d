"""What a user is told while a run is recorded: what it takes, what it misses and why, and that it has stopped.

Every kind of report is given once in a recording, as a warning at the user's line; what is as usual is in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from spotlights.errors import RecordingStoppedWarning, SpotlightsWarning, warn
from spotlights.memory.format.columns import Matching, Misfit
from spotlights.memory.slots import LayerStep, StepRecord

_LARGE, _LARGE_RUN = 10e6, 20e9
"""From that many bytes per example, or per 1,000 steps, on: a warning instead of a line in the log."""
_NAMES_SHOWN = 3


class Reports:
    """The reports of one recording."""

    def __init__(self, address: object) -> None:
        self._address = address
        self._given: set[str] = set()

    @property
    def stopped(self) -> bool:
        """Whether the user knows that recording has stopped."""
        return "stopped" in self._given

    def _once(self, kind: str, text: str, category: type[SpotlightsWarning] = SpotlightsWarning) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warn(text, category)

    def without_slots(self, step: int, layer: str, *, in_training: bool) -> None:
        reason = (
            "no call of its module was recorded (is its weight used outside the module?)"
            if in_training
            else "the model is in eval mode, which is not recorded (call model.train())"
        )
        self._once(
            "without slots",
            f'At step {step} layer "{layer}" has a gradient but no slots: {reason}. '
            "The step log marks such steps, and verify reports them.",
        )

    def late(self, step: int) -> None:
        self._once(
            "late",
            "recorder.batch(…) was called after the forward pass: it describes the forward passes that follow it, "
            f"so that no slot of step {step} has these columns. Call it before the forward pass.",
        )

    def rows(self, matching: Matching, staged: Mapping[str, LayerStep]) -> None:
        """That rows of a step do not fit the batch; or that it is not clear how they do."""
        misfits = {name: misfit for name, misfit in matching.misfits.items() if name in staged}
        for name in misfits:  # others may belong to an optimizer that has not stepped yet
            del matching.misfits[name]
        # A pass for monitoring has other rows, which no step uses.
        used = {n: m for n, m in misfits.items() if any(m.columns[0] not in r.columns for r in staged[n].rows)}
        if used:
            self._misfit(used)
        ambiguous, matching.ambiguous = matching.ambiguous, {}
        if ambiguous:
            self._ambiguous(ambiguous)

    def _misfit(self, misfits: Mapping[str, Misfit]) -> None:
        name, misfit = next(iter(misfits.items()))
        shapes = " or ".join(str(misfit.rows[:n]) for n in range(1, len(misfit.rows) + 1))
        given = "example" if "example" in misfit.columns else misfit.columns[0]  # the others follow from examples
        self._once(
            "misfit",
            f'Layer "{name}" has rows of shape {misfit.rows}, but recorder.batch gave {_listed(misfit.columns)} '
            f"with shape {misfit.given}: its slots have no {_listed(misfit.columns, 'or')}{_others(misfits)}. If you "
            f'know whose rows they are, say so: recorder.batch({given}=…, layer="{name}") with shape {shapes}. '
            "For micro-batches, call recorder.batch before the forward pass of each.",
        )

    def _ambiguous(self, misfits: Mapping[str, Misfit]) -> None:
        name, misfit = next(iter(misfits.items()))
        (column,) = misfit.columns
        self._once(
            "ambiguous",
            f'Layer "{name}" has rows of shape {misfit.rows}, and the column "{column}" was given with '
            f"shape {misfit.given}: examples may be counted along the first axis or along the second one"
            f"{_others(misfits)}. The first one was taken. To say which, give one value for each row: "
            f'recorder.batch({column}=values[:, None].expand{misfit.rows[:2]}, layer="{name}"), or '
            "values[None] where examples are counted along the second axis.",
        )

    def another_optimizer(self, step: int, name: str, layers: Sequence[str]) -> None:
        self._once(
            "another optimizer",
            f"After step {step}, layers of the model ({some_of(layers)}) are trained by an optimizer that was not "
            f"given to sl.record ({name}). Its steps are not recorded. Give sl.record all optimizers of the model, as "
            "a list; if a new optimizer takes the place of an old one, record from there on into a memory of its own.",
        )

    def gap(self, gap: str | None) -> None:
        """That gradients or weights are not what the slots explain, if that has been found."""
        if gap is not None:
            self._once(
                "gap", f"{gap}. Contributions will not add up to the answer; they and verify say how much is missing."
            )

    def forked(self) -> None:
        self._once(
            "forked",
            f"This process was forked from the one that records {self._address}. Only that one goes on recording; "
            "here, the recorder does nothing.",
        )

    def stop(self, failure: BaseException) -> None:
        self._once(
            "stopped",
            f"Recording to {self._address} has stopped: {failure}. Training continues without recording. The steps "
            "written so far can be opened.",
            RecordingStoppedWarning,
        )

    def bytes(self, record: StepRecord) -> None:
        """How much disk space an example takes, or a step if no examples were given; at the first step with slots."""
        if "bytes" in self._given:
            return
        of_layer = {name: sum(rows.nbytes for rows in step.rows) for name, step in record.layers.items()}
        total = sum(of_layer.values())
        if not total:
            return
        examples = max(_examples(record), default=0)
        first = sorted(of_layer, key=lambda name: -of_layer[name])[:_NAMES_SHOWN]
        shares = ", ".join(f"{name} {of_layer[name] / total:.0%}" for name in first)
        per = f"{size_in_words(total)} per step"
        per = f"{size_in_words(total / examples)} per example, {per}" if examples else per
        text = f"Slots take {per}, {size_in_words(1000 * total)} per 1,000 steps ({shares})."
        if (examples and total / examples >= _LARGE) or 1000 * total >= _LARGE_RUN:
            self._once("bytes", f'{text} Smaller: keep="recipe", layers=…, dtype="float16" or "int8", sample=….')
        else:
            self._given.add("bytes")
            logging.getLogger("spotlights").info("%s", text)


def _examples(record: StepRecord) -> list[int]:
    """How many different examples each layer's slots are of."""
    counts = []
    for step in record.layers.values():
        given = [rows.columns["example"] for rows in step.rows if "example" in rows.columns]
        counts += [len(np.unique(np.concatenate(given)))] if given else []
    return counts


def size_in_words(nbytes: int | float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def _listed(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _others(names: Mapping[str, object]) -> str:
    """How many layers there are besides the first, in words."""
    return "" if len(names) == 1 else f" (also: {some_of(list(names)[1:])})"


def some_of(names: Collection[str]) -> str:
    """The first of some names, in words."""
    return ", ".join(list(names)[:_NAMES_SHOWN]) + (" …" if len(names) > _NAMES_SHOWN else "")
