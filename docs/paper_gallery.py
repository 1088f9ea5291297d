"""Writes docs/paper/index.md and its pictures from finished runs: `python docs/paper_gallery.py RUN…`.

The text between the pictures is what `spotlights_paper.report.gallery` says. Sections about experiments of which no run
is given stay as they are. The verdicts of all runs so far are in docs/paper/verdicts.json, by seed; a run that is given
replaces its own. (Of seeds whose own numbers are lost, each stands there with their mean.)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from spotlights.figures import save
from spotlights_paper.report.gallery import Exhibit, exhibits
from spotlights_paper.statements import HEAD, STATEMENTS, Findings, Judged, judge, rows

FOLDER = Path(__file__).parent / "paper"
PAGE, VERDICTS = FOLDER / "index.md", FOLDER / "verdicts.json"
INTRODUCTION = """# The paper, figure by figure

K. Irie, R. Csordás, J. Schmidhuber, *The Dual Form of Neural Networks Revisited: Connecting Test Time Predictions to
Training Patterns via Spotlights of Attention* (ICML 2022). Each of its figures and tables, in its order: what the paper
shows, in our words; ours, with the command that makes it; and whether the paper's statements about it hold. A
statement's bound is taken from the paper's wording; our number is the mean over the seeds.

`spotlights reproduce` makes it all (`--seeds 1` for one seed), and `spotlights report RUN…` writes this page as
`gallery.html`. [The remarks](remarks.md) have a page of their own, and so have
[the experiments](../reproduction.md) and what differs."""


def markdown(folders: Sequence[Path]) -> str:
    """The whole page; its pictures and verdicts are written beside it."""
    runs = Findings.of(folders)
    judged = verdicts(runs)
    sections = {exhibit.title: "\n\n".join(_exhibit(exhibit)) for exhibit in exhibits(runs, judged)}
    given = [found.command.partition("--seed")[0] for found in runs]
    titles, last = list(sections), 0
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title = section.partition("\n")[0]
        same = [place for place, known in enumerate(titles) if _key(known) == _key(title)]
        if same:
            last = same[0]
        elif "spotlights run " in section and not any(command in section for command in given):
            sections[title] = "## " + _renewed(section.strip(), judged)
            titles.insert(last := last + 1, title)
    return "\n\n".join([INTRODUCTION, *(sections[title] for title in titles)]) + "\n"


def verdicts(runs: Sequence[Findings]) -> list[Judged]:
    """The verdicts of these runs and of earlier ones."""
    known = json.loads(VERDICTS.read_text(encoding="utf-8"))
    for found in runs:
        said = {judged.statement.text: _plain(*judged.verdicts[0]) for judged in judge([found])}
        if said:
            known.setdefault(f"{found.run.experiment} {found.run.preset}", {})[str(found.run.seed)] = said
    lines = [f"{json.dumps(name)}: {{\n" + _seeds(known[name]) + "\n}" for name in sorted(known)]
    VERDICTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    judged = []
    for statement in sorted(STATEMENTS, key=lambda statement: statement.section):
        earlier = [known.get(f"{statement.experiment} {preset}", {}) for preset in statement.presets]
        said = [run[statement.text] for run in next(filter(None, earlier), {}).values() if statement.text in run]
        judged += [Judged(statement, [(held, tuple(numbers)) for held, numbers in said])] if said else []
    return judged


def _plain(held: bool, numbers: Sequence[float]) -> tuple[bool, list[float]]:
    return bool(held), [float(f"{number:.7g}") for number in numbers]


def _seeds(runs: dict[str, object]) -> str:
    return ",\n".join(f"  {json.dumps(seed)}: {json.dumps(runs[seed], ensure_ascii=False)}" for seed in sorted(runs))


def _renewed(section: str, judged: Sequence[Judged]) -> str:
    """An earlier section with the verdicts as they are now."""
    fresh = {line.split(" | ")[1]: line for line in _table([], _cells(judged)).splitlines()[2:]}
    lines = [(line, line.split(" | ")) for line in section.splitlines()]
    return "\n".join(fresh.get(cells[1], line) if len(cells) == 4 else line for line, cells in lines)


def _cells(judged: Sequence[Judged]) -> list[list[str]]:
    return [[row[0], *row[2:]] for row in rows(list(judged))]


def _key(title: str) -> str:
    return title.partition(":")[0]


def _exhibit(exhibit: Exhibit) -> list[str]:
    about = [f"*The paper:* {exhibit.paper}", f"*Ours:* {exhibit.ours}"] if exhibit.paper else [exhibit.ours]
    parts = [f"## {exhibit.title}", *about]
    for picture in exhibit.pictures:
        save(picture.figure, FOLDER / "images" / f"{picture.name}.png")
        parts += [f"![{exhibit.title}](images/{picture.name}.png)", f"*{picture.caption}*"]
    for table in exhibit.tables:
        parts += [f"**{table.caption}**" if table.caption else "", _table(table.head, table.rows)]
    if exhibit.judged:
        parts.append(_table(HEAD[:1] + HEAD[2:], _cells(exhibit.judged)))
    parts.append(f"Made by `{exhibit.command}`." if exhibit.command else "")
    return list(filter(None, parts))


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: object) -> str:
    return " ".join(str(cell).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").split())


if __name__ == "__main__":
    PAGE.write_text(markdown([Path(folder) for folder in sys.argv[1:]]), encoding="utf-8")
