"""A griffe extension that turns the Sphinx roles of docstrings into Markdown, so that the site shows them as links.

``mkdocs.yml`` names this file. Nothing in the package imports it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

FACADES = ("handrail", "handrail.testing", "handrail.policy", "handrail.sandbox", "handrail.sources")
_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc|obj|const):`(~?)([^`<>]+)`")
_CODE = re.compile(r"``([^`]+)``")


class RolesExtension(griffe.Extension):
    """An extension that rewrites ``:class:`X``` and double backticks in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda match: f"`{_shown(match[1], match[2])}`", obj.docstring.value)
            obj.docstring.value = _CODE.sub(r"`\1`", text)


def _shown(short: str, name: str) -> str:
    return name.rpartition(".")[2] if short else name
