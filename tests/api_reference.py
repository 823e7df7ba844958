"""Generate the pages of the Python API from the public names of each facade.

``python -m tests.conformance`` writes the pages to ``docs/reference/api/`` and compares them with ``--check``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src"
FOLDER = Path(__file__).parent.parent / "docs" / "reference" / "api"

FACADES: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "handrail": (
        "This module is for programs that embed Handrail, and for tools.",
        {
            "Kernel and sessions": ("kernel", "session", "contract.session_protocols"),
            "Calls and results": ("contract.calls_and_results",),
            "Errors": ("contract.errors",),
            "Tools": ("contract.tool",),
            "Services for tools": ("contract.services",),
            "Triggers": ("contract.tool.trigger_tools",),
            "Approvals": ("contract.approval_requests",),
            "Agents and models": ("agent",),
            "Records": ("record",),
            "State and texts": ("store", "contract.text"),
            "The terminal": ("frontends",),
        },
    ),
    "handrail.testing": (
        "This module is for tests of tools and agents.",
        {
            "Kernel, user, client and tools": ("testing.scripted_kernel",),
            "Models in the process": ("testing.provider_request_checks",),
            "Scripts of models": ("agent.providers.scripted_model",),
            "Servers with the protocols of providers": ("testing.provider_servers",),
            "Forges": ("testing.forge_servers",),
        },
    ),
    "handrail.models": (
        "This module is for authors of model providers.",
        {
            "Models": ("agent.model_protocol", "agent.providers"),
            "Schemas of tools": ("catalog",),
        },
    ),
    "handrail.policy": ("This module is for authors of watchdogs.", {"Watchdogs": ("policy",)}),
    "handrail.sandbox": (
        "This module is for authors of sandbox providers.",
        {
            "Sandbox providers": ("contract.sandbox_protocol",),
            "Capabilities": ("contract.tool",),
            "Choice and checks": ("sandbox",),
            "Programs": ("origins",),
        },
    ),
    "handrail.sources": (
        "This module is for authors of sources of tools.",
        {"Sources": ("contract.tool_generation",), "Resources and prompts": ("contract.tool",)},
    ),
}
"""The purpose of each facade, and its groups with the modules that their names come from."""


class Member(NamedTuple):
    """A documented name of an API: an exported one, or a method or property of an exported class."""

    name: str
    text: str


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    return {FOLDER / f"{facade.rpartition('.')[2]}.md": _page(facade) for facade in FACADES}


def groups(facade: str) -> dict[str, list[str]]:
    """Return the exported names of each group.

    :raises LookupError: for a name whose module is in no group
    """
    found: dict[str, list[str]] = {title: [] for title in FACADES[facade][1]}
    for name, home in homes(facade).items():
        fitting = {
            prefix: title
            for title, prefixes in FACADES[facade][1].items()
            for prefix in prefixes
            if _is_in(home, prefix)
        }
        if not fitting:
            raise LookupError(f"{facade}.{name} comes from {home}, which is in no group of tests/api_reference.py")
        found[fitting[max(fitting, key=len)]].append(name)
    return {title: sorted(names, key=_order) for title, names in found.items()}


def homes(facade: str) -> dict[str, str]:
    """Return the module that each exported name comes from."""
    (imports,) = (node for node in _tree(facade.partition(".")[2]).body if isinstance(node, ast.If))
    return {
        one.name: node.module.removeprefix("handrail.")
        for node in imports.body
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }


def _is_in(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def _order(name: str) -> tuple[bool, str]:
    return name[0].isupper(), name.lower()


def _page(facade: str) -> str:
    lines = [
        f"# `{facade}`",
        "",
        FACADES[facade][0],
        "Import every name from the module itself. Other modules are private.",
        "",
    ]
    for title, names in groups(facade).items():
        lines += [f"## {title}", "", "| name | purpose |", "|---|---|"]
        lines += [f"| [`{name}`](#{facade}.{name}) | {first_sentence(documented(facade, name))} |" for name in names]
        for name in names:
            lines += ["", f"::: {facade}.{name}", "    options: {heading_level: 3}"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def first_sentence(text: str) -> str:
    """Return the first line of a docstring as Markdown."""
    line = text.strip().partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    for role in ("class", "func", "meth", "attr", "data", "mod"):
        line = line.replace(f":{role}:`~", "`").replace(f":{role}:`", "`")
    return line.replace("|", "\\|")


@cache
def _tree(home: str) -> ast.Module:
    path = SOURCE / "handrail" / Path(*home.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _node(facade: str, name: str) -> tuple[ast.stmt, ast.stmt | None]:
    """Return the definition of an exported name, and the statement after it."""
    return _defined(homes(facade)[name], name)


def _defined(home: str, name: str) -> tuple[ast.stmt, ast.stmt | None]:
    body = _tree(home).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and name in {one.name for one in node.names}:
            return _defined(node.module.removeprefix("handrail."), name)
    for place, node in enumerate(body):
        defined = {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else set[str]()
        if isinstance(node, ast.Assign):
            defined = {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined = {node.target.id}
        if name in defined and not _is_overload(node):
            return node, body[place + 1] if place + 1 < len(body) else None
    raise LookupError(f"{name} is not in handrail.{home}")


def documented(facade: str, name: str) -> str:
    """Return the docstring of an exported name, or an empty text."""
    node, after = _node(facade, name)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node) or ""
    text = after.value if isinstance(after, ast.Expr) else None
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


def members(facade: str) -> Iterator[Member]:
    """Yield the exported names, and the public methods and properties of exported classes."""
    for name in homes(facade):
        yield Member(f"{facade}.{name}", documented(facade, name))
        node, _ = _node(facade, name)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                is_function = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_function and not inner.name.startswith("_") and not _is_overload(inner):
                    yield Member(f"{facade}.{name}.{inner.name}", ast.get_docstring(inner) or "")


def _is_overload(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        ast.unparse(mark).rpartition(".")[2] in ("overload", "setter") for mark in node.decorator_list
    )
