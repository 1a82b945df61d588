"""How the documentation is built: `make docs`. Three tables come from the code itself, so that they cannot drift."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import heliograph
from heliograph.plugins import Discovered, Plugin, discover
from heliograph.plugins.first_party import DISTRIBUTIONS
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
pygments_dark_style = "github-dark"  # without lines under names
html_title = "Heliograph"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["tables.css"]

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


FOR_THE_SITE = re.compile(r"^(?:\S[^\n]*)?\n<!-- site\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


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
            for kind in heliograph.events.CATALOGUE
        ]


class PluginTable(TableDirective):
    """Every built-in plugin, with what it does."""

    header = ("Class", "Name for `load`", "What it does")
    widths = "28 27 45"

    def rows(self) -> list[list[str]]:
        """Return a row for each built-in plugin."""
        return [
            [_link(each.load()), f"`{each.name}`", (each.load().__doc__ or "").partition("\n")[0]]
            for each in _built_ins()
        ]


class DeclarationTable(TableDirective):
    """The built-in plugins that ask for something, need something, or are the only ones of their kind."""

    header = ("Class", "Exclusive", "Asks for", "Needs")
    widths = "28 24 20 28"

    def rows(self) -> list[list[str]]:
        """Return a row for each plugin that declares anything."""
        found = [each.load() for each in _built_ins()]
        declared = [(plugin, (plugin.exclusive, plugin.asks, plugin.needs)) for plugin in found]
        return [[_link(plugin), *map(", ".join, words)] for plugin, words in declared if any(words)]


def _built_ins() -> list[Discovered]:
    return [each for each in discover() if each.package in DISTRIBUTIONS]


def _link(plugin: Any) -> str:
    assert issubclass(plugin, Plugin)
    return f"[`{plugin.__name__}`](#{plugin.__name__.lower()})"


def _field(field: Any) -> str:
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    return f"`{field.name}: {kind}`"


def _one_line(kind: type) -> str:
    return re.sub(r"\s+", " ", inspect.getdoc(kind) or "")


def show_what_is_for_the_site(_: Sphinx, _name: str, source: list[str]) -> None:
    """Uncover what stands in comments `<!-- site ... -->`, in place of the line above, which is for GitHub."""
    source[0] = FOR_THE_SITE.sub(r"\n\n\1", source[0])


def check_page_name(app: Sphinx, pagename: str, templatename: str, *_: object) -> None:
    """Refuse a page of ours that Sphinx is about to overwrite with one of its own: `search`, `genindex`."""
    if pagename in app.env.found_docs and templatename != "page.html":
        raise ExtensionError(f"docs/{pagename}.md would be overwritten by Sphinx's {templatename}: rename the page.")


def setup(app: Sphinx) -> None:
    """Register what is ours."""
    app.connect("source-read", show_what_is_for_the_site)
    app.connect("html-page-context", check_page_name)
    app.add_directive("event-table", EventTable)
    app.add_directive("plugin-table", PluginTable)
    app.add_directive("declaration-table", DeclarationTable)
