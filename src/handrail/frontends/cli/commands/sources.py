"""``handrail sources``: third-party sources of tools, and a person's approval of their definitions."""

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

_NOTHING = "nothing of {} waits to be approved"


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
    help="approve: ask nobody; what waits is as it was when review printed this hash.",
)
@configured
def command(setting: Setting, action: str | None, source: str | None, tools: tuple[str, ...], known: str | None) -> int:
    """List the sources of tools that are not your own; look at what they say, and approve it.

    What a foreign tool says of itself are words of somebody else that a model acts on. Its tools are off until you have
    approved them as they stand, and off again when one changes, until you have looked at the difference.

    review shows what nobody has approved: new tools whole, changed ones as a difference, and a hash of all that it showed.
    approve shows it and asks; with that hash it asks nobody, and approves nothing if anything is otherwise by now. forget takes
    approvals back. Each is for all tools of a SOURCE or those named; what a running kernel has changes with its next generation.
    """
    if known is not None and action != "approve":
        raise click.UsageError("--hash belongs to approve")
    if action is None:
        return _list(setting)
    if source is None:
        raise click.UsageError(f"name a source: handrail sources {action} SOURCE; handrail sources lists them")
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
        out("every tool here is your own; packages add sources by the entry point group handrail.sources")
    return OUTPUT


def _review(setting: Setting, source: str, tools: tuple[str, ...]) -> int:
    waiting, _, faults = _waiting(setting, source, tools)
    for fault in faults:
        (note if setting.json else out)(_told(fault))
    if setting.json:
        out_json(_reviewed(source, waiting))
        return OUTPUT
    _show(waiting)
    note(f"to approve exactly these: {_by_hash(source, tools, waiting)}" if waiting else _NOTHING.format(source))
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
                "a person approves these: look at them with review, and give the --hash that it prints"
            )
        if not confirm(f"Approve {one_line(', '.join(waiting))} of {source} as shown?"):
            note("nothing was approved")
            return ERROR
    elif known.strip().lower() != hash_of(source, waiting):
        if setting.json:
            out_json(_reviewed(source, waiting))
        note(
            f"nothing was approved: what waits now is not what had the hash {spelled_out(known[:80])}. Look at it as it is "
            f"shown here, then: {_by_hash(source, tools, waiting)}"
        )
        return ERROR
    pins.approve(source, [one.now for one in waiting.values()])
    if setting.json:
        out_json({"source": source, "approved": {tool_id: one.now.hash for tool_id, one in waiting.items()}})
    else:
        out(f"approved {len(waiting)} of {source}: {one_line(', '.join(waiting))}")
    return OUTPUT


def _by_hash(source: str, tools: Sequence[str], waiting: Mapping[str, Review]) -> str:
    """How what was shown is approved."""
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
            f"nothing was taken back: of {spelled_out(', '.join(tools) or source)} nothing is approved; see handrail sources"
        )
    else:
        out(f"{count} of {source} {'is' if count == 1 else 'are'} not approved any more")
    return OUTPUT if count else ERROR


def _looked(setting: Setting) -> tuple[Generation, StoredPins]:
    """All tools there are, none of which runs, and what has been approved."""
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
    """Ask an MCP server that nobody was ever connected to what it has."""
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
            note(f"handrail sources: connecting to {source}, to see what it has")
            asyncio.run(look_at(config, folders, source))


def _waiting(setting: Setting, source: str, tools: Sequence[str]) -> tuple[dict[str, Review], StoredPins, list[Fault]]:
    """What of a source waits for a person, and what of it could not be taken: of those tools, or of all."""
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
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known) or 'none'}"
    return click.UsageError(f"there is no foreign source {source!r}; {hint}")


def _check_has(source: str, tools: Sequence[str], ids: Collection[str]) -> None:
    if unknown := [tool_id for tool_id in tools if tool_id not in ids]:
        raise click.UsageError(f"{source} has no tool {unknown[0]!r}; it has: {', '.join(ids) or 'none'}")


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
    return f"quarantined: {one_line(str(fault))}"  # ids are its author's words


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
