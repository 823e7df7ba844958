"""Requirements that a tool declares, and the capability set that a call effectively has.

A :class:`Requires` is a declaration with variables in it. :func:`expand_requires` fills the variables and gives one
*layer*. A :class:`CapabilitySet` is a conjunction of layers (the tool's, the agent's, the parent's, the
host's ceiling), and each layer must allow a thing. So an intersection is never computed and can never turn
empty into everything: two layers without a common host simply never both say yes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from handrail.contract.struct import Struct, field
from handrail.contract.text.glob_patterns import (
    build_any_path_glob_expression,
    compile_path_glob,
    escape_glob_literal,
    extract_literal_prefix,
    find_glob_pattern_fault,
    has_wildcard,
)
from handrail.contract.text.host_names import (
    HostPattern,
    capability_covers_host,
    find_host_pattern_fault,
    parse_host_address,
    parse_host_pattern,
)
from handrail.contract.text.lazy_patterns import compile_regex_lazily

Capability = Literal["fs.read", "fs.write", "net.fetch", "shell.run"]
"""The permissions of a rule besides tools: the four things that a call can touch outside the kernel."""

CAPABILITIES: tuple[Capability, ...] = ("fs.read", "fs.write", "net.fetch", "shell.run")

NAMED_CAPABILITIES: Mapping[str, str] = {
    "ask": "ask the user questions",
    "mode": "switch the permission mode of the session, to a wider one only if the user agrees",
    "state": "keep values in the session",
    "call": "call other tools through the arbiter",
    "jobs": "list, wait for and stop the jobs of the session",
    "terminals": "open terminals and type into those of the session",
    "agents": "delegate to sub-agents, and compact the agent's own conversation",
    "skills": "read the skills of the session",
    "channels": "send and receive messages on channels",
    "tasks": "read and change the tasks of the workspace",
    "transcript": "search the conversation, calls and artifacts of the session",
    "memory": "search the notes, the conversation and the user's stored facts, and store facts",
    "triggers": "notify the session at a time, or when a message arrives",
    "catalog": "search the available tools and load some for the model",
    "elicit": "show a form, or a URL to visit, to the user of the client",
    "sample": "request text from the client's model",
    "roots": "list the folders in which the client works",
    "resources": "read the resources and prompts of sources",
    "vcs.config": "change version-control configuration, by an allow-list of keys",
}
"""The closed list behind ``requires.capabilities``; an unknown name is a fault at load."""

VARIABLES = ("workspace", "ad-hoc", "user-data", "output")
_VARIABLE = compile_regex_lazily(r"\{([^{}]*)\}")

AccessCheck = Callable[[Capability, str | Sequence[str]], str | None]
"""A function that evaluates one access: a canonical absolute path, a host, a shell text, or an argv as a sequence.

It returns None if the access is allowed, else the reason of the refusal.
"""


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class FsRequires(_FrozenModel):
    """Path patterns relative to the workspace's root, or beginning with a variable."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


class NetRequires(_FrozenModel):
    """Outbound hosts: ``api.example.org``, ``*.example.org``, ``host:8443``, or ``*`` for every public host.

    A host without a port means ports 80 and 443; ``host:*`` means every port. A private address must be named itself,
    as in ``10.0.0.5:8080``.

    With ``by_rule``, each host also needs its own rule (``allow net.fetch HOST``) or the answer of the user; a rule about
    the tool opens none. Without ``hosts``, that can be any public host.
    """

    hosts: tuple[str, ...] = ()
    by_rule: bool = False


class AnyArgumentPattern(_FrozenModel):
    """A pattern that matches any one argument."""

    wildcard: Literal[True]


class PrefixArgumentPattern(_FrozenModel):
    """A pattern that matches one argument that starts with ``prefix``."""

    prefix: Annotated[str, Field(min_length=1)]


ArgumentPattern = str | AnyArgumentPattern | PrefixArgumentPattern


class ShellRequires(_FrozenModel):
    """One program that may run: ``cmd`` by name, ``args`` matching the whole argv after it (left out = any)."""

    cmd: Annotated[str, Field(min_length=1)]
    args: tuple[ArgumentPattern, ...] | None = None

    @property
    def is_literal(self) -> bool:
        """Whether it allows exactly one command."""
        return self.args is not None and all(isinstance(argument, str) for argument in self.args)

    def allows(self, argv: Sequence[str]) -> bool:
        """Return whether ``argv`` matches."""
        if not argv or (self.cmd != "*" and argv[0] != self.cmd):
            return False
        if self.args is None:
            return True
        return len(argv) - 1 == len(self.args) and all(
            argument == want
            if isinstance(want, str)
            else isinstance(want, AnyArgumentPattern) or argument.startswith(want.prefix)
            for want, argument in zip(self.args, argv[1:], strict=True)
        )


class Requires(_FrozenModel):
    """The declared needs of a tool. Its runtime has nothing else."""

    fs: FsRequires = FsRequires()
    net: NetRequires = NetRequires()
    shell: tuple[ShellRequires, ...] = ()
    capabilities: tuple[str, ...] = ()

    def find_faults(self) -> list[tuple[str, str]]:
        """Return ``(place, problem)`` for each unknown variable or capability, and each invalid pattern."""
        found: list[tuple[str, str]] = []
        for name, patterns in (("fs.read", self.fs.read), ("fs.write", self.fs.write)):
            for index, pattern in enumerate(patterns):
                found += [(f"requires.{name}[{index}]", problem) for problem in _faults_in_path(pattern)]
        for index, host in enumerate(self.net.hosts):
            if problem := find_host_pattern_fault(host):
                found.append((f"requires.net.hosts[{index}]", problem))
        for index, name in enumerate(self.capabilities):
            if name not in NAMED_CAPABILITIES:
                found.append(
                    (
                        f"requires.capabilities[{index}]",
                        f"unknown capability {name!r}; available: {', '.join(NAMED_CAPABILITIES)}",
                    )
                )
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is required."""
        net = self.net.hosts or self.net.by_rule
        return not (self.fs.read or self.fs.write or net or self.shell or self.capabilities)


NO_REQUIREMENTS = Requires()
"""The requirements of most tools."""


class PathVariables(Struct, frozen=True):
    """The values of ``{workspace}``, ``{ad-hoc}``, ``{user-data}`` and ``{output}``.

    They are absolute, canonical folders. An empty value closes the scope.

    :param workspace: the workspace, and the writable roots of the agent
    :param ad_hoc: the folders of files that the user has open outside the workspace; no frontend reports any yet
    :param user_data: the folder for data that tools keep for the user, in all workspaces
    :param output: the folder of the output folders of the workspace's sessions; each session reads its own
    :param readable: further folders that ``{workspace}`` means too, for reading only
    """

    workspace: tuple[str, ...] = ()
    ad_hoc: tuple[str, ...] = ()
    user_data: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def list_folders_of_variable(self, name: str, *, reading: bool = False) -> tuple[str, ...]:
        """Return the folders of a variable."""
        workspace = (*self.workspace, *self.readable) if reading else self.workspace
        every = {"workspace": workspace, "ad-hoc": self.ad_hoc, "user-data": self.user_data, "output": self.output}
        return every[name]


class CapabilityLayer(Struct, frozen=True):
    """One expanded requirement set: absolute path patterns, hosts, programs, named capabilities."""

    owner: str
    fs_read: tuple[str, ...] = ()
    fs_write: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    shell: tuple[ShellRequires, ...] = ()
    capabilities: frozenset[str] = frozenset()


class CapabilitySet(Struct, frozen=True):
    """What a call may touch at most: every layer must allow it. No layers allow nothing."""

    layers: tuple[CapabilityLayer, ...] = field(default=())

    def with_added_layers(self, *layers: CapabilityLayer) -> CapabilitySet:
        """Return the set with further layers."""
        return CapabilitySet((*self.layers, *layers))

    def without_hosts(self) -> CapabilitySet:
        """Return the set without any host."""
        if not self.may_allow_any_target("net.fetch"):
            return self
        return CapabilitySet(tuple(replace(layer, hosts=()) for layer in self.layers))

    def find_owner_denying_all_hosts(self, *, is_confined: bool) -> str | None:
        """Return whose limit leaves no hosts, or None if only the narrow sandbox of a confined call does."""
        owners = [layer.owner for layer in self.layers if not layer.hosts]
        if is_confined and len(owners) == len(self.layers):
            return None
        return owners[0] if owners else "this call"

    def without_writes_or_network(self) -> CapabilitySet:
        """Return the set without writable paths and hosts."""
        return CapabilitySet(tuple(replace(layer, fs_write=(), hosts=()) for layer in self.layers))

    def find_denying_layer(self, capability: Capability, target: str | Sequence[str]) -> CapabilityLayer | None:
        """Return the first layer that does not cover ``target`` (an absolute path, ``host[:port]``, or an argv)."""
        if not self.layers:
            return CapabilityLayer("nothing")
        for layer in self.layers:
            if not _covers(layer, capability, target):
                return layer
        return None

    def allows(self, capability: Capability, target: str | Sequence[str]) -> bool:
        """Return whether every layer covers ``target``."""
        return self.find_denying_layer(capability, target) is None

    def build_fast_coverage_predicate(
        self, capability: Literal["fs.read", "fs.write", "net.fetch"]
    ) -> Callable[[str], object]:
        """Return a fast form of :meth:`allows` for many paths or hosts.

        Check a false answer again with :meth:`allows`. A layer that has all the patterns of another one is left out,
        as an agent's layer has those of its tools.
        """
        wanted = {frozenset(map(str, _patterns(layer, capability))) for layer in self.layers}
        least = [some for some in wanted if not any(other < some for other in wanted)]
        if not least or frozenset() in least:
            return _allow_nothing
        try:
            if capability == "net.fetch":
                hosts = [[parse_host_pattern(pattern) for pattern in some] for some in least]
                return lambda host: _do_all_cover(hosts, host)
            tests = [
                re.compile(build_any_path_glob_expression(sorted(some)) + r"\Z", re.DOTALL).match for some in least
            ]
        except ValueError:
            return _allow_nothing  # a fault in a pattern shows where each is asked by itself
        return tests[0] if len(tests) == 1 else lambda path: all(test(path) is not None for test in tests)

    def has_capability(self, name: str) -> bool:
        """Return whether every layer has the named capability ``name``."""
        return bool(self.layers) and all(name in layer.capabilities for layer in self.layers)

    def may_allow_any_target(self, capability: Capability) -> bool:
        """Return whether any target at all could be allowed in every layer, by declarations alone."""
        return bool(self.layers) and all(bool(_patterns(layer, capability)) for layer in self.layers)

    def compute_covering_folders(self, capability: Literal["fs.read", "fs.write"]) -> tuple[str, ...]:
        """Return the absolute folders that hold everything that could be allowed; a sandbox mounts these.

        A folder is included only if every layer reaches into it or above it.
        """
        if not self.layers:
            return ()
        reach = [frozenset(_literal_folder(p) for p in _patterns(layer, capability)) for layer in self.layers]  # pyright: ignore[reportArgumentType]
        kept = {
            folder
            for folders in reach
            for folder in folders
            if all(any(_is_beneath(folder, other) for other in others) for others in reach)
        }
        return tuple(sorted(f for f in kept if not any(f != o and _is_beneath(f, o) for o in kept)))


def expand_requires(requires: Requires, variables: PathVariables, owner: str) -> CapabilityLayer:
    """Fill the variables. A pattern with an empty variable disappears, so its scope is closed."""
    return CapabilityLayer(
        owner,
        _expand_patterns(requires.fs.read, variables, reading=True),
        _expand_patterns(requires.fs.write, variables),
        requires.net.hosts or (("*",) if requires.net.by_rule else ()),
        tuple(requires.shell),
        frozenset(requires.capabilities),
    )


def unite_capability_layers(owner: str, layers: Iterable[CapabilityLayer]) -> CapabilityLayer:
    """Return one layer that allows what any of ``layers`` allows."""
    every = tuple(layers)
    shell: list[ShellRequires] = []
    for program in chain.from_iterable(layer.shell for layer in every):
        if program not in shell:
            shell.append(program)
    return CapabilityLayer(
        owner,
        _merge_patterns(layer.fs_read for layer in every),
        _merge_patterns(layer.fs_write for layer in every),
        _merge_patterns(layer.hosts for layer in every),
        tuple(shell),
        frozenset(chain.from_iterable(layer.capabilities for layer in every)),
    )


def _faults_in_path(pattern: str) -> list[str]:
    found: list[str] = []
    for match in _VARIABLE.finditer(pattern):
        if match.group(1) not in VARIABLES:
            found.append(f"unknown variable {match.group()}; available: {{{'}, {'.join(VARIABLES)}}}")
        elif match.start() or pattern[match.end() : match.end() + 1] not in ("", "/"):
            found.append(f"{pattern!r} has a variable within a name; put it at the beginning, alone or before a '/'")
    if not pattern:
        found.append("the pattern is empty; write '.' for the whole workspace")
    if ".." in pattern.split("/"):
        found.append(f"{pattern!r} contains '..'; name the folder itself")
    if "\0" in pattern:
        found.append(f"{pattern!r} contains a NUL character; remove it")
    if problem := find_glob_pattern_fault(pattern):
        found.append(problem)
    return found


def _expand_patterns(patterns: Iterable[str], variables: PathVariables, *, reading: bool = False) -> tuple[str, ...]:
    """Return absolute patterns. A faulty pattern is dropped, so its paths stay closed."""
    found: list[str] = []
    for pattern in patterns:
        if _faults_in_path(pattern):
            continue
        match = _VARIABLE.match(pattern)
        name = match.group(1) if match else "workspace"
        roots = ("/",) if pattern.startswith("/") else variables.list_folders_of_variable(name, reading=reading)
        tail = [part for part in pattern[match.end() if match else 0 :].split("/") if part not in ("", ".")]
        found += ["/".join((escape_glob_literal(root.rstrip("/")), *tail)) or "/" for root in roots]
    return tuple(dict.fromkeys(found))


def _merge_patterns(several: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(several)))


def _patterns(layer: CapabilityLayer, capability: Capability) -> Sequence[object]:
    match capability:
        case "fs.read":
            return layer.fs_read
        case "fs.write":
            return layer.fs_write
        case "net.fetch":
            return layer.hosts
        case "shell.run":
            return layer.shell


def _covers(layer: CapabilityLayer, capability: Capability, target: str | Sequence[str]) -> bool:
    """Return whether a layer covers a target.

    It uses plain loops: every call of every tool comes through here, and a search once for each file.
    """
    if capability == "shell.run":
        argv = (target,) if isinstance(target, str) else target
        return any(s.allows(argv) for s in layer.shell)
    assert isinstance(target, str)
    if capability == "net.fetch":
        return any(capability_covers_host(h, target) for h in layer.hosts)
    for pattern in layer.fs_read if capability == "fs.read" else layer.fs_write:
        if compile_path_glob(pattern).match(target) is not None:
            return True
    return False


def _allow_nothing(_target: str) -> bool:
    return False


def _do_all_cover(layers: Sequence[Sequence[HostPattern]], text: str) -> bool:
    try:
        host = parse_host_address(text)
    except ValueError:
        return False
    for patterns in layers:
        for pattern in patterns:
            if pattern.opens(host):
                break
        else:
            return False
    return True


def _literal_folder(pattern: object) -> str:
    text = str(pattern)
    prefix = extract_literal_prefix(text)
    if not has_wildcard(text):
        return prefix.rstrip("/") or "/"
    return prefix.rpartition("/")[0] or "/"


def _is_beneath(path: str, folder: str) -> bool:
    return path == folder or folder == "/" or path.startswith(folder + "/")
