"""The report about finished runs: one self-contained HTML page and its figures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import spotlights as sl
from spotlights.errors import SettingError
from spotlights.figures import palette, save
from spotlights_paper import statements
from spotlights_paper.experiments.progress import track
from spotlights_paper.experiments.registry import LanguageRun
from spotlights_paper.pictures import Picture
from spotlights_paper.report import case_figures, gallery, tables, test_set_figures
from spotlights_paper.report.two_levels_figure import two_levels_figure

__all__ = ["write_gallery", "write_report"]

REPORT, GALLERY, FIGURES = "report.html", "gallery.html", "figures"

TITLES = {
    "mnist-single": "One task: MNIST",
    "mnist-joint": "Two tasks at once: MNIST and Fashion-MNIST",
    "mnist-continual": "One task after the other: MNIST, then Fashion-MNIST",
    "mnist-cnn": "A convolutional network with Adam: MNIST",
    "aesop-char": "A language model of characters: Æsop's Fables",
    "aesop-gpt": "A GPT of characters: Æsop's Fables",
    "wikitext2-word": "A language model of words: WikiText-2",
    "char-lm": "A language model of characters",
    "word-lm": "A language model of words",
}


def write_report(folders: Iterable[Path], out: Path) -> Path:
    """Writes report.html, the gallery of the paper, and their figures about some finished runs; returns the report.

    Args:
        folders: those that `spotlights run` made. Runs that differ in their seeds only are averaged.
        out: the folder for the page and its figures.
    """
    runs = statements.Findings.of(folders)
    if not runs:
        raise SettingError("Give at least one run: spotlights report runs/mnist-single-paper-0.")
    page = (
        _pages(out)
        .get_template(REPORT)
        .render(
            groups=tables.groups_of(runs),
            languages=[found for found in runs if isinstance(found.run, LanguageRun)],
            judged=statements.judge(runs),
            titles=TITLES,
            track=lambda items: track(items, len(items), "drawing"),
            tables=tables,
            figures_of_cases=case_figures,
            figures_of_tests=test_set_figures,
            two_levels_figure=two_levels_figure,
        )
    )
    (out / REPORT).write_text(page, encoding="utf-8")
    exhibits = gallery.exhibits(runs)
    if exhibits:
        write_gallery(exhibits, out)
    return out / REPORT


def write_gallery(exhibits: Sequence[gallery.Exhibit], out: Path) -> None:
    """Writes gallery.html and its figures."""
    page = _pages(out).get_template(GALLERY).render(exhibits=exhibits)
    (out / GALLERY).write_text(page, encoding="utf-8")


def _pages(out: Path) -> Environment:
    """The templates. Their filter `png` saves a figure in the folder, and returns it as text."""
    out.mkdir(parents=True, exist_ok=True)

    def png(picture: Picture, folder: str = FIGURES) -> str:
        image = save(picture.figure, out / folder / f"{picture.name}.png")
        picture.figure.set_layout_engine("none")  # the layout is final: computing it again would take long
        save(picture.figure, out / folder / f"{picture.name}.pdf")
        return base64.b64encode(image.read_bytes()).decode("ascii")

    environment = Environment(
        loader=PackageLoader("spotlights_paper.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["png"] = png
    environment.globals.update(statements=statements, version=sl.__version__, palette=palette)
    return environment
