"""Launch plans: everything that a sandbox is started with, derived from a call's permissions and the machine.

Most calls of a kind need the same sandbox. So its plan is remembered with all lookups that led to it
(:mod:`handrail.sandbox.view.identity`), and made again if a repeated lookup gives another answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Limits, Profile, Program, TerminalSize
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.programs import folder_around
from handrail.sandbox.filters import seccomp
from handrail.sandbox.network import network
from handrail.sandbox.start import launcher
from handrail.sandbox.start.launcher import Mode
from handrail.sandbox.view import identity, mount_table, mounts, protected, toolchains
from handrail.sandbox.view.identity import Looks, Person
from handrail.sandbox.view.mount_table import MountTable

SECRETS_VARIABLE = "HANDRAIL_SECRETS_FD"
"""Holds the number of the descriptor from which a program reads its secrets, as one JSON object."""
_MOST_REMEMBERED, _MOST_ALIKE = 64, 4


@dataclass(frozen=True, slots=True)
class Made:
    """The properties of a sandbox that do not depend on its program.

    :param options: bubblewrap's mount options
    :param start: the folder in which its program begins by default
    :param filter: of system calls, active before the launcher; empty for none
    :param person: the user to become first; None for no other user
    :param staged: the sources of ``options`` that this user could not reach
    :param folders: the folders mounted in addition to the system, with their access
    :param tcp: whether the sandbox has its own loopback to serve on
    :param connect: the ports that it may connect to otherwise
    :param table: what must be true of the mounts that follow from ``options``
    :param standing: the identity and change time of each mounted-over path when the plan was made
    """

    options: tuple[str, ...]
    table: MountTable
    start: str
    filter: bytes
    person: Person | None
    staged: tuple[str, ...]
    folders: tuple[tuple[str, mounts.Access], ...]
    tcp: bool
    connect: tuple[int, ...]
    limits: Limits
    standing: tuple[tuple[str, protected.What, int], ...]

    def __hash__(self) -> int:
        return hash(self.options)  # these are most of it; hashing the rest would cost more than it distinguishes


@dataclass(frozen=True, slots=True)
class Plan:
    """One start: the sandbox's properties and the program in it.

    :param environment: a waiting shell's; a program's environment comes with its call
    :param call: the message to the launcher with which it begins
    :param secrets: the JSON text for the program's descriptor, if it has secrets
    :param terminal: the size of the program's terminal, if it has one
    """

    made: Made
    mode: Mode
    environment: tuple[tuple[str, str], ...]
    call: bytes
    secrets: bytes | None
    merge_stderr: bool
    terminal: TerminalSize | None = None

    @property
    def key(self) -> object:
        """A key that is equal for plans that the same ready sandbox can carry out."""
        return self.made, self.mode, self.environment, self.secrets is not None, self.merge_stderr


@dataclass(frozen=True, slots=True, eq=False)
class _Remembered:
    """A cached plan with the lookups that led to it.

    :param asked: the request that it was made for
    :param looks: the lookups made for it
    :param before: variables that those of the call's profile override
    :param after: variables that override them
    """

    asked: tuple[object, ...]
    looks: Looks
    made: Made
    before: Mapping[str, str]
    after: Mapping[str, str]


class Planning:
    """A planner that makes launch plans and caches them.

    :param system_calls: a filter that replaces the shipped one; empty for none
    """

    def __init__(self, system_calls: bytes | None = None) -> None:
        self._system_calls = system_calls
        self._git: Mapping[str, str] | None = None
        self._remembered: dict[tuple[str, str, bool], list[_Remembered]] = {}
        """The last few of each session, tool and right to write; the least recently used is dropped first."""

    async def plan(
        self, capabilities: CapabilitySet, profile: Profile, program: Program, *, ready_made: bool = False
    ) -> Plan:
        """Return the plan for starting a program.

        :param ready_made: whether the sandbox starts before its call; then a waiting shell reads the shell text
        :raises ToolError: as :meth:`handrail.contract.sandbox.Sandbox.start`
        """
        argv = program.argv
        if not argv:
            raise ToolError("The argv list is empty. Pass a program and its arguments.", kind="invalid_input")
        if (git := self._git) is None:
            git = await asyncio.get_running_loop().run_in_executor(None, toolchains.git_identity, profile.workspace)
            self._git = git
        known = self._made_of(capabilities, profile, git)
        made = known.made
        environment = {**known.before, **profile.environment, **known.after}
        _check_no_nul((made.start, *argv, *environment, *environment.values()))
        cwd = _cwd(profile, made)
        secrets = orjson.dumps(dict(profile.secrets)) if profile.secrets else None
        if secrets is not None:
            environment[SECRETS_VARIABLE] = str(after(program.descriptors))
            environment["PATH"] = outside_of(profile.workspace, environment["PATH"])
        text = None if program.descriptors or secrets else launcher.shell_text(argv, profile.environment)
        if text is not None and (ready_made or len(os.fsencode(text)) > launcher.LONGEST_TEXT):
            call = launcher.shell_call("" if cwd == made.start else cwd, text)
            return Plan(made, "shell", tuple(environment.items()), call, None, program.merge_stderr, program.terminal)
        _check_lengths(argv)
        call = launcher.program_call(cwd, argv, environment)
        return Plan(made, "exec", (), call, secrets, program.merge_stderr, program.terminal)

    def _made_of(self, capabilities: CapabilitySet, profile: Profile, git: Mapping[str, str]) -> _Remembered:
        place = profile.scratch, profile.tool, profile.workspace_writable
        asked = (
            capabilities,
            profile.workspace,
            profile.readable,
            profile.writable,
            profile.further,
            profile.hidden,
            profile.limits,
            profile.masked,
            profile.pinned,
            profile.unix_sockets,
        )
        alike = self._remembered.pop(place, [])
        known = next((one for one in alike if one.asked == asked), None)
        if known is None or not known.looks.same_again():
            if known is not None:
                alike.remove(known)
            known = self._put_together(capabilities, profile, git, asked)
            alike = [*alike[1 - _MOST_ALIKE :], known]
        self._remembered[place] = alike
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return known

    def _put_together(
        self, capabilities: CapabilitySet, profile: Profile, git: Mapping[str, str], asked: tuple[object, ...]
    ) -> _Remembered:
        look = Looks()
        found = toolchains.find(profile.workspace, look)
        folders = mounts.folder_access(capabilities, profile, found, look)
        options: Sequence[str] = mounts.arguments(folders, profile, look)
        person = identity.person_for(profile.workspace, look)
        staged: list[str] = []
        if person is not None:
            identity.prepare(profile, person, look)
        table = mount_table.expected(options, look)  # once the scratch belongs to that user
        if person is not None:
            options, staged = identity.staged(options, person, look)
        connected = capabilities.uses("net.fetch")
        system_calls = self._system_calls
        made = Made(
            tuple(options),
            table,
            start_of(folders, profile),
            seccomp.program(unix_sockets=profile.unix_sockets) if system_calls is None else system_calls,
            person,
            tuple(staged),
            tuple(folders.items()),
            profile.workspace_writable,
            (network.PROXY_PORT,) if connected else (),
            profile.limits,
            protected.standing(profile, look),
        )
        before = _environment(profile, found, git, look)
        return _Remembered(asked, look, made, before, network.environment(capabilities) if connected else {})


def _check_no_nul(words: Iterable[str]) -> None:
    if "\0" in "".join(words):
        raise ToolError(
            "An argument, folder or variable contains a NUL character. Remove it.",
            kind="invalid_input",
        )


def _check_lengths(argv: Iterable[str]) -> None:
    if any(len(os.fsencode(word)) > launcher.LONGEST_ARGUMENT for word in argv):
        raise ToolError(
            "The arguments are too long for the system. Put the data into a file, or pass it on stdin.", kind="limit"
        )


def _cwd(profile: Profile, made: Made) -> str:
    """Return the folder in which the program begins, which must be in its sandbox.

    :raises ToolError: ``denied`` if it is not
    """
    cwd = profile.cwd or made.start
    if cwd != made.start and not any(mounts.is_beneath(cwd, folder) for folder, _ in made.folders):
        raise ToolError(f"`{cwd}` is not in the sandbox of this call. Use a folder of the workspace.", kind="denied")
    return cwd


def outside_of(workspace: str, path: str) -> str:
    """Return PATH without folders of the workspace, for a program that gets secrets or trust."""
    return ":".join(one for one in path.split(":") if folder_around(one, (workspace,)) is None)


def start_of(folders: Mapping[str, mounts.Access], profile: Profile) -> str:
    """Return the folder in which a program begins by default."""
    inside = any(mounts.is_beneath(profile.workspace, folder) for folder in folders)
    return profile.workspace if inside else profile.scratch


def after(descriptors: Mapping[int, int] | None) -> int:
    """Return the first number above the standard three and the given descriptors."""
    return max((2, *(descriptors or ()))) + 1


def _environment(profile: Profile, found: toolchains.Toolchains, git: Mapping[str, str], look: Looks) -> dict[str, str]:
    """Return the environment without the call's own variables: a list of permitted variables."""
    ours = {name: value for name in toolchains.NAMES if (value := look.variable(name)) is not None}
    return {
        "LANG": toolchains.PLAIN,
        **toolchains.passed_on(ours),
        "PATH": ":".join(found.path),
        "HOME": profile.scratch,
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        **git,
        **found.environment,
    }
