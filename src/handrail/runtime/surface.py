"""The runtime that one call receives: cheap to create, each service built on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from handrail.contract.approvals import Attendant
from handrail.contract.call import Result
from handrail.contract.doors.agents import Agents
from handrail.contract.doors.channels import Channels, Triggers
from handrail.contract.doors.files import Files, Search
from handrail.contract.doors.jobs import Catalog, Jobs, Terminals
from handrail.contract.doors.memory import Skills, Transcript
from handrail.contract.doors.offers import Offers
from handrail.contract.doors.peer import LOG_LEVELS, Buffers, LogLevel, Peer, PeerDoor
from handrail.contract.doors.runtime import (
    Cancellation,
    ClientContext,
    Net,
    People,
    Question,
    Runtime,
    Secrets,
    Shell,
    State,
)
from handrail.contract.errors import ToolError
from handrail.contract.protected.protected import VCS_CONFIG
from handrail.contract.sandbox import Attempt, Denials, Profile, Sandbox
from handrail.contract.session import Values
from handrail.contract.tool.requires import CapabilitySet, May
from handrail.contract.tool.spec import Opened, ToolSpec
from handrail.runtime.files.files import RootedFiles, SeenFiles
from handrail.runtime.files.roots import Roots
from handrail.runtime.ripgrep import HiddenFiles
from handrail.runtime.search import RipgrepSearch
from handrail.runtime.secrets import NO_SECRETS, DeclaredSecrets, SecretStore, secret_settings
from handrail.runtime.shell import CallTerminals, SandboxedShell, SessionTerminals

NOBODY_TO_ASK = "question is unavailable: no user is attached to this session"
"""The fixed text of ``question`` in a headless session."""


@dataclass(slots=True)
class Surroundings:
    """The values and services that all calls of one session share."""

    session_id: str
    agent: str
    workdir: str
    scratch: str
    roots: Roots
    sandbox: Sandbox
    values: Values
    attendant: Attendant | None = None
    peer: Peer | None = None
    """The client of the session, if it can answer requests."""
    topic: str | None = None
    client: ClientContext | None = None
    seen: SeenFiles = field(default_factory=SeenFiles)
    hidden_files: HiddenFiles = field(default_factory=HiddenFiles)
    hidden: tuple[str, ...] = ()
    """Folders that no program may see, wherever they are: the kernel's state."""
    secrets: SecretStore = NO_SECRETS
    """The secrets of the session; a tool gets those that it declared."""
    denials: Callable[[], Denials] | None = None
    """Returns what the session's rules currently keep from programs."""
    home_of: Callable[[str], str] | None = None
    """Returns the HOME of a tool; None if all tools use the session's scratch folder."""
    quarantine: str = ""
    """The folder to which files that programs made under protected names are moved."""
    terminals: SessionTerminals = field(default_factory=SessionTerminals)
    transcript: Transcript | None = None

    def profile(self, *, workspace_writable: bool = True, readable: tuple[str, ...] = ()) -> Profile:
        """Return the sandbox profile of this session, with its scratch folder as HOME."""
        return Profile(
            workspace=self.workdir,
            scratch=self.scratch,
            workspace_writable=workspace_writable,
            readable=(*self.roots.readable, *readable),
            writable=self.roots.further.writable,
            further=self.roots.further.readable,
            hidden=self.hidden,
            denials=None if self.denials is None else self.denials(),
            quarantine=self.quarantine,
        )


class Doors(Protocol):
    """The services that the arbiter provides to the runtime of one call."""

    @property
    def cancellation(self) -> Cancellation: ...

    def may(self) -> May:
        """Return the check of everything that the call touches."""
        ...

    def tell(self, message: str, fraction: float | None, done: float | None, total: float | None) -> None: ...

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None: ...

    def output(self, piece: str | bytes) -> None: ...

    def jobs(self) -> Jobs: ...

    @property
    def job_id(self) -> str | None:
        """The job that the call is; None for a direct call."""
        ...

    @property
    def callers(self) -> tuple[str, ...]:
        """The ids under which programs run for this call and for the calls that made it."""
        ...

    def offers(self, runtime: Runtime) -> Offers:
        """Return the resources and prompts for this call.

        :param runtime: passed to a resource provider
        """
        ...

    def opened(self, runtime: Runtime) -> Opened:
        """Return the tool session that the call continues.

        :param runtime: passed to the open tool
        :raises ToolError: ``denied`` for a call that continues no tool session
        """
        ...

    def peer(self, require: Callable[[str], None]) -> PeerDoor:
        """Return the service for requests to the client.

        :param require: raises unless the tool has the capability of this name
        """
        ...

    def reached(self, attempt: Attempt) -> None:
        """Add a host that the call tried to reach to its record. Thread-safe."""
        ...

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result: ...

    def catalog(self) -> Catalog:
        """Return the tools that the call's interaction sees."""
        ...

    def agents(self) -> Agents:
        """Return the sub-agents to which the call may delegate work."""
        ...

    def channels(self) -> Channels:
        """Return the channels of the session, for this call."""
        ...

    def triggers(self) -> Triggers:
        """Return the triggers of the session."""
        ...

    def skills(self) -> Skills:
        """Return the skills of the session."""
        ...

    def answered(self, questions: Sequence[Question]) -> list[list[str]] | None:
        """Return the answers that the user gave to exactly these questions before the call began; else None."""
        ...

    async def ask(self, questions: Sequence[Question]) -> list[list[str]]:
        """Ask the user now, through the approval handler of the session."""
        ...


class CallRuntime:
    """The runtime of one call: :class:`~handrail.contract.doors.runtime.Runtime`."""

    # Each service is a class attribute until it is first used, which keeps creating a runtime cheap.
    kept: Any = None
    """The partial result to return if the tool is stopped."""
    read_only: bool = False
    """Whether programs find everything read-only, whatever the tool declared."""
    as_argv: Callable[[str], Sequence[str] | None] | None = None
    """Returns the argv that a shell text stands for; None if it needs a shell."""
    _files: RootedFiles | None = None
    _search: RipgrepSearch | None = None
    _shell: SandboxedShell | None = None
    _net: Net | None = None

    def __init__(
        self,
        spec: ToolSpec,
        call_id: str,
        around: Surroundings,
        capabilities: CapabilitySet,
        doors: Doors,
    ) -> None:
        self._spec = spec
        self._around = around
        self._doors = doors
        self.call_id = call_id
        self.capabilities = capabilities

    @property
    def tool_id(self) -> str:
        return self._spec.id

    @property
    def session_id(self) -> str:
        return self._around.session_id

    @property
    def agent(self) -> str:
        return self._around.agent

    @property
    def topic(self) -> str | None:
        return self._around.topic

    @property
    def client(self) -> ClientContext | None:
        return self._around.client

    @property
    def workdir(self) -> str:
        return self._around.workdir

    @property
    def config(self) -> Mapping[str, str]:
        return {key: c.default for key, c in self._spec.config.items() if c.default is not None}

    @property
    def max_output(self) -> int:
        return self._spec.max_output

    @property
    def files(self) -> Files:
        if self._files is None:
            fs = self._spec.requires.fs
            if not (fs.read or fs.write):
                self._require(False, "fs", '{"fs": {"read": ["{workspace}"]}}')
            around, may = self._around, self._doors.may()
            if around.peer is not None and isinstance(around.peer, Buffers):
                from handrail.runtime.files.unsaved import EditorFiles  # for sessions in editors

                self._files = EditorFiles(around.roots, around.seen, may, around.peer, around.hidden_files)
            else:
                self._files = RootedFiles(around.roots, around.seen, may, around.hidden_files)
        return self._files

    @property
    def search(self) -> Search:
        if self._search is None:
            self._require(bool(self._spec.requires.fs.read), "fs.read", '{"fs": {"read": ["{workspace}"]}}')
            around = self._around
            capabilities, may = self.capabilities.offline(), self._doors.may()
            self._search = RipgrepSearch(
                around.roots, around.sandbox, around.profile(), capabilities, may, around.hidden_files
            )
        return self._search

    @property
    def shell(self) -> Shell:
        if self._shell is None:
            self._require(bool(self._spec.requires.shell), "shell", '{"shell": [{"cmd": "git"}]}')
            around = self._around
            writable = self._spec.side_effect != "read" and not self.read_only
            self._shell = SandboxedShell(
                around.sandbox,
                self._online(around.profile(workspace_writable=writable)),
                self.capabilities,
                around.roots,
                self._doors.may(),
                self.as_argv,
            )
        return self._shell

    @property
    def net(self) -> Net:
        if self._net is None:
            hosts = bool(self._spec.requires.net.hosts)
            self._require(hosts, "net.hosts", '{"net": {"hosts": ["api.example.org"]}}')
            from handrail.runtime.net import CheckedNet  # HTTP and TLS are for the tools that fetch

            self._net = CheckedNet(self.capabilities, self._doors.may(), self._doors.reached)
        return self._net

    def _online(self, profile: Profile) -> Profile:
        """Return ``profile`` with the check of hosts, if the call has any, and with the tool's HOME."""
        call = self._doors.job_id or self.call_id
        profile = replace(profile, tool=self.tool_id, call=call, callers=self._doors.callers, scratch=self._home)
        if not self.capabilities.uses("net.fetch"):
            return profile
        may = self._doors.may()

        def gate(host: str, port: int) -> str | None:
            return may("net.fetch", f"{host}:{port}")

        return replace(profile, gate=gate, on_attempt=self._doors.reached)

    @property
    def _home(self) -> str:
        """The session's scratch folder, or a separate folder for a tool that may do more than ``bash``.

        Files in HOME decide what programs run: start-up files, git's configuration, Python modules. Files that one
        tool's programs write there must not run with another tool's hosts and secrets.
        """
        spec, around = self._spec, self._around
        more = (
            spec.secrets or secret_settings(spec) or spec.requires.net.hosts or VCS_CONFIG in spec.requires.capabilities
        )
        return around.home_of(spec.id) if more and around.home_of is not None else around.scratch

    @property
    def profile(self) -> Profile:
        """The sandbox profile of this call for executables, with the secrets that the tool declared.

        Programs that the shell service starts get no secrets.
        """
        profile = self._around.profile(workspace_writable=self._spec.side_effect != "read")
        if (self._spec.secrets or self._spec.config) and not self.read_only:
            profile = replace(profile, secrets=self._around.secrets.given(self._spec))
        return self._online(profile)

    @property
    def secrets(self) -> Secrets:
        refusal = "the call runs read-only" if self.read_only else None
        return DeclaredSecrets(self._spec, self._around.secrets, refusal)

    @property
    def state(self) -> State:
        self._require_named("state")
        return ToolState(self._around, self.tool_id)

    @property
    def people(self) -> People:
        self._require_named("ask")
        return SessionPeople(self._around, self._doors)

    @property
    def catalog(self) -> Catalog:
        self._require_named("catalog")
        return self._doors.catalog()

    @property
    def agents(self) -> Agents:
        self._require_named("agents")
        return self._doors.agents()

    @property
    def channels(self) -> Channels:
        self._require_named("channels")
        return self._doors.channels()

    @property
    def triggers(self) -> Triggers:
        self._require_named("triggers")
        return self._doors.triggers()

    @property
    def transcript(self) -> Transcript:
        self._require_named("transcript")
        if (transcript := self._around.transcript) is None:
            raise ToolError("This session keeps no transcript. Continue without it.", kind="unavailable")
        return transcript

    @property
    def skills(self) -> Skills:
        self._require_named("skills")
        return self._doors.skills()

    @property
    def jobs(self) -> Jobs:
        self._require_named("jobs")
        return self._doors.jobs()

    @property
    def terminals(self) -> Terminals:
        self._require_named("terminals")
        around, doors = self._around, self._doors
        opens = lambda: cast("SandboxedShell", self.shell)  # noqa: E731
        return CallTerminals(around.terminals, opens, doors.may(), doors.output, doors.job_id)

    @property
    def cancellation(self) -> Cancellation:
        return self._doors.cancellation

    @property
    def peer(self) -> PeerDoor:
        return self._doors.peer(self._require_named)

    @property
    def offers(self) -> Offers:
        self._require_named("offers")
        return self._doors.offers(self)

    @property
    def opened(self) -> Opened:
        return self._doors.opened(self)

    def progress(
        self,
        message: str = "",
        *,
        fraction: float | None = None,
        done: float | None = None,
        total: float | None = None,
    ) -> None:
        self._doors.tell(message, fraction, done, total)

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        if level not in LOG_LEVELS:
            raise ToolError(
                f"{level!r:.40} is not a log level. Use one of {', '.join(LOG_LEVELS)}.", kind="invalid_input"
            )
        self._doors.log(level, data, logger)

    def output(self, piece: str | bytes) -> None:
        self._doors.output(piece)

    def partial(self, data: Any) -> None:
        self.kept = data

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        self._require_named("call")
        return await self._doors.call_tool(tool_id, arguments)

    def _require_named(self, name: str) -> None:
        """Check that the tool declared a capability and that every layer of the call has it.

        :raises ToolError: ``denied`` if not
        """
        self._require(name in self._spec.requires.capabilities, name, f'{{"capabilities": ["{name}"]}}')
        if not self.capabilities.has(name):
            lacking = ", ".join(layer.owner for layer in self.capabilities.layers if name not in layer.capabilities)
            raise ToolError(
                f"Tool `{self.tool_id}` requires {name!r}, which {lacking or 'this call'} does not have. Ask the "
                "user to add it there.",
                kind="denied",
            )

    def _require(self, declared: bool, door: str, example: str) -> None:
        if not declared:
            raise ToolError(
                f"Tool `{self.tool_id}` did not declare {door!r} in `requires`. The author of the tool can add "
                f"it, as in {example}.",
                kind="denied",
            )


@dataclass(frozen=True, slots=True)
class ToolState:
    """A state service: the values of one tool in one session."""

    around: Surroundings
    tool_id: str

    async def get(self, key: str) -> Any:
        return await self.around.values.get(self.around.session_id, self.tool_id, key)

    async def put(self, key: str, value: Any) -> None:
        await self.around.values.put(self.around.session_id, self.tool_id, key, value)


@dataclass(frozen=True, slots=True)
class SessionPeople:
    """A service that asks the user questions."""

    around: Surroundings
    doors: Doors

    async def answer(self, questions: Sequence[Question]) -> list[list[str]]:
        if (known := self.doors.answered(questions)) is not None:
            return known
        if self.around.attendant is None:
            raise ToolError(NOBODY_TO_ASK, kind="unavailable")
        return await self.doors.ask(questions)
