"""The typed runtime that a tool receives: its only way from ``execute`` to the world.

Every service here is a Protocol; the implementations live in the ``runtime`` room and above. Access to a service that the
tool did not require raises :class:`~handrail.contract.errors.ToolError` of kind ``denied``, with the line to add to
``requires``. A tool passes paths as the model wrote them, workspace-relative or absolute. Returned paths have the form to
show, relative inside the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handrail.contract.call import Result
from handrail.contract.doors.agents import Agents
from handrail.contract.doors.channels import Channels, Triggers
from handrail.contract.doors.files import Files, Search
from handrail.contract.doors.jobs import Catalog, Jobs, Terminals
from handrail.contract.doors.memory import Skills, Transcript
from handrail.contract.doors.offers import Offers
from handrail.contract.doors.peer import LogLevel, PeerDoor
from handrail.contract.sandbox import Completed
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import Opened


class Shell(Protocol):
    """Programs in the sandbox of this call's capability set; nothing they start outlives the call."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        trusted: bool = False,
        on_output: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run a shell text, or an argv without a shell. The call's own time-out ends it, and so does cancelling this.

        :param environment: further variables of the program, for an argv only: rules judge a text by its words, so it has
            to bring what it means with it. They are the tool's own choice, never a name that a model gave; those that
            decide where programs and libraries are found, where HOME is and how the network is reached stay as they are
        :param apart: keep stderr out of ``output``, for output that is parsed
        :param trusted: take the program of an argv, and the programs that it starts by name, from outside of the
            workspace, for output that is relied on
        :param on_output: called with each piece of output that is kept, as it comes, so that a stopped run leaves what it
            wrote; where there is more than is kept, a last time with a line that says so
        """
        ...

    async def hidden(self, paths: Sequence[str]) -> Sequence[str]:
        """Those of ``paths`` that programs of this call cannot see, because rules keep them from being read. Judged by
        name, so the files need not exist any more."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered, whatever its status.

    :param url: of the last hop, in canonical form
    :param headers: in order, names in lower case
    :param body: decoded (gzip, deflate), at most as many bytes as were asked for
    :param more: whether there was more of it
    :param passed: the URLs of the hops before the last
    """

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    more: bool = False
    passed: tuple[str, ...] = ()

    def header(self, name: str) -> str | None:
        """The first value of a header, by its name in any case."""
        return next((value for key, value in self.headers if key == name.lower()), None)


class Net(Protocol):
    """Fetches over http and https from the hosts that the call may reach.

    Every hop is judged by the call's capability set and the rules, where ask counts as deny, and so is every address that
    its host leads to. An address that is not public is reached only by a literal grant.
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
    ) -> Response:
        """Fetch one URL.

        Redirects are followed, each as a new request; to another origin only the plainest headers go with it and no
        body, so a redirect that would take one there is answered as it is.

        :param max_bytes: of the decoded body; what comes after is not read
        :param timeout_ms: for all hops together
        :param on_body: told each kept piece of the last hop's body as it comes
        :raises ToolError: ``denied`` where a host may not be reached; ``invalid_input`` for a URL or header that is none;
            ``timeout``; ``limit`` for too many redirects; ``backend`` where a server cannot be reached or understood
        """
        ...


class State(Protocol):
    """A tool's own values in the session, JSON-able, kept across restarts."""

    async def get(self, key: str) -> Any: ...

    async def put(self, key: str, value: Any) -> None: ...


class Secrets(Protocol):
    """The secrets that the tool declared, by name. Their values are redacted wherever the tool's output carries them."""

    def get(self, name: str) -> str:
        """:raises ToolError: ``denied`` unless the tool declared the secret, ``unavailable`` when it has no value"""
        ...


@dataclass(frozen=True, slots=True)
class Option:
    label: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    question: str
    header: str = ""
    options: tuple[Option, ...] = ()
    multi_select: bool = False


class People(Protocol):
    """The people at the face."""

    async def answer(self, questions: Sequence[Question]) -> list[list[str]]:
        """One list of answers per question.

        :raises ToolError: ``unavailable`` when nobody is attached to the session
        """
        ...


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What the face knows of the person's surroundings; every field may be unknown."""

    time: str | None = None
    place: str | None = None
    locale: str | None = None
    device: str | None = None


class Cancellation(Protocol):
    @property
    def requested(self) -> bool: ...

    def check(self) -> None:
        """:raises ToolError: ``cancelled`` or ``timeout``, for code that runs in a thread."""
        ...


class Runtime(Protocol):
    """What ``execute`` is given: the call it runs for, and the doors to everything it may touch. A door that costs
    something is made when it is first used."""

    @property
    def tool_id(self) -> str: ...
    @property
    def call_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def agent(self) -> str:
        """The id of the agent that made the call."""
        ...

    @property
    def topic(self) -> str | None:
        """The session's topic, as its opener named it."""
        ...

    @property
    def client(self) -> ClientContext | None:
        """What the face knows of the person's surroundings; None when it knows nothing."""
        ...

    @property
    def workdir(self) -> str:
        """The workspace's canonical folder, absolute."""
        ...

    @property
    def capabilities(self) -> CapabilitySet:
        """What this call may touch: what the tool requires, within its agent's set and the host's ceiling."""
        ...

    @property
    def config(self) -> Mapping[str, str]:
        """The values of the settings that the tool declared, by key, without the secret ones: what the operator set, and
        otherwise the defaults."""
        ...

    @property
    def max_output(self) -> int:
        """How many bytes of what the call gives back a model reads, as the operator set it or the tool declared it. The rest
        is cut off and kept in a file, so a tool that can continue later gives less."""
        ...

    @property
    def files(self) -> Files:
        """Reading and writing files beneath the roots."""
        ...

    @property
    def search(self) -> Search:
        """Finding files, and text in them, beneath the roots."""
        ...

    @property
    def shell(self) -> Shell:
        """Running programs in the sandbox."""
        ...

    @property
    def net(self) -> Net:
        """Fetching over http and https."""
        ...

    @property
    def secrets(self) -> Secrets:
        """The secrets that the tool declared."""
        ...

    @property
    def state(self) -> State:
        """The tool's own values in the session."""
        ...

    @property
    def people(self) -> People:
        """Asking the person at the face."""
        ...

    @property
    def channels(self) -> Channels:
        """Messages between agents."""
        ...

    @property
    def triggers(self) -> Triggers:
        """The session's timers, schedules and watched channels."""
        ...

    @property
    def transcript(self) -> Transcript:
        """What was said and done in the session so far."""
        ...

    @property
    def catalog(self) -> Catalog:
        """The tools that the model sees, and those that can be brought into view."""
        ...

    @property
    def jobs(self) -> Jobs:
        """The jobs of this session."""
        ...

    @property
    def agents(self) -> Agents:
        """Sub-agents that work can be handed to."""
        ...

    @property
    def skills(self) -> Skills:
        """The session's skills."""
        ...

    @property
    def cancellation(self) -> Cancellation:
        """Whether the call is to end, for code that runs in a thread."""
        ...

    @property
    def peer(self) -> PeerDoor:
        """The client at the face, when it can do more than call tools. Each kind of request to it needs a capability."""
        ...

    @property
    def terminals(self) -> Terminals:
        """The session's terminals: programs that take typed input."""
        ...

    @property
    def offers(self) -> Offers:
        """The resources and prompts of sources."""
        ...

    @property
    def opened(self) -> Opened:
        """The open state that this call takes a step of or closes. For the built-in tools that do so only."""
        ...

    def progress(
        self,
        message: str = "",
        *,
        fraction: float | None = None,
        done: float | None = None,
        total: float | None = None,
    ) -> None:
        """Report progress to the face: ``fraction`` from 0 to 1, or ``done`` of ``total``, when known. Safe from any thread,
        never blocks."""
        ...

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        """Send a log message, any JSON-able data, to whoever watches the call. Safe from any thread, never blocks.

        :param logger: the part of the tool that sends it
        :raises ToolError: ``invalid_input`` for an unknown level
        """
        ...

    def output(self, piece: str | bytes) -> None:
        """Show a piece of output while the call runs: to whoever watches it and, if it is a job, to whoever reads the job.
        Bytes are decoded as UTF-8, also when a character is cut in two. The call's result is still what ``execute``
        returns. Safe from any thread, never blocks."""
        ...

    def partial(self, data: Any) -> None:
        """Set the data of the result in case the call is stopped before it returns. The last one counts."""
        ...

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        """Call another tool through the arbiter, under the locks that this call holds."""
        ...
