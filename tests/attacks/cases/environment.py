"""The environment of Handrail, and what a program could read of it."""

from __future__ import annotations

import os

from tests.attacks.case import Case, breach, python, shell
from tests.attacks.victim import SECRET, VictimHome

_LOADERS = "LD_PRELOAD LD_AUDIT BASH_ENV ENV PROMPT_COMMAND PYTHONSTARTUP PYTHONPATH NODE_OPTIONS PERL5OPT RUBYOPT"


async def _argv_of_the_tool(home: VictimHome) -> str | None:
    """A secret in the arguments of a command: other users' ``ps`` does not show it."""
    said = await home.shell("for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done")
    theirs = [line for line in said.splitlines() if "tests.attacks" in line or "first.py" in line]
    return breach(theirs, "command lines of the outside were read")


async def _no_variables_of_handrail(home: VictimHome) -> str | None:
    said = await home.shell("env -0 | tr '\\0' '\\n' | cut -d= -f1")
    known = {
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TZ",
        "TMPDIR",
        "SHELL",
        "TERM",
        "PWD",
        "SHLVL",
        "_",
        "OLDPWD",
    }
    further = ("GIT_AUTHOR_", "GIT_COMMITTER_", "HANDRAIL_")
    names = {name for name in said.split() if name.isidentifier()}
    odd = {name for name in names - known if not name.startswith(further)}
    poison = odd & {name for name in os.environ if SECRET in os.environ[name] or name in _LOADERS.split()}
    return breach(sorted(poison), "variables of Handrail's own were handed on")


CASES: list[Case] = [
    shell(
        "start-up files by variable",
        "environment",
        "BASH_ENV, ENV, PYTHONSTARTUP, PROMPT_COMMAND run a file of the attacker's with every program",
        "none of them is handed on",
        f'for n in {_LOADERS}; do [ -n "${{!n}}" ] && echo REACHED $n; done',
    ),
    shell(
        "preloaded libraries",
        "environment",
        "LD_PRELOAD and LD_AUDIT are code in every program",
        "neither is handed on",
        "cat /proc/self/environ | tr '\\0' '\\n' | grep -e ^LD_ && echo REACHED",
    ),
    shell(
        "git by variable",
        "environment",
        "GIT_SSH_COMMAND, GIT_EXTERNAL_DIFF and GIT_CONFIG_* name programs",
        "of git's variables only the identity is handed on",
        "env | grep ^GIT_ | grep -v -e '^GIT_AUTHOR_' -e '^GIT_COMMITTER_' -e '^GIT_CONFIG_NOSYSTEM=1' "
        "-e '^GIT_CONFIG_GLOBAL=/dev/null' -e '^GIT_TERMINAL_PROMPT=' -e '^GIT_OPTIONAL_LOCKS=' && echo REACHED",
    ),
    shell(
        "tokens",
        "environment",
        "keys of services in the environment of whoever starts the agent",
        "none is handed on",
        f"env | grep -e {SECRET} && echo REACHED",
    ),
    shell(
        "ways to agents and buses",
        "environment",
        "SSH_AUTH_SOCK, DOCKER_HOST, DBUS_SESSION_BUS_ADDRESS, DISPLAY lead to services of the user",
        "none is handed on",
        "env | grep -i -e agent.sock -e docker -e dbus -e display -e wayland && echo REACHED",
    ),
    shell(
        "environments in /proc",
        "environment",
        "/proc/PID/environ of the process that started one",
        "no process inside has a token in its environment or argv, the first one included",
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -e 'TOP-[S]ECRET-TOKEN' && echo REACHED",
    ),
    Case(
        "secrets in argv",
        "environment",
        "argv is visible to ps",
        "no command line of the outside can be read",
        _argv_of_the_tool,
    ),
    Case(
        "nothing but a list",
        "environment",
        "an environment that is inherited with things taken out always has one more in it",
        "only variables of the list are there",
        _no_variables_of_handrail,
    ),
    python(
        "inherited descriptors",
        "environment",
        "the log's database, or another call's pipe, open in the child",
        "0, 1 and 2 and nothing else; none leads to a file of the outside",
        "found = {n: os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{n}')}\n"
        "odd = {n: to for n, to in found.items() if n not in '012' or not to.startswith(('pipe:', '/dev/null'))}\n"
        "odd = {n: to for n, to in odd.items() if 'probe' not in to}\n"
        "print('REACHED', odd) if odd else print('only the three streams')\n",
        control=False,
        harmless=True,
    ),
    shell(
        "builtins poison nothing that lasts",
        "environment",
        "export, alias, trap, enable and a function for ls change what later commands do",
        "the next call starts from nothing: neither variables nor functions nor start-up files",
        'export LEFT=over; f() { :; }; export -f f; echo \'touch "$HOME/started"\' | tee "$HOME"/x; '
        'for n in .bashrc .profile .bash_profile .bash_login; do cp "$HOME/x" "$HOME/$n"; done',
        control=False,
    ),
    shell(
        "what an earlier call left in its home is no start-up file",
        "environment",
        "a planted .bashrc, .profile or .bash_profile that the next shell reads",
        "no shell of a later call reads them",
        'declare -F | grep -w f && echo REACHED; [ -n "$LEFT" ] && echo REACHED; bash -c true; '
        '[ -e "$HOME/started" ] && echo REACHED',
        sign="REACHED",
        control=False,
    ),
]
