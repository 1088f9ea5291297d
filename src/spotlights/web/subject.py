"""What an explorer is about: a memory, its network, the inputs to ask about, and how its data look."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from numpy import ndarray
from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import SettingError, UnknownNameError, UnsupportedError
from spotlights.web.views import View


@runtime_checkable
class Tokenizer(Protocol):
    """From text to the numbers that the model takes, and back."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, eq=False)
class Drawing:
    """Images that a user draws or uploads become inputs."""

    height: int
    width: int
    prepare: Callable[[UInt8[ndarray, "height width"]], Tensor]
    """From pixels (0 is background, 255 is ink) to one input, as the model takes it in a batch."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The test inputs."""

    tensors: Tensor
    """As the model takes them, one for each."""
    show: View
    """By their positions."""
    ids: list[int]
    labels: list[int] | None = None
    sources: list[str] | None = None

    def __post_init__(self) -> None:
        count = len(self.tensors)
        for name in ("ids", "labels", "sources"):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise SettingError(f"{count} inputs, but {len(given)} {name}. Give one for each input.")

    def __len__(self) -> int:
        return len(self.tensors)

    def place(self, example: int) -> int:
        """The position of the input with an id."""
        if example not in self._places:
            raise UnknownNameError(f"No test input has the id {example}.")
        return self._places[example]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {example: place for place, example in enumerate(self.ids)}


@dataclass(frozen=True, eq=False)
class Subject:
    """What an explorer is about."""

    title: str
    reopen: Callable[[], sl.Memory]
    """The memory as it is now: more of it, if it is still being recorded."""
    network: Callable[[sl.Memory], nn.Module]
    """The trained network; of a memory under recording, as of its last step."""
    inputs: Inputs
    code: str
    """Lines of Python that make `memory`, `model` and `inputs`, for the snippets."""
    class_names: Callable[[str | None], list[str]] | None = None
    """What the outputs are called, for inputs of a source."""
    show_example: View | None = None
    """How a training example looks, by its id."""
    example_input: Callable[[int], Tensor] | None = None
    """A training example as the model takes it, by its id; makes training examples queries."""
    example_code: str = ""
    """The same as a Python expression of `example`, for the snippets."""
    drawing: Drawing | None = None
    tokenizer: Tokenizer | None = None
    """Makes prompts queries."""
    kernel: str = "dot"
    """How keys and queries are compared; contributions and influence need the plain product."""


def _as_of(memory: sl.Memory, model: nn.Module) -> nn.Module:
    """The network that a memory is about: while it is being recorded, the model is some steps ahead of it."""
    if memory._view.reader.manifest.status != "recording":
        return model
    try:
        return memory.primal(model).eval()
    except UnsupportedError:  # scores are all that it has, and they need no more than the model as it is
        return model


def own_subject(
    memory: Any,
    model: Any,
    inputs: Any,
    *,
    labels: Any = None,
    ids: Any = None,
    show: View | None = None,
    show_input: View | None = None,
    example_input: Callable[[int], Tensor] | None = None,
    classes: Sequence[str] | None = None,
    drawing: Drawing | None = None,
    tokenizer: Tokenizer | None = None,
) -> Subject:
    """A user's own model and data; the arguments are those of `sl.explore`."""
    if not isinstance(memory, sl.Memory):
        raise SettingError(f"explore() takes an opened memory, sl.open(path), not {type(memory).__name__}.")
    if not isinstance(model, nn.Module):
        raise SettingError(f"explore() takes the trained torch module, not {type(model).__name__}.")
    if isinstance(inputs, Sequence) and inputs and all(isinstance(each, Tensor) for each in inputs):
        inputs = torch.stack(list(inputs))
    if not isinstance(inputs, Tensor) or inputs.ndim < 1 or len(inputs) == 0:
        raise SettingError("explore() takes the test inputs as one tensor, one row for each input, at least one.")
    tensors = inputs
    path = memory.path

    def default_view(position: int) -> Any:
        row = tensors[position].detach().cpu()
        if tokenizer is not None and row.ndim == 1 and not row.is_floating_point():
            return tokenizer.decode(row.tolist())
        if row.ndim == 2 or (row.ndim == 3 and row.shape[0] in (1, 3)):
            return row
        return {str(place): f"{value:.4g}" for place, value in enumerate(row.reshape(-1)[:40].tolist())}

    names = None if classes is None else [str(name) for name in classes]
    return Subject(
        title=path.name,
        reopen=lambda: sl.open(path),
        network=lambda memory: _as_of(memory, copy.deepcopy(model)),  # the user's own may go on training
        inputs=Inputs(
            tensors,
            show_input or default_view,
            list(range(len(tensors))) if ids is None else [int(each) for each in ids],
            None if labels is None else [int(each) for each in labels],
        ),
        code=f'memory = sl.open("{path}")\n# model and inputs: your own, as given to sl.explore',
        class_names=None if names is None else lambda source: names,
        show_example=show,
        example_input=example_input,
        example_code="example_input(example)",
        drawing=drawing,
        tokenizer=tokenizer,
    )
