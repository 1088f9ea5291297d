"""Settings of the documentation site: `make docs` builds it into docs/_build, and fails on a broken link."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from docutils import nodes

import spotlights

sys.path.insert(0, str(Path(__file__).parent))

# A dependency of the theme shows messages of level INFO of all libraries.
logging.getLogger("spotlights").setLevel(logging.WARNING)

project = "Spotlights"
author = "the authors of Spotlights"
version = release = spotlights.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "tutorial_pages",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "*.py"]

html_theme = "furo"
html_title = f"Spotlights {release}"
html_show_copyright = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings are plain text with `names` in single backticks and Google's "Args:".
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [
    # A link to another project would need its inventory from the network.
    (r"py:.*", r"(?!spotlights\.).*"),
    # Types of arguments that users never name.
    (r"py:.*", r"spotlights\.[a-z_]+\..*"),
]


def _public(app, env, node, contnode):
    """Links a class to its public name: annotations say `spotlights.query.attention.Attention`."""
    name = node.get("reftarget", "").rpartition(".")[2]
    domain = env.get_domain("py")
    for home in ("spotlights", "spotlights.results", "spotlights.figures"):
        known = domain.objects.get(f"{home}.{name}")
        if known is not None and node.get("refdomain") == "py":
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, known.objtype, f"{home}.{name}", node, nodes.literal(text=name)
            )
    return None


def _constructors_are_private(app, what, name, obj, options, signature, returns):
    """Objects that the library makes are documented without the arguments of their constructors."""
    made_by_users = {"FunctionalLinear", "AskTop", "AskTotals", "Subject"}
    if what == "class" and name.rpartition(".")[2] not in made_by_users:
        return "", returns
    return signature, returns


def _as_page(app, what, name, obj, options, lines):
    """Turns the files that docstrings name into links. The page of a module has an introduction of its own."""
    lines[:] = [] if what == "module" else [re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", line) for line in lines]


_plain: dict[str, list[str]] = {}


def _keep_plain(app, what, name, obj, options, lines):
    """Napoleon takes the text before a colon for the type of an attribute. Ours are sentences; see `_restore_plain`."""
    if what == "attribute":
        _plain[name] = list(lines)


def _restore_plain(app, what, name, obj, options, lines):
    if name in _plain:
        lines[:] = _plain.pop(name)


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _as_page)
    app.connect("autodoc-process-docstring", _keep_plain, priority=400)  # Napoleon has 500
    app.connect("autodoc-process-docstring", _restore_plain, priority=600)
    app.connect("missing-reference", _public)
    app.connect("autodoc-process-signature", _constructors_are_private)
