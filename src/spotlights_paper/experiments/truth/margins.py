"""Margins of retrained networks as one small file: with it, a method is scored in seconds, and nothing is trained.

The file is plain NumPy: `members` (halves × training examples, as bits), `examples` (how many of them), `fresh`
(halves × test inputs) and, for the best possible score, `again` (the first of the halves trained again with other
seeds). A margin is the setting's number of interest: for a regression the answer, for a language model the
log-likelihood of a passage. A method's numbers are plain NumPy too: `scores` (test inputs × training examples), the
name `method` and, if known, `seconds`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from spotlights.errors import SettingError
from spotlights.results import Printable, build
from spotlights_paper.experiments.paper import Estimate
from spotlights_paper.experiments.truth.scoring import ceiling, predictions, redrawn, score_of


@dataclass(frozen=True, eq=False)
class Margins:
    """What networks retrained on halves of the training examples answer."""

    setting: str
    members: Bool[Tensor, "halves train"]
    fresh: Float[Tensor, "halves test"]
    again: Float[Tensor, "fewer test"] | None = None

    @property
    def ceiling(self) -> Estimate | None:
        """About the best that any method could reach against fresh seeds."""
        return None if self.again is None else ceiling(self.fresh[: len(self.again)], self.again)

    def drawn(self, scores: Float[Tensor, "test train"]) -> Float[Tensor, "drawn"]:
        """The LDS of a method's numbers, followed by that of halves drawn anew: the same draws for every method."""
        wanted = self.fresh.shape[1], self.members.shape[1]
        if scores.shape != wanted:
            raise SettingError(
                f'Scores of shape {tuple(scores.shape)}: the setting "{self.setting}" has {wanted[0]} test inputs and '
                f"{wanted[1]} training examples. Give one number for each pair, of shape {wanted}."
            )
        return redrawn(predictions(scores, self.members), self.fresh)

    def lds(self, scores: Float[Tensor, "test train"]) -> Estimate:
        """The linear datamodeling score of a method's numbers."""
        return score_of(self.drawn(scores))

    @property
    def for_dattri(self) -> tuple[Float[Tensor, "halves test"], Int64[Tensor, "halves half"]]:
        """The same as the `ground_truth` of `dattri.metric.lds`; scores go there with training examples first."""
        return self.fresh, torch.stack([row.nonzero().flatten() for row in self.members])

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {
            "setting": self.setting,
            "members": np.packbits(self.members.numpy(), axis=1),
            "examples": self.members.shape[1],
            "fresh": self.fresh.float().numpy(),
        }
        if self.again is not None:
            arrays["again"] = self.again.float().numpy()
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Margins:
        try:
            with np.load(path, allow_pickle=False) as file:
                bits = np.unpackbits(file["members"], axis=1, count=int(file["examples"]))
                again = torch.from_numpy(file["again"]) if "again" in file else None
                fresh = torch.from_numpy(file["fresh"])
                return cls(str(file["setting"]), torch.from_numpy(bits.astype(bool)), fresh, again)
        except (OSError, KeyError, ValueError) as error:
            raise SettingError(f"{path} is not a file of margins, as docs/truth has them: {error}") from error


# -- a method's numbers ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MethodScores:
    """A method's number for each test input and training example."""

    method: str
    scores: Float[Tensor, "test train"]
    seconds: float
    """On top of training (and recording)."""

    @classmethod
    def load(cls, path: Path) -> MethodScores:
        try:
            with np.load(path, allow_pickle=False) as file:
                name = str(file["method"]) if "method" in file else path.stem
                seconds = float(file["seconds"]) if "seconds" in file else float("nan")
                return cls(name, torch.from_numpy(file["scores"]), seconds)
        except (OSError, KeyError, ValueError) as error:
            raise SettingError(
                f'{path} has no array "scores", one number for each test and training input: {error}'
            ) from error


def keep_answer(folder: Path, answer: MethodScores) -> None:
    """Writes a method's numbers where `evaluate` looks for them."""
    path = path_of(folder, answer.method)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, method=answer.method, scores=answer.scores.float().numpy(), seconds=answer.seconds)


def kept_answers(folder: Path) -> Iterator[MethodScores]:
    for path in sorted((folder / "scores").glob("*.npz")):
        yield MethodScores.load(path)


def path_of(folder: Path, method: str) -> Path:
    return folder / "scores" / (re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-") + ".npz")


@dataclass(frozen=True, repr=False)
class Scored(Printable):
    """What `spotlights evaluate scores` found: the best method first."""

    setting: str
    rows: list[dict[str, Any]]
    ceiling: Estimate | None

    def table(self) -> Any:
        note = None if self.ceiling is None else f"about the best possible with fresh seeds: {self.ceiling}"
        rows = [[row["method"], row["lds"], row["behind"] or "–"] for row in self.rows]
        return build(f"how truthful? {self.setting}", ["method", "LDS, fresh seeds", "behind the first"], rows, note)


def score_files(files: Sequence[Path], margins: Path) -> Scored:
    """The LDS of each file of scores, and how much less that is than the best one's, paired."""
    truths = Margins.load(margins)
    drawn = [(answer.method, truths.drawn(answer.scores)) for answer in map(MethodScores.load, files)]
    drawn.sort(key=lambda pair: -float(pair[1][0]))
    best = drawn[0][1]
    rows = [
        {"method": name, "lds": score_of(own), "behind": None if own is best else score_of(best - own)}
        for name, own in drawn
    ]
    return Scored(truths.setting, rows, truths.ceiling)
