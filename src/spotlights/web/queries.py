"""Queries: what is asked about, as it stands in an address, and what the network answers.

test:123            the test input with the id 123
train:456           the training example 456
pixels:eJzt…        a drawn or uploaded image: its bytes, row by row, deflated, in base64url
text:once upon      a prompt; `at` is the position of the token to ask about
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.attention import Spotlights
from spotlights.errors import SettingError
from spotlights.web.subject import Subject
from spotlights.web.views import Passage, as_json

MAX_PROMPT = 4000
SHOWN_OUTPUTS = 40
"""Of a network with more outputs, such as the words of a language, the largest are shown."""


@dataclass(frozen=True, eq=False)
class Query:
    """One input, and which row of the layers' queries is asked about."""

    name: str
    """As it stands in an address."""
    position: int | None
    """The token, for a text."""
    batch: Tensor
    """As the model takes it: a batch of one."""
    truth: int | None
    source: str | None
    shown: dict[str, Any]
    code: str
    """A Python expression for the batch."""
    tokens: list[str] | None = None


def read_query(subject: Subject, name: str, position: int | None) -> Query:
    """Makes a query of what stands in an address; every mistake gets a sentence."""
    kind, colon, rest = name.partition(":")
    readers = {"test": _test, "train": _train, "pixels": _pixels, "text": _text}
    if not colon or kind not in readers:
        raise SettingError(f"q={name[:40]!r}: a query begins with one of {', '.join(f'{k}:' for k in readers)}.")
    return readers[kind](subject, name, rest, position)


def _test(subject: Subject, name: str, rest: str, position: int | None) -> Query:
    example = whole_number(rest, "the id of a test input")
    inputs = subject.inputs
    place = inputs.place(example)
    return _placed(
        subject,
        name,
        inputs.tensors[place : place + 1],
        position,
        truth=None if inputs.labels is None else inputs.labels[place],
        source=None if inputs.sources is None else inputs.sources[place],
        shown={**as_json(inputs.show(place)), "image": f"api/inputs/{example}.png"},
        code=f"inputs[{place}:{place + 1}]",
    )


def _train(subject: Subject, name: str, rest: str, position: int | None) -> Query:
    example = whole_number(rest, "the id of a training example")
    if subject.example_input is None:
        raise SettingError("Training examples cannot be queries here: sl.explore was given no example_input=.")
    batch = torch.as_tensor(subject.example_input(example))[None]
    shown = {"kind": "table", "rows": [["training example", str(example)]]}
    if subject.show_example is not None:
        shown = {**as_json(subject.show_example(example)), "image": f"api/examples/{example}.png"}
    code = subject.example_code.replace("example)", f"{example})").replace("[example]", f"[{example}]") + "[None]"
    return _placed(subject, name, batch, position, truth=None, source=None, shown=shown, code=code)


def _pixels(subject: Subject, name: str, rest: str, position: int | None) -> Query:
    drawing = subject.drawing
    if drawing is None:
        raise SettingError("Images cannot be drawn or uploaded here: the explorer was given no drawing=.")
    size = drawing.height * drawing.width
    try:
        packed = base64.b64decode(rest + "=" * (-len(rest) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, size + 1)
    except (binascii.Error, ValueError, zlib.error):
        raise SettingError("q=pixels:… holds something else than deflated bytes in base64url.") from None
    if len(data) != size:
        raise SettingError(f"q=pixels:… must hold {drawing.height} × {drawing.width} = {size:,} bytes.")
    image = np.frombuffer(data, np.uint8).reshape(drawing.height, drawing.width).copy()
    shown = {**as_json(image), "image": None, "bytes": base64.b64encode(image.tobytes()).decode()}
    batch = torch.as_tensor(drawing.prepare(image))[None]
    code = f'drawn("{rest}")[None]'
    return _placed(subject, name, batch, position, truth=None, source=None, shown=shown, code=code)


def _text(subject: Subject, name: str, rest: str, position: int | None) -> Query:
    tokenizer = subject.tokenizer
    if tokenizer is None:
        raise SettingError("Prompts cannot be asked about here: the explorer was given no tokenizer=.")
    if len(rest) > MAX_PROMPT:
        raise SettingError(f"The prompt has {len(rest):,} characters; at most {MAX_PROMPT:,} are read.")
    try:
        numbers = list(tokenizer.encode(rest))
    except (KeyError, ValueError) as error:
        raise SettingError(f"The tokenizer does not know a part of this prompt: {error}.") from None
    if not numbers:
        raise SettingError("The prompt is empty. Type at least one token.")
    batch = torch.tensor([numbers])
    shown = {"kind": "text", "text": rest, "start": 0, "end": 0}
    return _placed(
        subject, name, batch, position, truth=None, source=None, shown=shown, code=f"torch.tensor([{numbers}])"
    )


def _placed(
    subject: Subject,
    name: str,
    batch: Tensor,
    position: int | None,
    *,
    truth: int | None,
    source: str | None,
    shown: dict[str, Any],
    code: str,
) -> Query:
    """Completes a query: a text's tokens, and the one that is asked about (the last one, if nobody says)."""
    tokenizer = subject.tokenizer
    if tokenizer is None or batch.ndim != 2 or batch.is_floating_point():
        return Query(name, None, batch, truth, source, shown, code)
    tokens = [tokenizer.decode([number]) for number in batch[0].tolist()]
    if position is None:
        position = len(tokens) - 1
    if not 0 <= position < len(tokens):
        raise SettingError(f"at={position}: the text has tokens 0 to {len(tokens) - 1}.")
    before = len("".join(tokens[:position]))
    passage = as_json(Passage("".join(tokens), before, before + len(tokens[position])))
    return Query(name, position, batch, truth, source, {**shown, **passage}, code, tokens)


def whole_number(text: str, what: str) -> int:
    """A number of an address; enormous ones are no ids."""
    if not text.lstrip("-").isascii() or not text.lstrip("-").isdigit() or len(text) > 18:
        raise SettingError(f"{text[:40]!r} is not {what}: a whole number is.")
    return int(text)


# -- the answer -------------------------------------------------------------------------------


def outputs_of(output: Any, query: Query) -> Float[Tensor, "outputs"]:
    """The network's outputs for a query: one number for each class, or for each token that could follow."""
    if not isinstance(output, Tensor):
        raise SettingError(f"The model's output is a {type(output).__name__}; the explorer needs a tensor of logits.")
    found = output.detach().double().cpu()
    if found.ndim == 3 and query.position is not None:
        return found[0, query.position]
    if found.ndim == 2 and query.position is not None and len(found) == len(query.tokens or ()):
        return found[query.position]
    if found.ndim != 2 or len(found) != 1:
        raise SettingError(
            f"The model's output for one input has the shape {tuple(found.shape)}; the explorer needs (1, classes), "
            "or (1, positions, tokens) with a tokenizer."
        )
    return found[0]


def target_of(query: Query, output: Tensor, target: int) -> Any:
    """The number of interest, as `contributions` takes it."""
    if output.ndim == 3:
        return lambda made: made[:, query.position, target]
    if query.position is not None and output.ndim == 2 and len(output) != 1:
        return lambda made: made[query.position, target][None]
    return target


def row_of(query: Query, rows: int) -> int | None:
    """Which of a layer's rows is asked about; None for all of them together: a convolution's positions of an image."""
    if query.position is None or rows == 1:
        return None
    return query.position if rows == len(query.tokens or ()) else rows - 1


@torch.no_grad()
def answer(model: nn.Module, query: Query) -> Float[Tensor, "outputs"]:
    """What the network says."""
    return outputs_of(model(query.batch), query)


def output_name(subject: Subject, query: Query, number: int) -> str:
    """What an output is called."""
    if subject.tokenizer is not None and query.position is not None:
        return subject.tokenizer.decode([number])
    names = [] if subject.class_names is None else subject.class_names(query.source)
    return names[number] if number < len(names) else str(number)


def _output_layer(spot: Spotlights, outputs: int) -> str:
    """The layer to look at first: the last one with as many outputs as the network itself."""
    names = [name for name, attention in spot.items() if attention.layer.entry.out_features == outputs]
    return names[-1] if names else list(spot)[-1]


def described(subject: Subject, query: Query, logits: Float[Tensor, "outputs"], spot: Spotlights) -> dict[str, Any]:
    """A query and its answer, for the page."""
    chances = logits.softmax(dim=0)
    said = int(logits.argmax())
    order = range(len(logits)) if len(logits) <= SHOWN_OUTPUTS else logits.topk(SHOWN_OUTPUTS).indices.tolist()
    return {
        "query": query.name,
        "at": query.position,
        "tokens": query.tokens,
        "shown": query.shown,
        "source": query.source,
        "truth": query.truth,
        "truth_name": None if query.truth is None else output_name(subject, query, query.truth),
        "said": said,
        "said_name": output_name(subject, query, said),
        "outputs": [
            {
                "number": number,
                "name": output_name(subject, query, number),
                "logit": float(logits[number]),
                "share": float(chances[number]),
            }
            for number in order
        ],
        "layers": list(spot),
        "layer": _output_layer(spot, len(logits)),
    }
