"""The paper's passages: their ranks among all positions and sentences of the training text, for our networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import spotlights as sl
from spotlights.results.passages import sentence_at
from spotlights_paper.experiments.language.evaluation import untrained
from spotlights_paper.experiments.language.trained import TrainedLanguage
from spotlights_paper.experiments.paper import PaperQuery

KERNELS = ("dot", "cosine")
_REACH = {"character": (45, 15), "word": (10, 4)}
"""Tokens before and after the attended one that are shown."""

Prompts = Mapping[PaperQuery, tuple[Sequence[str], int | None]]
"""For each query its prompt, and its own position if the query is from the training text."""


@dataclass(frozen=True)
class Rank:
    """The rank of one passage, 1 for the largest score."""

    network: str
    """ "trained" or "untrained"."""
    kernel: str
    by_position: int
    """Among all positions of the training text."""
    by_sentence: int
    """Among all sentences, each counted with its best position."""


@dataclass(frozen=True)
class PaperPassage:
    """One of the paper's passages."""

    position: int
    """Of the attended token, in our training text."""
    text: str
    """The words around the attended token, which has «» around it."""
    ranks: list[Rank]


def rank_papers(trained: TrainedLanguage, settings: Any, prompts: Prompts) -> dict[PaperQuery, list[PaperPassage]]:
    """The paper's passages for some queries, with their ranks for the trained and the untrained network."""
    text = trained.data.train.tokens
    sentences = np.full(len(text), -1, dtype=np.int64)
    ranks: dict[PaperQuery, list[PaperPassage]] = {
        query: [PaperPassage(place, _around(trained, place), []) for place in query.papers if place < len(text)]
        for query in prompts
    }

    def rank(network: str, model: Any, memory: sl.Memory) -> None:
        for query, (prompt, own) in prompts.items():
            for kernel in KERNELS:
                scores = _scores(trained, model, memory, prompt, kernel)
                if own is not None:
                    start, stop = sentence_at(text, own)
                    scores[start:stop] = -np.inf
                for passage in ranks[query]:
                    better = np.flatnonzero(scores > scores[passage.position])
                    held = {_sentence(sentences, text, place) for place in better.tolist()}
                    held.discard(_sentence(sentences, text, passage.position))
                    passage.ranks.append(Rank(network, kernel, len(better) + 1, len(held) + 1))

    rank("trained", trained.model, trained.memory)
    with untrained(trained.data, settings, seed=trained.seed) as (model, memory):
        rank("untrained", model, memory)
    return ranks


def _scores(trained: TrainedLanguage, model: Any, memory: sl.Memory, prompt: Sequence[str], kernel: str) -> np.ndarray:
    """The score of every position of the training text, for the last token of a prompt; -inf where none was read."""
    numbers = trained.data.vocabulary.encode(prompt)[None]
    spot = memory.attend(model, {"tokens": numbers, "last": True}, layers=[trained.layer], kernel=kernel)
    totals = spot[trained.layer].at(len(prompt) - 1).totals("example")
    scores = np.full(len(trained.data.train), -np.inf)
    scores[np.array(totals.groups, dtype=np.int64)] = totals.numpy()[0]
    return scores


def _sentence(sentences: np.ndarray, text: Sequence[str], place: int) -> int:
    """Where the sentence of a position begins; found once for all of its positions."""
    if sentences[place] < 0:
        start, stop = sentence_at(text, place)
        sentences[start:stop] = start
    return int(sentences[place])


def _around(trained: TrainedLanguage, place: int) -> str:
    """Some tokens on either side, with «» around the one at the place."""
    text, unit = trained.data.train.tokens, trained.data.vocabulary.unit
    before, after = _REACH[unit]
    parts = text[max(place - before, 0) : place], [f"«{text[place]}»"], text[place + 1 : place + 1 + after]
    words = [word for part in parts for word in part]
    return ("" if unit == "character" else " ").join(words).replace("\n", " ")
