"""Tables of the report, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from spotlights.experiments.paper import ACCURACIES, BEFORE_SWITCH, TABLE_1, TABLE_1_COLUMNS
from spotlights.report.gather import Group, mean_over
from spotlights.report.pictures import mask_name

HEADINGS = {
    "target_given_wrong": "vote = target, given a wrong answer",
    "output_given_wrong": "vote = output, given a wrong answer",
    "target_given_right": "vote = target = output, given a right answer",
}


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 1, caption: str = ""
) -> str:
    """A table; cells are escaped, columns from `numbers_from` on are set to the right."""

    def cell(tag: str, index: int, value: object) -> str:
        kind = ' class="n"' if index >= numbers_from else ""
        return f"<{tag}{kind}>{escape(str(value))}</{tag}>"

    lines = ["<table>"]
    if caption:
        lines.append(f"<caption>{escape(caption)}</caption>")
    lines.append("<thead><tr>" + "".join(cell("th", i, h) for i, h in enumerate(head)) + "</tr></thead><tbody>")
    lines += ["<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows]
    return "\n".join([*lines, "</tbody></table>"])


def accuracy_rows(groups: Sequence[Group]) -> list[list[object]]:
    """Every experiment's accuracies beside the paper's."""
    rows: list[list[object]] = []
    for group in groups:
        for source in group.results[0].sources:
            reported = ACCURACIES.get(group.experiment, {}).get(source)
            rows.append(
                [
                    group.experiment,
                    group.preset,
                    f"{source}, at the end",
                    f"{reported:.0f}" if reported else "–",
                    group.accuracy(source),
                    len(group.runs),
                ]
            )
        if group.results[0].masks:
            before = mean_over([found.masks[0].accuracy["mnist"] for found in group.results])
            step = group.results[0].masks[0].as_of
            rows.append(
                [
                    group.experiment,
                    group.preset,
                    f"mnist, at step {step:,}",
                    f"{BEFORE_SWITCH:.0f}",
                    before,
                    len(group.runs),
                ]
            )
    return rows


def table_1_rows(group: Group) -> list[list[object]]:
    """Table 1: for each layer ours and the paper's, side by side."""
    rows: list[list[object]] = []
    source = group.results[0].sources[0]
    for layer in group.results[0].layers:
        row: list[object] = [layer]
        for index, column in enumerate(TABLE_1_COLUMNS):
            ours = group.vote(layer, source, column)
            reported = TABLE_1[layer][index] if layer in TABLE_1 else None
            row += [ours, f"{reported.mean:.1f} ± {reported.deviation:.1f}" if reported else "–"]
        rows.append(row)
    return rows


def cells_that_hold(group: Group) -> tuple[int, int]:
    """How many cells of Table 1 are within the paper's bounds, and how many there are."""
    source = group.results[0].sources[0]
    verdicts = [
        reported.holds(group.vote(layer, source, column).mean)
        for layer, cells in TABLE_1.items()
        if layer in group.results[0].layers
        for column, reported in zip(TABLE_1_COLUMNS, cells, strict=True)
    ]
    return sum(verdicts), len(verdicts)


def vote_rows(group: Group) -> list[list[object]]:
    """The vote in every layer, on the test images of every source."""
    return [
        [layer, source, *(group.vote(layer, source, column) for column in TABLE_1_COLUMNS)]
        for layer in group.results[0].layers
        for source in group.results[0].sources
    ]


def agreement_html(group: Group) -> str:
    """2×2 tables, added up over the runs."""
    blocks = []
    for layer in group.results[0].layers:
        for source in group.results[0].sources:
            mine = [v for found in group.results for v in found.votes if (v.layer, v.source) == (layer, source)]
            for title, columns, tables in (
                ("vote and target", ("= target", "≠ target"), [v.vote_against_network for v in mine]),
                ("vote and output", ("= output", "≠ output"), [v.vote_with_network for v in mine]),
            ):
                added = [[sum(t[r][c] for t in tables) for c in range(2)] for r in range(2)]
                rows = [
                    [f"network {name}", *(f"{value:,}" for value in row)]
                    for name, row in zip(("right", "wrong"), added, strict=True)
                ]
                suffix = f", {source}" if len(group.results[0].sources) > 1 else ""
                blocks.append(html_table(["", *columns], rows, caption=f"{layer}{suffix}: {title}"))
    return '<div class="tiles">' + "\n".join(blocks) + "</div>"


def cross_task_rows(group: Group) -> list[list[object]]:
    """Shares of the attention, over the runs, and mean scores of a slot in the shown run."""
    first = group.results[group.shown].cross_task
    rows: list[list[object]] = []
    for index, each in enumerate(first):
        share = mean_over([found.cross_task[index].share for found in group.results])
        rows.append(
            [
                each.layer,
                each.test,
                each.train,
                share,
                f"{100 * each.share_spread:.1f}",
                f"{each.mean:.3g} ± {each.mean_spread:.2g}",
            ]
        )
    return rows


def mask_rows(group: Group) -> list[list[object]]:
    """Accuracies under masks, over the runs."""
    first = group.results[0]
    return [
        [
            mask_name(first, mask.masked, mask.layers, mask.as_of),
            *(mean_over([found.masks[index].accuracy[s] for found in group.results]) for s in first.sources),
        ]
        for index, mask in enumerate(first.masks)
    ]


def exactness_rows(groups: Sequence[Group]) -> list[list[object]]:
    """The worst layer of each run."""
    rows: list[list[object]] = []
    for group in groups:
        for run in group.runs:
            worst = max(run.exactness.values(), key=lambda check: check.relative_error)
            change = max(check.change_error for check in run.exactness.values())
            rows.append(
                [
                    group.name,
                    run.seed,
                    "yes" if run.exact else "NO",
                    f"{worst.relative_error:.1e}",
                    f"{change:.1e}",
                    f"{run.slots:,}",
                    f"{run.memory_bytes / 1e9:.1f} GB",
                    f"{run.seconds['training']:.0f} s",
                    f"{run.seconds['verify'] + run.seconds['analyses']:.0f} s",
                ]
            )
    return rows
