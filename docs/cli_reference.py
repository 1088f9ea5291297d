"""Writes docs/cli.md from the commands themselves: `make tables`. A test compares the two."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from spotlights.cli import app

PAGE = Path(__file__).with_name("cli.md")
_OPENING = """# The command line

Every command prints a table for people, and with `--json` the same answer for programs. An error is one sentence on
standard error, with exit code 2. `make tables` writes this page from the commands themselves.
"""


def reference() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    parts = [_OPENING]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)  # `evaluate` has commands of its own
        parts += [_section(f"{name} {each}", inner[each]) for each in inner] if inner else [_section(name, command)]
    return "\n".join(parts)


def _section(name: str, command) -> str:
    example = re.sub(r"\[/?[a-z]*\]", "", command.epilog or "").removeprefix("Example:").strip()
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["spotlights", name, *(_metavar(p) for p in arguments), "[OPTIONS]"])
    rows = [(f"`{_metavar(p)}`", _help(p)) for p in arguments]
    rows += [(" ".join(f"`{flag}`" for flag in [*p.opts, *p.secondary_opts]), _help(p)) for p in options]
    lines = [f"## {name}", "", command.help.strip(), "", "```sh", usage, "", "# for example", example, "```", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {left} | {right} |" for left, right in rows), ""]
    return "\n".join(lines)


def _metavar(parameter) -> str:
    return parameter.metavar or parameter.name.upper()


def _help(parameter) -> str:
    text = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    shown = default is not None and default is not False and default is not True and parameter.show_default is not False
    return text + (
        f" Default: `{default}`." if shown and parameter.param_type_name == "option" and not callable(default) else ""
    )


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
