"""``handrail state``: the stored state of each workspace, and its removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, workspace_options
from handrail.frontends.cli.commands.log import require_confirmation
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import state_keys
from handrail.frontends.cli.terminal_output import format_bytes, print_escaped_line, print_json, print_note

if TYPE_CHECKING:
    from pathlib import Path

    from handrail.store.state_inventory import StateInventoryEntry


@click.command("state")
@click.argument("action", required=False, type=click.Choice(["list", "remove"]), metavar="[list|remove]")
@click.argument("keys", nargs=-1, metavar="[KEY]...", shell_complete=state_keys)
@click.option("--all", "everything", is_flag=True, help="remove: the state of all workspaces.")
@click.option("--orphans", is_flag=True, help="remove: the state of workspaces that no longer exist.")
@click.option("--dry-run", is_flag=True, help="remove: only show what would be removed.")
@click.option("--yes", is_flag=True, help="remove: do not ask.")
@workspace_options
def command(
    setting: CommandOptions,
    action: str | None,
    keys: tuple[str, ...],
    everything: bool,
    orphans: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """List or remove the stored state of workspaces.

    remove deletes the state (log, sessions, outputs) of this workspace, or of the workspaces with the listed KEYs, or of
    --orphans or --all. It shows the state with its size, and asks for confirmation. State in use cannot be removed.
    """
    from handrail.store.state_folders import find_state_root
    from handrail.store.state_inventory import list_stored_state

    if action in (None, "list"):
        if everything or orphans or dry_run or yes:
            raise click.UsageError(
                "`--all`, `--orphans`, `--dry-run` and `--yes` require `remove`: handrail state remove"
            )
        _print_states(setting, list_stored_state(find_state_root(setting.state)))
        return OUTPUT
    if bool(keys) + everything + orphans > 1:
        raise click.UsageError("KEYs, `--orphans` and `--all` exclude each other. Pass only one of them.")
    kept = list_stored_state(find_state_root(setting.state))
    if everything:
        chosen = kept
    elif orphans:
        chosen = [one for one in kept if one.workspace_missing]
    else:
        chosen = _select_states(setting, kept, keys)
    return _remove(setting, chosen, dry_run=dry_run, yes=yes)


def _select_states(
    setting: CommandOptions, kept: Sequence[StateInventoryEntry], keys: tuple[str, ...]
) -> list[StateInventoryEntry]:
    """Return the state with these keys, or that of this workspace if there are no keys.

    :raises UsageError: for an unknown key
    """
    from handrail.store.state_folders import locate_folders

    wanted = keys or (locate_folders(setting.workspace, setting.state, allow_home=setting.allow_home).key,)
    chosen = [one for one in kept if one.key in wanted]
    unknown = set(keys) - {one.key for one in chosen}
    if unknown:
        raise click.UsageError(
            f"Unknown keys: {', '.join(map(repr, sorted(unknown)))}. `handrail state` lists the keys."
        )
    return chosen


def _remove(setting: CommandOptions, chosen: list[StateInventoryEntry], *, dry_run: bool, yes: bool) -> int:
    from handrail.store.state_folders import find_state_root
    from handrail.store.state_inventory import finish_interrupted_removals

    root = find_state_root(setting.state)
    if not chosen:
        if setting.json:
            print_json({"dry_run": dry_run, "removed": [], "problems": []})
        else:
            print_note("Nothing to remove.")
        return OUTPUT
    if not setting.json:
        _print_states(setting, chosen)
    if dry_run:
        if setting.json:
            print_json({"dry_run": True, "removed": [_state_data(one) for one in chosen], "problems": []})
        return OUTPUT
    require_confirmation(yes, f"Remove this permanently ({format_bytes(sum(one.size_bytes for one in chosen))})?")
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
            f"removed {len(removed)} of {len(chosen)}, {format_bytes(sum(one.size_bytes for one in removed))}"
        )
        for problem in problems:
            print_note(f"handrail state: {problem}")


def _remove_state(root: Path, one: StateInventoryEntry, problems: list[str]) -> bool:
    """Remove the state of one workspace, and return whether all of it was removed.

    :param problems: the list to which failures are added
    """
    from handrail.contract.errors import StartError
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
        print_note("No state is stored yet.")
        return
    rows = [(one.key, format_bytes(one.size_bytes), _last_used(one), _about(one)) for one in kept]
    TerminalRenderer().print_table(("KEY", "SIZE", "LAST USED", "WORKSPACE"), rows, right=(1,))


def _about(one: StateInventoryEntry) -> str:
    from handrail.store.state_inventory import USER_DATA

    if one.key == USER_DATA:
        return "data that tools store for you, in all workspaces"
    where = "an unknown workspace" if one.workspace is None else str(one.workspace)
    if one.workspace_missing:
        where += "  (no longer exists)"
    return where if one.holder is None else f"{where}  (in use by {one.holder})"


def _last_used(one: StateInventoryEntry) -> str:
    if one.used_ns is None:
        return "never used"
    return f"{datetime.fromtimestamp(one.used_ns / 1e9).astimezone():%Y-%m-%d %H:%M}"


def _state_data(one: StateInventoryEntry) -> dict[str, object]:
    return {**asdict(one), "workspace": None if one.workspace is None else str(one.workspace)}
