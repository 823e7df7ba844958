"""The stored past of a session: its conversation, a search in its transcript, and the skills that it can read."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Entry = tuple[int, Mapping[str, Any]]
"""A message's position in its session, and the message as JSON-able data. :mod:`handrail.agent.conversation` says what is in
it; whoever keeps it need not know."""


class History(Protocol):
    """The messages of one session."""

    async def read(self) -> Sequence[Entry]:
        """All that is kept, by position.

        :raises HandrailError: when it cannot be read
        """
        ...

    def keep(self, entries: Sequence[Entry]) -> Awaitable[None]:
        """Take messages: they are kept soon, and durable once what this gives was awaited, as often as that is. Calls that
        are proposed afterwards by :meth:`~handrail.contract.session.Turn.submit` have no side effects before that.

        The same position again takes the place of what was there, so that a caller who does not know whether it came
        through may repeat it. Secrets are left out.

        :raises LogUnavailable: when awaited, where they cannot be made durable
        """
        ...

    async def attached(self, data: bytes, media_type: str) -> str:
        """Keep what a message brings beside its text, without secrets, and give what the message may name it by.

        :raises LogUnavailable: when it cannot be kept
        """
        ...

    async def attachment(self, ref: str) -> bytes:
        """What :meth:`attached` kept.

        :raises ToolError: where that is not there any more, or damaged
        """
        ...

    async def compacted(self, told: Mapping[str, Any]) -> None:
        """What was said so far is left out of what the model sees from here on: texts that are given once in a conversation
        may be given again. It is recorded.

        :param told: how much is left out and how much is kept, for the record
        :raises HandrailError: when that cannot be kept
        """
        ...

    async def provided(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        """Keep what a provider's own tool gave, and that it did: ``content`` without secrets as an artifact, and each part
        of it that is binary as another. Gives their references, in that order.

        :param about: which tool, of which provider, asked for what
        :raises LogUnavailable: when it cannot be kept
        """
        ...


# The transcript: a search in the conversation and calls of a session so far.

PassageKind = Literal["user", "assistant", "notice", "call"]
"""What a user said, what the model said, what its agent was told meanwhile, and a call with what came of it."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One thing that was said or done. ``at_ns`` is wall-clock time.

    :param id: ``message/<position>`` in the conversation, or a call's id
    :param text: of a search the part around what was found; else the whole, or as much of it as was asked for
    :param tool: a call's
    :param untrusted: where a call's result comes from, where that is not the operator or the user
    :param next: where the text goes on, in characters; None at its end
    """

    id: str
    kind: PassageKind
    at_ns: int
    text: str
    tool: str | None = None
    untrusted: str | None = None
    next: int | None = None


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a search came to.

    :param passages: the best ones first
    :param found: how many there are
    :param searched: how many were looked through
    :param older_left_out: whether what is older than these was not looked through
    """

    passages: tuple[Passage, ...]
    found: int
    searched: int
    older_left_out: bool = False


@dataclass(frozen=True, slots=True)
class SessionArtifact:
    """A stored output of a call of the session, or what a user showed in it.

    :param media_type: what its maker said it is
    :param untrusted: where it comes from, where that is not the operator or the user
    """

    ref: str
    media_type: str
    data: bytes
    untrusted: str | None = None


class Transcript(Protocol):
    """The past of one session: its conversation, its calls and their artifacts, no other session's, not those of sub-agents
    either. A fork has what its parent had when it was forked."""

    async def search(self, query: str, *, limit: int = 10, kinds: Sequence[PassageKind] = ()) -> Recalled:
        """Find passages by words, or by phrases in double quotes, in any case. Parts of words count.

        :param kinds: only these; all if left out
        :raises ToolError: ``invalid_input`` for a query without any word
        :raises LogUnavailable: when the store cannot be read
        """
        ...

    async def passage(self, id: str, *, start: int = 0, most: int = 16_000) -> Passage:
        """One, whole or a part of it.

        :param start: the first character
        :param most: characters
        :raises ToolError: ``invalid_input`` where there is none of this id
        :raises LogUnavailable: when the store cannot be read
        """
        ...

    async def artifact(self, ref: str) -> SessionArtifact:
        """Read an artifact of this session, whole.

        :param ref: ``sha256:`` and 64 hexadecimal digits
        :raises ToolError: ``invalid_input`` where this session has no such artifact, ``denied`` where its maker keeps it from
            models, ``unavailable`` or ``backend`` where it is removed or damaged
        :raises LogUnavailable: when the store cannot be read
        """
        ...


# Skills: instructions for one kind of work, each in a folder with a ``SKILL.md``. The prompt lists each in one line, and
# the model reads the whole text on demand.
#
# A skill is text and grants no permission: the policy checks calls that follow a skill like all other calls.

SkillLayer = Literal["workspace", "user", "shipped"]
"""Who wrote it: whoever writes the workspace, which is nobody's word; the operator; Handrail's authors."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill as it was found.

    :param place: its ``SKILL.md``
    :param notes: what of its front matter has no effect here
    :param problem: why it cannot be read, or ``""``
    :param hidden_by: the place of a nearer one of the same name, or ``""``
    """

    name: str
    description: str
    layer: SkillLayer
    place: str
    notes: tuple[str, ...] = ()
    problem: str = ""
    hidden_by: str = ""

    @property
    def usable(self) -> bool:
        return not self.problem and not self.hidden_by


@dataclass(frozen=True, slots=True)
class SkillText:
    """A skill's instructions.

    :param files: what else lies in its folder, where the session's tools can read it: as they call it
    :param again: they were given in this session before; then ``body`` is empty
    :param changed: they are others than when the session began
    """

    skill: Skill
    body: str
    files: tuple[str, ...] = ()
    again: bool = False
    changed: bool = False


class Skills(Protocol):
    """The skills of one session, as they were found when it first asked."""

    async def all(self) -> Sequence[Skill]:
        """Those that can be read, the nearest first."""
        ...

    async def give(self, name: str) -> SkillText:
        """One's instructions, once in a session.

        :raises ToolError: ``invalid_input`` for a name that there is not, with the nearest there are; ``unavailable`` where
            its file cannot be read any more
        """
        ...


class SessionSkills(Skills, Protocol):
    """The same, for the session itself."""

    @property
    def index(self) -> Sequence[Skill]:
        """See :meth:`Skills.all`."""
        ...
