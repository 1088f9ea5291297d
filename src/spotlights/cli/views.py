"""The explorer's map and its comparison as commands: the same numbers, as tables."""

from pathlib import Path
from typing import Annotated, Any

import typer

from spotlights.cli import options
from spotlights.cli.options import AsJson, TableFile, app, optional, print_answer, waiting
from spotlights.cli.subjects import find_subject, other_subject
from spotlights.errors import SettingError


@app.command("map", epilog="Example:  [bold]spotlights map runs/demo 60008 --table map.csv[/]")
def show_map(
    memory: options.Memory,
    query: options.Query,
    subject: options.Subject = None,
    layer: options.AnswersLayer = None,
    measure: options.SignedMeasure = "contribution",
    target: options.Target = None,
    projection: Annotated[
        str, typer.Option(help="pca, the two directions in which the keys differ most; or umap, neighbours together.")
    ] = "pca",
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many examples are printed.")] = 10,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Show where a layer puts the training examples and an input; --table writes all of them."""
    from spotlights.explorer import maps
    from spotlights.results import build, layer_named

    with waiting("Finding two directions"):
        explorer, asked, wanted = _ask(find_subject(memory, subject), query, layer, measure, target)
        facts, rows = maps.rows(explorer, asked, wanted, projection)
    largest = sorted(rows, key=lambda row: -abs(row["value"]))[:k]
    title = f"{asked.name} lies at {facts['place'][0]:.4g}, {facts['place'][1]:.4g} in {layer_named(wanted.layer)}"
    note = f"the {len(largest)} of {len(rows):,} training examples with the largest {measure}"
    shown = build(title, list(rows[0]), [list(row.values()) for row in largest], note)
    print_answer({**facts, "points": len(rows), "rows": largest}, shown, as_json=as_json, rows=rows, table=table)


@app.command(epilog="Example:  [bold]spotlights compare runs/demo runs/cleaned 60008[/]")
def compare(
    memory: options.Memory,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another memory: of another seed, or after cleaning.")],
    query: options.Query,
    subject: options.Subject = None,
    layer: options.AnswersLayer = None,
    measure: options.SignedMeasure = "contribution",
    target: options.Target = None,
    by: Annotated[str | None, optional(help="The column of the groups; the first one by default.")] = None,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare what an answer is made of in two memories."""
    from spotlights.explorer.spotlight import spotlight
    from spotlights.results import build, layer_named

    with waiting("Asking both memories"):
        first = find_subject(memory, subject)
        explorer, asked, wanted = _ask(first, query, layer, measure, target)
        there, asked_there, _ = _ask(other_subject(first, other, subject), query, wanted.layer, measure, wanted.target)
        one, two = spotlight(explorer, asked, wanted), spotlight(there, asked_there, wanted)
        said = [explorer.answer(asked)["said_name"], there.answer(asked_there)["said_name"]]
    column = by or next(iter(one["totals"]), "")
    sums = [_sum(one, column), _sum(two, column)]
    names = list(dict.fromkeys([*sums[0], *sums[1]]))
    rows = [{"part": name, "here": sums[0].get(name), "there": sums[1].get(name)} for name in names]
    same = len({row.get("example") for row in one["top"]} & {row.get("example") for row in two["top"]})
    title = f"{asked.name}: the network says {said[0]}; the other, {said[1]}"
    where, count = layer_named(wanted.layer), len(one["top"])
    note = f"{measure} in {where}; of the {count} largest examples, {same} are the same in both"
    shown = build(title, ["part", "here", "there"], [list(row.values()) for row in rows], note)
    plain = {"query": asked.name, "here": one, "there": two, "rows": rows}
    print_answer(plain, shown, as_json=as_json, rows=rows, table=table)


def _ask(subject: Any, query: str, layer: str | None, measure: str, target: str | None) -> tuple[Any, Any, Any]:
    """What the explorer is asked: the explorer itself, the query, and what to look at."""
    from spotlights.explorer.explorer import Explorer
    from spotlights.explorer.queries import full_name, kind_named, known_layer, read_query
    from spotlights.explorer.spotlight import Wanted

    explorer, kind = Explorer(subject, prepare=False), kind_named(measure)
    asked = read_query(subject, full_name(query))
    layer = known_layer(layer, explorer.opened.layers) if layer else explorer.answering_layer(asked)
    if kind.signed and target is None:  # of two memories, the same output
        target = str(explorer.answer(asked)["said"])
    return explorer, asked, Wanted(layer, kind.name, target)


def _sum(answer: dict[str, Any], column: str) -> dict[str, float]:
    """The rows of the waterfall, by name; without the initial weights where they are not part of a sum."""
    if column not in answer["totals"]:
        raise SettingError(f"No column {column!r} divides the training. There are: {', '.join(answer['totals'])}.")
    parts = {f"{column} {row['value']}": row["total"] for row in answer["totals"][column]}
    if answer["initial"] is None or not (answer["exact"] or answer["caution"] == "approximate"):
        return parts
    rest = answer["value"] - answer["initial"] - sum(parts.values())
    return {"initial weights": answer["initial"], **parts, "rounding": rest, "logit": answer["value"]}
