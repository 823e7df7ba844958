"""``handrail sources``: third-party sources of tools, and the user's approval of their definitions."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import (
    ask_yes_or_no,
    escape_invisible_characters,
    escape_to_one_line,
    print_escaped_line,
    print_json,
    print_stderr_note,
)

if TYPE_CHECKING:
    from handrail.contract.errors import Diagnostic
    from handrail.contract.tool.spec import ToolSpec
    from handrail.contract.tool_generation import Generation, ToolEntry
    from handrail.registry.definition_pins import DefinitionReview, StoredPins

_SHOWN = 160
"""Characters of a description that the short review shows."""
_NOTHING = "No tool of {} requires approval."


@click.command("sources")
@click.argument(
    "action",
    required=False,
    type=click.Choice(["list", "review", "approve", "revoke"]),
    metavar="[list|review|approve|revoke]",
)
@click.argument("source", required=False)
@click.argument("tools", nargs=-1, metavar="[TOOL]...")
@click.option("--hash", "known", metavar="HASH", help="approve: hash that review printed, to approve without asking.")
@click.option("--all", "whole", is_flag=True, help="review, approve: show every new definition in full.")
@add_configuration_options
def command(
    setting: CommandOptions,
    action: str | None,
    source: str | None,
    tools: tuple[str, ...],
    known: str | None,
    whole: bool,
) -> int:
    """Review and approve third-party tools.

    The definition of a third-party tool is text that a model acts on. So such a tool is disabled until you approve its
    definition, and again when the definition changes.

    Without an action, lists the sources. review shows a line for each new tool, with its side effect, its hosts and
    sentences that look like instructions. It shows changed definitions as a diff, and a hash of all of them. With --all,
    or for named tools, it shows new definitions in full. approve shows the same and asks you. With --hash, it does not ask,
    and approves only if nothing has changed since the review. revoke removes approvals. Each action applies to all tools
    of a SOURCE, or to the named ones. A running kernel applies it in its next generation.
    """
    if known is not None and action != "approve":
        raise click.UsageError("`--hash` is an option of `approve`. Run: handrail sources approve SOURCE --hash HASH")
    if action in (None, "list"):
        return _list(setting)
    if source is None:
        raise click.UsageError(
            f"SOURCE is missing. Pass it, as in: handrail sources {action} SOURCE. `handrail sources` lists them."
        )
    if action == "review":
        return _review(setting, source, tools, whole=whole or bool(tools))
    full = whole or bool(tools)
    return (
        _approve(setting, source, tools, known, whole=full) if action == "approve" else _revoke(setting, source, tools)
    )


def _list(setting: CommandOptions) -> int:
    generation, pins = _load_sources(setting)
    rows = [_summary(name, entries, pins) for name, entries in _by_source(generation).items()]
    if setting.json:
        print_json({"sources": rows, "faults": [_fault_data(one) for one in generation.quarantined]})
        return OUTPUT
    table = [((str(row["name"]), "bold"), str(row["ready"]), str(row["waiting"])) for row in rows]
    TerminalRenderer().print_table(("SOURCE", "READY", "TO REVIEW"), table, right=(1, 2))
    for fault in generation.quarantined:
        print_escaped_line(_fault_text(fault))
    if not rows and not generation.quarantined:
        print_escaped_line("No third-party sources. Packages can add them by the entry point group handrail.sources.")
    return OUTPUT


def _review(setting: CommandOptions, source: str, tools: tuple[str, ...], *, whole: bool) -> int:
    waiting, entries, _, faults = _pending_reviews(setting, source, tools)
    for fault in faults:
        (print_stderr_note if setting.json else print_escaped_line)(_fault_text(fault))
    if setting.json:
        print_json(_review_data(source, waiting))
        return OUTPUT
    _show(waiting, entries, whole=whole)
    _print_requested_hosts(setting, source)
    print_stderr_note(
        f"to approve these: {_approve_hint(source, tools, waiting)}" if waiting else _NOTHING.format(source)
    )
    return OUTPUT


def _approve(setting: CommandOptions, source: str, tools: tuple[str, ...], known: str | None, *, whole: bool) -> int:
    from handrail.registry.definition_pins import hash_definitions_to_review

    waiting, entries, pins, faults = _pending_reviews(setting, source, tools)
    for fault in faults:
        print_stderr_note(_fault_text(fault))
    if not waiting:
        print_escaped_line(_NOTHING.format(source))
        return OUTPUT
    if not setting.json:
        _show(waiting, entries, whole=whole)
    if known is None:
        if setting.headless or setting.json or not sys.stdin.isatty():
            raise click.UsageError(
                f"Approval requires a terminal, or a hash. Run handrail sources review {source}, and pass its `--hash`."
            )
        if not ask_yes_or_no(f"Approve {escape_to_one_line(', '.join(waiting))} of {source} as shown?"):
            print_stderr_note("No tool was approved.")
            return ERROR
    elif known.strip().lower() != hash_definitions_to_review(source, waiting):
        if setting.json:
            print_json(_review_data(source, waiting))
        print_stderr_note(
            f"No tool was approved, because the definitions do not match the hash {escape_invisible_characters(known[:80])}. Review the "
            f"definitions shown here, then run: {_approve_hint(source, tools, waiting)}"
        )
        return ERROR
    pins.approve(source, [one.current for one in waiting.values()])
    if setting.json:
        print_json({"source": source, "approved": {tool_id: one.current.hash for tool_id, one in waiting.items()}})
    else:
        print_escaped_line(f"approved {len(waiting)} of {source}: {escape_to_one_line(', '.join(waiting))}")
    return OUTPUT


def _approve_hint(source: str, tools: Sequence[str], waiting: Mapping[str, DefinitionReview]) -> str:
    """Return the command that approves the shown definitions."""
    from handrail.registry.definition_pins import hash_definitions_to_review

    return " ".join(("handrail sources approve", source, *tools, "--hash", hash_definitions_to_review(source, waiting)))


def _review_data(source: str, waiting: Mapping[str, DefinitionReview]) -> dict[str, object]:
    from handrail.registry.definition_pins import hash_definitions_to_review

    return {
        "source": source,
        "hash": hash_definitions_to_review(source, waiting) if waiting else None,
        "tools": [_tool_data(tool_id, one) for tool_id, one in waiting.items()],
    }


def _revoke(setting: CommandOptions, source: str, tools: tuple[str, ...]) -> int:
    from handrail.registry.definition_pins import StoredPins

    folders = setting.folders
    count = StoredPins(folders.state).revoke(source, tools or None)
    if setting.json:
        print_json({"source": source, "revoked": count})
    elif not count:
        print_stderr_note(
            f"No approval was revoked, because no tool of {escape_invisible_characters(', '.join(tools) or source)} is approved. "
            "`handrail sources` lists the sources."
        )
    else:
        print_escaped_line(f"revoked the approval of {count} tool{'' if count == 1 else 's'} of {source}")
    return OUTPUT if count else ERROR


def _load_sources(setting: CommandOptions) -> tuple[Generation, StoredPins]:
    """Load all tools, without running any, and the stored approvals."""
    from handrail.authoring.tool_linter import raise_on_program_start
    from handrail.contract.agent_manifest import AgentManifest, CheckedAgentManifest
    from handrail.kernel.agent_loading import make_placeholder_secrets, make_tool_sources
    from handrail.kernel.sandbox_selection import make_limited_sandbox
    from handrail.registry.definition_pins import StoredPins
    from handrail.registry.sources.executable_tools import ToolConfinement

    config = load_and_validate_configuration(setting)
    folders = setting.folders
    confinement = ToolConfinement(make_limited_sandbox(config), raise_on_program_start, raise_on_program_start)
    whole = CheckedAgentManifest(AgentManifest(id=config.settings.agent))
    generation = make_tool_sources(
        config, whole, folders, confinement, make_placeholder_secrets(config)
    ).load_generation_of_agent(1)
    return generation, StoredPins(folders.state)


def _connect_for_listing(setting: CommandOptions, source: str) -> bool:
    """Connect to an MCP server once, if it has never been connected, to list its tools.

    :return: whether the source is a configured MCP server
    """
    import asyncio

    from handrail.kernel.agent_loading import make_placeholder_secrets
    from handrail.kernel.upstream_mcp_servers import fetch_and_store_tool_list
    from handrail.upstream.server_config_loader import load_enabled_servers as servers_in
    from handrail.upstream.server_definition import read_cached_listing as listed

    config = load_and_validate_configuration(setting)
    folders = setting.folders
    servers = [one for one in servers_in(config, make_placeholder_secrets(config)) if one.name == source]
    for server in servers:
        if listed(folders.state, source, server.definition_hash) is None:
            print_stderr_note(f"handrail sources: connecting to {source} to list its tools")
            asyncio.run(fetch_and_store_tool_list(config, folders, source))
    return bool(servers)


def _pending_reviews(
    setting: CommandOptions, source: str, tools: Sequence[str]
) -> tuple[dict[str, DefinitionReview], Mapping[str, ToolEntry], StoredPins, list[Diagnostic]]:
    """Return the tools of a source that require approval, all its tools, the stored approvals, and its faults.

    :param tools: the tool IDs to include; empty for all
    """
    from handrail.registry.definition_pins import find_unapproved_definitions

    is_server = _connect_for_listing(setting, source)
    generation, pins = _load_sources(setting)
    by_source = _by_source(generation)
    faults = [fault for fault in generation.quarantined if fault.third_party == source]
    if source not in by_source and not faults and is_server:
        raise click.UsageError(f"MCP server {source} lists no tools. Check its state with: handrail mcp list")
    if source not in by_source and not faults:
        raise _unknown_source_error(
            source, dict.fromkeys((*by_source, *(fault.third_party for fault in generation.quarantined)))
        )
    entries = by_source.get(source, {})
    _check_source_has_tools(source, tools, dict.fromkeys((*entries, *(fault.tool for fault in faults if fault.tool))))
    waiting = find_unapproved_definitions(source, (entry.spec for entry in entries.values()), pins)
    if tools:
        waiting = {tool_id: one for tool_id, one in waiting.items() if tool_id in tools}
        faults = [fault for fault in faults if fault.tool in tools]
    return waiting, entries, pins, faults


def _unknown_source_error(source: str, known: Collection[str]) -> click.UsageError:
    from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

    close = nearest_names(source, known, 1)
    hint = f"Did you mean {close[0]!r}?" if close else f"The third-party sources are: {', '.join(known) or 'none'}."
    return click.UsageError(f"Third-party source {source!r} does not exist. {hint}")


def _check_source_has_tools(source: str, tools: Sequence[str], ids: Collection[str]) -> None:
    if unknown := [tool_id for tool_id in tools if tool_id not in ids]:
        raise click.UsageError(
            f"{source} has no tool {unknown[0]!r}. Pass another ID. Its tools are: {', '.join(ids) or 'none'}."
        )


def _by_source(generation: Generation) -> dict[str, dict[str, ToolEntry]]:
    found: dict[str, dict[str, ToolEntry]] = {}
    for tool_id, entry in generation.entries.items():
        if entry.third_party is not None:
            found.setdefault(entry.third_party.name, {})[tool_id] = entry
    return found


def _summary(name: str, entries: Mapping[str, ToolEntry], pins: StoredPins) -> dict[str, object]:
    from handrail.registry.definition_pins import find_unapproved_definitions

    waiting = find_unapproved_definitions(name, (entry.spec for entry in entries.values()), pins)
    ready = sum(entry.unavailable_reason is None for entry in entries.values())
    tools = {
        tool_id: {"status": entry.status, "reason": entry.unavailable_reason} for tool_id, entry in entries.items()
    }
    return {"name": name, "ready": ready, "waiting": len(waiting), "tools": tools}


def _show(waiting: Mapping[str, DefinitionReview], entries: Mapping[str, ToolEntry], *, whole: bool) -> None:
    """Print the definitions to review: changed ones as a diff, and new ones in full or in a few lines each."""
    for tool_id, one in waiting.items():
        if whole or one.approved is not None:
            print_escaped_line(f"{escape_to_one_line(tool_id)}: {escape_to_one_line(one.disabled_reason)}")
            for line in one.diff_lines():
                print_escaped_line(f"  {escape_to_one_line(line)}")
        else:
            for line in _summarise(one, entries[tool_id].spec):
                print_escaped_line(line)
    if not whole and any(one.approved is None for one in waiting.values()):
        print_stderr_note("every word of the new definitions: add --all, or name a tool")


def _summarise(one: DefinitionReview, spec: ToolSpec) -> list[str]:
    """Return the lines that people read of a new tool."""
    from handrail.registry.definition_pins import find_instruction_like_lines

    arguments = ", ".join(map(escape_to_one_line, one.current.parameters.get("properties", {}))) or "none"
    hosts = ", ".join(spec.requires.net.hosts)
    effect = f"{spec.side_effect}{f', reaches {hosts}' if hosts else ''}"
    first = escape_to_one_line(one.current.description.strip().split("\n", 1)[0])
    lines = [
        f"{escape_to_one_line(one.current.id)} (new, {effect}): {first[:_SHOWN]}{'…' if len(first) > _SHOWN else ''}"
    ]
    lines.append(f"  arguments: {arguments[:_SHOWN]}{'…' if len(arguments) > _SHOWN else ''}")
    lines += [
        f"  looks like an instruction: {escape_to_one_line(line)}" for line in find_instruction_like_lines(one.current)
    ]
    return lines


def _print_requested_hosts(setting: CommandOptions, source: str) -> None:
    """Print the hosts that an MCP server asked for and was refused."""
    from handrail.kernel.agent_loading import make_placeholder_secrets
    from handrail.upstream.requested_hosts import describe_denied_hosts
    from handrail.upstream.server_config_loader import load_enabled_servers

    config = load_and_validate_configuration(setting)
    folders = setting.folders
    for server in load_enabled_servers(config, make_placeholder_secrets(config)):
        if server.name == source:
            for line in describe_denied_hosts(folders.state, source, server.hosts):
                print_stderr_note(f"{source} {line}")


def _fault_text(fault: Diagnostic) -> str:
    return f"quarantined: {escape_to_one_line(str(fault))}"  # IDs are untrusted text


def _fault_data(fault: Diagnostic) -> dict[str, str]:
    fields = {"source": fault.source, "where": fault.location, "problem": fault.problem}
    return fields | ({"tool": fault.tool} if fault.tool else {})


def _tool_data(tool_id: str, one: DefinitionReview) -> dict[str, object]:
    return {
        "id": tool_id,
        "reason": one.disabled_reason,
        "hash": one.current.hash,
        "now": one.current.to_dict(),
        "before": None if one.approved is None else one.approved.to_dict(),
        "difference": one.diff_lines(),
    }
