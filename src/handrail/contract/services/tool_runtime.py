"""The typed runtime that a tool receives: its only way from ``execute`` to the world.

Every service here is a Protocol; the implementations live in the ``runtime`` room and above. Access to a service that the
tool did not require raises :class:`~handrail.contract.errors.ToolError` of kind ``denied``, with the line to add to
``requires``. A tool passes paths as the model wrote them, workspace-relative or absolute. Returned paths have the form to
show, relative inside the workspace.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.permission_modes import Mode
from handrail.contract.sandbox_protocol import CompletedProcess
from handrail.contract.services.channels_and_triggers import ChannelService, TriggerService
from handrail.contract.services.client_services import ClientService, LogLevel
from handrail.contract.services.file_services import FileService, SearchService
from handrail.contract.services.history_and_skill_services import SkillService, TranscriptService
from handrail.contract.services.job_and_tool_services import CatalogService, JobService, TerminalService
from handrail.contract.services.language_services import LanguageService
from handrail.contract.services.memory_service import MemoryService
from handrail.contract.services.resource_services import ResourceService
from handrail.contract.services.subagent_services import SubagentService
from handrail.contract.services.task_services import TaskService
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import normalise_unicode_spelling, unescape_displayed_path
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSession


class ShellService(Protocol):
    """Programs in the sandbox of the call's capability set. All of them end with the call."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        separate_stderr: bool = False,
        trusted_program: bool = False,
        on_output: Callable[[bytes], None] | None = None,
        keep_bytes: int | None = None,
    ) -> CompletedProcess:
        """Run a shell text, or an argv without a shell.

        The call's time-out ends the program, and so does a cancellation.

        :param environment: further variables, for an argv only: rules evaluate the words of a shell text, so the text
            must set its own variables. The tool chooses the names, never the model. Variables for program and library
            paths, HOME and the network stay unchanged
        :param separate_stderr: keep stderr out of ``output``, for output that is parsed
        :param trusted_program: take the program of an argv, and the programs that it starts by name, from outside the
            workspace, for output that is relied on
        :param on_output: called with each kept piece of output, so that a stopped run leaves its partial output; if
            output is dropped, the last call says so
        :param keep_bytes: how many bytes ``output`` keeps, for callers that store the pieces themselves; the result then
            has the ``tail`` of a longer output, and no piece says that output is dropped
        """
        ...

    async def list_hidden_paths(self, paths: Sequence[str]) -> Sequence[str]:
        """Return those of ``paths`` that programs of this call cannot see because a rule denies reading.

        The check is by name, so the files need not exist.
        """
        ...


class HttpResponse(Struct, frozen=True):
    """The response of a server, with any status.

    :param url: of the last hop, in canonical form
    :param headers: in order, with lower-case names
    :param body: decoded (gzip, deflate), up to the requested number of bytes
    :param is_truncated: whether the body was longer
    :param redirects: the URLs of the hops before the last
    """

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    is_truncated: bool = False
    redirects: tuple[str, ...] = ()

    def header(self, name: str) -> str | None:
        """Return the first value of a header, by its name in any case."""
        return next((value for key, value in self.headers if key == name.lower()), None)


class NetworkService(Protocol):
    """HTTP and HTTPS requests to the hosts that the call may reach.

    The call's capability set and the rules evaluate every hop, where ask counts as deny, and every address that its
    host resolves to. A private address needs a literal grant.
    """

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        max_bytes: int = 16 * 1024 * 1024,
        timeout_ms: int = 30_000,
        max_redirects: int = 5,
        on_body: Callable[[bytes], None] | None = None,
    ) -> HttpResponse:
        """Fetch one URL.

        Each redirect is followed as a new request. To another origin only basic headers go along and no body. A
        redirect that would send a body there is returned as the response.

        :param max_bytes: of the decoded body; the rest is not read
        :param timeout_ms: for all hops together
        :param on_body: called with each kept piece of the last hop's body
        :raises ToolError: ``denied`` for a host that may not be reached; ``invalid_input`` for an invalid URL or
            header; ``timeout``; ``limit`` for too many redirects; ``backend`` if a server cannot be reached or
            understood
        """
        ...


class ExtractedWebPage(Struct, frozen=True):
    """The text of a web page.

    :param part: ``main`` for the main content, ``whole`` for all of the page
    :param links: text and absolute URL of the links in that part
    :param hidden_elements: how many elements with text the page hides; they are left out
    :param keeps_hidden: whether their text is in ``text`` nevertheless, because the page has hardly any other
    :param scripts: how many scripts the page has
    :param is_simplified: whether the page was too complex, so that only its tags were removed
    """

    text: str
    part: str
    title: str = ""
    links: tuple[tuple[str, str], ...] = ()
    hidden_elements: int = 0
    keeps_hidden: bool = False
    scripts: int = 0
    is_simplified: bool = False


class ExtractedPdfPages(Struct, frozen=True):
    """The text of pages of a PDF, from page ``first`` on, counted from 1.

    :param pages: fewer than the rest of the document if they reach a limit; empty if ``first`` is beyond its end
    :param total: the number of pages of the document
    """

    pages: tuple[str, ...]
    first: int
    total: int


class DocumentService(Protocol):
    """Text from documents, extracted in a process with its own limits."""

    async def extract_page(self, page: bytes, *, charset: str | None = None, url: str) -> ExtractedWebPage:
        """Return the main text of an HTML page.

        :param charset: of its response, if it had one
        :param url: of the page, for links
        :raises ToolError: ``failed`` if the page exceeds the limits; ``unavailable`` without the libraries
        """
        ...

    async def extract_pdf_pages(
        self, document: bytes, *, name: str, first: int = 1, count: int | None = None, max_bytes: int = 200_000
    ) -> ExtractedPdfPages:
        """Return the text of pages of a PDF.

        :param name: of the document, for messages
        :param first: the first page; below 0 it counts from the end
        :param max_bytes: of the text as JSON; a first page that is longer is cut
        :raises ToolError: ``unavailable`` without the extra ``pdf``, or for an encrypted document; ``limit`` if the first
            page exceeds the limits; ``failed`` for a document that is not a PDF
        """
        ...


class ToolStateService(Protocol):
    """The values that a tool keeps in the session, JSON-able and persistent."""

    async def get(self, key: str) -> Any:
        """Return a value, or None."""
        ...

    async def put(self, key: str, value: Any) -> None:
        """Store a value."""


class SecretService(Protocol):
    """The secrets that the tool declared, by name. Their values are redacted from the tool's output."""

    def get(self, name: str) -> str:
        """Return the value of a secret.

        :raises ToolError: ``denied`` if the tool did not declare the secret, ``unavailable`` if it has no value
        """
        ...


class QuestionOption(Struct, frozen=True):
    """A choice of a question."""

    label: str
    description: str = ""


class UserQuestion(Struct, frozen=True):
    """A question to the user."""

    question: str
    header: str = ""
    options: tuple[QuestionOption, ...] = ()
    multi_select: bool = False


class UserQuestionService(Protocol):
    """The user of the session."""

    async def ask(self, questions: Sequence[UserQuestion]) -> list[list[str]]:
        """Ask the user questions and return one list of answers for each.

        :raises ToolError: ``unavailable`` if the session has no user to ask
        """
        ...


class ModeService(Protocol):
    """The permission mode of the session. Sub-agents do not have this service."""

    async def change(self, mode: Mode | None) -> tuple[Mode, Mode]:
        """Switch the session to another mode. It applies at once.

        :param mode: None for the mode before the current one, or ``ask`` if that is unknown
        :return: the mode before the change, and the mode after it
        :raises ToolError: ``denied`` for a wider mode if the user has not answered a question of this call
        """
        ...


class UserContext(Struct, frozen=True):
    """What the frontend knows about the user's surroundings. Every field may be unknown."""

    time: str | None = None
    location: str | None = None
    locale: str | None = None
    device: str | None = None


class CancellationToken(Protocol):
    """The cancellation state of a call, for code that runs in a thread."""

    @property
    def is_requested(self) -> bool:
        """Whether the call is to end."""
        ...

    def raise_if_requested(self) -> None:
        """Raise if the call is to end.

        :raises ToolError: ``cancelled`` or ``timeout``
        """


class Runtime(Protocol):
    """The runtime of one call, which ``execute`` receives.

    It has the identity of the call and every service that the tool may use. A service that costs something is made on
    first use.
    """

    @property
    def tool_id(self) -> str:
        """The id of the tool."""
        ...

    @property
    def call_id(self) -> str:
        """The id of the call."""
        ...

    @property
    def session_id(self) -> str:
        """The id of the session."""
        ...

    @property
    def agent(self) -> str:
        """The id of the agent that made the call."""
        ...

    @property
    def topic(self) -> str | None:
        """The topic of the session, or None."""
        ...

    @property
    def user_context(self) -> UserContext | None:
        """What the frontend knows about the user's surroundings, or None."""
        ...

    @property
    def client_meta(self) -> Mapping[str, Any]:
        """The ``_meta`` of the request with which an MCP client made this call. Empty for other calls."""
        ...

    @property
    def workdir(self) -> str:
        """The absolute, canonical path of the workspace."""
        ...

    @property
    def capabilities(self) -> CapabilitySet:
        """What this call may touch: what the tool requires, within its agent's set and the host's ceiling."""
        ...

    @property
    def config(self) -> Mapping[str, str]:
        """The values of the tool's declared settings, by key.

        They are the operator's values or the defaults. Secret settings are not among them.
        """
        ...

    @property
    def max_output_bytes(self) -> int:
        """How many bytes of the result a model reads, as set by the operator or declared by the tool.

        The rest is cut and stored in a file, so a tool that supports paging should return less.
        """
        ...

    @property
    def files(self) -> FileService:
        """File access below the roots."""
        ...

    @property
    def search(self) -> SearchService:
        """Search for files and text below the roots."""
        ...

    @property
    def shell(self) -> ShellService:
        """Programs in the sandbox."""
        ...

    @property
    def net(self) -> NetworkService:
        """HTTP and HTTPS requests."""
        ...

    @property
    def documents(self) -> DocumentService:
        """Text from documents."""
        ...

    @property
    def language_servers(self) -> LanguageService:
        """What language servers know about the code below the roots."""
        ...

    @property
    def secrets(self) -> SecretService:
        """The secrets that the tool declared."""
        ...

    @property
    def state(self) -> ToolStateService:
        """The values that the tool keeps in the session."""
        ...

    @property
    def user(self) -> UserQuestionService:
        """Questions to the user."""
        ...

    @property
    def mode(self) -> ModeService:
        """The permission mode of the session."""
        ...

    @property
    def tasks(self) -> TaskService:
        """The tasks of the workspace."""
        ...

    @property
    def channels(self) -> ChannelService:
        """Messages between agents."""
        ...

    @property
    def triggers(self) -> TriggerService:
        """The timers, schedules and watched channels of the session."""
        ...

    @property
    def transcript(self) -> TranscriptService:
        """The conversation and calls of the session so far."""
        ...

    @property
    def memory(self) -> MemoryService:
        """The notes and the past of the session, and the facts stored for the user."""
        ...

    @property
    def catalog(self) -> CatalogService:
        """The active tools of the model, and those that can be loaded."""
        ...

    @property
    def jobs(self) -> JobService:
        """The background jobs of the session."""
        ...

    @property
    def subagents(self) -> SubagentService:
        """Sub-agents, to which the tool can delegate."""
        ...

    @property
    def skills(self) -> SkillService:
        """The skills of the session."""
        ...

    @property
    def cancellation(self) -> CancellationToken:
        """The cancellation state of the call, for code that runs in a thread."""
        ...

    @property
    def client(self) -> ClientService:
        """The client of the session, if it can do more than call tools. Each kind of request needs a capability."""
        ...

    @property
    def terminals(self) -> TerminalService:
        """The terminals of the session: programs that receive typed input."""
        ...

    @property
    def resources(self) -> ResourceService:
        """The resources and prompts of all sources."""
        ...

    @property
    def tool_session(self) -> ToolSession:
        """The tool session that this call steps or closes. For built-in tools only."""
        ...

    def report_progress(
        self, message: str = "", *, fraction: float | None = None, done: float | None = None, total: float | None = None
    ) -> None:
        """Report progress to the frontend. Safe from any thread, never blocks.

        :param fraction: from 0 to 1
        :param done: of ``total``, instead of ``fraction``
        """

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        """Send a log message, any JSON-able data, to the listeners of the call. Safe from any thread, never blocks.

        :param logger: the part of the tool that sends it
        :raises ToolError: ``invalid_input`` for an unknown level
        """

    def write_output(self, piece: str | bytes) -> None:
        """Show a piece of output while the call runs, to the listeners of the call or the readers of its job.

        Bytes are decoded as UTF-8, also if a piece ends within a character. The result of the call is still the
        return value of ``execute``. Safe from any thread, never blocks.
        """

    def set_partial_result(self, data: Any) -> None:
        """Set the data of the result if the call is stopped before it returns. The last value counts."""

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        """Call another tool through the arbiter, under the locks that this call holds."""
        ...


async def resolve_intended_path(runtime: Runtime, path: str) -> str:
    """Return the path of a tool's argument as it is spelled on the disk, or as git knows it if it was deleted."""
    if path.isascii() and not {" ", "\\"} & set(path):
        return path
    restored = unescape_displayed_path(path)
    try:
        there = resolve_tool_path(runtime, unescape_displayed_path((await runtime.files.stat(path)).path))
    except ToolError:
        return restored
    spellings = {normalise_unicode_spelling(resolve_tool_path(runtime, one)) for one in (path, restored)}
    # Through a link, another path leads there, and git has the link.
    return there if "\\" in path or normalise_unicode_spelling(there) in spellings else restored


async def resolve_intended_paths(runtime: Runtime, paths: Sequence[str]) -> list[str]:
    """Return the result of :func:`resolve_intended_path` for each path."""
    return [await resolve_intended_path(runtime, path) for path in paths]


def resolve_tool_path(runtime: Runtime, path: str) -> str:
    """Return the absolute path of a tool's path argument.

    :raises ToolError: ``invalid_input`` if the path is invalid
    """
    if "\0" in path:
        raise ToolError(f"The path is invalid: {path!r} contains a NUL character. Remove it.", kind="invalid_input")
    return posixpath.normpath(posixpath.join(runtime.workdir, path))
