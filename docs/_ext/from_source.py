"""Directives for what :mod:`reference_text` reads from the package's sources.

.. hivemind-arguments::     tables of every argument: name, type, default, meaning
.. hivemind-events::        every event with its fields
.. hivemind-errors::        the tree of exceptions
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from reference_text import PACKAGE, arguments_text, errors_text, events_text
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class FromSource(SphinxDirective):
    """Parses the text that ``make`` gives as reStructuredText, in place."""

    make: Any

    def run(self) -> list[nodes.Node]:
        for name in ("arguments.py", "events.py", "errors.py"):
            self.env.note_dependency(str(PACKAGE / name))
        container = nodes.container()
        self.state.nested_parse(StringList(list(type(self).make()), source="lightning_hivemind"), 0, container)
        return container.children


def setup(app: Sphinx) -> dict[str, bool]:
    for name, make in (("arguments", arguments_text), ("events", events_text), ("errors", errors_text)):
        app.add_directive(f"hivemind-{name}", type(name, (FromSource,), {"make": staticmethod(make)}))
    return {"parallel_read_safe": True}
