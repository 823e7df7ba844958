"""``handrail completion``: the script that lets a shell complete Handrail's commands and arguments with Tab."""

from __future__ import annotations

import click

from handrail.frontends.cli.command_group import OUTPUT, handrail
from handrail.frontends.cli.terminal_output import print_terminal_safe_text

VARIABLE = "_HANDRAIL_COMPLETE"
"""The variable by which click's scripts request completions. Click derives its name from the program's."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script of a shell.

    It completes commands, options, tools, sessions and calls.

    \b
    bash:  eval "$(handrail completion bash)"        in ~/.bashrc, bash 4.4 or newer
    zsh:   eval "$(handrail completion zsh)"         in ~/.zshrc, after compinit
    fish:  handrail completion fish | source         in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    # source() would first check the installed shell and may print a warning. The text is the same on every machine.
    completion = found(handrail, {}, "handrail", VARIABLE)
    print_terminal_safe_text(completion.source_template % completion.source_vars())
    return OUTPUT
