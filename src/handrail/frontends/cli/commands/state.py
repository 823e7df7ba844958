"""``handrail state``: the stored state of each workspace, and its removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.commands.log import agreed
from handrail.frontends.cli.completing import state_keys
from handrail.frontends.cli.options import Setting, located
from handrail.frontends.cli.show import amount, note, out, out_json, out_rows

if TYPE_CHECKING:
    from pathlib import Path

    from handrail.store.inventory import Kept


@click.command("state")
@click.argument("action", required=False, type=click.Choice(["remove"]), metavar="[remove]")
@click.argument("keys", nargs=-1, metavar="[KEY]...", shell_complete=state_keys)
@click.option("--all", "everything", is_flag=True, help="remove: the state of all workspaces.")
@click.option("--orphans", is_flag=True, help="remove: the state of workspaces that no longer exist.")
@click.option("--dry-run", is_flag=True, help="remove: only show what would be removed.")
@click.option("--yes", is_flag=True, help="remove: do not ask.")
@located
def command(
    setting: Setting,
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
    from handrail.store.folders import state_root
    from handrail.store.inventory import inventory

    if action is None:
        if everything or orphans or dry_run or yes:
            raise click.UsageError(
                "`--all`, `--orphans`, `--dry-run` and `--yes` require `remove`: handrail state remove"
            )
        _listed(setting, inventory(state_root(setting.state)))
        return OUTPUT
    if bool(keys) + everything + orphans > 1:
        raise click.UsageError("KEYs, `--orphans` and `--all` exclude each other. Pass only one of them.")
    kept = inventory(state_root(setting.state))
    if everything:
        chosen = kept
    elif orphans:
        chosen = [one for one in kept if one.gone]
    else:
        chosen = _named(setting, kept, keys)
    return _remove(setting, chosen, dry_run=dry_run, yes=yes)


def _named(setting: Setting, kept: Sequence[Kept], keys: tuple[str, ...]) -> list[Kept]:
    """Return the state with these keys, or that of this workspace if there are no keys.

    :raises UsageError: for an unknown key
    """
    from handrail.store.folders import locate

    wanted = keys or (locate(setting.workspace, setting.state, allow_home=setting.allow_home).key,)
    chosen = [one for one in kept if one.key in wanted]
    unknown = set(keys) - {one.key for one in chosen}
    if unknown:
        raise click.UsageError(
            f"Unknown keys: {', '.join(map(repr, sorted(unknown)))}. `handrail state` lists the keys."
        )
    return chosen


def _remove(setting: Setting, chosen: list[Kept], *, dry_run: bool, yes: bool) -> int:
    from handrail.store.folders import state_root
    from handrail.store.inventory import sweep

    root = state_root(setting.state)
    if not chosen:
        if setting.json:
            out_json({"dry_run": dry_run, "removed": [], "problems": []})
        else:
            note("Nothing to remove.")
        return OUTPUT
    if not setting.json:
        _listed(setting, chosen)
    if dry_run:
        if setting.json:
            out_json({"dry_run": True, "removed": [_plain(one) for one in chosen], "problems": []})
        return OUTPUT
    agreed(yes, f"Remove this permanently ({amount(sum(one.bytes for one in chosen))})?")
    problems = sweep(root)
    removed = [one for one in chosen if _is_removed(root, one, problems)]
    _show_removed(setting, chosen, removed, problems)
    return ERROR if problems else OUTPUT


def _show_removed(setting: Setting, chosen: Sequence[Kept], removed: Sequence[Kept], problems: Sequence[str]) -> None:
    if setting.json:
        out_json({"dry_run": False, "removed": [_plain(one) for one in removed], "problems": problems})
    else:
        out(f"removed {len(removed)} of {len(chosen)}, {amount(sum(one.bytes for one in removed))}")
        for problem in problems:
            note(f"handrail state: {problem}")


def _is_removed(root: Path, one: Kept, problems: list[str]) -> bool:
    """Remove the state of one workspace, and return whether all of it was removed.

    :param problems: the list to which failures are added
    """
    from handrail.contract.errors import StartError
    from handrail.store.inventory import remove

    try:
        failed = remove(root, one.key)
    except StartError as error:
        failed = [str(error)]
    problems += failed
    return not failed


def _listed(setting: Setting, kept: Sequence[Kept]) -> None:
    if setting.json:
        out_json([_plain(one) for one in kept])
        return
    if not kept:
        note("No state is stored yet.")
        return
    rows = [(one.key, amount(one.bytes), _used(one), _about(one)) for one in kept]
    out_rows([("KEY", "SIZE", "LAST USED", "WORKSPACE"), *rows])


def _about(one: Kept) -> str:
    from handrail.store.inventory import USER_DATA

    if one.key == USER_DATA:
        return "data that tools store for you, in all workspaces"
    where = "an unknown workspace" if one.workspace is None else str(one.workspace)
    if one.gone:
        where += "  (no longer exists)"
    return where if one.holder is None else f"{where}  (in use by {one.holder})"


def _used(one: Kept) -> str:
    if one.used_ns is None:
        return "never used"
    return f"{datetime.fromtimestamp(one.used_ns / 1e9).astimezone():%Y-%m-%d %H:%M}"


def _plain(one: Kept) -> dict[str, object]:
    return {**asdict(one), "workspace": None if one.workspace is None else str(one.workspace)}
