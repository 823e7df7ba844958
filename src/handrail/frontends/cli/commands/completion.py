"""``handrail completion``: a script that lets a shell complete Handrail's words with Tab."""

from __future__ import annotations

import click

from handrail.frontends.cli.app import OUTPUT, handrail
from handrail.frontends.cli.show import out_payload

VARIABLE = "_HANDRAIL_COMPLETE"
"""By which click's scripts ask the program; the name is click's rule."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion of a shell: commands, options, tools, sessions, calls.

    \b
    bash:  eval "$(handrail completion bash)"        in ~/.bashrc, bash 4.4 or newer
    zsh:   eval "$(handrail completion zsh)"         in ~/.zshrc, after compinit
    fish:  handrail completion fish | source         in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    # Its own source() would look for the shell first, and remark on it; the text is the same wherever it is printed.
    completion = found(handrail, {}, "handrail", VARIABLE)
    out_payload(completion.source_template % completion.source_vars())
    return OUTPUT
