"""The runtime that one call receives: cheap to create, each service built on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from handrail.contract.approval_requests import ApprovalHandler
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings
from handrail.contract.protected.path_protection import VCS_CONFIG
from handrail.contract.sandbox_protocol import CallConfinement, ConnectionAttempt, PathDenials, Sandbox, SandboxProfile
from handrail.contract.services.channels_and_triggers import ChannelService, TriggerService
from handrail.contract.services.client_services import (
    LOG_LEVELS,
    ClientHandler,
    ClientService,
    EditorClientHandler,
    LogLevel,
)
from handrail.contract.services.file_services import FileService, ResolvedPath, SearchService
from handrail.contract.services.history_and_skill_services import SkillService, TranscriptService
from handrail.contract.services.job_and_tool_services import CatalogService, JobService, TerminalService
from handrail.contract.services.language_services import LanguageService
from handrail.contract.services.memory_service import MemoryService, SessionMemoryService
from handrail.contract.services.resource_services import ResourceService
from handrail.contract.services.subagent_services import SubagentService
from handrail.contract.services.task_services import TaskService
from handrail.contract.services.tool_runtime import (
    CancellationToken,
    DocumentService,
    ModeService,
    NetworkService,
    Runtime,
    SecretService,
    ShellService,
    ToolStateService,
    UserContext,
    UserQuestion,
    UserQuestionService,
)
from handrail.contract.session_protocols import SessionValueStore
from handrail.contract.struct import Struct, field
from handrail.contract.tool.requires import AccessCheck, CapabilitySet
from handrail.contract.tool.spec import ToolSession, ToolSpec
from handrail.runtime.files.joint_changes import MultiFileChangeJournal
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.repository_index import RepositoryWordIndex
from handrail.runtime.ripgrep import HiddenFileRecord
from handrail.runtime.search_service import RipgrepSearch
from handrail.runtime.secret_store import NO_SECRETS, SecretStore, ToolSecretService, list_secret_setting_keys
from handrail.runtime.shell_service import CallTerminals, SandboxedShell, SessionTerminals
from handrail.runtime.undo.file_tool_trackers import FileChangeRecorder
from handrail.runtime.undo.workspace_snapshots import WorkspaceSnapshots

if TYPE_CHECKING:
    from handrail.runtime.language_servers.server_pool import LanguageServerPool

NO_USER_ATTACHED = "question is unavailable: no user is attached to this session"
"""The fixed text of ``question`` in a headless session."""


class SessionSharedServices(Struct):
    """The values and services that all calls of one session share."""

    session_id: str
    agent: str
    workdir: str
    scratch: str
    roots: SessionRoots
    sandbox: Sandbox
    values: SessionValueStore
    prepare_folders: Callable[[], None] | None = None
    """Creates the session's own folders; None once they exist. Most sessions run no program and need none."""
    approval_handler: ApprovalHandler | None = None
    client: ClientHandler | None = None
    """The client of the session, if it can answer requests."""
    topic: str | None = None
    user_context: UserContext | None = None
    seen_files: SeenFileHashes = field(default_factory=SeenFileHashes)
    hidden_files: HiddenFileRecord = field(default_factory=HiddenFileRecord)
    file_index: RepositoryWordIndex = field(default_factory=RepositoryWordIndex)
    """The words of the files that surveys have read, for all sessions of the workspace."""
    hidden: tuple[str, ...] = ()
    """Folders that no program may see, wherever they are: the kernel's state."""
    secrets: SecretStore = NO_SECRETS
    """The secrets of the session; a tool gets those that it declared."""
    denials: Callable[[], PathDenials] | None = None
    """Returns what the session's rules currently keep from programs."""
    find_tool_home: Callable[[str], str] | None = None
    """Returns the HOME of a tool; None if all tools use the session's scratch folder."""
    passed_environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """The variables of the operator's environment that the programs of the shell tools get."""
    quarantine: str = ""
    """The folder to which files that programs made under protected names are moved."""
    terminals: SessionTerminals = field(default_factory=SessionTerminals)
    transcript: TranscriptService | None = None
    get_server_pool: Callable[[], LanguageServerPool] | None = None
    """Returns the language servers of the kernel; None if there are none."""
    memory: SessionMemoryService | None = None
    snapshots: WorkspaceSnapshots | None = None
    """Keeps what the calls change in the workspace; None if nothing is kept."""
    change_journal: MultiFileChangeJournal | None = None
    """The journal of changes of several files; None if files are changed one at a time only."""
    route: OutboundConnectionSettings = DIRECT_ROUTE
    """The way to hosts, for tools and for the programs of a call."""

    def build_sandbox_profile(
        self, *, workspace_writable: bool = True, readable: tuple[str, ...] = ()
    ) -> SandboxProfile:
        """Return the sandbox profile of this session, with its scratch folder as HOME.

        :raises ToolError: ``unavailable`` if the session's folders cannot be created
        """
        if self.prepare_folders is not None:
            self.prepare_folders()
            self.prepare_folders = None
        return SandboxProfile(
            workspace=self.workdir,
            scratch=self.scratch,
            workspace_writable=workspace_writable,
            readable=(*self.roots.readable, *readable),
            outputs=self.roots.readable,
            writable=self.roots.further.writable,
            read_only_roots=self.roots.further.readable,
            hidden=self.hidden,
            denials=None if self.denials is None else self.denials(),
            quarantine=self.quarantine,
            route=self.route,
        )


class CallServices(Protocol):
    """The services that the arbiter provides to the runtime of one call."""

    @property
    def cancellation(self) -> CancellationToken: ...

    def build_access_check(self) -> AccessCheck:
        """Return the check of everything that the call touches."""
        ...

    def report_progress(
        self, message: str, fraction: float | None, done: float | None, total: float | None
    ) -> None: ...

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None: ...

    def output(self, piece: str | bytes) -> None: ...

    def jobs(self) -> JobService: ...

    @property
    def job_id(self) -> str | None:
        """The job that the call is; None for a direct call."""
        ...

    @property
    def calling_call_ids(self) -> tuple[str, ...]:
        """The ids under which programs run for this call and for the calls that made it."""
        ...

    def resources(self, runtime: Runtime) -> ResourceService:
        """Return the resources and prompts for this call.

        :param runtime: passed to a resource provider
        """
        ...

    def tool_session(self, runtime: Runtime) -> ToolSession:
        """Return the tool session that the call continues.

        :param runtime: passed to the open tool
        :raises ToolError: ``denied`` for a call that continues no tool session
        """
        ...

    def client(self, require: Callable[[str], None]) -> ClientService:
        """Return the service for requests to the client.

        :param require: raises unless the tool has the capability of this name
        """
        ...

    def explain_host_refusal(self, host: str) -> str | None:
        """Return why programs may not reach ``host:port`` by its own rule; None if they may."""
        ...

    async def request_host(self, host: str) -> str | None:
        """Do the same, and ask the user first if no rule decides."""
        ...

    def record_attempt(self, attempt: ConnectionAttempt) -> None:
        """Add a host that the call tried to reach to its record. Thread-safe."""

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result: ...

    def catalog(self) -> CatalogService:
        """Return the tools that the call's interaction sees."""
        ...

    def subagents(self) -> SubagentService:
        """Return the sub-agents to which the call may delegate work."""
        ...

    def mode(self) -> ModeService:
        """Return the permission mode of the session, for this call."""
        ...

    def tasks(self) -> TaskService: ...

    def channels(self) -> ChannelService:
        """Return the channels of the session, for this call."""
        ...

    def triggers(self) -> TriggerService: ...

    def skills(self) -> SkillService: ...

    def find_answers(self, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        """Return the answers that the user gave to exactly these questions before the call began; else None."""
        ...

    async def ask_user(self, questions: Sequence[UserQuestion]) -> list[list[str]]:
        """Ask the user now, through the approval handler of the session."""
        ...


class CallRuntime:
    """The runtime of one call: :class:`~handrail.contract.services.tool_runtime.Runtime`."""

    # Each service is a class attribute until it is first used, which keeps creating a runtime cheap.
    partial_result: Any = None
    """The partial result to return if the tool is stopped."""
    read_only: bool = False
    """Whether programs find everything read-only, whatever the tool declared."""
    client_meta: Mapping[str, Any] = MappingProxyType({})
    """The metadata of the client's request."""
    confinement: CallConfinement | None = None
    """The narrow sandbox of a call under a rule with ``{confined}``."""
    split_shell_text: Callable[[str], Sequence[str] | None] | None = None
    """Returns the argv that a shell text stands for; None if it needs a shell."""
    _files: RootedFiles | None = None
    _search: RipgrepSearch | None = None
    _shell: SandboxedShell | None = None
    _net: NetworkService | None = None

    def __init__(
        self,
        spec: ToolSpec,
        call_id: str,
        environment: SessionSharedServices,
        capabilities: CapabilitySet,
        services: CallServices,
    ) -> None:
        self._spec = spec
        self._environment = environment
        self._services = services
        self.call_id = call_id
        if spec.requires.net.by_rule and not environment.sandbox.tier.supports_per_host_network:
            capabilities = capabilities.without_hosts()
        self.capabilities = capabilities

    @property
    def tool_id(self) -> str:
        return self._spec.id

    @property
    def session_id(self) -> str:
        return self._environment.session_id

    @property
    def agent(self) -> str:
        return self._environment.agent

    @property
    def topic(self) -> str | None:
        return self._environment.topic

    @property
    def user_context(self) -> UserContext | None:
        return self._environment.user_context

    @property
    def workdir(self) -> str:
        return self._environment.workdir

    @property
    def config(self) -> Mapping[str, str]:
        return {key: c.default for key, c in self._spec.config.items() if c.default is not None}

    @property
    def max_output_bytes(self) -> int:
        return self._spec.max_output

    @property
    def files(self) -> FileService:
        if self._files is None:
            fs = self._spec.requires.fs
            if not (fs.read or fs.write):
                self._require_declared(False, "fs", '{"fs": {"read": ["{workspace}"]}}')
            environment, may = self._environment, self._services.build_access_check()
            if environment.client is not None and isinstance(environment.client, EditorClientHandler):
                from handrail.runtime.files.editor_file_service import EditorFiles  # for sessions in editors

                self._files = EditorFiles(
                    environment.roots,
                    environment.seen_files,
                    may,
                    environment.client,
                    environment.hidden_files,
                    self._track_change,
                    environment.change_journal,
                )
            else:
                self._files = RootedFiles(
                    environment.roots,
                    environment.seen_files,
                    may,
                    environment.hidden_files,
                    self._track_change,
                    environment.change_journal,
                )
        return self._files

    def _track_change(self, located: ResolvedPath) -> FileChangeRecorder | None:
        snapshots, callers = self._environment.snapshots, self._services.calling_call_ids
        return (
            None if snapshots is None or not callers else FileChangeRecorder(snapshots, located, callers, self.tool_id)
        )

    @property
    def search(self) -> SearchService:
        if self._search is None:
            self._require_declared(bool(self._spec.requires.fs.read), "fs.read", '{"fs": {"read": ["{workspace}"]}}')
            environment = self._environment
            capabilities, may = self.capabilities.without_hosts(), self._services.build_access_check()
            self._search = RipgrepSearch(
                environment.roots,
                environment.sandbox,
                environment.build_sandbox_profile(),
                capabilities,
                may,
                environment.hidden_files,
                environment.file_index,
            )
        return self._search

    @property
    def shell(self) -> ShellService:
        if self._shell is None:
            self._require_declared(bool(self._spec.requires.shell), "shell", '{"shell": [{"cmd": "git"}]}')
            environment = self._environment
            self._shell = SandboxedShell(
                environment.sandbox,
                self._add_network_to_profile(self._build_narrowed_profile()),
                self.capabilities,
                environment.roots,
                self._services.build_access_check(),
                self.split_shell_text,
            )
        return self._shell

    @property
    def net(self) -> NetworkService:
        if self._net is None:
            hosts = bool(self._spec.requires.net.hosts)
            self._require_declared(hosts, "net.hosts", '{"net": {"hosts": ["api.example.org"]}}')
            from handrail.runtime.http_service import CheckedNetworkService  # HTTP and TLS are for the tools that fetch

            self._net = CheckedNetworkService(
                self.capabilities,
                self._services.build_access_check(),
                self._services.record_attempt,
                route=self._environment.route,
            )
        return self._net

    @property
    def documents(self) -> DocumentService:
        from handrail.runtime.documents.document_service import SandboxedDocuments  # for the tools that read documents

        return SandboxedDocuments(self._environment.sandbox, self._environment.build_sandbox_profile())

    @property
    def language_servers(self) -> LanguageService:
        self._require_declared(bool(self._spec.requires.fs.read), "fs.read", '{"fs": {"read": ["{workspace}"]}}')
        environment = self._environment
        if environment.get_server_pool is None:
            raise ToolError("This session has no language servers. Use grep and read.", kind="unavailable")
        from handrail.runtime.language_servers.language_service import PooledLanguageService  # for the tool that asks

        return PooledLanguageService(
            environment.get_server_pool(),
            environment.roots,
            environment.build_sandbox_profile(workspace_writable=False),
            self.capabilities.without_hosts(),
            self._services.build_access_check(),
        )

    def _build_narrowed_profile(self) -> SandboxProfile:
        """Return the profile of the session's programs as this call narrows it: read-only, or to its confinement."""
        writable = self._spec.side_effect != "read" and not self.read_only
        profile = self._environment.build_sandbox_profile(workspace_writable=writable)
        if self.confinement is None:
            return profile
        kept = self._environment.roots.further.repositories if self.confinement.changes_repository else ()
        return replace(
            profile,
            writable=kept,
            read_only_roots=(*profile.read_only_roots, *(one for one in profile.writable if one not in kept)),
            confined=True,
            repositories_read_only=not self.confinement.changes_repository,
        )

    def _add_network_to_profile(self, profile: SandboxProfile) -> SandboxProfile:
        """Return ``profile`` with the check of hosts, if the call has any, and with the tool's HOME."""
        call = self._services.job_id or self.call_id
        profile = replace(
            profile,
            tool=self.tool_id,
            call=call,
            callers=self._services.calling_call_ids,
            scratch=self._program_home_folder,
        )
        if self._spec.requires.net.by_rule:
            # A call without hosts must not find the proxy of one that has some.
            connected = self.capabilities.may_allow_any_target("net.fetch")
            own = self.tool_id if self._spec.requires.net.hosts else ""
            shared = f"{self.session_id}/{own}/{'hosts' if connected else 'no hosts'}"
            profile = replace(
                profile,
                environment=self._environment.passed_environment,
                network=shared if profile.workspace_writable else "",
            )
        if not self.capabilities.may_allow_any_target("net.fetch"):
            return profile
        services = self._services
        if self._spec.requires.net.by_rule:

            def check(host: str, port: int) -> str | None:
                return services.explain_host_refusal(f"{host}:{port}")

            async def request(host: str, port: int) -> str | None:
                return await services.request_host(f"{host}:{port}")

            return replace(profile, check_host=check, request_host=request, on_attempt=services.record_attempt)
        may = services.build_access_check()

        def gate(host: str, port: int) -> str | None:
            return may("net.fetch", f"{host}:{port}")

        return replace(profile, check_host=gate, on_attempt=services.record_attempt)

    @property
    def _program_home_folder(self) -> str:
        """The session's scratch folder, or a separate folder for a tool that may do more than ``bash``.

        Files in HOME decide what programs run: start-up files, git's configuration, Python modules. Files that one
        tool's programs write there must not run with another tool's hosts and secrets.
        """
        spec, environment = self._spec, self._environment
        more = (
            spec.secrets
            or list_secret_setting_keys(spec)
            or spec.requires.net.hosts
            or VCS_CONFIG in spec.requires.capabilities
        )
        return (
            environment.find_tool_home(spec.id)
            if more and environment.find_tool_home is not None
            else environment.scratch
        )

    @property
    def profile(self) -> SandboxProfile:
        """The sandbox profile of this call for executables, with the secrets that the tool declared.

        Programs that the shell service starts get no secrets.
        """
        profile = self._build_narrowed_profile()
        if (self._spec.secrets or self._spec.config) and not self.read_only:
            profile = replace(profile, secrets=self._environment.secrets.get_secret_values_for_tool(self._spec))
        return self._add_network_to_profile(profile)

    @property
    def secrets(self) -> SecretService:
        refusal = "the call runs read-only" if self.read_only else None
        return ToolSecretService(self._spec, self._environment.secrets, refusal)

    @property
    def state(self) -> ToolStateService:
        self._require_capability("state")
        return CallToolStateService(self._environment, self.tool_id)

    @property
    def user(self) -> UserQuestionService:
        self._require_capability("ask")
        return SessionUserService(self._environment, self._services)

    @property
    def catalog(self) -> CatalogService:
        self._require_capability("catalog")
        return self._services.catalog()

    @property
    def subagents(self) -> SubagentService:
        self._require_capability("agents")
        return self._services.subagents()

    @property
    def mode(self) -> ModeService:
        self._require_capability("mode")
        return self._services.mode()

    @property
    def tasks(self) -> TaskService:
        self._require_capability("tasks")
        return self._services.tasks()

    @property
    def channels(self) -> ChannelService:
        self._require_capability("channels")
        return self._services.channels()

    @property
    def triggers(self) -> TriggerService:
        self._require_capability("triggers")
        return self._services.triggers()

    @property
    def transcript(self) -> TranscriptService:
        self._require_capability("transcript")
        if (transcript := self._environment.transcript) is None:
            raise ToolError("This session has no transcript. Continue without it.", kind="unavailable")
        return transcript

    @property
    def memory(self) -> MemoryService:
        self._require_capability("memory")
        if (memory := self._environment.memory) is None:
            raise ToolError("This session has no memory. Continue without it.", kind="unavailable")
        return memory.for_call(self.call_id)

    @property
    def skills(self) -> SkillService:
        self._require_capability("skills")
        return self._services.skills()

    @property
    def jobs(self) -> JobService:
        self._require_capability("jobs")
        return self._services.jobs()

    @property
    def terminals(self) -> TerminalService:
        self._require_capability("terminals")
        environment, services = self._environment, self._services
        opens = lambda: cast("SandboxedShell", self.shell)  # noqa: E731
        return CallTerminals(
            environment.terminals, opens, services.build_access_check(), services.output, services.job_id
        )

    @property
    def cancellation(self) -> CancellationToken:
        return self._services.cancellation

    @property
    def client(self) -> ClientService:
        return self._services.client(self._require_capability)

    @property
    def resources(self) -> ResourceService:
        self._require_capability("resources")
        return self._services.resources(self)

    @property
    def tool_session(self) -> ToolSession:
        return self._services.tool_session(self)

    def report_progress(
        self, message: str = "", *, fraction: float | None = None, done: float | None = None, total: float | None = None
    ) -> None:
        self._services.report_progress(message, fraction, done, total)

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        if level not in LOG_LEVELS:
            raise ToolError(
                f"{level!r:.40} is not a log level. Use one of {', '.join(LOG_LEVELS)}.", kind="invalid_input"
            )
        self._services.log(level, data, logger)

    def write_output(self, piece: str | bytes) -> None:
        self._services.output(piece)

    def set_partial_result(self, data: Any) -> None:
        self.partial_result = data

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        self._require_capability("call")
        return await self._services.call_tool(tool_id, arguments)

    def _require_capability(self, name: str) -> None:
        """Check that the tool declared a capability and that every layer of the call has it.

        :raises ToolError: ``denied`` if not
        """
        self._require_declared(name in self._spec.requires.capabilities, name, f'{{"capabilities": ["{name}"]}}')
        if not self.capabilities.has_capability(name):
            lacking = ", ".join(layer.owner for layer in self.capabilities.layers if name not in layer.capabilities)
            raise ToolError(
                f"Tool `{self.tool_id}` requires {name!r}, which {lacking or 'this call'} does not have. Ask the "
                "user to add it there.",
                kind="denied",
            )

    def _require_declared(self, declared: bool, service: str, example: str) -> None:
        if not declared:
            raise ToolError(
                f"Tool `{self.tool_id}` did not declare {service!r} in `requires`. The author of the tool can add "
                f"it, as in {example}.",
                kind="denied",
            )


class CallToolStateService(Struct, frozen=True):
    """A state service: the values of one tool in one session."""

    environment: SessionSharedServices
    tool_id: str

    async def get(self, key: str) -> Any:
        return await self.environment.values.get(self.environment.session_id, self.tool_id, key)

    async def put(self, key: str, value: Any) -> None:
        await self.environment.values.put(self.environment.session_id, self.tool_id, key, value)


class SessionUserService(Struct, frozen=True):
    """A service that asks the user questions."""

    environment: SessionSharedServices
    services: CallServices

    async def ask(self, questions: Sequence[UserQuestion]) -> list[list[str]]:
        if (known := self.services.find_answers(questions)) is not None:
            return known
        if self.environment.approval_handler is None:
            raise ToolError(NO_USER_ATTACHED, kind="unavailable")
        return await self.services.ask_user(questions)
