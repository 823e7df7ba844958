"""Approval requests: their answers and states, and the Protocols of approval handlers and services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol, get_args

from handrail.contract.json_codec import write
from handrail.contract.services.tool_runtime import QuestionOption, UserQuestion
from handrail.contract.struct import Struct, field

ApprovalChoice = Literal[
    "once",  # this call only, with these arguments or those that the user gave instead
    "session",  # also store the shown rule for the session
    "project",  # also store the shown rule for every session of this workspace
    "session-wider",  # as session, with the shown wider rule
    "project-wider",  # as project, with the shown wider rule
    "reject",  # deny this call; the model gets the message
    "reject-always",  # also store the shown deny rule for every session of this workspace
    "stop",  # deny this call, and stop the session
    "defer",  # no user is present: the call awaits approval, which another frontend may give
]
APPROVAL_CHOICES: tuple[ApprovalChoice, ...] = get_args(ApprovalChoice)
APPROVING_CHOICES: frozenset[ApprovalChoice] = frozenset(
    {"once", "session", "project", "session-wider", "project-wider"}
)

ApprovalKind = Literal[
    "approval",  # may the call run?
    "question",  # what does the user answer to its tool?
    "host",  # may the programs of the running call reach a host?
]
ApprovalState = Literal[
    "pending",  # not answered yet
    "approved",  # or a question was answered: the call may run once
    "rejected",
    "used",  # the call has started
    "expired",  # not answered, or not used, in time
    "withdrawn",  # the call was stopped, or its session closed, before it was answered
]


class ApprovalRequest(Struct, frozen=True):
    """A request that asks a user whether a call may run. The user sees all of it.

    :param arguments: with the names of registered secrets instead of the secrets
    :param arguments_hash: of the arguments with which the call will run
    :param definition_hash: of the definition of the tool that will run
    :param suggested_rule: the rule that "for this session" and "for this project" store, with literals escaped; None if no
        safe rule is known
    :param suggested_deny: the deny rule that "reject always" stores; None if no safe rule is known
    :param suggested_wider_rule: a broader rule that "session-wider" and "project-wider" store, for one folder or for further words
        of a command that changes nothing; None if none is known to be safe
    :param id: a short, typable name of the request, the same in every frontend
    :param targets: what the call would touch, in readable form
    :param created_ns: wall-clock nanoseconds, like ``expires_ns``
    :param expires_ns: the time after which the request can no longer be answered
    :param origin: the sub-agent that asks, and its parent; ``""`` for the agent that the user talks to
    :param files: the workspace files that the call runs, each with its current hash; the call runs only if they stay
        the same
    :param concerns: why each part of the call requires approval, such as each command of a script, the worst first
    :param is_shared: whether several clients share the session; an answer for the whole session is not offered then
    """

    call_id: str
    session_id: str
    tool_id: str
    arguments: Mapping[str, Any]
    arguments_hash: str
    definition_hash: str
    reason: str
    suggested_rule: str | None = None
    suggested_deny: str | None = None
    id: str = ""
    targets: tuple[str, ...] = ()
    suggested_wider_rule: str | None = None
    created_ns: int = 0
    expires_ns: int = 0
    origin: str = ""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    is_shared: bool = False
    concerns: tuple[str, ...] = ()


class ApprovalAnswer(Struct, frozen=True):
    """The decision of a user.

    :param message: after a rejection, shown to the model
    :param arguments: with ``once``: the arguments to run with instead. The kernel validates and evaluates them like
        the original ones, and a deny stays a deny
    """

    choice: ApprovalChoice
    message: str = ""
    arguments: Mapping[str, Any] | None = None


class Approval(Struct, frozen=True):
    """An approval request with its state and its decision. Plain data: every frontend shows the same.

    :param kind: ``approval`` for a call that needs permission, ``question`` for a tool that asks the user, ``host`` for a
        running call whose programs want to reach a host
    :param questions: the questions of a ``question``
    :param decided_by: the frontend that the answer came from
    :param grant_expires_ns: the time until which an approved call may start
    :param changed_arguments: the arguments that the user gave instead, or None
    :param changed_files: the files that a call with these arguments runs, as in the request
    :param answers: one list for each question, after they were answered
    :param is_answered: whether the call has its result; if not, the session resumes it when it is opened again
    """

    request: ApprovalRequest
    kind: ApprovalKind = "approval"
    state: ApprovalState = "pending"
    questions: tuple[UserQuestion, ...] = ()
    choice: ApprovalChoice | None = None
    message: str = ""
    decided_ns: int | None = None
    decided_by: str = ""
    grant_expires_ns: int | None = None
    changed_arguments: Mapping[str, Any] | None = None
    changed_arguments_hash: str | None = None
    changed_files: Mapping[str, str] | None = None
    answers: tuple[tuple[str, ...], ...] = ()
    is_answered: bool = False

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.request.id

    @property
    def is_pending(self) -> bool:
        """Whether the request can still be answered."""
        return self.state == "pending"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data: the fields of the request and of the approval in one object."""
        whole: dict[str, Any] = write(Approval, self)
        return {**whole.pop("request"), **whole, "questions": [asdict(asked) for asked in self.questions]}


def parse_user_question(data: Mapping[str, Any]) -> UserQuestion:
    """Create a question from JSON-able data."""
    options = tuple(
        QuestionOption(option["label"], option.get("description", "")) for option in data.get("options", ())
    )
    return UserQuestion(data["question"], data.get("header", ""), options, data.get("multi_select", False))


class StoredProjectRule(Struct, frozen=True):
    """A project rule that an answer of a user stored in the state of the workspace.

    :param approval_id: the request whose answer stored it
    """

    id: str
    text: str
    created_ns: int
    approval_id: str


class ApprovalHandler(Protocol):
    """A frontend's way to ask its user for approvals and answers. A session without one is headless.

    If several clients share the session, the handler has a true attribute ``is_shared``: an answer of one client then
    stores no rule for the others.

    The kernel cancels both methods if the answer arrives from another frontend, or if the call is stopped.
    """

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        """Ask the user about a call.

        :return: the answer; the choice ``defer`` defers the request if no user is present
        """
        ...

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        """Ask the user questions.

        :return: one list of answers for each question, or None if no user is present
        """
        ...


class ApprovalService(Protocol):
    """The pending approvals of a workspace: ``kernel.approvals``. Every frontend sees the same.

    An answer runs nothing itself. The call continues where it waits, or when its session is resumed.
    """

    def list_pending(self, session_id: str | None = None) -> list[Approval]:
        """Return the requests that can be answered now, the oldest first."""
        ...

    def get(self, approval_id: str) -> Approval:
        """Return one request in any state.

        :raises ToolError: ``invalid_input`` if no request has this id
        """
        ...

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """Answer a request. The answer is durable on return.

        :param by: the frontend, for the record
        :raises ToolError: ``invalid_input`` for an impossible answer; ``denied`` if a rule denies the changed
            arguments (the request stays open); ``conflict`` if the request was answered before or has expired, or its
            call was stopped
        :raises LogUnavailable: if the answer cannot be made durable
        """
        ...

    async def answer_questions(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """Answer the questions of a request, one list for each; see :meth:`decide`."""
        ...

    def list_rules(self) -> list[StoredProjectRule]:
        """Return the project rules that answers of users stored."""
        ...

    async def revoke_rule(self, rule_id: str) -> StoredProjectRule:
        """Remove one of :meth:`list_rules` and return it.

        :raises ToolError: ``invalid_input`` if no stored rule has this id
        """
        ...


class DeferApprovals:
    """An approval handler that defers every request.

    The requests are answered later through ``kernel.approvals`` or ``handrail approve``.
    """

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        """Defer the request."""
        return ApprovalAnswer("defer")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        """Defer the questions."""
        return None
