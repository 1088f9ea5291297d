"""Questions about one answer of a subject's network: the same as on the explorer's page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

import spotlights as sl
from spotlights.cli.options import progress_bar
from spotlights.errors import SettingError
from spotlights.explorer import queries
from spotlights.results import Passages
from spotlights.selections import read_selections, where_any, without_any


@dataclass(frozen=True, eq=False)
class Asked:
    """One query about a subject, and the network's attention."""

    memory: sl.Memory
    model: nn.Module
    query: queries.Query
    spot: sl.Spotlights

    def answer(self, target: str | None) -> str:
        """What the network says, and which output is looked at."""
        said = self.query.described(self.spot.output)["said_name"]
        looked_at = "" if target is None else f"; shown is output {self.target_name(target)}"
        return f"{self.query.name}: the network says {said}{looked_at}"

    def described(self, about: dict[str, Any]) -> dict[str, Any]:
        """The question with everything that was left to its defaults, and the network's answer."""
        settings = dict(about["settings"])
        layered = settings["measure"] not in ("influence", "history")
        signed = settings["measure"] not in ("score", "absolute")
        settings["layer"] = (settings["layer"] or list(self.spot)[-1]) if layered else None
        settings["target"] = self.target_name(settings["target"]) if signed else None
        said = self.query.described(self.spot.output)["said_name"]
        place = {"memory": self.memory.view.reader.address}
        return {**about, **place, "query": self.query.name, "settings": settings, "network says": said}

    def measure(self, name: str, layer: str | None, target: str | None) -> Any:
        """A measure of one layer, by default the last; of all layers for influence and history."""
        if name == "history":
            if layer is not None:
                raise SettingError("A history goes through all layers: leave out --layer.")
            return self.history(target)
        kind = queries.kind_named(name)
        numbers = self.query.output_numbers(self.spot.output, target) if kind.signed else None
        measure = queries.measure_of(self.query, self.spot, kind, layer, numbers)
        return measure.absolute() if name == "absolute" else measure

    def target_name(self, target: str | None) -> str:
        """The output that is asked about, or the difference of two, by name."""
        numbers = self.query.output_numbers(self.spot.output, target)
        return " − ".join(self.query.output_name(number) for number in numbers)

    def history(self, target: str | None) -> sl.History:
        """How an output, or the difference of two ("7-9"), came about; by default the largest output."""
        numbers = self.query.output_numbers(self.spot.output, target)
        toward = self.query.target(self.spot.output, numbers)
        with progress_bar("Going back over all of training") as progress:
            return self.spot.history({self.target_name(target): toward}, progress=progress)

    def masked(self, left_out: str, layers: str | None) -> tuple[dict[str, Any], tuple[str, ...] | None]:
        """The answer with and without what the mask leaves out, and in which layers that is; None for all."""
        last = queries.output_layer(self.memory.layers, self.query, self.spot)
        mask = queries.mask_of(left_out, layers, self.memory, last)
        view = without_any(self.memory, [dict(conditions) for conditions in mask.selections])
        masked = view.primal(self.model, layers=mask.layers) if mask else self.model
        networks = {"with": self.model, "without": masked}
        answers = {
            name: self.query.described(queries.run(network, self.query.batch)) for name, network in networks.items()
        }
        return answers, mask.layers


def ask(subject: sl.Subject, query: str, *, where: str = "", without: str = "", engine: Any = None) -> Asked:
    """Asks the subject's network about an input, over some of the slots; a bare number is the id of a test input."""
    memory = subject.open()
    memory = memory if engine is None else memory.on(engine)
    model = subject.network(memory)
    asked = queries.read_query(subject, query if ":" in query else f"test:{query}")
    view = without_any(where_any(memory, read_selections(where, memory)), read_selections(without, memory))
    return Asked(memory, model, asked, view.attend(model, asked.batch))


# -- passages of a text -----------------------------------------------------------------------


def passages(
    subject: sl.Subject, prompt: str, *, last: int, kernel: str, part: str | None, layer: str | None, **shown: Any
) -> Passages:
    """The passages of the training text that the last tokens of a prompt attend to."""
    text = subject.text
    if text is None:
        raise SettingError("Passages are of a training text: give the subject text= and tokenizer=.")
    query, memory = queries.read_query(subject, f"text:{prompt}"), subject.open()
    # The words of a text stand without the spaces around them.
    tokens = [token if isinstance(text, str) else token.strip() or token for token in query.tokens or ()]
    layer = layer or subject.layer or list(memory.layers)[-1]
    spot = memory.attend(subject.network(memory), query.batch, layers=[layer], kernel=kernel, part=part)
    return spot[layer].passages(text, prompt=tokens, tokens=range(-min(last, len(tokens)), 0), **shown)
