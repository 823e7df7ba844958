"""``handrail state``: the stored state of each workspace, its adoption, copies and removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from handrail.contract.errors import StartError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_workspace_options
from handrail.frontends.cli.command_runner import print_former_paths
from handrail.frontends.cli.commands.log import require_confirmation
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import state_keys
from handrail.frontends.cli.terminal_output import (
    ProgressLine,
    format_byte_count,
    print_escaped_line,
    print_json,
    print_stderr_note,
    print_terminal_safe_text,
)
from handrail.store.database.sqlite_connection import DatabaseNotCreated, open_reader
from handrail.store.state_folders import resolve_state_root

if TYPE_CHECKING:
    from pathlib import Path

    from handrail.record.state_backup import BackupDescription
    from handrail.store.state_folders import StateFolders
    from handrail.store.state_inventory import StateInventoryEntry


@click.command("state")
@click.argument(
    "action",
    required=False,
    type=click.Choice(["list", "adopt", "backup", "restore", "export", "remove"]),
    metavar="[list|adopt|backup|restore|export|remove]",
)
@click.argument("values", nargs=-1, metavar="[KEY|FOLDER|SESSION]...", shell_complete=state_keys)
@click.option("--all", "everything", is_flag=True, help="remove: the state of all workspaces.")
@click.option("--orphans", is_flag=True, help="remove: the state of workspaces that no longer exist.")
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="export: new file. Default: stdout.")
@click.option("--replace", is_flag=True, help="restore: remove the current state of the workspace.")
@click.option("--dry-run", is_flag=True, help="adopt, remove: only show what would be done.")
@click.option("--yes", is_flag=True, help="adopt, restore, remove: do not ask.")
@add_workspace_options
def command(setting: CommandOptions, action: str | None, values: tuple[str, ...], **flags: Any) -> int:
    """List, move, copy or remove the stored state of workspaces.

    adopt lets this workspace continue with the state of its former path, after its folder was moved. Handrail recognises a
    moved folder by what the file system knows of it, never by its content. For a folder on another file system, pass the KEY
    of the state. It shows which stored answers will hold, and asks for confirmation.

    backup copies the state of this workspace into FOLDER, also while Handrail runs. Repeat it to continue an interrupted
    backup, or to bring one up to date. restore checks the backup in FOLDER and restores it for this workspace.

    export writes all sessions, or the listed SESSIONs, as JSON lines.

    remove deletes the state (log, sessions, outputs) of this workspace, or of the workspaces with the listed KEYs, or of
    --orphans or --all. It shows the state with its size, and asks for confirmation. State in use cannot be removed.
    """
    given = {name for name, value in flags.items() if value}
    if wrong := sorted(given - _FLAGS[action]):
        names = " and ".join(f"`--{'all' if name == 'everything' else name.replace('_', '-')}`" for name in wrong)
        raise click.UsageError(f"{names} cannot be used with `{action or 'state'}`. See `handrail state --help`.")
    match action:
        case "adopt":
            return _adopt(setting, _at_most_one(values, "KEY"), dry_run=flags["dry_run"], yes=flags["yes"])
        case "backup":
            return _back_up(setting, _require_single_workspace(values, "backup"))
        case "restore":
            return _restore(
                setting, _require_single_workspace(values, "restore"), replace=flags["replace"], yes=flags["yes"]
            )
        case "export":
            return _export(setting, values, flags["out"])
        case "remove":
            return _remove_chosen(setting, values, flags)
        case _:
            _list_states(setting)
            return OUTPUT


_FLAGS: dict[str | None, set[str]] = {
    None: set(),
    "list": set(),
    "adopt": {"dry_run", "yes"},
    "backup": set(),
    "restore": {"replace", "yes"},
    "export": {"out"},
    "remove": {"everything", "orphans", "dry_run", "yes"},
}
"""The flags of each action."""


def _at_most_one(values: tuple[str, ...], name: str) -> str | None:
    if len(values) > 1:
        raise click.UsageError(f"Too many values: {' '.join(values)!r:.80}. Pass one {name}.")
    return values[0] if values else None


def _require_single_workspace(values: tuple[str, ...], action: str) -> Path:
    from pathlib import Path

    if (value := _at_most_one(values, "FOLDER")) is None:
        raise click.UsageError(f"The folder is missing. Pass it, as in: handrail state {action} FOLDER")
    return Path(value).expanduser()


def _locate(setting: CommandOptions) -> StateFolders:

    return setting.folders


def _adopt(setting: CommandOptions, key: str | None, *, dry_run: bool, yes: bool) -> int:
    from handrail.store.state_adoption import adopt_state, select_adoptable_state

    folders = _locate(setting)
    chosen = select_adoptable_state(folders, key)
    rules = _stored_rules(folders, chosen.stored)
    if not setting.json:
        _print_states(setting, [chosen.stored])
        if not chosen.is_recognised:
            print_stderr_note(
                f"handrail state: {folders.workspace} is not recognised as the folder of this state: it is a copy, or on another "
                "file system. Adopt the state only if you know that it belongs here."
            )
        for rule in rules:
            print_escaped_line(f"stored answer that will apply here: {rule}")
    if not dry_run:
        require_confirmation(yes, f"Use this state for {folders.workspace}?", "adopted")
        adopt_state(folders, chosen)
    done = {"workspace": str(folders.workspace), "key": chosen.stored.key, "recognised": chosen.is_recognised}
    if setting.json:
        print_json({"dry_run": dry_run, **done, "rules": rules})
    elif not dry_run:
        print_escaped_line(f"adopted: {folders.workspace} uses the state {chosen.stored.key}")
        print_stderr_note(
            "If the workspace has a configuration that you trust, run `handrail trust`: trust belongs to a path."
        )
    return OUTPUT


def _stored_rules(folders: StateFolders, stored: StateInventoryEntry) -> list[str]:
    """Return the texts of the project rules that answers stored in a state."""
    from contextlib import closing
    from dataclasses import replace

    from handrail.store.tables.approval_tables import ApprovalReader

    try:
        with closing(open_reader(replace(folders, key=stored.key).database_file)) as connection:
            return [rule.text for rule in ApprovalReader(connection).list_rules()]
    except DatabaseNotCreated:
        return []


def _back_up(setting: CommandOptions, target: Path) -> int:
    import time

    from handrail.record.state_backup import back_up_state

    with ProgressLine() as progress:
        found = back_up_state(_locate(setting), target, time.time_ns(), progress.show)
    _show_backup(setting, found, f"backed up to {target}")
    return OUTPUT


def _restore(setting: CommandOptions, backup: Path, *, replace: bool, yes: bool) -> int:
    from handrail.record.state_backup import read_backup_description, restore_state

    folders, found = _locate(setting), read_backup_description(backup)
    if replace or found.workspace != str(folders.workspace):
        print_stderr_note(f"handrail state: the backup is of {found.workspace}, from {_time(found.created_ns)}.")
        question = f"Restore it for {folders.workspace}" + (", and remove its present state?" if replace else "?")
        require_confirmation(yes, question, "restored")
    with ProgressLine() as progress:
        restore_state(folders, backup, replace=replace, show=progress.show)
    _show_backup(setting, found, f"restored for {folders.workspace}")
    return OUTPUT


def _show_backup(setting: CommandOptions, found: BackupDescription, done: str) -> None:
    if setting.json:
        print_json(asdict(found))
    else:
        size = format_byte_count(found.bytes)
        print_escaped_line(f"{done}: {found.records:,} records, {found.files:,} files, {size}, head {found.head}")


def _export(setting: CommandOptions, sessions: tuple[str, ...], out: str | None) -> int:
    import os
    import time
    from contextlib import closing
    from importlib.metadata import version

    from handrail.record.session_export import format_line, iterate_session_export_lines

    folders = _locate(setting)
    program = f"handrail {version('handrail')}"
    with closing(open_reader(folders.database_file)) as connection:
        lines = iterate_session_export_lines(connection, str(folders.workspace), program, time.time_ns(), sessions)
        first = next(lines)  # before a file is made
        if out is None:
            for line in (first, *lines):
                print_terminal_safe_text(format_line(line))
            return OUTPUT
        try:
            descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise click.UsageError(
                f"The file {out} cannot be created: {error.strerror}. Choose a new file name."
            ) from None
        count = 1
        with os.fdopen(descriptor, "w", encoding="utf-8") as file, ProgressLine() as progress:
            file.write(format_line(first) + "\n")
            for line in lines:
                file.write(format_line(line) + "\n")
                count += 1
                progress.show_count("lines", count)
    if setting.json:
        print_json({"file": out, "lines": count})
    else:
        print_escaped_line(f"exported {count:,} lines to {out}")
    return OUTPUT


def _list_states(setting: CommandOptions) -> None:
    from handrail.store.state_inventory import list_stored_state

    _print_states(setting, list_stored_state(resolve_state_root(setting.state)))
    if setting.json:
        return
    with suppress(StartError):  # the folder is no workspace
        print_former_paths(_locate(setting))


def _remove_chosen(setting: CommandOptions, keys: tuple[str, ...], flags: Mapping[str, Any]) -> int:
    from handrail.store.state_inventory import list_stored_state

    if bool(keys) + flags["everything"] + flags["orphans"] > 1:
        raise click.UsageError("KEYs, `--orphans` and `--all` exclude each other. Pass only one of them.")
    kept = list_stored_state(resolve_state_root(setting.state))
    if flags["everything"]:
        chosen = kept
    elif flags["orphans"]:
        chosen = [one for one in kept if one.workspace_missing]
    else:
        chosen = _select_states(setting, kept, keys)
    return _remove(setting, chosen, dry_run=flags["dry_run"], yes=flags["yes"])


def _select_states(
    setting: CommandOptions, kept: Sequence[StateInventoryEntry], keys: tuple[str, ...]
) -> list[StateInventoryEntry]:
    """Return the state with these keys, or that of this workspace if there are no keys.

    :raises UsageError: for an unknown key
    """

    wanted = keys or (setting.folders.key,)
    chosen = [one for one in kept if one.key in wanted]
    if unknown := set(keys) - {one.key for one in chosen}:
        raise click.UsageError(
            f"Unknown keys: {', '.join(map(repr, sorted(unknown)))}. `handrail state` lists the keys."
        )
    return chosen


def _remove(setting: CommandOptions, chosen: list[StateInventoryEntry], *, dry_run: bool, yes: bool) -> int:
    from handrail.store.state_inventory import finish_interrupted_removals

    root = resolve_state_root(setting.state)
    if not chosen:
        if setting.json:
            print_json({"dry_run": dry_run, "removed": [], "problems": []})
        else:
            print_stderr_note("Nothing to remove.")
        return OUTPUT
    if not setting.json:
        _print_states(setting, chosen)
    if dry_run:
        if setting.json:
            print_json({"dry_run": True, "removed": [_state_data(one) for one in chosen], "problems": []})
        return OUTPUT
    require_confirmation(yes, f"Remove this permanently ({format_byte_count(sum(one.size_bytes for one in chosen))})?")
    problems = finish_interrupted_removals(root)
    removed = [one for one in chosen if _remove_state(root, one, problems)]
    _show_removed(setting, chosen, removed, problems)
    return ERROR if problems else OUTPUT


def _show_removed(
    setting: CommandOptions,
    chosen: Sequence[StateInventoryEntry],
    removed: Sequence[StateInventoryEntry],
    problems: Sequence[str],
) -> None:
    if setting.json:
        print_json({"dry_run": False, "removed": [_state_data(one) for one in removed], "problems": problems})
    else:
        print_escaped_line(
            f"removed {len(removed)} of {len(chosen)}, {format_byte_count(sum(one.size_bytes for one in removed))}"
        )
        for problem in problems:
            print_stderr_note(f"handrail state: {problem}")


def _remove_state(root: Path, one: StateInventoryEntry, problems: list[str]) -> bool:
    """Remove the state of one workspace, and return whether all of it was removed.

    :param problems: the list to which failures are added
    """
    from handrail.store.state_inventory import remove_workspace_state

    try:
        failed = remove_workspace_state(root, one.key)
    except StartError as error:
        failed = [str(error)]
    problems += failed
    return not failed


def _print_states(setting: CommandOptions, kept: Sequence[StateInventoryEntry]) -> None:
    if setting.json:
        print_json([_state_data(one) for one in kept])
        return
    if not kept:
        print_stderr_note("No state is stored yet.")
        return
    rows = [(one.key, format_byte_count(one.size_bytes), _last_used(one), _describe_state_entry(one)) for one in kept]
    TerminalRenderer().print_table(("KEY", "SIZE", "LAST USED", "WORKSPACE"), rows, right=(1,))


def _describe_state_entry(one: StateInventoryEntry) -> str:
    from handrail.store.state_inventory import MEMORY, USER_DATA

    if one.key == USER_DATA:
        return "data that tools store for you, in all workspaces"
    if one.key == MEMORY:
        return "facts that agents stored for you, in all workspaces"
    where = "an unknown workspace" if one.workspace is None else str(one.workspace)
    if one.workspace_missing:
        where += "  (no longer exists)"
    return where if one.holder is None else f"{where}  (in use by {one.holder})"


def _last_used(one: StateInventoryEntry) -> str:
    if one.used_ns is None:
        return "never used"
    return _time(one.used_ns)


def _time(at_ns: int) -> str:
    return f"{datetime.fromtimestamp(at_ns / 1e9).astimezone():%Y-%m-%d %H:%M}"


def _state_data(one: StateInventoryEntry) -> dict[str, object]:
    return {**asdict(one), "workspace": None if one.workspace is None else str(one.workspace)}
