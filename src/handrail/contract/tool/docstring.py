"""What a docstring says of a function and of its parameters, in Google or reST form."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?):\s*\Z"
)
_ARGUMENT_SECTIONS = frozenset({"Args", "Arguments", "Parameters", "Params"})
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)\Z")
_REST = re.compile(r":(\w+)\b([^:]*):\s*(.*)\Z")


@dataclass(frozen=True, slots=True)
class Documented:
    """``summary`` is the first paragraph in one line, ``body`` the prose after it, ``parameters`` name to text."""

    summary: str
    body: str
    parameters: Mapping[str, str]


def read_docstring(text: str | None) -> Documented:
    """Split a docstring. Sections and fields other than those of parameters are left out."""
    lines = inspect.cleandoc(text or "").splitlines()
    prose: list[str] = []
    found: dict[str, list[str]] = {}
    section: str | None = None  # inside "Args:" and the like, whose lines are indented
    entry: list[str] | None = None  # what a further-indented line continues
    entry_indent = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        bare = line.strip()
        if not bare:
            if section is None:
                entry = None
                prose.append("")
            continue
        if entry is not None and indent > entry_indent:
            entry.append(bare)
            continue
        if match := _SECTION.match(bare) if indent == 0 else None:
            section, entry = match.group(1), None
            continue
        if match := _REST.match(bare):
            section, entry, entry_indent = None, [], indent
            if match.group(1) in ("param", "parameter", "arg", "argument") and match.group(2).strip():
                entry = found.setdefault(match.group(2).split()[-1], [])
            entry.append(match.group(3))
            continue
        if section is not None and indent > 0:
            match = _GOOGLE.match(bare)
            if match and section in _ARGUMENT_SECTIONS:
                entry, entry_indent = found.setdefault(match.group(1), []), indent
                entry.append(match.group(2))
            continue
        section, entry = None, None
        prose.append(line.rstrip())
    summary, _, body = "\n".join(prose).strip().partition("\n\n")
    return Documented(
        " ".join(summary.split()), body.strip(), {name: " ".join(text).strip() for name, text in found.items()}
    )
