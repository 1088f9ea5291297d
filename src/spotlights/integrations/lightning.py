"""Records what a Lightning `Trainer` trains: `Trainer(…, callbacks=[SpotlightsCallback("run.memory")])`.

An example is the position of an item in the training data set. The loader's batch sampler notes which positions it
hands out, and a batch is announced when it arrives; the training stays the same bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spotlights.errors import SettingError, warn
from spotlights.recording import Recorder, record


class SpotlightsCallback(Callback):
    """Records a training run of a `Trainer` in one process, with every item's position as its example.

    Args:
        path: the directory to write, or an address in a bucket.
        columns: from a batch to further columns: `lambda batch: {"label": batch[1]}`.
        options: further options of `spotlights.record`, such as `keep="recipe"`, `dtype="float16"` or `resume=True`.
    """

    def __init__(
        self, path: str | Path, *, columns: Callable[[Any], dict[str, Any]] = lambda batch: {}, **options: Any
    ) -> None:
        self.path = path
        self.recorder: Recorder | None = None
        """While training runs."""
        self._columns, self._options = columns, options
        self._positions: deque[list[int]] = deque()
        self._data: tuple[Any, Callable[[list[Any]], Any]] | None = None

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        """The loss of `training_step` on some items: `recompute=` of a recipe. After a training run, or `set_data`."""
        if self._data is None:
            raise SettingError("The data set is not known yet: train first, or call callback.set_data(data, collate).")
        dataset, collate = self._data
        step: Any = model.training_step  # type: ignore[attr-defined]
        output = step(collate([dataset[position] for position in ids.tolist()]), 0)
        return output["loss"] if isinstance(output, dict) else output

    def set_data(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        """Gives `loss` the items and how a batch is made of them, where no training has run in this process."""
        self._data = dataset, collate

    # -- what the Trainer calls ------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The loader's iterator begins before any later hook. Tried with Lightning 2.6; else slots have no example.
        source: Any = getattr(trainer.fit_loop, "_data_source", None)
        if callable(getattr(source, "dataloader", None)) and "dataloader" not in vars(source):
            given = source.dataloader
            source.dataloader = lambda: self._watched(given())

    def _watched(self, loader: Any) -> Any:
        if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
            self.set_data(loader.dataset, loader.collate_fn)
            before = loader.batch_sampler
            noting = _Noting(before.sampled if isinstance(before, _Noting) else before, self._positions)
            object.__setattr__(loader, "batch_sampler", noting)  # a loader refuses another one
        return loader

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            warn("SpotlightsCallback records runs in one process, not this one.")
            return
        if self._data is None:
            warn("No batches of one data set: slots have no example.")
        self.recorder = record(pl_module, trainer.optimizers, self.path, **self._options)
        self.recorder.__enter__()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None:
            known = {"example": torch.tensor(self._positions.popleft())} if self._positions else {}
            self.recorder.batch(**known, **self._columns(batch))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(type(exception))

    def _close(self, kind: type[BaseException] | None) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(kind)
            self.recorder = None


class _Noting:
    """A batch sampler that notes the positions it hands out, one list for each batch of the epoch."""

    def __init__(self, sampler: Any, positions: deque[list[int]]) -> None:
        self.sampled, self._positions = sampler, positions

    def __len__(self) -> int:
        return len(self.sampled)

    def __getattr__(self, name: str) -> Any:
        if name == "sampled":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.sampled, name)

    def __iter__(self) -> Iterator[list[int]]:
        self._positions.clear()
        for positions in self.sampled:
            self._positions.append(list(positions))
            yield positions
