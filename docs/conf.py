"""How the documentation is built: `make docs`. Two tables come from the code itself, so that they cannot drift."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import heliograph
from heliograph.plugins import Plugin, discover
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils.nodes import Node
    from sphinx.application import Sphinx

project = "Heliograph"
author = "The Heliograph founders"
copyright = author  # noqa: A001  # Sphinx's name for it
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples/**"]
html_theme = "furo"
html_title = "Heliograph"
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings mark code with single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True


class TableDirective(SphinxDirective):
    """A table whose rows are read from the package at build time."""

    header: ClassVar[tuple[str, ...]]
    widths: ClassVar[str]

    @abstractmethod
    def rows(self) -> list[list[str]]:
        """Return the cells in Markdown."""

    def run(self) -> list[Node]:
        """Return the table."""
        lines = ["```{list-table}", ":header-rows: 1", f":widths: {self.widths}", ""]
        for row in (list(self.header), *self.rows()):
            lines += [f"{'  ' if place else '* '}- {cell}" for place, cell in enumerate(row)]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


class EventTable(TableDirective):
    """Every event of the catalogue, in its order, with its fields and its docstring."""

    header = ("Event", "Fields", "Emitted")
    widths = "22 24 54"

    def rows(self) -> list[list[str]]:
        """Return a row for each event."""
        return [
            [f"`{kind.__name__}`", ", ".join(map(_field, fields(kind))) or "none", _one_line(kind)]  # type: ignore[arg-type]
            for kind in heliograph.CATALOGUE
        ]


class PluginTable(TableDirective):
    """Every built-in plugin, with what it declares about itself."""

    header = ("Name for `load`", "Class", "An error", "Claims alone", "Asks for", "Needs")
    widths = "22 24 16 14 12 12"

    def rows(self) -> list[list[str]]:
        """Return a row for each entry point of the package."""
        found = {each.name: each for each in discover() if each.package == "heliograph"}
        return [self._row(name, each.load()) for name, each in sorted(found.items())]

    def _row(self, name: str, plugin: Any) -> list[str]:
        assert issubclass(plugin, Plugin)
        error = "is logged" if plugin.policy == "observer" else "fails the run"
        declared = [", ".join(f"`{word}`" for word in words) for words in (plugin.exclusive, plugin.asks, plugin.needs)]
        return [f"`{name}`", f"[`{plugin.__name__}`](#{plugin.__name__.lower()})", error, *declared]


def _field(field: Any) -> str:
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    return f"`{field.name}: {kind}`"


def _one_line(kind: type) -> str:
    return re.sub(r"\s+", " ", inspect.getdoc(kind) or "")


def check_page_name(app: Sphinx, pagename: str, templatename: str, *_: object) -> None:
    """Refuse a page of ours that Sphinx is about to overwrite with one of its own: `search`, `genindex`."""
    if pagename in app.env.found_docs and templatename != "page.html":
        raise ExtensionError(f"docs/{pagename}.md would be overwritten by Sphinx's {templatename}: rename the page.")


def setup(app: Sphinx) -> None:
    """Register what is ours."""
    app.connect("html-page-context", check_page_name)
    app.add_directive("event-table", EventTable)
    app.add_directive("plugin-table", PluginTable)
