"""What `top`, `totals`, `merge` and `mask` have in common: a question as plain data, answered and printed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

import spotlights as sl
from spotlights.cli.options import print_json, print_result, waiting, write_table
from spotlights.cli.subjects import find_subject
from spotlights.errors import SettingError


def ask_about(
    memory: Path, query: str, subject: str | None, where: str = "", without: str = "", engine: Any = None
) -> Any:
    from spotlights.cli.asking import ask

    return ask(find_subject(memory, subject), query, where=where, without=without, engine=engine)


def print_answer(
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
        asked = ask_about(Path(about["memory"]), about["query"], subject, about["where"], about["without"], engine)
        result = ANSWERS[about["command"]](asked, **about["settings"])
    if shard is not None:
        engine.save(out, about)
        typer.echo(out)
        return
    write_table(result.rows(0), table)
    if as_json:
        print_json({"asked": asked.described(about), "rows": list(result.rows(0))})
    else:
        print_result(asked.answer(about["settings"]["target"]), *_pictures(asked, result), result)


def _pictures(asked: Any, result: Any) -> list[Any]:
    """The examples of an answer as pictures, if they are pictures and the terminal can show them."""
    from rich.console import Console

    from spotlights.cli.thumbnails import can_show, strips
    from spotlights.results import Top
    from spotlights.results.tables import first_rows

    console = Console()
    if not can_show(console) or not isinstance(result, Top):
        return []
    rows = first_rows(list(result.rows(0)))
    examples = list(dict.fromkeys(row["example"] for row in rows if row.get("example") is not None))
    subject, (kind, _, number) = asked.query.subject, asked.query.name.partition(":")
    place = subject.inputs.place(int(number)) if kind == "test" else None
    pictures = strips(subject, place, examples, console.width)
    return [] if pictures is None else [pictures]


def _top(asked: Any, *, layer: Any, measure: Any, target: Any, k: int, slots: bool, against: bool) -> Any:
    values = asked.measure(measure, layer, target)
    if against and not values.signed:
        raise SettingError(f"Nothing speaks against an output by its {measure}. Give --measure contribution.")
    by = None if slots or "example" not in asked.memory.columns else "example"
    return (values.bottom if against else values.top)(k, by=by)


def _totals(asked: Any, *, layer: Any, measure: Any, target: Any, by: str | None, bins: int | None) -> Any:
    if by is None:
        by = next(iter(asked.memory.groups()), "step")
        bins = 10 if bins is None and by == "step" else bins
    return asked.measure(measure, layer, target).totals(by, bins=bins)


ANSWERS = {"top": _top, "totals": _totals}


def compared(answers: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs with and without, a row for each."""
    now = {output["number"]: output["logit"] for output in answers["without"]["outputs"]}
    return [
        {
            "output": output["name"],
            "with": output["logit"],
            "without": now[output["number"]],
            "change": now[output["number"]] - output["logit"],
        }
        for output in answers["with"]["outputs"]
        if output["number"] in now
    ]


def compared_table(rows: list[dict[str, Any]], answers: dict[str, Any], layers: Sequence[str] | None) -> Any:
    """The rows for people; `layers` are those in which slots are left out, None for all."""
    from spotlights.results import build, layer_named

    title = f"the network says {answers['with']['said_name']}; without these: {answers['without']['said_name']}"
    where = (
        "all layers"
        if layers is None
        else f"{', '.join(map(layer_named, layers))}; other layers as they are (--layers)"
    )
    columns = ["output", "with", "without", "change"]
    return build(title, columns, [list(row.values()) for row in rows], f"left out in {where}")
