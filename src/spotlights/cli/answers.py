"""Questions about one answer of a subject's network, as on the explorer's page: asked, answered, printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from torch import nn

import spotlights as sl
from spotlights.cli.options import print_answer, progress_bar, waiting
from spotlights.cli.subjects import find_subject
from spotlights.cli.thumbnails import can_show, strips
from spotlights.errors import SettingError
from spotlights.explorer import queries
from spotlights.results import Passages, Top, build, layer_named
from spotlights.results.tables import first_rows
from spotlights.selections import read_selections, where_any, without_any


@dataclass(frozen=True, eq=False)
class Asked:
    """One query about a subject, and the network's attention."""

    memory: sl.Memory
    model: nn.Module
    query: queries.Query
    spot: sl.Spotlights

    @property
    def said(self) -> str:
        """What the network says."""
        return self.query.described(self.spot.output)["said_name"]

    def title(self, target: str | None) -> str:
        """What the network says, and which output is looked at."""
        looked_at = "" if target is None else f"; shown is output {self.target_name(target)}"
        return f"{self.query.name}: the network says {self.said}{looked_at}"

    def described(self, about: dict[str, Any]) -> dict[str, Any]:
        """The question with everything that was left to its defaults, and the network's answer."""
        settings = dict(about["settings"])
        layered = settings["measure"] not in ("influence", "history")
        signed = settings["measure"] not in ("score", "absolute")
        settings["layer"] = (settings["layer"] or list(self.spot)[-1]) if layered else None
        settings["target"] = self.target_name(settings["target"]) if signed else None
        place = {"memory": self.memory.view.reader.address}
        return {**about, **place, "query": self.query.name, "settings": settings, "network says": self.said}

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
        return self.query.target_name(self.query.output_numbers(self.spot.output, target))

    def history(self, target: str | None) -> sl.History:
        """How an output, or the difference of two ("7-9"), came about; by default the largest output."""
        toward = self.query.target(self.spot.output, self.query.output_numbers(self.spot.output, target))
        with progress_bar("Going back over all of training") as progress:
            return self.spot.history({self.target_name(target): toward}, progress=progress)

    def totals(self, measure: Any, by: str | None, bins: int | None) -> Any:
        """A measure's totals; by default of the first column that has few values, or of ten stretches of steps."""
        if by is None:
            by = next(iter(self.memory.groups()), "step")
            bins = 10 if bins is None and by == "step" else bins
        return measure.totals(by, bins=bins)

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
    """Asks the subject's network about an input, over some of the slots."""
    memory = subject.open()
    memory = memory if engine is None else memory.on(engine)
    model = subject.network(memory)
    asked = queries.read_query(subject, queries.full_name(query))
    view = without_any(where_any(memory, read_selections(where, memory)), read_selections(without, memory))
    return Asked(memory, model, asked, view.attend(model, asked.batch))


# -- top and totals ---------------------------------------------------------------------------


def answer_question(
    about: dict[str, Any],
    subject: str | None,
    shard: str | None = None,
    out: Path | None = None,
    *,
    table: Path | None = None,
    as_json: bool,
    engine: Any = None,
) -> None:
    """Answers a question that is given as plain data: all of it, one shard, or what an engine has of it already."""
    if (shard is None) != (out is None):
        raise SettingError("--shard 3/20 and --out FILE belong together.")
    if shard is not None:
        if table is not None:
            raise SettingError("The answer for a share of the memory is incomplete: give --table to spotlights merge.")
        number, _, count = shard.partition("/")
        if not (number.isdecimal() and count.isdecimal()):
            raise SettingError(f'--shard {shard}: write "3/20" for the third of 20 shares.')
        engine = sl.Shard(int(number), int(count))
    with waiting("Scanning the slots"):
        known = find_subject(Path(about["memory"]), subject)
        asked = ask(known, about["query"], where=about["where"], without=about["without"], engine=engine)
        result = ANSWERS[about["command"]](asked, **about["settings"])
    if shard is not None:
        engine.save(out, about)
        typer.echo(out)
        return
    rows = list(result.rows(0))
    shown = asked.title(about["settings"]["target"]), *_pictures(asked, result), result
    print_answer({"asked": asked.described(about), "rows": rows}, *shown, as_json=as_json, rows=rows, table=table)


def _pictures(asked: Asked, result: Any) -> list[Any]:
    """The examples of an answer as pictures, if they are pictures and the terminal can show them."""
    console = Console()
    if not can_show(console) or not isinstance(result, Top):
        return []
    rows = first_rows(list(result.rows(0)))
    examples = list(dict.fromkeys(row["example"] for row in rows if row.get("example") is not None))
    subject, (kind, _, number) = asked.query.subject, asked.query.name.partition(":")
    place = subject.inputs.place(int(number)) if kind == "test" else None
    pictures = strips(subject, place, examples, console.width)
    return [] if pictures is None else [pictures]


def _top(asked: Asked, *, layer: Any, measure: Any, target: Any, k: int, slots: bool, against: bool) -> Any:
    values = asked.measure(measure, layer, target)
    if against and not values.signed:
        raise SettingError(f"Nothing speaks against an output by its {measure}. Give --measure contribution.")
    by = None if slots or "example" not in asked.memory.columns else "example"
    return (values.bottom if against else values.top)(k, by=by)


def _totals(asked: Asked, *, layer: Any, measure: Any, target: Any, by: str | None, bins: int | None) -> Any:
    return asked.totals(asked.measure(measure, layer, target), by, bins)


ANSWERS = {"top": _top, "totals": _totals}


# -- masks ------------------------------------------------------------------------------------


def compared(answers: dict[str, Any], layers: tuple[str, ...] | None) -> tuple[list[dict[str, Any]], Any]:
    """The outputs with and without, as rows and as a table; `layers` are those of the mask, None for all."""
    now = {output["number"]: output["logit"] for output in answers["without"]["outputs"]}
    rows = [
        {
            "output": output["name"],
            "with": output["logit"],
            "without": now[output["number"]],
            "change": now[output["number"]] - output["logit"],
        }
        for output in answers["with"]["outputs"]
        if output["number"] in now
    ]
    title = f"the network says {answers['with']['said_name']}; without these: {answers['without']['said_name']}"
    some = None if layers is None else f"{', '.join(map(layer_named, layers))}; other layers as they are (--layers)"
    columns = ["output", "with", "without", "change"]
    return rows, build(title, columns, [list(row.values()) for row in rows], f"left out in {some or 'all layers'}")


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
