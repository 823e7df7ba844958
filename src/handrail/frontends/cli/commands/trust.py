"""``handrail trust``: the user reviews a workspace's own configuration, and decides whether all of it applies."""

from __future__ import annotations

import shutil
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

import click

from handrail.contract.text.text_encodings import decode_settings_text
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import (
    load_and_validate_configuration,
    to_one_line_json,
    warn_about_outdated_lease_holder,
)
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import (
    escape_invisible_characters,
    escape_to_one_line,
    print_escaped_line,
    print_json,
    print_prompt,
    print_stderr_note,
)

if TYPE_CHECKING:
    from pathlib import Path

    from handrail.config import MergedConfiguration, WorkspaceFile
    from handrail.store.state_folders import StateFolders


@click.command("trust")
@click.argument("action", required=False, type=click.Choice(["list"]), metavar="[list]")
@click.option(
    "--hash", "known", metavar="SHA256", help="Hash that this command printed, to trust the file without asking."
)
@click.option("--revoke", is_flag=True, help="Revoke the trust in the workspace's file.")
@add_configuration_options
def command(setting: CommandOptions, action: str | None, known: str | None, revoke: bool) -> int:
    """Review and trust the workspace's handrail.toml.

    Rules that deny or ask always apply. Rules that allow, and all other settings, apply only if you trust exactly this
    content. Any change of the file ends the trust. Your decision applies to kernels that start from now on. list shows the
    trusted files of all workspaces.
    """

    if sum((known is not None, revoke, action is not None)) > 1:
        raise click.UsageError("`--hash`, `--revoke` and `list` exclude each other. Pass only one of them.")
    folders = setting.folders
    if action == "list":
        return _list(setting, folders.state)
    if revoke:
        return _revoke(setting, folders)
    config = load_and_validate_configuration(setting)
    if (file := config.workspace) is None:
        print_stderr_note(f"handrail trust: {folders.workspace} has no handrail.toml. To write one: handrail init")
        return ERROR
    if known is not None:
        return _trust_by_hash(setting, file, known)
    return _ask_trust(setting, config, file)


def _trust_by_hash(setting: CommandOptions, file: WorkspaceFile, known: str) -> int:
    if known.strip().lower() != file.sha256:
        print_stderr_note(f"handrail trust: Not trusted, because {file.path} has another hash: {file.sha256}")
        return ERROR
    return _grant_trust(setting, file)


def _ask_trust(setting: CommandOptions, config: MergedConfiguration, file: WorkspaceFile) -> int:
    """Show the full file, and the changes if it is trusted, then ask the user at the terminal."""
    if not file.trusted and not config.untrusted_workspace_values:
        print_stderr_note(f"{file.path} has only rules that deny or ask. They apply without trust. Nothing to decide.")
        return OUTPUT
    if setting.json:
        print_json(_decision_data(file, config))
    else:
        _show(config, file)
    if file.trusted:
        print_stderr_note("This content is trusted. To revoke the trust: handrail trust --revoke")
        return OUTPUT
    if setting.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        print_stderr_note(
            f"Not trusted: there is no terminal to ask. After your review: handrail trust --hash {file.sha256}"
        )
        return ERROR
    if not _ask_yes_no("Trust exactly this content?"):
        print_stderr_note("Not trusted.")
        return ERROR
    return _grant_trust(setting, file)


def _show(config: MergedConfiguration, file: WorkspaceFile) -> None:
    text = decode_settings_text(file.content).removesuffix("\n")
    print_escaped_line(escape_to_one_line(str(file.path)))
    for line in text.replace("\r\n", "\n").split("\n"):
        for number, part in enumerate(
            _wrap_line(escape_invisible_characters(line))
        ):  # marked, so that no line looks like Handrail's
            print_escaped_line(f"  {'┆' if number else '│'} {part}")
    print_escaped_line(f"sha256 {file.sha256}")
    if held := config.untrusted_workspace_values:
        print_escaped_line()
        print_escaped_line("If trusted, these settings apply:")
        for value in held:
            if value.key == "rules":
                print_escaped_line(f"  {escape_to_one_line(str(value.value))}")
            else:
                now = [v for v in config.values if v.key == value.key and not v.inactive_reason]
                before = (
                    f", now {to_one_line_json(now[0].value)} ({escape_to_one_line(str(now[0].origin))})" if now else ""
                )
                print_escaped_line(f"  set {value.key} to {to_one_line_json(value.value)}{before}")


def _grant_trust(setting: CommandOptions, file: WorkspaceFile) -> int:
    """Trust the content that was read and shown, also if the file has changed since."""
    from handrail.store import operator_decisions
    from handrail.store.state_folders import prepare_folders

    folders = prepare_folders(setting.workspace, setting.state, allow_home=setting.allow_home)
    operator_decisions.trust_workspace_content(folders, file.sha256, clock=time.time_ns)
    if setting.json:
        print_json({"file": str(file.path), "sha256": file.sha256, "trusted": True})
    else:
        print_escaped_line(f"trusted {escape_to_one_line(str(file.path))}")
    warn_about_outdated_lease_holder(setting)
    return OUTPUT


def _revoke(setting: CommandOptions, folders: StateFolders) -> int:
    from handrail.store import operator_decisions

    was = operator_decisions.revoke_workspace_trust(folders)
    if setting.json:
        print_json({"revoked": was})
    else:
        print_escaped_line(
            f"{'revoked the trust' if was else 'no file was trusted'} in {escape_to_one_line(str(folders.workspace))}"
        )
    if was:
        warn_about_outdated_lease_holder(setting)
    return OUTPUT


def _list(setting: CommandOptions, state: Path) -> int:
    from handrail.store import operator_decisions

    records = operator_decisions.list_trusted_workspaces(state)
    if setting.json:
        print_json([{"workspace": one.workspace, "sha256": one.sha256, "at_ns": one.at_ns} for one in records])
        return OUTPUT
    rows = [
        (
            one.sha256[:12],
            datetime.fromtimestamp(one.at_ns / 1e9).astimezone().isoformat(sep=" ", timespec="minutes"),
            one.workspace,
        )
        for one in records
    ]
    TerminalRenderer().print_table(("SHA256", "TRUSTED SINCE", "WORKSPACE"), rows)
    if not rows:
        print_stderr_note("No file is trusted.")
    return OUTPUT


def _decision_data(file: WorkspaceFile, config: MergedConfiguration) -> dict[str, object]:
    return {
        "file": str(file.path),
        "sha256": file.sha256,
        "trusted": file.trusted,
        "content": decode_settings_text(file.content),
        "would_count": [value.to_dict() for value in config.untrusted_workspace_values],
    }


def _wrap_line(line: str) -> Iterator[str]:
    """Yield a line in pieces that fit the terminal, so that a wrapped part does not look like a line."""
    width = max(20, shutil.get_terminal_size().columns - 5)
    piece, used = "", 0
    for character in line.expandtabs(4):
        wide = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used + wide > width:
            yield piece
            piece, used = "", 0
        piece, used = piece + character, used + wide
    yield piece


def _ask_yes_no(question: str) -> bool:
    """Ask the user, and return the answer. Earlier input is discarded, and the end of input means no."""
    with suppress(Exception):  # not a POSIX terminal
        import termios

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    while True:
        print_prompt(f"{question} [y/n] ")
        line = sys.stdin.readline()
        if (answer := line.strip().lower()) in ("y", "yes"):
            return True
        if not line or answer in ("n", "no"):
            return False
