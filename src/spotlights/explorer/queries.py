"""What can be asked, on the page and on the command line: a query, and a measure of it.

A query is an input, as an address names it:

test:123            the test input with the id 123
train:456           the training example 456
pixels:eJzt…        a drawn or uploaded image: its bytes, row by row, deflated, in base64url
text:once upon      a prompt; `at` is the position of the token to ask about
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import spotlights as sl
from spotlights.errors import SettingError, UnknownNameError, UnsupportedError
from spotlights.explorer.views import MarkedText, as_json
from spotlights.selections import read_selections

if TYPE_CHECKING:
    from spotlights.subject import Subject

MAX_PROMPT = 4000
SHOWN_OUTPUTS = 40
"""Of a network with more outputs, such as the words of a language, the largest are shown."""


@dataclass(frozen=True, eq=False)
class Query:
    """One input of a subject, and which row of the layers' queries is asked about."""

    subject: Subject
    name: str
    """As an address names it."""
    batch: Any
    """As the model takes it: a batch of one, or a tuple or dict of the model's arguments."""
    shown: dict[str, Any]
    truth: int | None = None
    source: str | None = None
    position: int | None = None
    """The token, for a text."""
    tokens: list[str] | None = None

    def at(self, position: int | None) -> Query:
        """The same query about one of its tokens (the last one, if nobody says), if it is a text."""
        tokenizer, batch = self.subject.tokenizer, self.batch
        if tokenizer is None or not isinstance(batch, Tensor) or batch.ndim != 2 or batch.is_floating_point():
            return self
        tokens = [tokenizer.decode([number]) for number in batch[0].tolist()]
        if position is None:
            position = len(tokens) - 1
        if not 0 <= position < len(tokens):
            raise SettingError(f"at={position}: the text has tokens 0 to {len(tokens) - 1}.")
        before = len("".join(tokens[:position]))
        marked = as_json(MarkedText("".join(tokens), before, before + len(tokens[position])))
        return replace(self, position=position, tokens=tokens, shown={**self.shown, **marked})

    def outputs(self, output: Any) -> Float[Tensor, "outputs"]:
        """The numbers of interest in the network's output for this query."""
        return numbers_of(self.subject, output, self)[0].detach().double().cpu()

    def output_numbers(self, output: Any, wanted: str | int | None) -> tuple[int, ...]:
        """The outputs that are asked about: one, "7", or two whose difference counts, "7-9"; by default the largest."""
        outputs = self.outputs(output)
        if wanted is None or wanted == "":
            return (int(outputs.argmax()),)
        parts = str(wanted).split("-")
        if len(parts) > 2 or not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
            raise SettingError(f'target={str(wanted)[:40]}: write an output, "7", or the difference of two, "7-9".')
        numbers = tuple(int(part) for part in parts)
        for number in numbers:
            if number >= len(outputs):
                raise SettingError(f"target={number}: the network has the outputs 0 to {len(outputs) - 1}.")
        return numbers

    def target(self, output: Any, numbers: tuple[int, ...]) -> Any:
        """An output or the difference of two, as `contributions`, `influence` and `history` take it."""
        if isinstance(output, Tensor) and output.ndim == 2 and len(output) == 1 and self.subject.target is None:
            return numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[1]}"

        return lambda output: towards(numbers_of(self.subject, output, self), numbers)

    def row(self, rows: int) -> int | None:
        """Which row of a layer is asked about; None for all rows together, as the positions of an image."""
        if self.position is None or rows == 1:
            return None
        return self.position if rows == len(self.tokens or ()) else rows - 1

    def output_name(self, number: int) -> str:
        if self.subject.tokenizer is not None and self.position is not None and not self.subject.class_names():
            return self.subject.tokenizer.decode([number])
        return self.subject.class_name(number, self.source)

    def target_name(self, numbers: tuple[int, ...]) -> str:
        """An output by name, or the difference of two."""
        return " − ".join(self.output_name(number) for number in numbers)

    def described(self, output: Any) -> dict[str, Any]:
        """The query and the network's answer, as plain data."""
        logits = self.outputs(output)
        chances = logits.softmax(dim=0)
        said = int(logits.argmax())
        order = range(len(logits)) if len(logits) <= SHOWN_OUTPUTS else logits.topk(SHOWN_OUTPUTS).indices.tolist()
        alone = len(logits) == 1  # a number, not a choice between classes
        return {
            "query": self.name,
            "at": self.position,
            "tokens": self.tokens,
            "shown": self.shown,
            "source": self.source,
            "truth": self.truth,
            "truth_name": None if self.truth is None else self.output_name(self.truth),
            "said": said,
            "said_name": f"{float(logits[0]):.4g}" if alone else self.output_name(said),
            "outputs": [
                {
                    "number": number,
                    "name": self.output_name(number),
                    "logit": float(logits[number]),
                    "share": None if alone else float(chances[number]),
                }
                for number in order
            ],
        }


# -- what an address names --------------------------------------------------------------------


def full_name(query: str | int) -> str:
    """A query as an address names it: a number alone is the id of a test input."""
    return str(query) if ":" in str(query) else f"test:{query}"


def read_query(subject: Subject, name: str, position: int | None = None) -> Query:
    """The query that an address names; every mistake gets a sentence."""
    kind, colon, rest = name.partition(":")
    readers = {"test": _test, "train": _train, "pixels": _pixels, "text": _text}
    if not colon or kind not in readers:
        raise SettingError(f"q={name[:40]!r}: a query begins with one of {', '.join(f'{k}:' for k in readers)}.")
    return readers[kind](subject, name, rest).at(position)


def _test(subject: Subject, name: str, rest: str) -> Query:
    example = whole_number(rest, "the id of a test input")
    inputs = subject.inputs
    place = inputs.place(example)
    return Query(
        subject,
        name,
        inputs.batch([place]),
        as_json(inputs.show(place), f"api/inputs/{example}.png"),
        truth=None if inputs.labels is None else inputs.labels[place],
        source=None if inputs.sources is None else inputs.sources[place],
    )


def _train(subject: Subject, name: str, rest: str) -> Query:
    example = whole_number(rest, "the id of a training example")
    if subject.example_input is None:
        raise SettingError("Training examples cannot be queries here: the subject has no example_input=.")
    batch = torch.as_tensor(subject.example_input(example))[None]
    shown = {"kind": "table", "rows": [["training example", str(example)]]}
    if subject.show_example is not None:
        shown = as_json(subject.show_example(example), f"api/examples/{example}.png")
    return Query(subject, name, batch, shown)


def _pixels(subject: Subject, name: str, rest: str) -> Query:
    drawing = subject.drawing
    if drawing is None:
        raise SettingError("Images cannot be drawn or uploaded here: the subject has no drawing=.")
    size = drawing.height * drawing.width
    try:
        packed = base64.b64decode(rest + "=" * (-len(rest) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, size + 1)
    except (binascii.Error, ValueError, zlib.error):
        raise SettingError("q=pixels:… is not deflated bytes in base64url.") from None
    if len(data) != size:
        raise SettingError(f"q=pixels:… must hold {drawing.height} × {drawing.width} = {size:,} bytes.")
    image = np.frombuffer(data, np.uint8).reshape(drawing.height, drawing.width).copy()
    shown = {**as_json(image), "image": None, "bytes": base64.b64encode(image.tobytes()).decode()}
    return Query(subject, name, torch.as_tensor(drawing.prepare(image))[None], shown)


def _text(subject: Subject, name: str, rest: str) -> Query:
    tokenizer = subject.tokenizer
    if tokenizer is None:
        raise SettingError("Prompts cannot be asked about here: the subject has no tokenizer=.")
    if len(rest) > MAX_PROMPT:
        raise SettingError(f"The prompt has {len(rest):,} characters; at most {MAX_PROMPT:,} are read.")
    try:
        numbers = list(tokenizer.encode(rest))
    except (KeyError, ValueError) as error:
        raise SettingError(f"The tokenizer does not know a part of this prompt: {error}.") from None
    if not numbers:
        raise SettingError("The prompt is empty. Type at least one token.")
    return Query(subject, name, torch.tensor([numbers]), as_json(rest))


def whole_number(text: str, what: str) -> int:
    """A number of an address; enormous ones are not ids."""
    if not text.lstrip("-").isascii() or not text.lstrip("-").isdigit() or len(text) > 18:
        raise SettingError(f"{text[:40]!r} is not {what}: a whole number is.")
    return int(text)


# -- the network's answer ---------------------------------------------------------------------


def run(network: Callable[..., Any], batch: Any) -> Any:
    """The network's output for a batch: a tensor, or a tuple or dict of the network's arguments."""
    with torch.no_grad():
        if isinstance(batch, dict):
            return network(**batch)
        return network(*batch) if isinstance(batch, tuple) else network(batch)


def numbers_of(subject: Subject, output: Any, query: Query | None = None) -> Float[Tensor, "inputs outputs"]:
    """The numbers of interest: one for each class, or for each token that could follow the query's token."""
    numbers = output if subject.target is None else subject.target(output)
    if not isinstance(numbers, Tensor):
        raise SettingError(
            f"The model's output is a {type(numbers).__name__}. Give the subject a target= that makes a tensor of it, "
            "with one row for each input and one column for each class."
        )
    if query is not None and query.position is not None:
        if numbers.ndim == 3:
            return numbers[:, query.position]
        if numbers.ndim == 2 and len(numbers) == len(query.tokens or ()) != 1:
            return numbers[query.position][None]
    if numbers.ndim == 1:
        return numbers[:, None]
    if numbers.ndim != 2 or (query is not None and len(numbers) != 1):
        raise SettingError(
            f"The model's output has the shape {tuple(numbers.shape)}; needed is (inputs, classes), or (inputs, "
            "positions, tokens) with a tokenizer. Give the subject a target= that makes one of the other."
        )
    return numbers


def towards(outputs: Float[Tensor, "*inputs outputs"], numbers: tuple[int, ...]) -> Float[Tensor, "*inputs"]:
    """One output, or the difference of two."""
    return outputs[..., numbers[0]] - (outputs[..., numbers[1]] if len(numbers) > 1 else 0.0)


# -- measures ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One of the measures that a user chooses from."""

    name: str
    title: str
    help: str
    signed: bool = False
    """Values speak for or against one output, the target."""
    estimate: bool = False
    """Predicts the effect of leaving examples out: over all layers, for whole examples."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "contribution",
            "contribution",
            "What a training example adds to this output, with its sign. In the last layer exact: all of them and the "
            "initial weights add up to the output. In a hidden layer first order.",
            signed=True,
        ),
        Kind(
            "influence",
            "influence",
            "An estimate: had the example been left out of training, would this output be lower (for) or higher "
            "(against)? All visits and layers added up. Order and sign count; the size has no unit.",
            signed=True,
            estimate=True,
        ),
        Kind("score", "score", "key·query: how similar the layer finds the training example and this input."),
        Kind("absolute", "|score|", "The size of the score, whatever its sign."),
    )
}


def kind_named(name: str) -> Kind:
    if name not in KINDS:
        raise SettingError(f'No measure "{name}". There are: {", ".join(KINDS)}.')
    return KINDS[name]


def measure_of(query: Query, spot: sl.Spotlights, kind: Kind, layer: str | None, target: tuple[int, ...] | None) -> Any:
    """The library's measure of one query: of a layer, or of all layers (None), which only influence has.

    For |score| it is the score: `absolute()` of kept scores costs nothing.
    """
    toward: Any = None if target is None else query.target(spot.output, target)
    if kind.estimate:
        estimated, left_out = spot.influence_layers()
        if layer is None and not estimated:
            raise UnsupportedError(f"There is no estimate of influence through {', '.join(left_out)}.")
        # The joint estimate may take minutes the first time: too long for a page.
        return spot.influence(toward, rule="whitened") if layer is None else spot[layer].influence(toward)
    attention = spot[list(spot)[-1] if layer is None else layer]
    row = query.row(len(attention.queries))
    if row is not None:
        attention = attention.at(row)
    return attention.contributions(toward).whole() if kind.signed else attention.whole()


ALL_LAYERS = "all"


def mask_of(left_out: str, layers: str | None, memory: sl.Memory, answers: str) -> sl.Mask:
    """The mask of what is left out, such as `label=3,5; step=0-300`, and in which layers: `layers.1,layers.2`.

    By default in the layer that answers alone. There a mask takes a part of a sum away and nothing else changes. Hidden
    layers add up far larger numbers that cancel, and without some of them the rest is not a network that ever existed.
    """
    selections = read_selections(left_out, memory)
    if layers == ALL_LAYERS:
        return sl.Mask.of(selections, None)
    return sl.Mask.of(selections, [known_layer(name, memory.layers) for name in (layers or answers).split(",")])


def output_layer(layers: Mapping[str, Any], query: Query, spot: sl.Spotlights) -> str:
    """The layer that answers: the last one with as many outputs as the network itself."""
    outputs = len(query.outputs(spot.output))
    names = [name for name in spot if name in layers and layers[name].out_features == outputs]
    return names[-1] if names else list(spot)[-1]


def known_layer(name: str, layers: Collection[str]) -> str:
    """The name of a recorded layer; any other is refused."""
    if name not in layers:
        raise UnknownNameError(f'No layer "{name[:80]}" in this memory. It has: {", ".join(layers)}.')
    return name
