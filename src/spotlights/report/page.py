"""The report: one HTML page that needs nothing else, and its figures as PNG and PDF beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from spotlights._version import __version__
from spotlights.experiments.progress import track
from spotlights.figures.canvas import save
from spotlights.figures.palette import FAINT, INK, MARK, QUIET, SOURCES
from spotlights.report import tables
from spotlights.report.gather import Group, Language, sorted_out
from spotlights.report.language import language_section
from spotlights.report.pictures import (
    Shown,
    audit_figures,
    case_figures,
    describe,
    forgetting_figures,
    test_set_figures,
)

PAGE, FIGURES = "report.html", "figures"

TITLES = {
    "mnist-single": "One task: MNIST",
    "mnist-joint": "Two tasks at once: MNIST and Fashion-MNIST",
    "mnist-continual": "One task after the other: MNIST, then Fashion-MNIST",
    "mnist-cnn": "A convolutional network with Adam: MNIST",
}

WITH_TABLE_1 = ("mnist-single",)

_CSS = f"""
:root {{ color-scheme: light; }}
body {{ font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", sans-serif; margin: 0; }}
body {{ color: {INK}; background: #fff; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; }}
h2 {{ font-size: 1.45rem; margin: 3.5rem 0 .6rem; padding-top: 1.2rem; border-top: 2px solid {INK}; }}
h3 {{ font-size: 1.1rem; margin: 2.2rem 0 .4rem; }}
p.lead {{ color: {QUIET}; max-width: 46rem; margin: .2rem 0 1rem; }}
nav a {{ margin-right: 1.2rem; }}
a {{ color: {SOURCES["mnist"]}; }}
table {{ border-collapse: collapse; margin: .8rem 0 1.4rem; font-size: .9rem; }}
table {{ font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .3rem; }}
th, td {{ text-align: left; padding: .32rem 1.1rem .32rem 0; border-bottom: 1px solid {FAINT}; }}
th {{ vertical-align: bottom; }}
th {{ font-weight: 600; color: {QUIET}; border-bottom: 1.5px solid {QUIET}; max-width: 11rem; }}
.n {{ text-align: right; padding-right: 1.4rem; }}
figure {{ margin: 1.2rem 0 2rem; }}
figure img {{ max-width: 100%; height: auto; display: block; }}
figcaption {{ color: {QUIET}; font-size: .88rem; max-width: 54rem; margin-top: .4rem; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 0 1.5rem; }}
details {{ margin: .8rem 0 1.4rem; }} summary {{ cursor: pointer; color: {QUIET}; }}
.scroll {{ overflow-x: auto; }}
mark {{ background: {MARK}; padding: 0 .08em; border-radius: .15em; }}
footer {{ margin-top: 4rem; color: {QUIET}; font-size: .85rem; }}
@media print {{ h2 {{ break-before: page; }} figure, table {{ break-inside: avoid; }} }}
"""


_SUSPECTS = """<h3>Suspicious labels</h3>
<p class="lead">Training images by the sum over their visits of the norm of the last layer's error: what the network
kept disagreeing with. A ranking, not a verdict: hard and rare images rank high too.
As many as you like, as a page and CSV: <code>spotlights audit RUN/run.memory --data mnist</code>.</p>"""


def write_report(runs: Iterable[Path], out: Path) -> Path:
    """Writes report.html and its figures about some finished runs; returns the page.

    Args:
        runs: folders that `spotlights run` made. Runs that differ in their seeds only are averaged.
        out: the folder for the page and its figures.
    """
    groups, languages = sorted_out(runs)
    out.mkdir(parents=True, exist_ok=True)
    sections = [_opening(groups, languages)]
    sections += [_section(group, out) for group in track(groups, len(groups), "drawing")]
    sections += [language_section(each, lambda shown: embedded(shown, out)) for each in languages]
    if groups:
        sections.append(_exactness(groups))
    page = out / PAGE
    page.write_text(whole_page("\n".join(sections), "Spotlights: the paper's experiments"), encoding="utf-8")
    return page


def whole_page(body: str, title: str) -> str:
    """An HTML page that needs nothing else."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_CSS}</style></head>
<body><main>
{body}
<footer>Written by spotlights {escape(__version__)}.</footer>
</main></body></html>
"""


def _opening(groups: Sequence[Group], languages: Sequence[Language]) -> str:
    names = [each.name for each in (*groups, *languages)] + (["exactness"] if groups else [])
    links = " ".join(f'<a href="#{name}">{escape(name)}</a>' for name in names)
    opening = f"""<h1>Which training examples is an answer made of?</h1>
<p class="lead">Experiments of “The Dual Form of Neural Networks Revisited”
(Irie, Csordás, Schmidhuber, ICML 2022), run again with every training step recorded.</p>
<nav>{links}</nav>"""
    if not groups:
        return opening
    head = ["experiment", "preset", "test accuracy (%)", "paper", "here", "seeds"]
    return f"""{opening}
<h3>Accuracy</h3>
<p class="lead">Numbers are means ± standard deviations over seeds.</p>
{tables.html_table(head, tables.accuracy_rows(groups), numbers_from=3)}"""


def _section(group: Group, out: Path) -> str:
    results, run = group.results[group.shown], group.runs[group.shown]
    parts = [
        f'<h2 id="{group.name}">{escape(TITLES.get(group.experiment, group.experiment))} '
        f"<small>({escape(group.preset)})</small></h2>",
        _settings(group),
    ]
    parts.append(_table_1(group) if group.experiment in WITH_TABLE_1 else _votes(group))
    parts.append(
        "<details><summary>Agreement of the vote as 2×2 tables (numbers of test images, all seeds)</summary>"
        f"{tables.agreement_html(group)}</details>"
    )
    if results.masks:
        parts.append("<h3>Masked: what if it had never seen the other task?</h3>")
        head = ["mask", *(f"{source} (%)" for source in results.sources)]
        parts.append(tables.html_table(head, tables.mask_rows(group)))
        parts += [embedded(shown, out) for shown in forgetting_figures(results, run, group.name)]
    parts.append("<h3>Over the test set</h3>")
    if len(results.sources) > 1:
        head = ["layer", "test images", "slots", "share (%)", "spread over images", "mean |score| of a slot"]
        parts.append(tables.html_table(head, tables.cross_task_rows(group), numbers_from=3))
    parts += [embedded(shown, out) for shown in test_set_figures(results, run, group.name)]
    suspects = [embedded(shown, out) for shown in audit_figures(results, group.name)]
    if suspects:
        parts.append(_SUSPECTS)
        parts += suspects
    for index, case in enumerate(results.cases):
        parts.append(f"<h3>{escape(describe(results, case))}</h3>")
        prefix = f"{group.name}-{index + 1}"
        parts += [embedded(shown, out) for shown in case_figures(results, case, run, prefix)]
    return "\n".join(parts)


def _settings(group: Group) -> str:
    run = group.runs[0]
    seeds = ", ".join(str(each.seed) for each in group.runs)
    images = ", ".join(f"{count:,} {source}" for source, count in run.train_images.items())
    rows = [[key, value] for key, value in run.settings.items()] + [[k, v] for k, v in run.versions.items()]
    return f"""<p class="lead">Trained on {escape(images)} images; seeds {escape(seeds)}.
<code>spotlights run {escape(group.experiment)} --preset {escape(group.preset)} --seed {run.seed}</code></p>
<details><summary>All settings and versions</summary>
{tables.html_table(["setting", "value"], rows, numbers_from=2)}</details>"""


def _table_1(group: Group) -> str:
    head = ["layer"]
    for column in tables.HEADINGS.values():
        head += [column, "paper"]
    hold, cells = tables.cells_that_hold(group)
    return f"""<h3>Table 1: the class with the most attention</h3>
<p class="lead">How often (%) the class with the largest total |score| is the target or the network's output.
{hold} of {cells} cells are within two of the paper's standard deviations (1.5 points where that is 0.0).</p>
<div class="scroll">{tables.html_table(head, tables.table_1_rows(group))}</div>"""


def _votes(group: Group) -> str:
    head = ["layer", "test images", *tables.HEADINGS.values()]
    vote = group.results[group.shown].votes[0]
    asked = vote.right + vote.wrong
    return f"""<h3>The class with the most attention</h3>
<p class="lead">How often (%) the class with the largest total |score|, over all slots,
is the target or the network's output. Over {asked:,} test images of each task.</p>
<div class="scroll">{tables.html_table(head, tables.vote_rows(group), numbers_from=2)}</div>"""


def embedded(shown: Shown, out: Path) -> str:
    """Writes the figure's files; returns it with the image inside."""
    png = save(shown.figure, out / FIGURES / f"{shown.name}.png")
    shown.figure.set_layout_engine("none")  # all has its place now: finding it again would take long
    save(shown.figure, out / FIGURES / f"{shown.name}.pdf")
    data = base64.b64encode(png.read_bytes()).decode("ascii")
    return (
        f'<figure id="{escape(shown.name)}">'
        f'<img alt="{escape(shown.caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(shown.caption)}</figcaption></figure>"
    )


def _exactness(groups: Sequence[Group]) -> str:
    head = [
        "run",
        "seed",
        "exact",
        "relative error",
        "of the change",
        "slots",
        "memory",
        "training",
        "verify and analyses",
    ]
    return f"""<h2 id="exactness">Exactness</h2>
<p class="lead">‖W₀ + Σ value ⊗ key − W‖ / ‖W‖ for the worst layer of each run: the memory is the network.</p>
{tables.html_table(head, tables.exactness_rows(groups), numbers_from=3)}"""
