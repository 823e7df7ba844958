"""The workspace's own ``handrail.toml``: read safely, and what of it counts before a person has trusted it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from handrail.config.layers import Kind, Layer
from handrail.config.reading import content_of, parsed
from handrail.config.settings import FILE_NAME, OPERATORS
from handrail.contract.errors import Fault
from handrail.contract.rules import text_of
from handrail.contract.tool.names import nearest
from handrail.policy.rules.rules import ACTIONS

UNTRUSTED = "its content is not trusted; look at it with handrail trust"
NARROWING = ("deny", "ask")
"""Rules that count whoever wrote them."""


@dataclass(frozen=True, slots=True)
class WorkspaceFile:
    """The file as it was read once.

    :param sha256: of ``content``, in hexadecimal: what a person trusts
    :param trusted: whether a person has trusted exactly this
    """

    path: Path
    content: bytes
    sha256: str
    trusted: bool


def found(workspace: Path, trusted: str | None) -> WorkspaceFile | None:
    """The workspace's file, or None where there is none.

    :param workspace: canonical
    :param trusted: the hash a person trusted last, if any
    :raises LoadError: for anything but a regular file of one name and a sensible size
    """
    path = workspace / FILE_NAME
    content = content_of(path, alone=True)
    if content is None:
        return None
    digest = hashlib.sha256(content).hexdigest()
    return WorkspaceFile(path, content, digest, digest == trusted)


def layer_of(file: WorkspaceFile) -> tuple[Layer, list[Fault]]:
    """What it says, and the faults that only a workspace's file can have.

    :raises LoadError: when it is not TOML
    """
    table, lines = parsed(file.path, file.content)
    layer = layer_of_file("workspace", file.path, table, lines)
    if not file.trusted:
        layer = Layer(layer.kind, layer.table, layer.place, _held_back)
    faults: list[Fault] = []
    for key, reason in OPERATORS.items():
        if key in table:
            text = f"a workspace's file {reason}; [{key}] belongs into the {FILE_NAME} of the configuration folder"
            faults.append(Fault(layer.place(key), key, text))
    rules: Any = table.get("rules")
    for number, text in enumerate(cast("list[Any]", rules) if isinstance(rules, list) else []):
        where = f"rules[{number}]"
        if not isinstance(text, (str, dict)):
            continue  # which is a fault of its own
        written = text_of(cast("object", text))
        if (action := action_of(written)) not in ACTIONS:
            near = nearest(action.lower(), ACTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            faults.append(
                Fault(
                    layer.place(where),
                    where,
                    f"{written!r} does not begin with allow, ask or deny, as a rule does{hint}",
                )
            )
    return layer, faults


def layer_of_file(kind: Kind, path: Path, table: Mapping[str, Any], lines: Mapping[str, int]) -> Layer:
    """The layer of one file, whose places are its lines."""

    def place(where: str) -> str:
        # The line of the value, or of what holds it.
        if f"{where}[0]" in lines:  # an array of tables stands nowhere itself
            where = f"{where}[0]"
        while where and where not in lines:
            where = where[: max(where.rfind("."), where.rfind("["), 0)]
        return f"{path}:{lines[where]}" if where in lines else str(path)

    return Layer(kind, table, place)


def action_of(rule: str) -> str:
    """The first word of a rule: by it alone, whatever follows, an untrusted rule is let in or not."""
    return (rule.strip(" \t").split(None, 1) or [""])[0]


def _held_back(key: str, value: Any) -> str:
    return "" if key == "rules" and action_of(text_of(value)) in NARROWING else UNTRUSTED
