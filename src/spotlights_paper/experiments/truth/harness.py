"""`spotlights evaluate truth`: estimates against retraining, in one table.

Everything that takes long is kept in the folder (`OUT/SETTING/`) and not done again: the recorded run, the margins of
retrained networks (`retrained/`, and all of them in `margins.npz`), and each method's numbers (`scores/NAME.npz`).
Whatever another tool writes there in the same form is scored as well; `benchmarks/truth_peers.py` does so for some.
With a file of margins, such as those in docs/truth, nothing is retrained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spotlights.errors import SettingError, UnsupportedError
from spotlights.results import Printable, build
from spotlights_paper.experiments.paper import Estimate
from spotlights_paper.experiments.progress import stage
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.margins import Margins, keep_answer, kept_answers, path_of
from spotlights_paper.experiments.truth.mislabelled import Mislabelled, find_mislabelled
from spotlights_paper.experiments.truth.recorded import METHODS, Recorded, ask, record, train_plainly
from spotlights_paper.experiments.truth.removal import Removal, removal_curve
from spotlights_paper.experiments.truth.retraining import halves, retrained
from spotlights_paper.experiments.truth.scoring import lds, score_of
from spotlights_paper.experiments.truth.settings import Setting, prepare, setting_named

FILE, MARGINS = "truth.json", "margins.npz"


@dataclass(frozen=True)
class MethodRow:
    """How one method did."""

    method: str
    fresh: Estimate
    """LDS against networks with initial weights and orders of their own."""
    behind: Estimate | None
    """How much less that is than influence's, paired: the halves are drawn anew for both at once."""
    same: Estimate | None
    """LDS against networks with the recorded run's initial weights and order."""
    seconds: float
    """On top of training, for all test images."""


@dataclass(frozen=True, repr=False)
class Truth(Printable):
    """What `spotlights evaluate truth` found."""

    setting: str
    retrains: int
    plain_seconds: float
    """Of one plain training run."""
    recorded_seconds: float
    rows: list[MethodRow]
    ceiling: Estimate | None
    """About the best that any method could reach against fresh seeds."""
    refused: list[str]
    """What the memory cannot answer, and why."""
    mislabelled: Mislabelled | None = None
    removal: list[Removal] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def table(self) -> Any:
        names = ["method", "LDS, fresh seeds", "behind influence", "same init and order", "seconds"]
        rows = [[r.method, r.fresh, r.behind or "–", r.same or "–", f"{r.seconds:.1f}"] for r in self.rows]
        notes = [
            f"{self.retrains} retrained halves; a plain training run took {self.plain_seconds:.1f} s, "
            f"a recorded one {self.recorded_seconds:.1f} s"
        ]
        if self.ceiling is not None:
            notes.append(f"about the best possible with fresh seeds: {self.ceiling}")
        if self.mislabelled is not None:
            notes.append(str(self.mislabelled))
        notes += [*map(str, self.removal), *self.refused]
        return build(f"how truthful? {self.setting}", names, rows, "\n".join(notes))


def evaluate(
    name: str,
    *,
    out: Path,
    retrains: int = 100,
    again: int = 0,
    same: int = 0,
    removals: int = 0,
    methods: Sequence[str] = tuple(METHODS),
    margins: Path | None = None,
    quick: bool = False,
) -> Truth:
    """Records, retrains, asks and compares.

    Args:
        name: one of `SETTINGS`.
        out: the folder; goes on with what lies there.
        retrains: networks retrained on random halves with fresh seeds.
        again: how many of them once more with other seeds, for the best possible score.
        same: networks retrained with the recorded run's initial weights and order.
        removals: test images for which the top examples are dropped and the network is retrained.
        methods: which of the memory's own answers to ask for; exact contributions under Adam take long.
        margins: a file of margins; then no halves are retrained.
        quick: make everything small: to see that it works.
    """
    if retrains < 4:
        raise SettingError(f"retrains={retrains}: give at least 4; a correlation over fewer says nothing.")
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise SettingError(f"methods: {', '.join(unknown)}. There are: {', '.join(METHODS)}.")
    setting = setting_named(name, quick=quick)
    data = prepare(setting)
    folder = out / setting.name
    with stage("training plainly and with recording"):
        plain = _plain_seconds(setting, data, folder / "plain_seconds.json")
        recorded = record(setting, data, folder)
    if margins is not None:
        truths = Margins.load(margins)
    else:
        fresh = retrained(folder, setting, data, kind="fresh", count=retrains)
        other = retrained(folder, setting, data, kind="again", count=again) if again else None
        truths = Margins(setting.name, halves(retrains, len(data.train)), fresh, other)
        truths.save(folder / MARGINS)
    alike = retrained(folder, setting, data, kind="same", count=same) if same else None
    with stage("asking"):
        refused = _ask_all(data, recorded, folder, methods)
    rows = []
    with stage("comparing"):
        answers = list(kept_answers(folder))
        drawn = {answer.method: truths.drawn(answer.scores) for answer in answers}
        influence = drawn.get("influence")
        for answer in answers:
            mine = drawn[answer.method]
            behind = None if influence is None or influence is mine else score_of(influence - mine)
            like = None if alike is None else lds(answer.scores, truths.members[: len(alike)], alike)
            rows.append(MethodRow(answer.method, score_of(mine), behind, like, answer.seconds))
    truth = Truth(
        setting.name,
        len(truths.fresh),
        plain,
        recorded.seconds,
        sorted(rows, key=lambda row: -row.fresh.mean),
        truths.ceiling,
        refused,
        find_mislabelled(setting, data, folder) if data.kind == "classes" else None,
        removal_curve(setting, data, folder, tests=removals, recorded=recorded) if removals else [],
    )
    (folder / FILE).write_text(json.dumps(truth.as_dict(), indent=1) + "\n", encoding="utf-8")
    return truth


def _plain_seconds(setting: Setting, data: Data, path: Path) -> float:
    """Of training without recording; measured once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(train_plainly(setting, data)[1]))
    return json.loads(path.read_text())


def _ask_all(data: Data, recorded: Recorded, folder: Path, methods: Sequence[str]) -> list[str]:
    """Asks what has not been asked before; returns what this memory cannot answer, in sentences."""
    refused = []
    for method in methods:
        if not path_of(folder, method).exists():
            try:
                keep_answer(folder, ask(method, data, recorded))
            except UnsupportedError as error:
                refused.append(f"{method}: {error}")
    return refused
