"""``handrail sources``: third-party sources of tools, and the user's approval of their definitions."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import confirm, note, one_line, out, out_json, out_rows, spelled_out

if TYPE_CHECKING:
    from handrail.contract.errors import Fault
    from handrail.contract.generation import Entry, Generation
    from handrail.registry.pins import Review, StoredPins

_NOTHING = "No tool of {} requires approval."


@click.command("sources")
@click.argument(
    "action", required=False, type=click.Choice(["review", "approve", "forget"]), metavar="[review|approve|forget]"
)
@click.argument("source", required=False)
@click.argument("tools", nargs=-1, metavar="[TOOL]...")
@click.option(
    "--hash",
    "known",
    metavar="HASH",
    help="approve: hash that review printed, to approve without asking.",
)
@configured
def command(setting: Setting, action: str | None, source: str | None, tools: tuple[str, ...], known: str | None) -> int:
    """Review and approve third-party tools.

    The definition of a third-party tool is text that a model acts on. So such a tool is disabled until you approve its
    definition, and again when the definition changes.

    Without an action, lists the sources. review shows new definitions in full, changed ones as a diff, and a hash of
    everything shown. approve shows the same and asks you. With --hash, it does not ask, and approves only if nothing has
    changed since the review. forget revokes approvals. Each action applies to all tools of a SOURCE, or to the named ones.
    A running kernel applies it in its next generation.
    """
    if known is not None and action != "approve":
        raise click.UsageError("`--hash` requires `approve`: handrail sources approve SOURCE --hash HASH")
    if action is None:
        return _list(setting)
    if source is None:
        raise click.UsageError(f"SOURCE is missing: handrail sources {action} SOURCE. `handrail sources` lists them.")
    if action == "review":
        return _review(setting, source, tools)
    return _approve(setting, source, tools, known) if action == "approve" else _forget(setting, source, tools)


def _list(setting: Setting) -> int:
    generation, pins = _looked(setting)
    rows = [_summary(name, entries, pins) for name, entries in _by_source(generation).items()]
    if setting.json:
        out_json({"sources": rows, "faults": [_fault(one) for one in generation.quarantined]})
        return OUTPUT
    out_rows((str(row["name"]), f"{row['ready']} ready", f"{row['waiting']} to review") for row in rows)
    for fault in generation.quarantined:
        out(_told(fault))
    if not rows and not generation.quarantined:
        out("No third-party sources. Packages can add them by the entry point group handrail.sources.")
    return OUTPUT


def _review(setting: Setting, source: str, tools: tuple[str, ...]) -> int:
    waiting, _, faults = _waiting(setting, source, tools)
    for fault in faults:
        (note if setting.json else out)(_told(fault))
    if setting.json:
        out_json(_reviewed(source, waiting))
        return OUTPUT
    _show(waiting)
    note(f"to approve these: {_by_hash(source, tools, waiting)}" if waiting else _NOTHING.format(source))
    return OUTPUT


def _approve(setting: Setting, source: str, tools: tuple[str, ...], known: str | None) -> int:
    from handrail.registry.pins import hash_of

    waiting, pins, faults = _waiting(setting, source, tools)
    for fault in faults:
        note(_told(fault))
    if not waiting:
        out(_NOTHING.format(source))
        return OUTPUT
    if not setting.json:
        _show(waiting)
    if known is None:
        if setting.headless or setting.json or not sys.stdin.isatty():
            raise click.UsageError(
                f"Approval requires a terminal, or a hash. Run handrail sources review {source}, and pass its `--hash`."
            )
        if not confirm(f"Approve {one_line(', '.join(waiting))} of {source} as shown?"):
            note("No tool was approved.")
            return ERROR
    elif known.strip().lower() != hash_of(source, waiting):
        if setting.json:
            out_json(_reviewed(source, waiting))
        note(
            f"No tool was approved, because the definitions do not match the hash {spelled_out(known[:80])}. Review the "
            f"definitions shown here, then run: {_by_hash(source, tools, waiting)}"
        )
        return ERROR
    pins.approve(source, [one.now for one in waiting.values()])
    if setting.json:
        out_json({"source": source, "approved": {tool_id: one.now.hash for tool_id, one in waiting.items()}})
    else:
        out(f"approved {len(waiting)} of {source}: {one_line(', '.join(waiting))}")
    return OUTPUT


def _by_hash(source: str, tools: Sequence[str], waiting: Mapping[str, Review]) -> str:
    """Return the command that approves the shown definitions."""
    from handrail.registry.pins import hash_of

    return " ".join(("handrail sources approve", source, *tools, "--hash", hash_of(source, waiting)))


def _reviewed(source: str, waiting: Mapping[str, Review]) -> dict[str, object]:
    from handrail.registry.pins import hash_of

    return {
        "source": source,
        "hash": hash_of(source, waiting) if waiting else None,
        "tools": [_whole(tool_id, one) for tool_id, one in waiting.items()],
    }


def _forget(setting: Setting, source: str, tools: tuple[str, ...]) -> int:
    from handrail.registry.pins import StoredPins
    from handrail.store.folders import locate

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    count = StoredPins(folders.state).forget(source, tools or None)
    if setting.json:
        out_json({"source": source, "forgotten": count})
    elif not count:
        note(
            f"No approval was revoked, because no tool of {spelled_out(', '.join(tools) or source)} is approved. "
            "`handrail sources` lists the sources."
        )
    else:
        out(f"revoked the approval of {count} tool{'' if count == 1 else 's'} of {source}")
    return OUTPUT if count else ERROR


def _looked(setting: Setting) -> tuple[Generation, StoredPins]:
    """Load all tools, without running any, and the stored approvals."""
    from handrail.authoring.linting import nothing_runs
    from handrail.contract.agent import AgentManifest, CheckedAgent
    from handrail.kernel.agents import as_configured, sources_of
    from handrail.kernel.sandbox import sandbox_of
    from handrail.registry.pins import StoredPins
    from handrail.registry.sources.executables import Confinement
    from handrail.store.folders import locate

    config = read(setting)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    confinement = Confinement(sandbox_of(config), nothing_runs, nothing_runs)
    whole = CheckedAgent(AgentManifest(id=config.settings.agent))
    generation = sources_of(config, whole, folders, confinement, as_configured(config)).load(1)
    return generation, StoredPins(folders.state)


def _connect_unknown(setting: Setting, source: str) -> None:
    """Connect to an MCP server once, if it has never been connected, to list its tools."""
    import asyncio

    from handrail.kernel.agents import as_configured
    from handrail.kernel.servers import look_at
    from handrail.store.folders import locate
    from handrail.upstream.configured import configured as servers_in
    from handrail.upstream.definition import read as listed

    config = read(setting)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    for server in servers_in(config, as_configured(config)):
        if server.name == source and listed(folders.state, source, server.hash) is None:
            note(f"handrail sources: connecting to {source} to list its tools")
            asyncio.run(look_at(config, folders, source))


def _waiting(setting: Setting, source: str, tools: Sequence[str]) -> tuple[dict[str, Review], StoredPins, list[Fault]]:
    """Return the tools of a source that require approval, the stored approvals, and the source's faults.

    :param tools: the tool IDs to include; empty for all
    """
    from handrail.registry.pins import reviews

    _connect_unknown(setting, source)
    generation, pins = _looked(setting)
    by_source = _by_source(generation)
    faults = [fault for fault in generation.quarantined if fault.foreign == source]
    if source not in by_source and not faults:
        raise _unknown(source, dict.fromkeys((*by_source, *(fault.foreign for fault in generation.quarantined))))
    entries = by_source.get(source, {})
    _check_has(source, tools, dict.fromkeys((*entries, *(fault.tool for fault in faults if fault.tool))))
    waiting = reviews(source, (entry.spec for entry in entries.values()), pins)
    if tools:
        waiting = {tool_id: one for tool_id, one in waiting.items() if tool_id in tools}
        faults = [fault for fault in faults if fault.tool in tools]
    return waiting, pins, faults


def _unknown(source: str, known: Collection[str]) -> click.UsageError:
    from handrail.contract.tool.names import nearest

    close = nearest(source, known, 1)
    hint = f"Did you mean {close[0]!r}?" if close else f"The third-party sources are: {', '.join(known) or 'none'}."
    return click.UsageError(f"Third-party source {source!r} does not exist. {hint}")


def _check_has(source: str, tools: Sequence[str], ids: Collection[str]) -> None:
    if unknown := [tool_id for tool_id in tools if tool_id not in ids]:
        raise click.UsageError(f"{source} has no tool {unknown[0]!r}. Its tools are: {', '.join(ids) or 'none'}.")


def _by_source(generation: Generation) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for tool_id, entry in generation.entries.items():
        if entry.foreign is not None:
            found.setdefault(entry.foreign.name, {})[tool_id] = entry
    return found


def _summary(name: str, entries: Mapping[str, Entry], pins: StoredPins) -> dict[str, object]:
    from handrail.registry.pins import reviews

    waiting = reviews(name, (entry.spec for entry in entries.values()), pins)
    ready = sum(entry.withheld is None for entry in entries.values())
    tools = {tool_id: {"status": entry.status, "reason": entry.withheld} for tool_id, entry in entries.items()}
    return {"name": name, "ready": ready, "waiting": len(waiting), "tools": tools}


def _show(waiting: Mapping[str, Review]) -> None:
    for tool_id, one in waiting.items():
        out(f"{one_line(tool_id)}: {one_line(one.reason)}")
        for line in one.difference():
            out(f"  {one_line(line)}")


def _told(fault: Fault) -> str:
    return f"quarantined: {one_line(str(fault))}"  # IDs are untrusted text


def _fault(fault: Fault) -> dict[str, str]:
    told = {"source": fault.source, "where": fault.where, "problem": fault.problem}
    return told | ({"tool": fault.tool} if fault.tool else {})


def _whole(tool_id: str, one: Review) -> dict[str, object]:
    return {
        "id": tool_id,
        "reason": one.reason,
        "hash": one.now.hash,
        "now": one.now.as_data(),
        "before": None if one.before is None else one.before.as_data(),
        "difference": one.difference(),
    }
