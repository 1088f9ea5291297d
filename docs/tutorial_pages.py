"""Turns a tutorial, a plain Python script, into a page of the site with what it prints.

A comment that begins at the left margin is text, in Markdown; the rest is code. The script is run while the page is
built, block by block, and what a block prints stands below it: so a page shows what its code really does, and a
tutorial that fails breaks the build. A reader can also run the script itself.

Sphinx-Gallery does this for reStructuredText, with thumbnails and notebooks; MyST-NB does it through Jupyter. Our
pages are Markdown and need neither, so these few lines do.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from dataclasses import dataclass

from myst_parser.parsers.sphinx_ import MystParser


@dataclass(frozen=True)
class Block:
    """A stretch of the script: text or code, and the number of its first line."""

    is_text: bool
    lines: list[str]
    first_line: int

    @property
    def text(self) -> str:
        """The Markdown of a comment."""
        return "\n".join(re.sub("^# ?", "", line) for line in self.lines)

    @property
    def code(self) -> str:
        return "\n".join(self.lines).rstrip("\n")


def blocks(script: str) -> list[Block]:
    """The script as text and code in turns. A comment is text if it has empty lines around it."""
    parts: list[Block] = []
    number = 1
    for paragraph in re.split(r"(\n\n+)", script.rstrip("\n")):
        lines = paragraph.split("\n")
        if paragraph.strip():
            is_text = all(line.startswith("#") for line in lines)
            if parts and not parts[-1].is_text and not is_text:
                parts[-1].lines.extend(lines)
            else:
                parts.append(Block(is_text, lines, number))
        elif parts:
            parts[-1].lines.extend([""] * (len(lines) - 2))
        number += len(lines) - 1
    return parts


def page(script: str, name: str) -> str:
    """The page in Markdown, with what the script prints."""
    text: list[str] = []
    namespace = {"__name__": name}
    # As wide as a page; a table must not depend on the terminal of whoever builds the site.
    os.environ["COLUMNS"] = "88"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks(script):
            if block.is_text:
                text += [block.text, ""]
                continue
            printed = io.StringIO()
            padded = "\n" * (block.first_line - 1) + block.code
            with contextlib.redirect_stdout(printed):
                exec(compile(padded, f"{name}.py", "exec"), namespace)
            text += ["```python", block.code, "```", ""]
            if printed.getvalue().strip():
                text += ["```text", printed.getvalue().rstrip(), "```", ""]
    return "\n".join(text)


class TutorialParser(MystParser):
    """Reads a script as the page that it makes."""

    supported = ("tutorial",)

    def parse(self, inputstring: str, document) -> None:
        name = document.settings.env.docname.rpartition("/")[2]
        super().parse(page(inputstring, name), document)


def setup(app) -> dict[str, bool]:
    app.add_source_suffix(".py", "tutorial")
    app.add_source_parser(TutorialParser)
    # A tutorial runs in a directory of its own, and a process has only one.
    return {"parallel_read_safe": False}
