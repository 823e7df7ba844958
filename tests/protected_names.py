"""Generate the page of protected names and secret-like names from the tables in the code.

``python -m tests.conformance`` writes the page to ``docs/reference/protected-names.md`` and compares it with ``--check``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from handrail.contract.protected.approval_required import APPROVAL_REQUIRED, UNPROTECTED
from handrail.contract.protected.never_written import NEVER_WRITTEN, ProtectedProgramFiles
from handrail.policy.rules.rules_and_modes import SECRET_NAME_ROWS

TABLE = Path(__file__).parent.parent / "docs" / "reference" / "protected-names.md"

_HEAD = """\
# Protected names

This page lists the names of files that Handrail protects, and the names that look like secrets. `make docs` writes it from the
tables in the code, and `make lint` fails if it is out of date. [Protected paths](../concepts/protected-paths.md) explains what
the answers mean.

Handrail compares names at any depth and ignores the case of letters. `a/b` is an entry `b` of a folder `a`. `*` stands for any
characters of one name. A name covers everything below it.
"""
_PARTS: tuple[tuple[str, str, tuple[ProtectedProgramFiles, ...]], ...] = (
    ("Never", "No tool and no program can write these. Rules and approvals do not change that.", NEVER_WRITTEN),
    (
        "Ask always",
        "A tool can write these only if a user approves it, or if a rule names the path.",
        APPROVAL_REQUIRED,
    ),
)
_TITLES: Mapping[str, str] = {
    "key": "Keys",
    "start-up": "Start-up files",
    "vcs": "Configuration of version control",
    "hook": "Hooks and their managers",
    "editor": "Configuration of editors and agents",
    "instructions": "Instructions for agents",
    "settings": "Settings of tools",
    "code": "What tools run or load as code",
}


def render() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    for title, meaning, rows in _PARTS:
        lines += [f"## {title}", "", meaning, ""]
        for kind in dict.fromkeys(row.kind for row in rows):
            lines += [f"### {_TITLES[kind]}", "", "| program | names | source |", "|---|---|---|"]
            lines += [_line(row.program, row.names, row.source) for row in rows if row.kind == kind]
            lines.append("")
    lines += ["## Free", "", "Rules decide about these as about any other file.", ""]
    lines += [
        "| what | names | why |",
        "|---|---|---|",
        *(_line(row.program, row.names, row.source) for row in UNPROTECTED),
        "",
    ]
    lines += [
        "## Names that look like secrets",
        "",
        "Reading these requires approval, and programs do not see them. Handrail ignores the case of ASCII letters.",
        "",
    ]
    lines += [
        "| program | names | source |",
        "|---|---|---|",
        *(_line(row.program, row.names, row.source) for row in SECRET_NAME_ROWS),
    ]
    return "\n".join(lines) + "\n"


def _line(what: str, names: str, source: str) -> str:
    return f"| {what} | {' '.join(_code(names.split()))} | {_linked(source)} |"


def _code(names: Iterable[str]) -> Iterable[str]:
    return (f"`{name.replace('|', '&#124;')}`" for name in names)


def _linked(source: str) -> str:
    return re.sub(r"(https?://[^\s,]+)", r"<\1>", source)
