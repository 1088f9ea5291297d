"""Records what a Hugging Face `Trainer` trains: `Trainer(…, callbacks=[SpotlightsCallback("run.memory")])`.

An example is the position of an item in the training data set. Batches carry the positions of their items to the model,
where a hook takes them out before the forward pass; the training stays the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

from spotlights.errors import SettingError, warn
from spotlights.recording import Recorder, record

EXAMPLE = "spotlights_example"
"""The key of the positions in a batch."""


class SpotlightsCallback(TrainerCallback):  # pyright: ignore[reportGeneralTypeIssues]
    """Records a training run of a `Trainer` in one process, with every item's position as its example.

    Args:
        path: the directory to write, or an address in a bucket.
        columns: entries of the batch that become columns of the memory, such as "labels".
        options: further options of `spotlights.record`, such as `keep="recipe"`, `dtype="float16"` or `resume=True`.
    """

    def __init__(self, path: str | Path, *, columns: Sequence[str] = (), **options: Any) -> None:
        self.path = path
        self.recorder: Recorder | None = None
        """While training runs."""
        self._columns, self._options = columns, options
        self._data: tuple[Any, Callable[[list[Any]], Any]] | None = None
        self._hook: Any = None

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        """The model's own loss of some items: `recompute=` of a recipe. After a training run, or `set_data`."""
        if self._data is None:
            raise SettingError("The data set is not known yet: train first, or call callback.set_data(data, collator).")
        dataset, collate = self._data
        return model(**collate([dataset[position] for position in ids.tolist()])).loss

    def set_data(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        """Gives `loss` the items and how a batch is made of them, where no training has run in this process."""
        self._data = dataset, collate

    # -- what the Trainer calls ------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, train_dataloader: Any, **others: Any
    ) -> None:
        if args.world_size > 1:
            warn("SpotlightsCallback records runs in one process, not this one.")
            return
        self._close(RuntimeError)  # of a training that raised: the Trainer tells nobody
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # accelerate wraps it
        if isinstance(loader.dataset, IterableDataset):
            warn("Items without positions: slots have no example.")
        elif not isinstance(loader.dataset, _Numbered):
            self.set_data(loader.dataset, loader.collate_fn)
            loader.collate_fn = _Collated(loader.collate_fn)
            object.__setattr__(loader, "dataset", _Numbered(loader.dataset))  # a loader refuses another one
        self.recorder = record(model, optimizer, self.path, **self._options)
        self.recorder.__enter__()
        self._hook = model.register_forward_pre_hook(self._announce, with_kwargs=True, prepend=True)

    def _announce(self, model: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
        examples = batch.pop(EXAMPLE, None)
        if self.recorder is not None and model.training and examples is not None:
            columns = {name: batch[name] for name in self._columns if name in batch}
            self.recorder.batch(example=examples, **columns)
        return args, batch

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.recorder is not None:
            self.recorder.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._close(None)

    def _close(self, raised: type[BaseException] | None) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(raised)
            self.recorder = None
            self._hook.remove()


class _Numbered:
    """A data set whose items come with their positions."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> tuple[int, Any]:
        return int(position), self.dataset[position]


class _Collated:
    """Makes a batch of such items."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[tuple[int, Any]]) -> Any:
        batch = self._collate([item for _, item in items])
        batch[EXAMPLE] = torch.tensor([position for position, _ in items])
        return batch
