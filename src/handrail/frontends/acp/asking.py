"""The person at an editor: what they are asked about a call, and what a tool asks them.

Every request is put by itself, so several can be open and be answered in any order. An editor that goes away while it is
asked has answered nothing: the call is parked, and asked about again when its session is taken up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

from acp import schema
from acp.exceptions import RequestError

from handrail.contract.approvals import APPROVING, ApprovalAnswer, ApprovalRequest, Choice
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import ToolError
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.acp import showing
from handrail.frontends.cli.preview import preview
from handrail.frontends.cli.show import one_line
from handrail.frontends.cli.terminal import file_lines, request_lines
from handrail.frontends.mcp.forms import TITLED_SINCE, question_answers, question_form
from handrail.runtime.surface import NOBODY_TO_ASK

OptionKind = schema.PermissionOptionKind


class Client(Protocol):
    """What is needed of the connection here."""

    async def request_permission(
        self, session_id: str, tool_call: schema.ToolCallUpdate, options: list[schema.PermissionOption]
    ) -> schema.RequestPermissionResponse: ...

    def create_elicitation(self, message: str, mode: Any) -> Awaitable[Any]: ...


def options_of(request: ApprovalRequest) -> list[tuple[Choice, OptionKind, str]]:
    """What may be answered, each with the rule that it would store, whole."""
    found: list[tuple[Choice, OptionKind, str]] = [("once", "allow_once", "Allow once")]
    for rule, session, project in (
        (request.always, "session", "project"),
        (request.wider, "session-wider", "project-wider"),
    ):
        if rule is not None:
            shown = one_line(rule)
            if not request.shared:
                found.append((cast("Choice", session), "allow_always", f"Always in this session: {shown}"))
            found.append((cast("Choice", project), "allow_always", f"Always in this project: {shown}"))
    found.append(("reject", "reject_once", "Reject"))
    if request.never is not None:
        found.append(("reject-always", "reject_always", f"Never in this project: {one_line(request.never)}"))
    return found


class Person:
    """An :class:`~handrail.contract.approvals.Attendant`: whoever sits at the client of one session.

    :param session_id: the client's session; calls of its sub-agents are asked about in it too
    :param forms: whether the client fills in forms
    :param introduce: tells of a call before it is asked about, where the client has not heard of it
    :param decided: hears what became of it
    :ivar there: set once the client knows its session, of which calls may be asked about from before; till then they wait
    """

    def __init__(
        self,
        client: Client,
        workdir: str,
        spec_of: Callable[[str], ToolSpec | None],
        *,
        forms: bool,
        introduce: Callable[[ApprovalRequest], None],
        decided: Callable[[ApprovalRequest, bool], None],
    ) -> None:
        self.session_id = ""
        self._client = client
        self._workdir = workdir
        self._spec_of = spec_of
        self._forms = forms
        self._introduce = introduce
        self._decided = decided
        self.there = asyncio.Event()

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        await self.there.wait()
        options = options_of(request)
        self._introduce(request)
        answer = await self._answered(request, options)
        self._decided(request, answer.choice in APPROVING)
        return answer

    async def _answered(
        self, request: ApprovalRequest, options: list[tuple[Choice, OptionKind, str]]
    ) -> ApprovalAnswer:
        call = await self._call(request)
        try:
            answer = await self._client.request_permission(
                self.session_id,
                call,
                [schema.PermissionOption(option_id=choice, kind=kind, name=name) for choice, kind, name in options],
            )
        except OSError:  # it has gone
            return ApprovalAnswer("later")
        except RequestError as error:
            raise ToolError(f"the client did not answer: {str(error)[:300]}", kind="unavailable") from None
        except ValueError:  # pydantic's, of an answer that is none
            return ApprovalAnswer("reject", "the client gave an answer that is none")
        chosen = answer.outcome.option_id if isinstance(answer.outcome, schema.AllowedOutcome) else None
        for choice, _, _ in options:
            if choice == chosen:
                return ApprovalAnswer(choice)
        return ApprovalAnswer("reject", "" if chosen is None else "the client chose what was not offered")

    async def _call(self, request: ApprovalRequest) -> schema.ToolCallUpdate:
        """The call, whole: its reason, every argument, and what it would change."""
        spec, workdir = self._spec_of(request.tool_id), self._workdir
        found: list[showing.Content] = []
        changes = await preview(request, workdir)
        path = request.arguments.get("path")
        drawn = False
        if changes is not None and isinstance(path, str):
            read = showing.differences(changes, showing.absolute(path, workdir))
            drawn = bool(read.parts) and read.whole
            found += read.parts if drawn else []
        origin = f"Asked by {one_line(request.origin)}.\n" if request.origin else ""
        lines = (
            [f"{request.id}  {one_line(request.reason)}", *file_lines(request)]
            if drawn
            else request_lines(request, changes)
        )
        found.insert(0, showing.text(origin + lines[0]))
        if len(lines) > 1:
            found.insert(1, showing.fenced_whole("\n".join(lines[1:])))
        return schema.ToolCallUpdate(
            tool_call_id=request.call_id,
            title=showing.title_of(request.tool_id, request.arguments, request.origin.partition(" of ")[0]),
            kind=spec.kind if spec is not None else "other",
            status="pending",
            content=list(found),
            locations=showing.places_of(spec, request.arguments, workdir),
            raw_input=dict(request.arguments),
        )

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        if not self._forms:
            raise ToolError(NOBODY_TO_ASK, kind="unavailable")
        await self.there.wait()
        form = question_form(questions, TITLED_SINCE).params
        mode = schema.ElicitationFormSessionMode(
            session_id=self.session_id,
            requested_schema=schema.ElicitationSchema.model_validate(form["requestedSchema"]),
        )
        try:
            answer = await self._client.create_elicitation(str(form["message"]), mode)
        except OSError:
            return None
        except RequestError as error:
            raise ToolError(f"the client did not answer: {str(error)[:300]}", kind="unavailable") from None
        except ValueError:
            raise ToolError("the client gave an answer that is none", kind="unavailable") from None
        filled = {"action": answer.action, "content": getattr(answer, "content", None)}
        answers = question_answers(questions, filled, TITLED_SINCE)
        if answers is None or isinstance(answers, str):
            raise ToolError(answers or "the user did not answer", kind="denied")
        return answers
