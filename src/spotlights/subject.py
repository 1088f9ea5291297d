"""A subject: a memory, its trained network, inputs to ask about, and how examples and inputs look.

All commands and the explorer work on a subject. Nothing is loaded before it is needed, so that a module may define
its subject at the top level.
"""

from __future__ import annotations

import copy
import html
import inspect
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from numpy import ndarray
from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import SettingError, SpotlightsError, UnknownNameError, UnsupportedError
from spotlights.explorer.views import MarkedText, Show
from spotlights.results import Printable, TablePage, sentence_at
from spotlights.selections import id_range

if TYPE_CHECKING:
    from spotlights.explorer import Served
    from spotlights.explorer.saved import SavedPage

SHOWN_NUMBERS = 40
"""An input that is neither an image nor a text is shown as a table of its first numbers."""
SAME = 0.01
"""Relative difference up to which a parameter of the model counts as the recorded one; float16 may round."""


@runtime_checkable
class Tokenizer(Protocol):
    """From text to the numbers that the model takes, and back."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, eq=False)
class Drawing:
    """Lets users of the explorer draw or upload images as inputs."""

    height: int
    width: int
    prepare: Callable[[UInt8[ndarray, "height width"]], Tensor]
    """From pixels (0 is background, 255 is ink) to one input, without the batch dimension."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The test inputs of a subject."""

    data: Tensor | list[Tensor] | tuple[Tensor, ...] | dict[str, Tensor]
    """One row for each input. A list if their shapes differ; a tuple or dict of the model's arguments."""
    show: Show
    """How an input looks, by its position."""
    ids: list[int]
    labels: list[int] | None
    sources: list[str] | None

    def __len__(self) -> int:
        return _count(self.data)

    def batch(self, positions: Sequence[int]) -> Any:
        """Some inputs as the model takes them."""
        return _select(self.data, list(positions))

    def batches(self, size: int) -> Iterator[Any]:
        """All inputs, some at a time; one at a time if their shapes differ."""
        size = 1 if isinstance(self.data, list) else size
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def place(self, number: int) -> int:
        """The position of the input with an id."""
        if number not in self._places:
            raise UnknownNameError(f"No test input has the id {number}. The ids are {id_range(self.ids)}.")
        return self._places[number]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {number: place for place, number in enumerate(self.ids)}


class Subject:
    """A memory, its trained network, inputs to ask about, and how examples and inputs look."""

    def __init__(
        self,
        memory: sl.Memory | str | Path,
        model: nn.Module | Callable[..., nn.Module] | None = None,
        inputs: Any = None,
        *,
        labels: Any = None,
        ids: Any = None,
        sources: Sequence[str] | None = None,
        classes: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        show: Show | None = None,
        show_input: Show | None = None,
        example_input: Callable[[int], Tensor] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        retrain: Callable[..., nn.Module] | None = None,
        decisions: sl.Decisions | str | Path | None = None,
        drawing: Drawing | None = None,
        tokenizer: Tokenizer | None = None,
        text: Any = None,
        layer: str | None = None,
        target: Callable[[Any], Tensor] | None = None,
        kernel: str = "dot",
        title: str | None = None,
    ) -> None:
        """
        Args:
            memory: a memory or its path.
            model: the trained network; or a function that makes it, without arguments or of the opened memory.
            inputs: the test inputs: a tensor or an array with one row for each, a list of tensors, a tuple or dict of
                the model's arguments, a dataset of inputs or of (input, label) pairs; or a function that gives these.
            labels: the class of each input, as a whole number.
            ids: a whole number for each input; 0, 1, 2 … by default.
            sources: the data set of each input, if there are several.
            classes: the names of the outputs; for several sources, a mapping from a source to its names.
            show: from a training example's id to an image (array, tensor or PIL), a text, or a row (mapping, sequence);
                by default the sentence around a position of `text`.
            show_input: the same for the position of a test input; by default its own numbers.
            example_input: from a training example's id to the model's input, so that it can be asked about.
            loss: for a recipe: `loss(model, ids)`, as `sl.open` takes it in `recompute=`.
            retrain: from the ids of training examples to the network trained without these; `spotlights retrain-check`
                compares it with the estimate. A second argument, if it takes one, is a dict of new labels by id.
            decisions: those of an audit, or the file that the explorer exported; its audit goes on from there.
            drawing: how drawn and uploaded images become inputs.
            tokenizer: has `encode` and `decode`, so that prompts can be asked about.
            text: the training text whose positions are the example ids: a string of characters, a list of tokens, or a
                function that gives one of these.
            layer: the layer whose keys are compared to find passages; the last one by default.
            target: from the model's output to the numbers of interest, one row for each input. Needed if the output
                is not a tensor of shape (inputs, classes), or (inputs, positions, tokens) with a tokenizer.
            kernel: how keys and queries are compared. Contributions need "dot".
            title: the name of the subject; that of the memory by default.
        """
        self.path = memory.path if isinstance(memory, sl.Memory) else Path(memory)
        if model is not None and not callable(model):
            raise SettingError(f"model= is the trained torch module or a function, not {type(model).__name__}.")
        self._model, self._inputs, self._text = model, inputs, text
        self._labels, self._ids, self._sources, self._show_input = labels, ids, sources, show_input
        self._classes, self._show, self._example_input = classes, show, example_input
        self._loss = loss
        self.retrain, self.drawing, self.tokenizer, self.target = retrain, drawing, tokenizer, target
        self.layer, self.kernel = layer, kernel
        self.decisions = sl.Decisions.read(decisions) if isinstance(decisions, str | Path) else decisions
        self.title = self.path.name if title is None else title

    @staticmethod
    def recognised(path: str | Path) -> Subject | None:
        """The subject of a run that an installed package knows, by the entry points `spotlights.subjects`."""
        subjects = (entry.load()(Path(path)) for entry in entry_points(group="spotlights.subjects"))
        return next((subject for subject in subjects if subject is not None), None)

    def at(self, memory: str | Path) -> Subject:
        """The same subject on another memory."""
        other = copy.copy(self)
        other.path = Path(memory)
        return other

    def _other(self, compare: Subject | str | Path | None) -> Subject | None:
        """What answers are compared with: a subject, or this one on another memory."""
        return compare if compare is None or isinstance(compare, Subject) else self.at(compare)

    def with_examples(self, example_input: Callable[[int], Tensor]) -> Subject:
        """The same subject, whose training examples can be asked about and shown, if nobody has said how."""
        other = copy.copy(self)
        other._example_input = self._example_input or example_input  # noqa: SLF001 (of the same class)
        if self.show_example is None:
            other._show = lambda example: self.looks(example_input(example))  # noqa: SLF001
        return other

    def explore(
        self,
        *,
        compare: Subject | str | Path | None = None,
        host: str = "127.0.0.1",
        port: int = 8733,
        open_browser: bool | None = None,
    ) -> Served:
        """Opens the explorer on this subject; it runs in the background until it is closed or the program ends.

        Args:
            compare: another memory of the same inputs, or its subject, to compare answers with.
            host: another address than this machine's own demands a token, which is part of the printed URL.
            port: 0 takes any that is free.
            open_browser: by default if somebody sits at a terminal.
        """
        from spotlights.explorer import Served

        notebook = "ipykernel" in sys.modules  # which shows the page inline
        served = Served(self, other=self._other(compare), host=host, port=port, framed=notebook)
        if open_browser if open_browser is not None else sys.stdout.isatty() and not notebook:
            webbrowser.open(served.url)
        if not notebook:
            print(served)
        return served

    def page(
        self,
        query: str | int,
        *,
        view: str = "",
        layer: str | None = None,
        measure: str | None = None,
        target: str | int | None = None,
    ) -> SavedPage:
        """The explorer's page of one answer as one HTML file, for sharing; a notebook shows it without a server.

        Args:
            query: the id of a test input; or "train:ID", "text:PROMPT", as the subject can.
            view: "history", "map" or "audit"; the answer itself by default.
            layer: the layer that answers by default.
            measure: "contribution", "influence", "score" or "absolute".
            target: an output, or the difference of two ("7-9"); what the network says by default.
        """
        from spotlights.explorer.explorer import Explorer
        from spotlights.explorer.queries import full_name
        from spotlights.explorer.saved import saved_page

        explorer = Explorer(self, prepare=False)
        explorer.prepare(explorer.opened)
        given = {"view": view, "layer": layer, "measure": measure, "target": target}
        state = {name: str(value) for name, value in given.items() if value not in (None, "")}
        return saved_page(explorer, {"q": full_name(query), **state})

    def pictured(self, result: Printable) -> TablePage:
        """An answer of this memory as a table with a picture, or the text, of each training example."""
        from spotlights.explorer.views import as_json, picture, png_url

        show = self.show_example
        if show is None:
            raise SettingError("How do training examples look? Give sl.Subject(…, show=a function of an example's id).")

        def seen(example: int) -> str:
            shown = show(example)
            kind = as_json(shown)
            if kind["kind"] == "image":
                return f'<img alt="example {example}" src="{png_url(picture(shown))}"> '
            return f"{html.escape(kind['text'])} " if kind["kind"] == "text" else ""

        return result.page(seen)

    def widget(self, query: str | int = "", *, compare: Subject | str | Path | None = None, height: int = 820) -> Any:
        """The explorer as a widget of a notebook. It needs no port, so it works on remote kernels too.

        Args:
            query: the id of a test input, or "train:ID", "text:PROMPT", as the subject can; the first input by default.
            compare: another memory of the same inputs, or its subject, to compare answers with.
            height: of the page, in pixels.
        """
        from spotlights.explorer.queries import full_name
        from spotlights.explorer.widget import widget_of

        return widget_of(
            self, {"q": full_name(query)} if query != "" else {}, other=self._other(compare), height=height
        )

    # -- the memory and its network ------------------------------------------------------------

    def open(self) -> sl.Memory:
        """The memory as it is now: it has more steps than before if it is still being recorded."""
        memory = sl.open(self.path)
        if self._loss is None:
            return memory
        return sl.open(self.path, model=self.load_model(memory), recompute=self._loss)

    def load_model(self, memory: sl.Memory) -> nn.Module:
        """A copy of the model as it was given, or what the given function makes."""
        if self._model is None:
            raise SettingError("This subject has no network: give sl.Subject(memory, model=the_trained_network, …).")
        if isinstance(self._model, nn.Module):
            return copy.deepcopy(self._model).eval()  # the user's own may go on training
        needed = [p for p in inspect.signature(self._model).parameters.values() if p.default is p.empty]
        model = self._model(memory) if needed else self._model()
        if not isinstance(model, nn.Module):
            raise SettingError(f"The function model= gave {type(model).__name__}, not a torch module.")
        return model.eval()

    def network(self, memory: sl.Memory) -> nn.Module:
        """The trained network; while the memory is being recorded, the network as of the memory's last step."""
        model, final = self.load_model(memory), memory.final_parameters()
        if final is not None:
            _check_trained(model, final, memory.path)
            return model
        try:
            return memory.primal(model).eval()
        except UnsupportedError:  # such a memory answers scores only, which the model as it is can ask for
            return model

    # -- the data ------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> Inputs:
        """The test inputs, read when they are first needed."""
        data, labels = _tensors(_called(self._inputs))
        labels = labels if self._labels is None else _called(self._labels)
        count = _count(data)
        ids = range(count) if self._ids is None else self._ids
        given = {
            "labels": None if labels is None else _whole_numbers(labels, "labels"),
            "ids": _whole_numbers(ids, "ids"),
            "sources": None if self._sources is None else [str(source) for source in self._sources],
        }
        for name, values in given.items():
            if values is not None and len(values) != count:
                raise SettingError(f"{count} inputs, but {len(values)} {name}. Give one for each input.")
        return Inputs(data, self._show_input or self._numbers(data), **given)

    def class_names(self, source: str | None = None) -> list[str]:
        """The names of the outputs, for inputs of a source; empty if there are none."""
        classes = self._classes or []
        if isinstance(classes, Mapping):
            classes = classes[source] if source in classes else next(iter(classes.values()))
        return [str(name) for name in classes]

    def class_name(self, number: Any, source: str | None = None) -> str:
        """The name of an output, by its number; the number itself if it has no name."""
        names = self.class_names(source)
        return names[number] if isinstance(number, int) and 0 <= number < len(names) else str(number)

    @cached_property
    def text(self) -> Sequence[str] | None:
        """The training text, whose tokens are strings."""
        given = _called(self._text)
        if given is None or isinstance(given, str):
            return given
        values = _plain_list(given)
        if values and not isinstance(values[0], str):
            if self.tokenizer is None:
                raise SettingError("text= holds numbers of tokens. Give the tokenizer= that decodes them too.")
            return [self.tokenizer.decode([int(value)]) for value in values]
        return values

    def _passage(self, position: int) -> MarkedText:
        """A token of the training text in its sentence."""
        text = self.text or ""
        if not 0 <= position < len(text):
            raise UnknownNameError(f"The training text has no position {position}: it has 0 to {len(text) - 1}.")
        space = "" if isinstance(text, str) else " "
        start, stop = sentence_at(text, position)
        before, after = space.join(text[start:position]), space.join(text[position + 1 : stop])
        first = len(before) + len(space) * bool(before)
        whole = space.join(part for part in (before, text[position], after) if part)
        return MarkedText(whole, first, first + len(text[position]))

    @property
    def show_example(self) -> Show | None:
        """How a training example looks, by its id; None if nobody has said."""
        show = self._passage if self._show is None and self._text is not None else self._show
        return None if show is None else partial(self._of_example, show, "show")

    @property
    def example_input(self) -> Callable[[int], Tensor] | None:
        """A training example as the model takes it, by its id; None if nobody has said."""
        give = self._example_input
        return None if give is None else partial(self._of_example, give, "example_input")

    def _of_example(self, function: Callable[[int], Any], name: str, example: int) -> Any:
        """What the user's function gives for an example's id; a sentence for an id that it does not know."""
        try:
            return function(example)
        except SpotlightsError:
            raise
        except (LookupError, ValueError) as error:
            memory = self.open()
            ids = memory.distinct("example") if "example" in memory.columns else []
            there = f"The ids in the memory are {id_range(ids)}; " if ids else ""
            message = f"No training example {example}. {there}{name}({example}) raised {error!r}."
            raise UnknownNameError(message) from error

    def _numbers(self, data: Any) -> Show:
        """How an input looks if nobody says."""

        def show(position: int) -> Any:
            row = _select(data, [position])
            if isinstance(row, dict | tuple):
                named = row.items() if isinstance(row, dict) else enumerate(row)
                return {str(name): value[0].reshape(-1)[:SHOWN_NUMBERS].tolist() for name, value in named}
            return self.looks(row[0])

        return show

    def looks(self, row: Tensor) -> Any:
        """How one input looks if nobody says: an image, a text, or a row of numbers."""
        row = row.detach().cpu()
        if self.tokenizer is not None and row.ndim == 1 and not row.is_floating_point():
            return self.tokenizer.decode(row.tolist())
        return row if row.ndim >= 2 else row.reshape(-1)[:SHOWN_NUMBERS].tolist()


# -- what users give --------------------------------------------------------------------------


def _called(given: Any) -> Any:
    return given() if callable(given) and not hasattr(given, "__getitem__") else given


def _tensors(given: Any) -> tuple[Any, Any]:
    """The inputs as tensors; and their labels, if a dataset has them."""
    if isinstance(given, tuple | dict) and given:
        values = given.values() if isinstance(given, dict) else given
        tensors = [torch.as_tensor(value) for value in values]
        if len({len(tensor) for tensor in tensors}) > 1:
            raise SettingError("inputs= is a tuple or dict of the model's arguments, each with one row for each input.")
        return (dict(zip(given, tensors, strict=True)) if isinstance(given, dict) else tuple(tensors)), None
    labels = None
    if isinstance(given, Tensor | ndarray):
        data: Any = torch.as_tensor(given)
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and len(given):
        items = [given[place] for place in range(len(given))]
        if isinstance(items[0], tuple) and len(items[0]) > 1:
            items, labels = [item[0] for item in items], [item[1] for item in items]
        rows = [torch.as_tensor(item) for item in items]
        data = torch.stack(rows) if len({row.shape for row in rows}) == 1 else rows
    else:
        data = None
    if data is None or len(data) == 0 or (isinstance(data, Tensor) and data.ndim == 0):
        kind = "nothing" if given is None else f"{type(given).__name__}"
        raise SettingError(f"inputs= are the test inputs, as a tensor with one row for each, at least one; not {kind}.")
    return data, labels


def _select(data: Any, positions: list[int]) -> Any:
    if isinstance(data, tuple):
        return tuple(tensor[positions] for tensor in data)
    if isinstance(data, dict):
        return {name: tensor[positions] for name, tensor in data.items()}
    return torch.stack([data[place] for place in positions]) if isinstance(data, list) else data[positions]


def _count(data: Any) -> int:
    return len(data[0] if isinstance(data, tuple) else next(iter(data.values())) if isinstance(data, dict) else data)


def _plain_list(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _whole_numbers(values: Any, name: str) -> list[int]:
    plain = [value.item() if hasattr(value, "item") else value for value in _plain_list(values)]
    if any(not isinstance(value, int | float) or int(value) != value for value in plain):
        raise SettingError(f"{name}= are whole numbers, one for each input. For a regression, leave labels= out.")
    return [int(value) for value in plain]


def _check_trained(model: nn.Module, final: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Refuses a network whose weights are not those that the recording left, as of one that was never trained."""
    for layer, parameters in final.items():
        for name, value in parameters.items():
            try:
                own = model.get_submodule(layer).get_parameter(name).detach().cpu().double()
            except AttributeError:
                continue  # a layer made of several modules has parameters of its own names
            forms = [own, own.T] if own.ndim == 2 else [own] if own.ndim == 1 else []  # some modules have W transposed
            forms = [form for form in forms if form.shape == value.shape]
            if forms and all((form - value).norm() > SAME * value.double().norm() for form in forms):
                raise SettingError(
                    f'The model is not the network that {path} recorded: "{layer}.{name}" differs from what the '
                    "recording left. Give the trained network, or take the weights from the memory: "
                    "model=lambda memory: memory.primal(Net())."
                )
