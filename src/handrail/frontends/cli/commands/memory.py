"""``handrail memory``: the facts that agents stored, for the person whom they are about."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_workspace_options
from handrail.frontends.cli.commands.log import require_confirmation
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import memory_ids
from handrail.frontends.cli.terminal_output import (
    escape_to_one_line,
    print_escaped_line,
    print_json,
    print_stderr_note,
    print_terminal_safe_text,
)
from handrail.store.state_folders import resolve_state_root

if TYPE_CHECKING:
    from handrail.store.memory.knowledge_store import KnowledgeEntry, KnowledgeStore

_ACTIONS = ("list", "show", "confirm", "forget", "undo", "export")
_FLAGS: dict[str, set[str]] = {
    "list": {"unconfirmed", "history"},
    "show": set(),
    "confirm": set(),
    "forget": {"everything", "yes"},
    "undo": set(),
    "export": {"history"},
}
"""The flags of each action."""
_SHOWN_CHARACTERS = 100


@click.command("memory")
@click.argument(
    "action", required=False, default="list", type=click.Choice(_ACTIONS), metavar=f"[{'|'.join(_ACTIONS)}]"
)
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=memory_ids)
@click.option("--unconfirmed", is_flag=True, help="list: only unconfirmed facts.")
@click.option("--history", is_flag=True, help="list, export: include facts that were replaced.")
@click.option("--all", "everything", is_flag=True, help="forget: all facts.")
@click.option("--yes", is_flag=True, help="forget: do not ask.")
@add_workspace_options
def command(setting: CommandOptions, action: str, ids: tuple[str, ...], **flags: Any) -> int:
    """List, confirm or forget what agents stored about you.

    list shows the stored facts of all workspaces, the latest first. show prints the origin and the history of a fact.

    A fact that may come from a file or page is unconfirmed, and agents see a label with it. confirm removes that label.

    forget deletes facts with their history. undo restores the facts that the last memory.compact folded, or the listed facts.
    export prints all facts as JSON lines.
    """
    from handrail.store.memory.knowledge_store import KnowledgeStore, KnowledgeUnavailable

    given = {name for name, value in flags.items() if value}
    if wrong := sorted(given - _FLAGS[action]):
        names = " and ".join(f"`--{'all' if name == 'everything' else name}`" for name in wrong)
        raise click.UsageError(f"{names} cannot be used with `{action}`. See `handrail memory --help`.")
    if ids and action in ("list", "export"):
        raise click.UsageError(f"`{action}` takes no ID. To see one fact: handrail memory show ID")
    if not ids and not flags["everything"] and action in ("show", "confirm", "forget"):
        raise click.UsageError(
            f"The ID is missing. Pass it, as in: handrail memory {action} ID. `handrail memory` lists the facts."
        )
    with closing(KnowledgeStore(resolve_state_root(setting.state))) as knowledge:
        try:
            return _run(setting, knowledge, action, ids, flags)
        except KnowledgeUnavailable as error:
            print_stderr_note(f"handrail memory: {error}")
            return ERROR


def _run(
    setting: CommandOptions, knowledge: KnowledgeStore, action: str, ids: tuple[str, ...], flags: dict[str, Any]
) -> int:
    match action:
        case "show":
            return _show(setting, knowledge, ids)
        case "confirm":
            return _confirm(setting, knowledge, ids)
        case "forget":
            return _forget(setting, knowledge, ids, everything=flags["everything"], yes=flags["yes"])
        case "undo":
            return _undo(setting, knowledge, ids)
        case "export":
            for entry in knowledge.list_entries(history=flags["history"]):
                print_json(asdict(entry))
            return OUTPUT
        case _:
            return _list(setting, knowledge, flags)


def _list(setting: CommandOptions, knowledge: KnowledgeStore, flags: dict[str, Any]) -> int:
    found = knowledge.list_entries(history=flags["history"], only_unconfirmed=flags["unconfirmed"])
    if setting.json:
        for entry in found:
            print_json(asdict(entry))
    elif found:
        rows = [
            (entry.id, _state(entry), _time(entry.created_ns), entry.key or "", entry.text[:_SHOWN_CHARACTERS])
            for entry in found
        ]
        TerminalRenderer().print_table(("ID", "STATE", "STORED", "KEY", "TEXT"), rows)
    elif flags["unconfirmed"]:
        print_stderr_note("No fact is unconfirmed.")
    else:
        print_stderr_note("No facts are stored. Agents store them with the tool memory.upsert.")
    return OUTPUT


def _show(setting: CommandOptions, knowledge: KnowledgeStore, ids: tuple[str, ...]) -> int:
    found = _get(knowledge, ids)
    for entry in found:
        history = knowledge.list_replaced_entries(entry.id)
        if setting.json:
            print_json({**asdict(entry), "history": [asdict(one) for one in history]})
            continue
        print_terminal_safe_text(entry.text)
        origin = f"stored {_time(entry.created_ns)} by agent {entry.agent} in {entry.workspace}"
        print_escaped_line(f"  {entry.id}: {_state(entry)}, {origin}")
        if entry.call:
            print_escaped_line(f"  call: {entry.call}")
        if entry.untrusted:
            was = "was unconfirmed" if entry.is_confirmed else "unconfirmed"
            print_escaped_line(f"  {was} because {entry.untrusted}")
        for name, value in (("key", entry.key), ("tags", ", ".join(entry.tags)), ("replaces", entry.replaces)):
            if value:
                print_escaped_line(f"  {name}: {value}")
        for one in history:
            print_escaped_line(f"  replaced {one.id}: {escape_to_one_line(one.text)}")
    return OUTPUT


def _confirm(setting: CommandOptions, knowledge: KnowledgeStore, ids: tuple[str, ...]) -> int:
    from handrail.store.memory.knowledge_store import UnknownKnowledgeEntry

    for entry in _get(knowledge, ids):
        try:
            confirmed = knowledge.confirm(entry.id, time.time_ns())
        except UnknownKnowledgeEntry:
            raise click.UsageError(
                f"{entry.id} was replaced by {entry.superseded_by}. To make it current again: handrail memory undo {entry.id}"
            ) from None
        if setting.json:
            print_json(asdict(confirmed))
        else:
            print_escaped_line(f"confirmed {entry.id}: {escape_to_one_line(entry.text)}")
    return OUTPUT


def _forget(
    setting: CommandOptions, knowledge: KnowledgeStore, ids: tuple[str, ...], *, everything: bool, yes: bool
) -> int:
    if everything and ids:
        raise click.UsageError("IDs and `--all` exclude each other. Pass only one of them.")
    found = knowledge.list_entries(history=True) if everything else _get(knowledge, ids)
    if not setting.json:
        for entry in found:
            print_escaped_line(f"{entry.id}: {escape_to_one_line(entry.text[:_SHOWN_CHARACTERS])}")
    if found:
        require_confirmation(yes, f"Delete {_count(found)} and all earlier versions?", "deleted")
    deleted = knowledge.forget([entry.id for entry in found])
    if setting.json:
        print_json({"forgotten": deleted})
    else:
        print_escaped_line(f"forgotten: {_count(deleted)}")
    return OUTPUT


def _undo(setting: CommandOptions, knowledge: KnowledgeStore, ids: tuple[str, ...]) -> int:
    _get(knowledge, ids)
    restored = [one for id in ids for one in knowledge.restore(id=id)] if ids else knowledge.restore()
    if setting.json:
        print_json({"restored": restored})
    elif restored:
        print_escaped_line(f"current again: {', '.join(restored)}")
    else:
        print_stderr_note("Nothing to undo.")
    return OUTPUT


def _get(knowledge: KnowledgeStore, ids: tuple[str, ...]) -> list[KnowledgeEntry]:
    """Return entries, also from history.

    :raises UsageError: for an unknown id
    """
    found = {id: knowledge.get(id) for id in ids}
    if unknown := [id for id, entry in found.items() if entry is None]:
        raise click.UsageError(f"Unknown IDs: {', '.join(map(repr, unknown))}. `handrail memory` lists the facts.")
    return [entry for entry in found.values() if entry is not None]


def _count(facts: Sequence[object]) -> str:
    return f"{len(facts):,} fact{'' if len(facts) == 1 else 's'}"


def _state(entry: KnowledgeEntry) -> str:
    if entry.superseded_by is not None:
        return "replaced"
    if entry.confirmed_ns is not None:
        return "confirmed"
    return "unconfirmed" if entry.untrusted else "from the user"


def _time(at_ns: int) -> str:
    return f"{datetime.fromtimestamp(at_ns / 1e9).astimezone():%Y-%m-%d %H:%M}"
