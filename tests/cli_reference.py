"""Generate the reference page of the command line from the click commands.

``python -m tests.conformance`` writes the page to ``docs/reference/cli.md`` and compares it with ``--check``.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import click

from handrail.frontends.cli.command_group import EPILOG, handrail

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"

_HEAD = """\
# Command line

This page describes every command of `handrail` and its options. `make docs` writes it from the commands, and a test fails if a
command or an option is missing. `handrail COMMAND --help` prints the same text.
"""
_RANGES = click.IntRange | click.FloatRange
_COMMON = 8
"""An option with the same name and help in this many commands is described once."""
_VARIABLES = """\
## Environment variables

Every setting has a variable, which [Configuration](configuration.md) lists. These variables belong to the command line:

| variable | meaning |
|---|---|
| `HANDRAIL_STATE` | State folder, as `--state`. |
| `HANDRAIL_MODEL` | Model of `handrail run` and `handrail acp`, as `--model`. |
| `HANDRAIL_HEADLESS` | `1` sets `--headless`, `0` turns it off. Without it, `CI` sets `--headless`. |
| `HANDRAIL_DEBUG` | `1` prints the traceback of an unexpected error. |
"""


def commands() -> list[tuple[str, click.Command, click.Context]]:
    """Return every command with its full name, in the order of the help."""
    return list(_below(handrail, click.Context(handrail, info_name="handrail"), "handrail"))


def _below(
    command: click.Command, context: click.Context, name: str
) -> Iterator[tuple[str, click.Command, click.Context]]:
    yield name, command, context
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from _below(found, click.Context(found, info_name=inner, parent=context), f"{name} {inner}")


def options(command: click.Command) -> list[click.Option]:
    """Return the options of a command that its help shows."""
    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden]


def render() -> str:
    """Return the page as Markdown."""
    every = commands()
    counts = Counter(_row(option) for _, command, _ in every for option in options(command))
    common = [row for row, count in counts.items() if count >= _COMMON]
    lines = [_HEAD, "## Commands", "", "| command | purpose |", "|---|---|"]
    lines += [f"| [`{name}`](#{name.replace(' ', '-')}) | {_summary(command)} |" for name, command, _ in every[1:]]
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|", *_codes(), ""]
    lines += ["## Common options", "", "Most commands have these options. Each section names those that apply.", ""]
    lines += [*_table(("option", "default", "meaning"), common), _VARIABLES]
    for name, command, context in every:
        lines += _section(name, command, context, common)
    return "\n".join(lines).rstrip() + "\n"


def _summary(command: click.Command) -> str:
    return (command.help or "").strip().partition("\n\n")[0].replace("\n", " ").replace("\b", "").strip()


def _codes() -> Iterable[str]:
    text = EPILOG.partition(": ")[2].rstrip(".")
    return (f"| {code} | {meaning} |" for code, meaning in re.findall(r"(\d+) ((?:[^,(]|\([^)]*\))+)", text))


def _section(
    name: str, command: click.Command, context: click.Context, common: Sequence[tuple[str, str, str]]
) -> Iterator[str]:
    yield f"## `{name}`"
    yield ""
    yield from _help(command.help or "")
    yield from ("```text", f"{name} {' '.join(command.collect_usage_pieces(context))}", "```", "")
    rows = [_row(option) for option in options(command)]
    yield from _table(("option", "default", "meaning"), [row for row in rows if row not in common])
    if shared := [row[0] for row in rows if row in common]:
        yield f"Common options: {', '.join(names.partition(',')[0].partition(' ')[0] for names in shared)}."
        yield ""


def _row(option: click.Option) -> tuple[str, str, str]:
    """Return the names, the default and the meaning of an option."""
    names = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
    if not option.is_flag:
        ranged = option.type._describe_range() if isinstance(option.type, _RANGES) and not option.metavar else ""  # pyright: ignore[reportPrivateUsage]
        metavar = ranged or option.make_metavar(click.Context(click.Command("x")))
        shown = f"<code>{html.escape(metavar).replace('|', '&#124;')}</code>" if "|" in metavar else f"`{metavar}`"
        names = f"{names} {shown}"
    text = (option.help or "").rstrip()
    meaning, _, default = text.partition("Default: ")
    default, _, rest = default.partition(". ")
    if not default and not option.is_flag and isinstance(option.default, str | int | float):
        default = str(cast("Any", option.default))
    meaning = f"{meaning} {rest}".strip()
    return (
        names,
        default.rstrip(".") or ("off" if option.is_flag else "none"),
        meaning.replace("|", "\\|"),
    )


def _help(text: str) -> Iterator[str]:
    """Yield the help text as Markdown; a block after ``\\b`` keeps its lines."""
    for block in text.strip().split("\n\n"):
        if "\b" in block:
            yield from ("```text", *block.replace("\b", "").strip("\n").splitlines(), "```", "")
        else:
            yield from (_escaped(" ".join(block.split())), "")


def _escaped(text: str) -> str:
    return re.sub(r"([*_<|])", r"\\\1", text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"| {' | '.join(head)} |"
        yield "|---" * len(head) + "|"
        yield from (f"| {' | '.join(row)} |" for row in rows)
        yield ""
