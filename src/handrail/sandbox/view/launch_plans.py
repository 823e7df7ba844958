"""Launch plans: everything that a sandbox is started with, derived from a call's permissions and the machine.

Most calls of a kind need the same sandbox. So its plan is remembered with all lookups that led to it
(:mod:`handrail.sandbox.view.sandbox_user`), and made again if a repeated lookup gives another answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import orjson

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, SandboxLimits, SandboxProfile, TerminalSize
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.program_lookup import find_enclosing_folder
from handrail.sandbox.filters import seccomp
from handrail.sandbox.network import sandbox_network
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.launcher_messages import LaunchMode
from handrail.sandbox.view import mount_comparison, mount_options, protected_mounts, sandbox_user, toolchains
from handrail.sandbox.view.mount_comparison import ExpectedMounts
from handrail.sandbox.view.sandbox_user import LookupCache, SandboxUser

SECRETS_VARIABLE = "HANDRAIL_SECRETS_FD"
"""Holds the number of the descriptor from which a program reads its secrets, as one JSON object."""
_MOST_REMEMBERED, _MOST_ALIKE = 64, 4


class SandboxSetup(Struct, frozen=True):
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
    :param network: the name of the loopback that it shares; empty for its own
    :param mounted_states: the identity and change time of each mounted-over path when the plan was made
    """

    options: tuple[str, ...]
    table: ExpectedMounts
    start: str
    filter: bytes
    person: SandboxUser | None
    staged: tuple[str, ...]
    folders: tuple[tuple[str, mount_options.MountAccess], ...]
    tcp: bool
    connect: tuple[int, ...]
    limits: SandboxLimits
    network: str
    mounted_states: tuple[tuple[str, protected_mounts.FileIdentity, int], ...]

    def __hash__(self) -> int:
        return hash(self.options)  # these are most of it; hashing the rest would cost more than it distinguishes


class LaunchPlan(Struct, frozen=True):
    """One start: the sandbox's properties and the program in it.

    :param environment: a waiting shell's; a program's environment comes with its call
    :param call: the message to the launcher with which it begins
    :param secrets: the JSON text for the program's descriptor, if it has secrets
    :param terminal: the size of the program's terminal, if it has one
    :param program: the folder, argv and environment that ``call`` has; None for a shell text
    """

    made: SandboxSetup
    mode: LaunchMode
    environment: tuple[tuple[str, str], ...]
    call: bytes
    secrets: bytes | None
    merge_stderr: bool
    terminal: TerminalSize | None = None
    program: tuple[str, Sequence[str], Mapping[str, str]] | None = None

    def with_proxy_port(self, port: int) -> LaunchPlan:
        """Return the same plan with the proxy of its program behind another port."""
        if port == sandbox_network.PROXY_PORT:
            return self
        environment = tuple(sandbox_network.replace_proxy_port(dict(self.environment), port).items())
        if self.program is None:
            return replace(self, environment=environment)
        folder, argv, given = self.program
        call = launcher_messages.encode_program_start_message(
            folder, argv, sandbox_network.replace_proxy_port(given, port)
        )
        return replace(self, environment=environment, call=call)

    @property
    def ready_sandbox_key(self) -> object:
        """A key that is equal for plans that the same ready sandbox can carry out."""
        return self.made, self.mode, self.environment, self.secrets is not None, self.merge_stderr


class _CachedPlan(Struct, frozen=True, eq=False):
    """A cached plan with the lookups that led to it.

    :param request: the request that it was made for
    :param lookups: the lookups made for it
    :param before: variables that those of the call's profile override
    :param after: variables that override them
    """

    request: tuple[object, ...]
    lookups: LookupCache
    made: SandboxSetup
    before: Mapping[str, str]
    after: Mapping[str, str]


class LaunchPlanner:
    """A planner that makes launch plans and caches them.

    :param system_calls: a filter that replaces the shipped one; empty for none
    """

    def __init__(self, system_calls: bytes | None = None) -> None:
        self._system_calls = system_calls
        self._git_variables: Mapping[str, str] | None = None
        self._remembered: dict[tuple[str, str, bool], list[_CachedPlan]] = {}
        """The last few of each session, tool and right to write; the least recently used is dropped first."""

    async def plan(
        self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec, *, ready_made: bool = False
    ) -> LaunchPlan:
        """Return the plan for starting a program.

        :param ready_made: whether the sandbox starts before its call; then a waiting shell reads the shell text
        :raises ToolError: as :meth:`handrail.contract.sandbox_protocol.Sandbox.start`
        """
        argv = program.argv
        if not argv:
            raise ToolError("The argv list is empty. Pass a program and its arguments.", kind="invalid_input")
        if (git := self._git_variables) is None:
            git = await asyncio.get_running_loop().run_in_executor(
                None, toolchains.read_git_identity, profile.workspace
            )
            self._git_variables = git
        known = self._get_or_build(capabilities, profile, git)
        made = known.made
        # The call's variables override the defaults, and the ones that the sandbox depends on override those of the
        # call.
        environment = {**known.before, **profile.environment, **known.after}
        _check_no_nul((made.start, *argv, *environment, *environment.values()))
        cwd = _find_program_folder(profile, made)
        secrets = orjson.dumps(dict(profile.secrets)) if profile.secrets else None
        if secrets is not None:
            environment[SECRETS_VARIABLE] = str(find_free_descriptor_number(program.descriptors))
            # A program of the workspace with the name of a system program must not be started with secrets.
            environment["PATH"] = remove_workspace_from_path(profile.workspace, environment["PATH"])
        text = (
            None
            if program.descriptors or secrets
            else launcher_messages.find_prestartable_shell_text(argv, profile.environment)
        )
        if text is not None and (ready_made or len(os.fsencode(text)) > launcher_messages.MAX_TEXT_BYTES):
            call = launcher_messages.encode_shell_start_message("" if cwd == made.start else cwd, text)
            return LaunchPlan(
                made, "shell", tuple(environment.items()), call, None, program.merge_stderr, program.terminal
            )
        _check_lengths(argv)
        call = launcher_messages.encode_program_start_message(cwd, argv, environment)
        started = cwd, argv, environment
        return LaunchPlan(made, "exec", (), call, secrets, program.merge_stderr, program.terminal, started)

    def _get_or_build(
        self, capabilities: CapabilitySet, profile: SandboxProfile, git: Mapping[str, str]
    ) -> _CachedPlan:
        place = profile.scratch, profile.tool, profile.workspace_writable
        asked = (
            capabilities,
            profile.workspace,
            profile.readable,
            profile.writable,
            profile.read_only_roots,
            profile.hidden,
            profile.limits,
            profile.masked,
            profile.pinned,
            profile.listed,
            profile.unix_sockets,
            profile.network,
            profile.serves,
        )
        alike = self._remembered.pop(place, [])
        known = next((one for one in alike if one.request == asked), None)
        # A cached plan is valid only while every file and variable that it was derived from is unchanged.
        if known is None or not known.lookups.are_lookups_unchanged():
            if known is not None:
                alike.remove(known)
            known = self._build(capabilities, profile, git, asked)
            # A few plans, since calls of one tool may alternate between requests, such as with and without network.
            alike = [*alike[1 - _MOST_ALIKE :], known]
        # Popped above and added again, so that the order of the dictionary is that of the last use.
        self._remembered[place] = alike
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return known

    def _build(
        self, capabilities: CapabilitySet, profile: SandboxProfile, git: Mapping[str, str], asked: tuple[object, ...]
    ) -> _CachedPlan:
        look = LookupCache()
        found = toolchains.find_toolchains(profile.workspace, look)
        folders = mount_options.compute_mount_access(capabilities, profile, found, look)
        options: Sequence[str] = mount_options.build_mount_options(folders, profile, look)
        person = sandbox_user.find_sandbox_user(profile.workspace, look)
        staged: list[str] = []
        if person is not None:
            sandbox_user.give_user_folder_access(profile, person, look)
        table = mount_comparison.derive_expected_mounts(options, look)  # once the scratch belongs to that user
        if person is not None:
            options, staged = sandbox_user.replace_unreachable_sources(options, person, look)
        connected = sandbox_network.needs_proxy(capabilities, profile)
        system_calls = self._system_calls
        made = SandboxSetup(
            tuple(options),
            table,
            find_default_start_folder(folders, profile),
            seccomp.build_filter(unix_sockets=profile.unix_sockets) if system_calls is None else system_calls,
            person,
            tuple(staged),
            tuple(folders.items()),
            profile.workspace_writable or profile.serves,
            (sandbox_network.PROXY_PORT,) if connected else (),
            profile.limits,
            profile.network,
            protected_mounts.read_mounted_path_states(profile, look),
        )
        before = _build_permitted_environment(profile, found, git, look)
        return _CachedPlan(
            asked, look, made, before, sandbox_network.build_proxy_environment(capabilities) if connected else {}
        )


def _check_no_nul(words: Iterable[str]) -> None:
    if "\0" in "".join(words):
        raise ToolError(
            "An argument, folder or variable contains a NUL character. Remove it.",
            kind="invalid_input",
        )


def _check_lengths(argv: Iterable[str]) -> None:
    if any(len(os.fsencode(word)) > launcher_messages.MAX_ARGUMENT_BYTES for word in argv):
        raise ToolError(
            "The arguments are too long for the system. Put the data into a file, or pass it on stdin.", kind="limit"
        )


def _find_program_folder(profile: SandboxProfile, made: SandboxSetup) -> str:
    """Return the folder in which the program begins, which must be in its sandbox.

    :raises ToolError: ``denied`` if it is not
    """
    cwd = profile.cwd or made.start
    if cwd != made.start and not any(mount_options.is_beneath(cwd, folder) for folder, _ in made.folders):
        raise ToolError(f"`{cwd}` is not in the sandbox of this call. Use a folder of the workspace.", kind="denied")
    return cwd


def remove_workspace_from_path(workspace: str, path: str) -> str:
    """Return PATH without folders of the workspace, for a program that gets secrets or trust."""
    return ":".join(one for one in path.split(":") if find_enclosing_folder(one, (workspace,)) is None)


def find_default_start_folder(folders: Mapping[str, mount_options.MountAccess], profile: SandboxProfile) -> str:
    """Return the folder in which a program begins by default."""
    inside = any(mount_options.is_beneath(profile.workspace, folder) for folder in folders)
    return profile.workspace if inside else profile.scratch


def find_free_descriptor_number(descriptors: Mapping[int, int] | None) -> int:
    """Return the first number above the standard three and the given descriptors."""
    return max((2, *(descriptors or ()))) + 1


def _build_permitted_environment(
    profile: SandboxProfile, found: toolchains.ToolchainSet, git: Mapping[str, str], look: LookupCache
) -> dict[str, str]:
    """Return the environment without the call's own variables: a list of permitted variables."""
    ours = {
        name: value
        for name in toolchains.LOCALE_VARIABLES
        if (value := look.read_environment_variable(name)) is not None
    }
    return {
        "LANG": toolchains.DEFAULT_LOCALE,
        **toolchains.select_locale_variables(ours),
        "PATH": ":".join(found.path),
        "HOME": profile.scratch,
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        **git,
        **found.environment,
    }
