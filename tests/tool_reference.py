"""One row for each tool that ships, from its spec, and the keys of its result, which ``tests/tools/test_reference.py`` proves.

``python -m tests.conformance`` writes the table to ``docs/tool-reference.md`` and compares it with ``--check``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from handrail.contract.generation import Generation, ToolEntry
from handrail.contract.sandbox import SandboxTier
from handrail.contract.tool.spec import ToolSpec, properties_of
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import BuiltinSource

TABLE = Path(__file__).parent.parent / "docs" / "tool-reference.md"

RESULTS: Mapping[str, str] = {
    "read": "path text first_line last_line next size total_lines",
    "write": "path created size diff lines_added lines_removed",
    "edit": "path replacements size diff lines_added lines_removed",
    "file.patch": "path size diff lines_added lines_removed",
    "glob": "paths",
    "grep": "matches",
    "bash": "exit_code output",
    "todo": "todos",
    "question": "answers",
    "task": "agent session_id text turns calls",
    "skill": "name from content",
    "browse_tools": "categories",
    "load_tools": "loaded tools_added message",
    "find_tools": "tools message",
    "tool_search": "tools nothing_fits message",
    "info": "id name category description parameters guidance example",
    "multi_edit": "path replacements size diff lines_added lines_removed",
    "tree": "path files tree",
    "json_read": "path pointer type value",
    "json_write": "path pointer created size diff lines_added lines_removed",
    "python": "exit_code output",
    "jobs": "jobs",
    "read_job": "job_id state text cursor more",
    "wait": "job_id state result",
    "stop_task": "job_id state note",
    "terminal.start": "job_id state note",
    "terminal.send": "id sent_bytes",
    "terminal.read": "id text cursor state more",
    "terminal.resize": "id columns rows",
    "terminal.stop": "id state",
    "tool.step": "state_id step",
    "tool.close": "state_id closed",
    "scratchpad": "key replaced",
    "search_memory": "hits found searched",
    "artifact.read": "ref media_type base64 start end next size",
    "memory.compact": "removed_messages removed_tokens kept_messages note",
    "send_message": "channel sent unread",
    "wait_channel": "channel message sender",
    "add_timer": "trigger_id kind prompt interval once next",
    "add_schedule": "trigger_id kind prompt cron next",
    "watch_channel": "trigger_id kind prompt channel",
    "list_triggers": "triggers",
    "remove_trigger": "trigger_id removed fired",
    "git.status": "repository branch commit clean staged unstaged untracked conflicts",
    "git.log": "commits",
    "git.diff": "files added deleted patch",
    "git.show": "commit parents author date subject refs files added deleted patch",
    "git.blame": "path commits lines",
    "git.branches": "branches remote_branches remotes",
    "git.add": "staged",
    "git.commit": "branch commit subject author files",
    "git.create_branch": "branch commit",
    "git.checkout": "branch commit subject author",
    "git.merge": "result branch commit subject author",
    "git.stash": "stashes",
    "git.init": "repository branch",
    "git.clone": "repository branch commit from",
    "git.push": "remote url branch result commits",
    "resource.list": "resources resourceTemplates",
    "resource.read": "contents",
    "resource.subscribe": "subscribed",
    "resource.unsubscribe": "unsubscribed",
    "prompt.list": "prompts",
    "prompt.get": "messages",
    "prompt.complete": "values total hasMore",
}
"""The keys of the object that a plain call gives as its data."""

_HEAD = """\
# The tools that ship

Written by `make docs` from the tools themselves; `make lint` fails when it is out of date, and a test calls each tool and
compares what it gives. Parameters are *name: type*, with `?` where they may be left out. The result is the keys of the
object that a plain call gives; where there is more to say (what was cut, what rules hid) there are more. `info` tells a
model the whole of a tool, `handrail tools --json` tells you.

What a call of each needs of rules is in [Rules](rules.md). Tools of a model's provider are in [Writing a
tool](tools.md#tools-of-a-models-provider): they are no tools that ship, since nothing here carries them out.

| tool | parameters | result | requires | locks | side effect | runs | category |
|---|---|---|---|---|---|---|---|
"""


def shipped() -> Generation:
    """All of them, where everything can be confined."""
    return load_generation([BuiltinSource()], tier=SandboxTier("sandbox", ""))


def rows() -> dict[str, list[str]]:
    """By id, the cells."""
    generation = shipped()
    names: dict[str, list[str]] = {}
    for alias, tool_id in generation.aliases.items():
        names.setdefault(tool_id, []).append(alias)
    return {entry.id: _row(entry, names.get(entry.id, [])) for entry in generation.entries.values()}


def render() -> str:
    """The page."""
    return _HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in rows().values())


def where(spec: ToolSpec) -> str:
    """Where it does its work."""
    places = ["in process"]
    if spec.requires.shell:
        places.append("programs in the sandbox")
    if spec.requires.net.hosts:
        places.append("network through its proxy" if spec.requires.shell else "network")
    return ", ".join(places)


def _row(entry: ToolEntry, aliases: Iterable[str]) -> list[str]:
    spec = entry.spec
    named = "".join(f"<br>also `{alias}`" for alias in aliases)
    keys = RESULTS.get(entry.id, "")
    return [
        f"`{spec.id}`{named}",
        "<br>".join(_parameters(spec)) or "none",
        ", ".join(f"`{key}`" for key in keys.split()),
        "<br>".join(_requires(spec)) or "nothing",
        "<br>".join(f"`{lock}`" for lock in spec.effective_locks) or "none",
        spec.side_effect,
        where(spec),
        f"{spec.category}, core" if spec.tier == "core" else str(spec.category),
    ]


def _parameters(spec: ToolSpec) -> Iterable[str]:
    required = set(spec.parameters.get("required", ()))
    for name, schema in properties_of(spec.parameters).items():
        yield f"`{name}{'' if name in required else '?'}: {_type(schema)}`"


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " / ".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)  # pyright: ignore[reportUnknownArgumentType]


def _requires(spec: ToolSpec) -> Iterable[str]:
    requires = spec.requires
    for access in ("read", "write"):
        if patterns := getattr(requires.fs, access):
            yield f"`fs.{access}` " + ", ".join(f"`{pattern}`" for pattern in patterns)
    if requires.net.hosts:
        yield "`net.fetch` " + ", ".join(f"`{host}`" for host in requires.net.hosts)
    if requires.shell:
        yield "`shell.run` " + ", ".join(f"`{one.cmd}`" for one in requires.shell)
    yield from (f"`{capability}`" for capability in requires.capabilities)
