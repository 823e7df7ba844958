"""Approval requests: the request that a person sees, the answer, its state, and the Protocols of handler and desk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args

from handrail.contract.codec import write
from handrail.contract.doors.runtime import Option, Question

Choice = Literal[
    "once",  # this call, with exactly these arguments or with those the person gave instead
    "session",  # the same, and the shown rule is stored for the session
    "project",  # the same, and the shown rule is stored for every session of this workspace
    "session-wider",  # as session, with the shown wider rule
    "project-wider",  # as project, with the shown wider rule
    "reject",  # not this call; the model is told the message
    "reject-always",  # the same, and the shown deny is stored for every session of this workspace
    "stop",  # not this call, and the session takes no further ones
    "later",  # nobody is here now: the call is parked, and answered from another door
]
CHOICES: tuple[Choice, ...] = get_args(Choice)
APPROVING: frozenset[Choice] = frozenset({"once", "session", "project", "session-wider", "project-wider"})

ApprovalKind = Literal["approval", "question"]
ApprovalState = Literal[
    "pending",  # nobody has answered
    "approved",  # or a question was answered: its call may run, once
    "rejected",
    "used",  # its call has begun
    "expired",  # nobody answered in time, or the yes was not used in time
    "withdrawn",  # the call was stopped, or its session closed, before it was answered
]


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """Shown whole: nobody approves what they cannot see.

    :param arguments: with the names of registered secrets in the secrets' places
    :param arguments_hash: of the arguments as they will run
    :param definition_hash: of the tool as it will run
    :param always: the rule that "for this session" and "for this project" would store, literals escaped, ready to
        show; None where no safe rule can be suggested
    :param never: the rule that "reject always" would store; None likewise
    :param wider: a rule that would allow more of the same kind, one folder or further words of a command that changes
        nothing, which "session-wider" and "project-wider" would store; None where none is known to be safe
    :param id: short and typable: what the request is called at every door
    :param targets: what the call would touch, as people read it
    :param created_ns: wall-clock nanoseconds, as is ``expires_ns``
    :param expires_ns: after this nobody can answer any more
    :param origin: the sub-agent that asks, and whose it is; ``""`` for the agent that people talk to
    :param files: the files of the workspace that the call runs, each with what it is now: the call runs only while they
        are the same
    :param shared: several clients share its session, so that an answer for the session would be one for all of them: it
        is not offered
    """

    call_id: str
    session_id: str
    tool_id: str
    arguments: Mapping[str, Any]
    arguments_hash: str
    definition_hash: str
    reason: str
    always: str | None = None
    never: str | None = None
    id: str = ""
    targets: tuple[str, ...] = ()
    wider: str | None = None
    created_ns: int = 0
    expires_ns: int = 0
    origin: str = ""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ApprovalAnswer:
    """What a person decided.

    :param message: after a rejection, told to the model
    :param arguments: with ``once``: run with these instead; they are validated and judged like the first ones, and a
        deny of them stays a deny
    """

    choice: Choice
    message: str = ""
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Approval:
    """A request that somebody was asked, and what came of it. Plain data: every door shows the same.

    :param kind: ``approval`` for a call that asks whether it may run, ``question`` for one whose tool asks people
    :param questions: of a ``question``
    :param decided_by: the door the answer came from
    :param grant_expires_ns: until when an approved call may begin
    :param changed: the arguments the person gave instead, or None
    :param changed_files: the files that a call with these arguments runs, as in the request
    :param answers: one list for each question, once answered
    :param answered: the call has its result; until then a session that is opened again takes it up
    """

    request: ApprovalRequest
    kind: ApprovalKind = "approval"
    state: ApprovalState = "pending"
    questions: tuple[Question, ...] = ()
    choice: Choice | None = None
    message: str = ""
    decided_ns: int | None = None
    decided_by: str = ""
    grant_expires_ns: int | None = None
    changed: Mapping[str, Any] | None = None
    changed_hash: str | None = None
    changed_files: Mapping[str, str] | None = None
    answers: tuple[tuple[str, ...], ...] = ()
    answered: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def pending(self) -> bool:
        return self.state == "pending"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data for people and programs at a door: the request's fields beside its own."""
        whole: dict[str, Any] = write(Approval, self)
        return {**whole.pop("request"), **whole, "questions": [asdict(asked) for asked in self.questions]}


def question_of(data: Mapping[str, Any]) -> Question:
    """A question from JSON-able data."""
    options = tuple(Option(option["label"], option.get("description", "")) for option in data.get("options", ()))
    return Question(data["question"], data.get("header", ""), options, data.get("multi_select", False))


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule of the project that a person's answer stored, in the workspace's state.

    :param approval_id: the request whose answer stored it
    """

    id: str
    text: str
    created_ns: int
    approval_id: str


class Attendant(Protocol):
    """A face's way to reach whoever can answer. A face without one is headless.

    If several clients share its session, an attendant says so by an attribute ``shared`` that is true: a yes of one is
    then no rule for the others.

    Both methods are cancelled when the answer has come from another door, or the call was stopped.
    """

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        """Ask about a call. The choice ``later`` says that nobody is here now."""
        ...

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        """Ask questions: one list of answers for each, or None when nobody is here now."""
        ...


class ApprovalDesk(Protocol):
    """What waits for a person in a workspace, as every door sees it: ``kernel.approvals``. Answering runs nothing by
    itself: the call goes on where it waits, or when its session is taken up again."""

    def pending(self, session_id: str | None = None) -> list[Approval]:
        """What can be answered now, the oldest first."""
        ...

    def get(self, approval_id: str) -> Approval:
        """One request, whatever has become of it.

        :raises ToolError: ``invalid_input`` when there is none
        """
        ...

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """Answer a request; durable on return.

        :param by: the door, for the record
        :raises ToolError: ``invalid_input`` for an answer that cannot be, ``denied`` for changed arguments that a rule
            denies (the request stays), ``conflict`` when it was answered before, expired, or its call was stopped
        :raises LogUnavailable: when it cannot be made durable
        """
        ...

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """Answer the questions of a request, one list for each; see :meth:`decide`."""
        ...

    def rules(self) -> list[StoredRule]:
        """The project's rules that people's answers stored."""
        ...

    async def forget_rule(self, rule_id: str) -> StoredRule:
        """Remove one of :meth:`rules`. Gives what it was.

        :raises ToolError: ``invalid_input`` when there is none of that id
        """
        ...


class Away:
    """An :class:`Attendant` for nobody: whatever is asked is parked until somebody answers at another door."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("later")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        return None
