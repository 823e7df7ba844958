"""Sessions for editors: the kernel of each workspace, the user and the files at the editor, and new sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from acp import schema
from acp.agent.connection import AgentSideConnection
from acp.exceptions import RequestError

from handrail.agent.agent_loop import Agent
from handrail.contract.approval_requests import (
    APPROVING_CHOICES,
    Approval,
    ApprovalAnswer,
    ApprovalChoice,
    ApprovalRequest,
)
from handrail.contract.errors import ToolError
from handrail.contract.services.client_services import ClientMethod, RequestToClient, UnsupportedClientRequest
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.session_protocols import ClientInfo, Session
from handrail.contract.struct import Struct, field
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.acp import editor_call_format
from handrail.frontends.acp.editor_session import EditorSession
from handrail.frontends.acp.editor_terminals import EditorTerminals, choose_output_display
from handrail.frontends.acp.editor_updates import Update, UpdateSender
from handrail.frontends.cli.terminal_approvals import (
    format_approval_request_lines,
    format_program_files,
    preview_edit_diff,
)
from handrail.frontends.cli.terminal_output import escape_to_one_line
from handrail.frontends.mcp.approval_forms import TITLED_SINCE, make_question_form, parse_question_form_answers
from handrail.runtime.call_runtime import NO_USER_ATTACHED

if TYPE_CHECKING:
    from handrail.agent.model_protocol import Model
    from handrail.agent.run_budget import Budget
    from handrail.contract.agent_manifest import AgentManifest
    from handrail.kernel.kernel_interface import Kernel
    from handrail.session.transcript_search import StoredSessionReader


# The user at an editor: approval requests for calls, and questions of tools.
#
# Each request is sent separately, so several can be open and be answered in any order. If an editor disconnects during a
# request, the call waits for approval, and Handrail asks again when its session is resumed.

OptionKind = schema.PermissionOptionKind


def make_permission_options(request: ApprovalRequest) -> list[tuple[ApprovalChoice, OptionKind, str]]:
    """Return the possible answers to a request, each with the full rule that it would store."""
    found: list[tuple[ApprovalChoice, OptionKind, str]] = [("once", "allow_once", "Allow once")]
    for rule, session, project in (
        (request.suggested_rule, "session", "project"),
        (request.suggested_wider_rule, "session-wider", "project-wider"),
    ):
        if rule is not None:
            shown = escape_to_one_line(rule)
            if not request.is_shared:
                found.append((cast("ApprovalChoice", session), "allow_always", f"Always in this session: {shown}"))
            found.append((cast("ApprovalChoice", project), "allow_always", f"Always in this project: {shown}"))
    found.append(("reject", "reject_once", "Reject"))
    if request.suggested_deny is not None:
        found.append(
            ("reject-always", "reject_always", f"Never in this project: {escape_to_one_line(request.suggested_deny)}")
        )
    return found


class EditorApprovalHandler:
    """An :class:`~handrail.contract.approval_requests.ApprovalHandler` that asks the user at an editor.

    Requests for calls of sub-agents are sent in the same session.

    :param forms: whether the client answers forms
    :param introduce: called before a request, to show a call that the client does not know
    :param decided: called with the decision
    :param list_pending: returns the pending requests of the workspace, among them those of questions
    :ivar session_id: the ID of the client's session
    :ivar client_ready: set when the client knows its session; earlier requests wait for it
    """

    def __init__(
        self,
        client: AgentSideConnection,
        workdir: str,
        spec_of: Callable[[str], ToolSpec | None],
        *,
        forms: bool,
        introduce: Callable[[ApprovalRequest], None],
        decided: Callable[[ApprovalRequest, bool], None],
        list_pending: Callable[[], Sequence[Approval]],
    ) -> None:
        self.session_id = ""
        self._client = client
        self._workdir = workdir
        self._spec_of = spec_of
        self._forms = forms
        self._introduce = introduce
        self._decided = decided
        self._list_pending = list_pending
        self.client_ready = asyncio.Event()

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        await self.client_ready.wait()
        options = make_permission_options(request)
        self._introduce(request)
        answer = await self._request_permission(request, options)
        self._decided(request, answer.choice in APPROVING_CHOICES)
        return answer

    async def _request_permission(
        self, request: ApprovalRequest, options: list[tuple[ApprovalChoice, OptionKind, str]]
    ) -> ApprovalAnswer:
        call = await self._describe_call_fully(request)
        try:
            answer = await self._client.request_permission(
                self.session_id,
                call,
                [schema.PermissionOption(option_id=choice, kind=kind, name=name) for choice, kind, name in options],
            )
        except OSError:  # the client has disconnected
            return ApprovalAnswer("defer")
        except RequestError as error:
            text = f"The client did not answer the approval request: {str(error)[:300]}. Continue without this call."
            raise ToolError(text, kind="unavailable") from None
        except ValueError:  # pydantic's, for an invalid answer
            return ApprovalAnswer("reject", "The client returned an invalid answer to the approval request.")
        chosen = answer.outcome.option_id if isinstance(answer.outcome, schema.AllowedOutcome) else None
        for choice, _, _ in options:
            if choice == chosen:
                return ApprovalAnswer(choice)
        unknown = f"The client chose an unknown option: {str(chosen)[:80]!r}."
        return ApprovalAnswer("reject", "" if chosen is None else unknown)

    async def _describe_call_fully(self, request: ApprovalRequest) -> schema.ToolCallUpdate:
        """Return the full description of a call: its reason, every argument, and its changes."""
        spec, workdir = self._spec_of(request.tool_id), self._workdir
        found: list[editor_call_format.Content] = []
        changes = await preview_edit_diff(request, workdir)
        path = request.arguments.get("path")
        drawn = False
        if changes is not None and (isinstance(path, str) or request.tool_id == "apply_patch"):
            read = (
                editor_call_format.parse_unified_diff(changes, editor_call_format.to_protocol_path(path, workdir))
                if isinstance(path, str)
                else editor_call_format.parse_unified_diff(changes, "", workdir)
            )
            drawn = bool(read.parts) and read.is_complete
            found += read.parts if drawn else []
        origin = f"Requested by {escape_to_one_line(request.origin)}.\n" if request.origin else ""
        lines = (
            [f"{request.id}  {escape_to_one_line(request.reason)}", *format_program_files(request)]
            if drawn
            else format_approval_request_lines(request, changes)
        )
        found.insert(0, editor_call_format.make_text_content(origin + lines[0]))
        if len(lines) > 1:
            found.insert(1, editor_call_format.make_full_fenced_content("\n".join(lines[1:])))
        return schema.ToolCallUpdate(
            tool_call_id=request.call_id,
            title=editor_call_format.make_call_title(
                request.tool_id, request.arguments, request.origin.partition(" of ")[0]
            ),
            kind=spec.kind if spec is not None else "other",
            status="pending",
            content=list(found),
            locations=editor_call_format.extract_call_file_locations(spec, request.arguments, workdir),
            raw_input=dict(request.arguments),
        )

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        await self.client_ready.wait()
        if not self._forms:
            return await self._answer_by_permission(session_id, questions)
        form = make_question_form(questions, TITLED_SINCE).params
        mode = schema.ElicitationFormSessionMode(
            session_id=self.session_id,
            requested_schema=schema.ElicitationSchema.model_validate(form["requestedSchema"]),
        )
        try:
            answer = await self._client.create_elicitation(str(form["message"]), mode)
        except OSError:
            return None
        except RequestError as error:
            text = f"The client did not answer: {str(error)[:300]}. Continue without the answer."
            raise ToolError(text, kind="unavailable") from None
        except ValueError:
            text = "The client returned an invalid answer to `elicitation/create`. Continue without it."
            raise ToolError(text, kind="unavailable") from None
        filled = {"action": answer.action, "content": getattr(answer, "content", None)}
        answers = parse_question_form_answers(questions, filled, TITLED_SINCE)
        if answers is None or isinstance(answers, str):
            raise ToolError(answers or "The user did not answer. Continue without the answer.", kind="denied")
        return answers

    async def _answer_by_permission(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        """Ask questions with the options of a permission request, for a client without forms."""
        if any(not question.options or question.multi_select for question in questions):
            raise ToolError(NO_USER_ATTACHED, kind="unavailable")
        request = next(
            (
                row.request
                for row in self._list_pending()
                if row.kind == "question"
                and row.request.session_id == session_id
                and tuple(row.questions) == tuple(questions)
            ),
            None,
        )
        if request is None:  # answered meanwhile
            return None
        self._introduce(request)
        answers: list[list[str]] = []
        for question in questions:
            if (chosen := await self._request_option(request, question)) is None:
                return None
            answers.append([chosen])
        self._decided(request, True)
        return answers

    async def _request_option(self, request: ApprovalRequest, question: UserQuestion) -> str | None:
        """Return the label of the chosen option, or None if the client has disconnected.

        :raises ToolError: ``denied`` if the user declined to answer
        """
        shown = [
            schema.PermissionOption(
                option_id=f"option-{number}",
                kind="allow_once",
                name=escape_to_one_line(
                    f"{option.label}: {option.description}" if option.description else option.label
                ),
            )
            for number, option in enumerate(question.options, 1)
        ]
        shown.append(schema.PermissionOption(option_id="decline", kind="reject_once", name="Decline to answer"))
        spec = self._spec_of(request.tool_id)
        call = schema.ToolCallUpdate(
            tool_call_id=request.call_id,
            title=escape_to_one_line(question.header or request.tool_id),
            kind=spec.kind if spec is not None else "other",
            status="pending",
            content=[editor_call_format.make_text_content(question.question)],
        )
        try:
            answer = await self._client.request_permission(self.session_id, call, shown)
        except OSError:
            return None
        except (RequestError, ValueError) as error:
            text = f"The client did not answer the question: {str(error)[:300]}. Continue without the answer."
            raise ToolError(text, kind="unavailable") from None
        chosen = answer.outcome.option_id if isinstance(answer.outcome, schema.AllowedOutcome) else "decline"
        for one, option in zip(shown, question.options, strict=False):
            if one.option_id == chosen:
                return option.label
        self._decided(request, False)
        raise ToolError("The user declined to answer. Continue without the answer.", kind="denied")


# The editor's content of files, with unsaved changes, for tools that read.


class AcpEditorClientHandler:
    """The unsaved files of an editor.

    A :class:`~handrail.contract.services.client_services.ClientHandler` with :class:`~handrail.contract.services.client_services.EditorClientHandler`. It answers no requests
    of MCP servers.
    """

    def __init__(self, client: AgentSideConnection) -> None:
        self.session_id = ""
        self._client = client

    async def read_unsaved_text(self, path: str) -> str | None:
        try:
            return (await self._client.read_text_file(self.session_id, path)).content
        except (OSError, RequestError, ValueError):  # it has disconnected, has no such file, or answered invalidly
            return None

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        return False

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        methods: list[ClientMethod] = [ask.method for ask in requests.values()]
        raise UnsupportedClientRequest(*methods)

    def detach(self, call_id: str) -> None:
        pass


# The workspaces of an editor: each has one kernel, which opens with its first session and closes with its last.

McpServer = schema.HttpMcpServer | schema.SseMcpServer | schema.AcpMcpServer | schema.McpServerStdio
WorkspaceOpener = Callable[[str], "AbstractAsyncContextManager[Kernel]"]


class _OpenWorkspace(Struct, eq=False):
    """One open workspace.

    A separate task opens and closes its kernel, because the first caller may be cancelled.
    """

    ready: asyncio.Future[Kernel]
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    task: asyncio.Task[None] | None = None


class OpenWorkspacePool:
    """The open workspaces, each with one shared kernel.

    :param opening: opens a workspace
    """

    def __init__(self, opening: WorkspaceOpener) -> None:
        self._opening = opening
        self._workspaces: dict[str, _OpenWorkspace] = {}

    async def acquire_kernel(self, folder: str) -> Kernel:
        """Return the kernel of a workspace. Call :meth:`release_workspace` once for each call of this method.

        :param folder: the canonical path
        :raises HandrailError: if the workspace cannot be opened
        """
        while (place := self._workspaces.get(folder)) is not None and place.closing.is_set():
            assert place.task is not None
            await asyncio.wait((place.task,))
        if place is None:
            place = _OpenWorkspace(asyncio.get_running_loop().create_future())
            self._workspaces[folder] = place
            place.task = asyncio.create_task(self._hold_open(folder, place))
        place.users += 1
        try:
            return await asyncio.shield(place.ready)
        except BaseException:
            self._remove_user(place)
            raise

    async def release_workspace(self, folder: str) -> None:
        """Release a workspace, and close it if this was its last user."""
        if (place := self._workspaces.get(folder)) is None:  # all workspaces were closed meanwhile
            return
        self._remove_user(place)
        if place.closing.is_set() and place.task is not None:
            await asyncio.wait((place.task,))

    @staticmethod
    def _remove_user(place: _OpenWorkspace) -> None:
        place.users -= 1
        if not place.users:
            place.closing.set()

    async def _hold_open(self, folder: str, place: _OpenWorkspace) -> None:
        try:
            async with self._opening(folder) as kernel:
                place.ready.set_result(kernel)
                await place.closing.wait()
        except Exception as error:
            if place.ready.done():
                raise
            place.ready.set_exception(error)
        finally:
            del self._workspaces[folder]

    async def aclose(self) -> None:
        """Close all workspaces."""
        tasks = [place.task for place in self._workspaces.values() if place.task is not None]
        for place in self._workspaces.values():
            place.closing.set()
        if tasks:
            await asyncio.wait(tasks)


def describe_unconfigured_servers(kernel: Kernel, servers: Sequence[McpServer]) -> list[str]:
    """Return a note about MCP servers that the client names and the operator has not configured.

    Handrail starts only servers that the operator has configured.
    """
    own = {status.name for status in kernel.mcp_servers.server_statuses}
    if not (others := sorted({server.name[:80] for server in servers} - own)):
        return []
    names = ", ".join(repr(name) for name in others)
    return [
        f"[Handrail does not use these MCP servers of the editor: {names}. It starts only servers that you have configured. "
        "Add them to [mcp.servers] in handrail.toml, or see `handrail mcp import --help`.]"
    ]


class AcpFrontendSettings(Struct, frozen=True):
    """How the ACP agent serves its clients.

    :param open_workspace: opens a workspace
    :param open_reader: opens the stored sessions of a workspace, also while another process holds it
    :param open_agent_model: opens the model of an agent; raises ``HandrailError`` if it has none
    :param budget: returns the limits of each prompt
    :param only_workspace: the canonical path of the only allowed workspace; None for any
    :param headless: never ask the user
    :param model_names: returns the names of the models that an editor can choose from; the initial one comes first
    :param open_model: opens one of these models
    """

    open_workspace: WorkspaceOpener
    open_reader: Callable[[str], AbstractContextManager[StoredSessionReader]]
    open_agent_model: Callable[[AgentManifest], Model]
    budget: Callable[[AgentManifest], Budget]
    only_workspace: str | None = None
    headless: bool = False
    model_names: Callable[[AgentManifest], Sequence[str]] = lambda _: ()
    open_model: Callable[[str], Model] | None = None


async def open_editor_session(
    kernel: Kernel,
    folder: str,
    session_id: str | None,
    model: Model,
    serving: AcpFrontendSettings,
    offered: schema.ClientCapabilities,
    client: AgentSideConnection,
    info: ClientInfo | None = None,
) -> EditorSession:
    """Open a session for one client, with an agent that works in it. On an error, no session stays open.

    :param folder: the canonical path of the workspace
    :param session_id: an earlier session; None for a new one
    :param offered: the client's capabilities
    :param info: the client's name and version, for the record
    :raises HandrailError: if the session or the agent does not exist
    """

    def spec_of(name: str) -> ToolSpec | None:
        return None if (entry := kernel.generation.resolve_tool_name(name)) is None else entry.spec

    def list_pending() -> Sequence[Approval]:
        return kernel.approvals.list_pending()

    async def send(update: Update) -> None:
        await client.session_update(person.session_id, update)

    screens = EditorTerminals(client, choose_output_display(offered))
    telling = UpdateSender(send, spec_of, kernel.workdir, screens)
    forms = offered.elicitation is not None and offered.elicitation.form is not None
    person = EditorApprovalHandler(
        client,
        kernel.workdir,
        spec_of,
        forms=forms,
        introduce=telling.show_subagent_approval_request,
        decided=telling.show_subagent_approval_decision,
        list_pending=list_pending,
    )
    editor = AcpEditorClientHandler(client) if offered.fs is not None and offered.fs.read_text_file else None
    try:
        session = await kernel.session(
            session_id,
            client=editor,
            client_info=info,
            headless=serving.headless,
            approval_handler=None if serving.headless else person,
        )
        try:
            conversation = _build_session(kernel, session, model, telling, folder, serving, person)
        except BaseException:
            await session.suspend()
            raise
    except BaseException:
        await telling.aclose()
        raise
    person.session_id = screens.session_id = session.id
    if editor is not None:
        editor.session_id = session.id
    session.watch_events(telling.show_call_event)
    session.watch_events(conversation.forward_mode_change)
    return conversation


def _build_session(
    kernel: Kernel,
    session: Session,
    model: Model,
    telling: UpdateSender,
    folder: str,
    serving: AcpFrontendSettings,
    person: EditorApprovalHandler,
) -> EditorSession:
    manifest = kernel.default_agent

    def working(model: Model) -> Agent:
        bounds = serving.budget(manifest)
        return Agent(session, model, workspace=session.workdir, instructions=manifest.prompt, budget=bounds)

    def other(name: str) -> tuple[Agent, Model]:
        assert serving.open_model is not None
        opened = serving.open_agent_model(manifest) if name == models[0] else serving.open_model(name)
        return working(opened), opened

    models = tuple(serving.model_names(manifest) if serving.open_model is not None else ()) or ("",)
    begins_with = models[0]
    return EditorSession(
        session, working(model), model, telling, folder, person.client_ready, models, other, model_name=begins_with
    )
