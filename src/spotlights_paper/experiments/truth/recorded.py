"""The recorded run of a setting, and what its memory says of each training example for each test image."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import UnsupportedError
from spotlights.results import Totals
from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.margins import MethodScores
from spotlights_paper.experiments.truth.settings import Setting, epoch_orders, initial_network

RUNS = 3
"""How many are recorded for the mean over runs."""
MEMORY, MODEL, SECONDS = "run.memory", "model.safetensors", "seconds.txt"


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trained network and its memory."""

    setting: Setting
    folder: Path
    model: nn.Module
    seconds: float
    """Of training with recording."""

    @cached_property
    def memory(self) -> sl.Memory:
        return sl.open(self.folder / MEMORY)


def _train(
    setting: Setting, data: Data, seed: int, recorder: Callable[[nn.Module, torch.optim.Optimizer], Any]
) -> tuple[nn.Module, float]:
    """Trains a network inside a context, which may be a recorder; returns it and the seconds."""
    model = initial_network(setting, seed)
    optimizer = setting.make_optimizer(model.parameters())
    started = time.perf_counter()
    with recorder(model, optimizer) as recording:
        for epoch in epoch_orders(len(data.train), setting.epochs, seed):
            for batch in epoch.split(setting.batch):
                if recording is not None:
                    labels = {"label": data.train.labels[batch]} if data.kind == "classes" else {}
                    recording.batch(example=data.train.ids[batch], **labels)
                optimizer.zero_grad()
                data.loss(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
                optimizer.step()
    return model, time.perf_counter() - started


def train_plainly(setting: Setting, data: Data, seed: int = 0) -> tuple[nn.Module, float]:
    """The same training without recording, and its seconds."""
    return _train(setting, data, seed, lambda model, optimizer: nullcontext())


def record(setting: Setting, data: Data, folder: Path, seed: int = 0) -> Recorded:
    """Trains with recording, or opens what was recorded here before."""
    if not (folder / MODEL).exists():
        folder.mkdir(parents=True, exist_ok=True)
        recorder = partial(sl.record, path=folder / MEMORY, dtype=setting.dtype, overwrite=True)
        model, seconds = _train(setting, data, seed, recorder)
        (folder / SECONDS).write_text(f"{seconds:.2f}\n")
        save_file(model.state_dict(), folder / MODEL)
    model = initial_network(setting, seed)
    model.load_state_dict(load_file(folder / MODEL))
    return Recorded(setting, folder, model, float((folder / SECONDS).read_text()))


def ask_about(data: Data, recorded: Recorded) -> sl.Spotlights:
    """The attention of all test images."""
    return recorded.memory.attend(recorded.model, data.test.inputs)


def in_order(totals: Totals, data: Data) -> Float[Tensor, "test train"]:
    """Totals by example, in the order of the training images."""
    return totals.values[:, order_of(totals.groups, data)]


def order_of(examples: Sequence[Any], data: Data) -> list[int]:
    """Where each training image is among some examples."""
    where = {example: index for index, example in enumerate(examples)}
    return [where[example] for example in data.train.ids.tolist()]


def margin_of(data: Data) -> Callable[[Tensor], Tensor]:
    """The number of interest of each test input."""
    return lambda output: data.number(output, data.test.labels)


# -- methods ----------------------------------------------------------------------------------


def influence(data: Data, recorded: Recorded, rule: str | None = None) -> Float[Tensor, "test train"]:
    """The library's default, or one of its rules."""
    return in_order(ask_about(data, recorded).influence(margin_of(data), rule=rule).totals("example"), data)


def of_runs(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """The mean over several recorded runs; those with other seeds lie beside the first one."""
    others = [record(recorded.setting, data, recorded.folder / f"run-{seed}", seed) for seed in range(1, RUNS)]
    runs = [recorded, *others]
    memories, models = [run.memory for run in runs], [run.model for run in runs]
    return in_order(sl.influence(memories, models, data.test.inputs, target=margin_of(data)).totals("example"), data)


def contributions(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """All layers added up: exact in the last one, first order in the others."""
    layers, target = list(ask_about(data, recorded).values()), margin_of(data)
    return in_order(sl.Influence([attention.contributions(target) for attention in layers]).totals("example"), data)


def scores(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """The last layer's attention."""
    spot = ask_about(data, recorded)
    return in_order(spot[list(spot)[-1]].totals("example"), data)


def same_label(data: Data, recorded: Recorded) -> Float[Tensor, "test train"]:
    """Knows nothing but labels: what any method must beat."""
    if data.kind != "classes":
        raise UnsupportedError("there are no classes.")
    return (data.test.labels[:, None] == data.train.labels[None]).double()


def words(data: Data, recorded: Recorded | None = None, *, bm25: bool = False) -> Float[Tensor, "test train"]:
    """Knows nothing but texts: TF-IDF or BM25 of groups of letters."""
    if not data.train.texts:
        raise UnsupportedError("there is no text.")
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

    groups = CountVectorizer(analyzer="char_wb", ngram_range=(2, 5))
    train, test = groups.fit_transform(data.train.texts), groups.transform(data.test.texts)
    if bm25:
        train, test = _bm25(train), test.minimum(1)
    else:
        weigh = TfidfTransformer(sublinear_tf=True)
        train, test = weigh.fit_transform(train), weigh.transform(test)
    alike = torch.from_numpy((test @ train.T).toarray()).double()
    if data.kind == "classes":  # a text of another class speaks against
        alike = alike * torch.where(data.test.labels[:, None] == data.train.labels[None], 1.0, -1.0)
    return alike


def _bm25(counts: Any, k: float = 1.5, b: float = 0.75) -> Any:
    """Okapi's weights of the terms of each text, with the usual constants."""
    rows = counts.tocoo()
    length = np.asarray(counts.sum(axis=1)).ravel()
    of_term = np.bincount(rows.col, minlength=counts.shape[1])
    idf = np.log1p((counts.shape[0] - of_term + 0.5) / (of_term + 0.5))
    full = rows.data + k * (1 - b + b * length[rows.row] / length.mean())
    rows.data = idf[rows.col] * rows.data * (k + 1) / full
    return rows.tocsr()


METHODS: dict[str, Callable[[Data, Recorded], Float[Tensor, "test train"]]] = {
    "influence": influence,
    f"influence, {RUNS} runs": of_runs,
    "whitened": partial(influence, rule="whitened"),
    "joint": partial(influence, rule="joint"),
    "contribution": contributions,
    "score": scores,
    "same label": same_label,
    "TF-IDF": words,
    "BM25": partial(words, bm25=True),
}


def ask(method: str, data: Data, recorded: Recorded) -> MethodScores:
    started = time.perf_counter()
    numbers = METHODS[method](data, recorded)
    return MethodScores(method, numbers, time.perf_counter() - started)
