"""An observed memory: the gradients of a network that is already trained, at its final weights or at a few checkpoints.

The recorder writes one step for each batch. Its optimizer has a learning rate of 1 and never sees a gradient, so the
weights stay and every visit weighs the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from spotlights.errors import RecordingStoppedWarning, SettingError, UnsupportedError
from spotlights.layers.adapter import unwrapped
from spotlights.memory.files import read_manifest
from spotlights.memory.store import Store
from spotlights.recording.recorder import Recorder
from spotlights.recording.rerun import Loss
from spotlights.recording.settings import RecordingSettings

Checkpoint = Mapping[str, Tensor] | str | Path
"""A state dict, or a file of one: `.safetensors`, or what `torch.save` wrote."""


class Observed(torch.optim.SGD):
    """Stands in the step log for the optimizer of a training that nobody recorded."""


def observe_network(
    model: nn.Module,
    loss: Loss,
    ids: Any,
    store: Store,
    *,
    checkpoints: Sequence[Checkpoint],
    columns: Mapping[str, Any],
    batch: int,
    layers: str | Sequence[str] | None,
    dtype: str | None,
    overwrite: bool,
    told: Callable[[float], object],
) -> None:
    """Passes over the training data once for each checkpoint and once at the model's own weights; see `sl.observe`."""
    ids = _in_order(ids)
    for name, values in columns.items():
        if len(values) != len(ids):
            raise SettingError(
                f'columns["{name}"] has {len(values)} values for {len(ids)} examples. Give one for each.'
            )
    if batch < 1 or not len(ids):
        raise SettingError(f"batch={batch} of {len(ids)} ids: give at least one of each.")
    settings = RecordingSettings(
        layers=layers,
        dtype=dtype,
        overwrite=overwrite,
        observed=len(checkpoints) + 1,
    )
    with torch.inference_mode(False), torch.enable_grad():
        own = copy.deepcopy(unwrapped(model)).eval()
        for _ in _all_weights(own, checkpoints):
            pass  # looked at before anything is overwritten, and before the first pass
        optimizer = Observed([p for p in own.parameters() if p.requires_grad], lr=1.0)
        with warnings.catch_warnings(), Recorder(own, optimizer, store, settings) as recorder:
            warnings.simplefilter("ignore", RecordingStoppedWarning)  # an error below
            optimizer.register_step_pre_hook(lambda *step: optimizer.zero_grad())  # after the recorder's hook
            done, total = 0, len(ids) * settings.observed
            for number, weights in enumerate(_all_weights(own, checkpoints)):
                own.load_state_dict(weights)
                recorder.accept_weights()
                for first in range(0, len(ids), batch):
                    some = slice(first, first + batch)
                    described = {name: values[some] for name, values in columns.items()}
                    if checkpoints:
                        described["checkpoint"] = number
                    recorder.batch(example=ids[some], **described)
                    _sum_of(loss(own, ids[some]), len(ids[some])).backward()
                    if not any(p.grad is not None for p in own.parameters()):
                        raise SettingError(
                            "loss(model, ids) must use the model that it is given (a copy): none of its parameters got "
                            "a gradient."
                        )
                    optimizer.step()
                    done += len(ids[some])
                    told(done / total)
    status = read_manifest(store)[0].status
    if status != "closed":
        raise UnsupportedError(f"The network could not be observed: {status}.")


def _in_order(ids: Any) -> Any:
    """Examples as a loss takes them: a tensor of numbers, or a list of names."""
    if isinstance(ids, Tensor):
        return ids.detach().cpu()
    listed = list(ids)
    return listed if any(isinstance(item, str) for item in listed) else torch.as_tensor(listed)


def _all_weights(model: nn.Module, checkpoints: Sequence[Checkpoint]) -> Iterator[Mapping[str, Tensor]]:
    """Those of the checkpoints, then the model's own."""
    final = copy.deepcopy(model.state_dict())
    for checkpoint in checkpoints:
        weights = checkpoint if isinstance(checkpoint, Mapping) else _loaded(Path(checkpoint))
        names = sorted(map(str, final.keys() ^ weights.keys()))
        different = names or [n for n in final if final[n].shape != getattr(weights[n], "shape", None)]
        if different:
            raise SettingError(
                f"A checkpoint is not one of this model: it differs in {', '.join(different[:5])}. Give state dicts of "
                "the model, or files of them."
            )
        yield weights
    yield final


def _loaded(path: Path) -> Mapping[str, Tensor]:
    """A file of a state dict, from which no code is run."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
            raise OSError("it is no file")
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, Mapping):
            raise ValueError(f"it holds a {type(weights).__name__}")
        return weights
    except Exception as error:
        sentence = str(error).partition("\n")[0]
        raise SettingError(f"{path} is no file of a state dict: {type(error).__name__}: {sentence}") from error


def _sum_of(loss: Tensor, examples: int) -> Tensor:
    """The sum over a batch, from its mean or from one loss for each example: examples weigh the same in any batch."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise SettingError(f"loss(model, ids) must return a loss with a gradient; it returned {loss!r}.")
    return loss * examples if loss.ndim == 0 else loss.flatten(1).mean(dim=1).sum() if loss.ndim > 1 else loss.sum()
