"""One row of the table of protected names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["rules", "start-up", "key", "hook", "vcs", "state", "editor", "instructions", "settings", "code", "free"]

WHAT: Mapping[Kind, str] = {
    "rules": "holds the workspace's rules and settings",
    "start-up": "is read by shells, interpreters and sessions as they start, and can make them run anything",
    "key": "is where keys are kept",
    "hook": "is what version control runs by itself",
    "vcs": "is version-control configuration, which can make git run anything",
    "state": "is what version control keeps of its own, and only its programs write it",
    "editor": "is configuration by which editors and agents run programs",
    "instructions": "tells other agents what to do",
    "settings": "is a tool's configuration, which can make that tool run anything",
    "code": "is configuration from which a tool runs or loads code",
}
"""What a file of each kind is, to follow "it"."""


class Row(NamedTuple):
    """Names that one program reads.

    :param program: the program, as a document names it
    :param names: as :mod:`handrail.contract.protected.protected` compares them, with spaces between them
    :param source: the manual, or the address of the document, that says so
    """

    kind: Kind
    program: str
    names: str
    source: str
