"""The addresses of the API: what each one takes, and what it answers. A bad parameter gets a sentence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

import spotlights as sl
from spotlights.errors import SettingError, SpotlightsError, TooLargeError, UnknownNameError, UnsupportedError
from spotlights.explorer import data, histories, maps
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.jobs import Preparing
from spotlights.explorer.queries import KINDS, Query, known_layer, mask_of, read_query, whole_number
from spotlights.explorer.spotlight import Wanted, audit, over_time, spotlight
from spotlights.explorer.tokens import shading
from spotlights.explorer.views import picture
from spotlights.selections import format_selections, read_selections

QUERY = ("q", "at")
LOOK = (*QUERY, "layer", "measure", "target", "top", "by", "where")
MASK = ("mask", "in")
MOST_TEXTS = 100


class Parameters:
    """The parameters of one request, and the id in its address; unknown ones are mistakes."""

    def __init__(
        self, explorer: Explorer, given: Mapping[str, Any], allowed: tuple[str, ...], number: str | None
    ) -> None:
        self._explorer, self._number = explorer, number
        self._given = {name: str(value) for name, value in given.items() if value is not None}
        unknown = [name for name in self._given if name not in allowed]
        if unknown:
            raise SettingError(f"Unknown parameter {unknown[0][:40]!r}. There are: {', '.join(allowed) or 'none'}.")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._given.get(name, default)
        if value is None:
            raise SettingError(f"The parameter {name}= is missing.")
        return value

    def optional(self, name: str) -> str | None:
        return self._given.get(name) or None

    def choice(self, name: str, *choices: str) -> str:
        """One of some words, by default the first."""
        value = self._given.get(name, choices[0])
        if value not in choices:
            raise SettingError(f"{name}={value[:40]!r}: give one of {', '.join(choices)}.")
        return value

    def number(self, name: str, default: int | None, low: int, high: int) -> Any:
        given = self._given.get(name)
        if not given:
            return default
        value = whole_number(given, f"a value of {name}=")
        if not low <= value <= high:
            raise SettingError(f"{name}={value}: give {low:,} to {high:,}.")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Some ids, with commas between them."""
        texts = [text for text in self._given.get(name, "").split(",") if text]
        if len(texts) > MOST_TEXTS:
            raise SettingError(f"{name}= has {len(texts):,} ids: give {MOST_TEXTS} at most.")
        return tuple(whole_number(text, "an id") for text in texts)

    # -- what a request is about ---------------------------------------------------------------

    @property
    def id(self) -> int:
        return whole_number(self._number or "", "an id")

    def query(self) -> Query:
        return read_query(self._explorer.subject, self.text("q"), self.number("at", None, 0, 1 << 20))

    def wanted(self) -> Wanted:
        layers = self._explorer.opened.layers
        where, memory = self.optional("where"), self._explorer.opened.memory
        return Wanted(
            layer=known_layer(self.text("layer", next(reversed(layers), "")), layers),
            measure=self.choice("measure", *KINDS),
            target=self.optional("target"),
            by=self.choice("by", "example", "slot"),
            where=format_selections(read_selections(where, memory)) if where else "",
            top=self.number("top", 24, 1, 500),
        )

    def mask(self, query: Query | None = None) -> sl.Mask:
        """What is left out; by default in the layer that answers."""
        answers = self._explorer.answering_layer(query)
        return mask_of(self.text("mask", ""), self.optional("in"), self._explorer.opened.memory, answers)


# -- answers ----------------------------------------------------------------------------------


def _refresh(explorer: Explorer, given: Parameters) -> Any:
    """Opens a memory again that is still being recorded."""
    explorer.refresh()
    return data.overview(explorer)


def _inputs(explorer: Explorer, given: Parameters) -> Any:
    """Test inputs with what the network says to them."""
    only, order = given.choice("only", "all", "wrong", "right"), given.choice("order", "given", "random", "unsure")
    label, source = given.number("label", None, -(1 << 31), 1 << 31), given.optional("source")
    first, count = given.number("first", 0, 0, 1 << 31), given.number("count", 60, 1, 500)
    seed = given.number("seed", 0, 0, 1 << 31)
    inputs, predicted = explorer.inputs, data.predictions(explorer)
    wanted = torch.ones(len(inputs), dtype=torch.bool)
    if inputs.labels is not None:
        labels = torch.tensor(inputs.labels)
        if label is not None:
            wanted &= labels == label
        if predicted is not None and only != "all":
            wanted &= (predicted[0] == labels) == (only == "right")
    if source is not None and inputs.sources is not None:
        wanted &= torch.tensor([own == source for own in inputs.sources])
    places = wanted.nonzero().flatten()
    if order == "random":
        places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
    elif order == "unsure" and predicted is not None:
        places = places[predicted[1][places].argsort(stable=True)]
    rows = [data.input_row(explorer, place) for place in places[first : first + count].tolist()]
    return {"matching": len(places), "first": first, "inputs": rows}


def _input_png(explorer: Explorer, given: Parameters) -> bytes:
    return picture(explorer.inputs.show(explorer.inputs.place(given.id)))


def _example(explorer: Explorer, given: Parameters) -> Any:
    """A training example: how it looks, what is known of it, and when it was visited."""
    with explorer.scanning:
        visits = explorer.opened.memory.visits(given.id)
    return {**asdict(visits), "shown": data.show_example(explorer, given.id)}


def _example_png(explorer: Explorer, given: Parameters) -> bytes:
    show = explorer.subject.show_example
    if show is None:
        raise UnknownNameError("Training examples have no pictures here.")
    return picture(show(given.id))


def _looked(explorer: Explorer, given: Parameters, answer: Callable[..., Any], *more: Any) -> Any:
    """What is said about the values of a query; kept."""
    query, wanted = given.query(), given.wanted()
    if KINDS[wanted.measure].estimate:
        explorer.prepare_influence()  # before anybody holds the scan: it may take longer than a request should
    key = answer.__name__, query.name, query.position, wanted, *more
    return explorer.kept(key, lambda: answer(explorer, query, wanted, *more))


def _tokens(explorer: Explorer, given: Parameters) -> Any:
    """The value of each token of the input, and of some training texts."""
    return _looked(explorer, given, shading, given.numbers("examples"))


def _history(explorer: Explorer, given: Parameters) -> Any:
    """How an answer came about; with `during`, the examples whose visits in these steps added and took most."""
    query, target, stretch = given.query(), given.optional("target"), given.optional("during")
    if stretch is None:
        return histories.described(explorer, query, target, given.optional("per"))
    first, _, end = stretch.partition("-")
    steps = range(whole_number(first, "a step"), whole_number(end, "a step"))
    return histories.during(explorer, query, target, steps, given.number("top", 6, 1, 100))


def _map(explorer: Explorer, given: Parameters) -> Any:
    layer, column, projection = given.wanted().layer, given.optional("per"), _placed(explorer, given)
    key = "map", layer, column, projection
    return explorer.kept(key, lambda: maps.described(explorer, layer, column, projection), 1 << 20)


def _lamp(explorer: Explorer, given: Parameters) -> Any:
    return _looked(explorer, given, maps.lamp, _placed(explorer, given))


def _placed(explorer: Explorer, given: Parameters) -> str:
    """How the points are placed, which is found out before anybody holds the scan."""
    projection = given.choice("projection", *maps.PROJECTIONS)
    maps.places_of(explorer, given.wanted().layer, projection)
    return projection


def _audit(explorer: Explorer, given: Parameters) -> Any:
    top, where = given.number("top", 24, 1, 500), given.text("where", "")
    return explorer.kept(("audit", top, where), lambda: audit(explorer, top, where))


def _mask(explorer: Explorer, given: Parameters) -> Any:
    """The answer with and without what the mask leaves out."""
    query = given.query()
    mask, masks, output = given.mask(query), explorer.masks(), explorer.attend(query).output
    masked = masks.network(mask)(query.batch) if mask else output
    return {"with": query.described(output), "without": query.described(masked)}


def _accuracy(explorer: Explorer, given: Parameters) -> Any:
    mask = given.mask()
    explorer.masks()
    return explorer.kept(("accuracy", mask), lambda: data.accuracy(explorer, mask))


ADDRESSES: dict[str, tuple[Callable[[Explorer, Parameters], Any], tuple[str, ...]]] = {
    "run": (lambda explorer, _: data.overview(explorer), ()),
    "refresh": (_refresh, ()),
    "status": (lambda explorer, _: data.status(explorer), ()),
    "inputs": (_inputs, ("only", "label", "source", "order", "seed", "first", "count")),
    "inputs/{id}.png": (_input_png, ()),
    "query": (lambda explorer, given: explorer.answer(given.query()), QUERY),
    "layer": (lambda explorer, given: _looked(explorer, given, spotlight), LOOK),
    "time": (lambda explorer, given: _looked(explorer, given, over_time), LOOK),
    "tokens": (_tokens, (*LOOK, "examples")),
    "history": (_history, (*QUERY, "target", "per", "during", "top")),
    "map": (_map, ("layer", "per", "projection")),
    "lamp": (_lamp, (*LOOK, "projection")),
    "mask": (_mask, (*QUERY, *MASK)),
    "accuracy": (_accuracy, MASK),
    "examples/{id}.png": (_example_png, ()),
    "examples/{id}": (_example, ()),
    "audit": (_audit, ("top", "where")),
}
"""What answers, and the parameters that it takes."""
EFFECTS = ("refresh",)
"""The addresses that change what others see, which take POST; all others take GET."""
_ADDRESS = re.compile(r"(\w+)(?:/(.*?)(\.png)?)?", re.DOTALL)


def answer(explorer: Explorer, path: str, given: Mapping[str, Any]) -> Any:
    """What an address answers: plain data, or the bytes of a picture. `other/…` asks the memory to compare with."""
    if path.startswith("other/") and explorer.other is not None:
        return answer(explorer.other, path.removeprefix("other/"), given)
    place, number, kind = match.groups() if (match := _ADDRESS.fullmatch(path)) else ("", None, None)
    name = place if number is None else f"{place}/{{id}}{kind or ''}"
    if name not in ADDRESSES:
        raise UnknownNameError(f"There is no {path[:40]!r} here.")
    function, allowed = ADDRESSES[name]
    return function(explorer, Parameters(explorer, given, allowed, number))


def replied(act: Callable[[], Any]) -> tuple[int, Any]:
    """What a function answers, with its status; one shape of errors, and of answers for later."""
    try:
        return 200, act()
    except Preparing as later:
        return 202, {"progress": later.progress}
    except UnknownNameError as error:
        return refused(404, str(error))
    except (UnsupportedError, TooLargeError) as error:
        return refused(422, str(error))
    except SpotlightsError as error:
        return refused(400, str(error))


def refused(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"status": status, "message": message}}


def as_text(answer: Any) -> str:
    """An answer as JSON; the numbers of a network that diverged are null."""
    return json.dumps(finite(answer), allow_nan=False, separators=(",", ":"), default=str)


def finite(answer: Any) -> Any:
    """The same with null for every number that JSON does not have."""
    if isinstance(answer, dict):
        return {key: finite(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [finite(value) for value in answer]
    return None if isinstance(answer, float) and not math.isfinite(answer) else answer
