"""A complete kernel in a temporary folder, with a scripted user, client, resolver and third-party source of tools."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.errors import Diagnostic
from handrail.contract.services.client_services import ClientMethod, RequestToClient, classify_client_request
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.workspace_opening import open_kernel
from handrail.policy.watchdogs.api import Watchdog

KEYWORD_SEARCH = '[search]\nembedder = "none"\n'


@asynccontextmanager
async def temporary_kernel(
    folder: Path | None = None,
    *,
    tools: Iterable[Tool] = (),
    rules: Iterable[str] = (),
    secrets: Mapping[str, str] | None = None,
    watchdogs: Iterable[Watchdog] = (),
    settings: str = "",
) -> AsyncGenerator[LocalKernel]:
    """Open a kernel whose workspace, state and configuration are all in ``folder``.

    The workspace is ``folder/ws``. It and ``folder/state`` may exist, so that a test can open them again.

    :param folder: a folder that is kept; None for a temporary one that is removed
    :param settings: the text of its ``handrail.toml``; tool folders are next to it in ``folder/config``. Without
        ``[search]``, a search compares keywords only, so that no test loads an embedding model
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="handrail-test-") as made:
            async with temporary_kernel(
                Path(made), tools=tools, rules=rules, secrets=secrets, watchdogs=watchdogs, settings=settings
            ) as kernel:
                yield kernel
        return
    workspace, config = folder / "ws", folder / "config" / "handrail.toml"
    workspace.mkdir(parents=True, exist_ok=True)
    config.parent.mkdir(exist_ok=True)
    config.write_text(settings if "[search]" in settings else f"{settings}\n{KEYWORD_SEARCH}", encoding="utf-8")
    async with open_kernel(
        workspace, tools=tools, rules=rules, secrets=secrets, watchdogs=watchdogs, state=folder / "state", config=config
    ) as kernel:
        assert isinstance(kernel, LocalKernel), "another process holds this workspace"
        yield kernel


class ScriptedApprovalHandler:
    """An :class:`~handrail.contract.approval_requests.ApprovalHandler` with prepared answers, which records its requests.

    :param approvals: one answer for each approval request, in order; further requests are rejected
    :param answers: for each ``question`` call in order, one list of answers per question
    """

    def __init__(
        self, approvals: Iterable[ApprovalAnswer] = (), answers: Iterable[Sequence[Sequence[str]]] = ()
    ) -> None:
        self._approvals = deque(approvals)
        self._answers = deque(answers)
        self.requests: list[ApprovalRequest] = []
        self.questions: list[UserQuestion] = []
        self.request_received = asyncio.Event()
        """Set when a request has arrived."""
        self.may_answer = asyncio.Event()
        """Clear it to delay the answers."""
        self.may_answer.set()

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        """Record the request, and return the next prepared answer."""
        self.requests.append(request)
        self.request_received.set()
        await self.may_answer.wait()
        return (
            self._approvals.popleft() if self._approvals else ApprovalAnswer("reject", "The test prepared no answer.")
        )

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        """Record the questions, and return the next prepared answers."""
        self.questions.extend(questions)
        self.request_received.set()
        await self.may_answer.wait()
        prepared = self._answers.popleft() if self._answers else [[""] for _ in questions]
        return [list(one) for one in prepared]


class ScriptedClient:
    """A :class:`~handrail.contract.services.client_services.ClientHandler` with prepared answers, which records its requests.

    :param answers: for each ask in order, a mapping of key to answer, or an exception to raise
    :param kinds: the kinds of requests that its client declared
    """

    def __init__(
        self,
        answers: Iterable[Mapping[str, Any] | Exception] = (),
        kinds: Iterable[str] = ("form", "url", "sample", "sample-tools", "sample-context", "roots"),
    ) -> None:
        self._answers = deque(answers)
        self.kinds: frozenset[str] = frozenset(kinds)
        self.calls: list[str] = []
        """The ID of the call of each ask, in order."""
        self.asks: list[Mapping[str, RequestToClient]] = []
        self.detached: list[str] = []
        self.request_received = asyncio.Event()
        """Set when a request has arrived."""
        self.may_answer = asyncio.Event()
        """Clear it to delay the answers."""
        self.may_answer.set()

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        """Return whether the client declared this kind of request."""
        return classify_client_request(method, params) in self.kinds

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Record the requests, and return the next prepared answers, or raise the next prepared exception."""
        self.calls.append(call_id)
        self.asks.append(requests)
        self.request_received.set()
        await self.may_answer.wait()
        prepared = self._answers.popleft() if self._answers else {key: {"action": "decline"} for key in requests}
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    def detach(self, call_id: str) -> None:
        """Record that the call was detached."""
        self.detached.append(call_id)


# A scripted name resolver, whose second answer for a name may differ from the first.
#
# ::
#
#     names = Names({"api.example.org": ["127.0.0.1"], "rebinds.example": [["198.51.100.7"], ["127.0.0.1"]]})


class ScriptedResolver:
    """A :class:`handrail.sandbox.network.egress_check.HostResolver` with a table.

    :param table: host name to its addresses, or to a list of such answers: one for each query, the last for all further
    """

    def __init__(self, table: Mapping[str, Sequence[str] | Sequence[Sequence[str]]]) -> None:
        self._answers = {
            name: [list(answer) for answer in answers]
            if not all(isinstance(answer, str) for answer in answers)
            else [[str(a) for a in answers]]
            for name, answers in table.items()
        }
        self.queries: list[str] = []
        """All queries, in order."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Return the next answer of the table for a host name.

        :raises OSError: if the table has no such name
        """
        self.queries.append(name)
        if (answers := self._answers.get(name)) is None:
            raise OSError(f"The name {name!r} is not in the table of this resolver.")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@dataclass(slots=True)
class ThirdPartySource:
    """A third-party source of tools. Faulty tools are quarantined, and none runs before its approval.

    :param name: the operator's name of the source
    :param about: the operator's description of it
    :param faults: the faults of the source itself
    :param broken: an exception that loading raises, like that of a disconnected server
    """

    name: str
    tools: list[Tool] = field(default_factory=list[Tool])
    about: str = ""
    faults: list[Diagnostic] = field(default_factory=list[Diagnostic])
    broken: Exception | None = None
    rank: SourceRank = "package"
    is_third_party: bool = True

    def offer_tools(self, *tools: Tool) -> None:
        """Add tools from now on, and replace those with the same IDs."""
        self.tools = [*(old for old in self.tools if old.spec.id not in {new.spec.id for new in tools}), *tools]

    def withdraw(self, *tool_ids: str) -> None:
        """Remove tools from now on."""
        self.tools = [tool for tool in self.tools if tool.spec.id not in tool_ids]

    def load(self) -> SourceContents:
        """Return the tools and faults, or raise the exception of ``broken``."""
        if self.broken is not None:
            raise self.broken
        return SourceContents(self._found_tools(self.tools), tuple(self.faults), self.name, self.about)

    def _found_tools(self, tools: Iterable[Tool]) -> tuple[DiscoveredTool, ...]:
        return tuple(DiscoveredTool(tool, f"{self.name}: {tool.spec.id}") for tool in tools)
