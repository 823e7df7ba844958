"""The stored past of a session: its conversation, a search in its transcript, and its skills."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, Protocol

from handrail.contract.struct import Struct

HistoryEntry = tuple[int, Mapping[str, Any]]
"""The position of a message in its session, and the message as JSON-able data in the format of
:mod:`handrail.agent.conversation`."""


class ConversationHistory(Protocol):
    """The stored messages of one session."""

    async def read_stored_messages(self) -> Sequence[HistoryEntry]:
        """Return all stored messages, by position.

        :raises HandrailError: if they cannot be read
        """
        ...

    def store_messages(self, entries: Sequence[HistoryEntry]) -> Awaitable[None]:
        """Store messages. Secrets are left out.

        The messages are stored soon; they are durable after the returned object was awaited, once or several times.
        Calls that are proposed afterwards by :meth:`~handrail.contract.session_protocols.Turn.start_streamed_call` have no side effects
        before that. A message at a known position replaces the stored one, so a caller may repeat a failed call.

        :raises LogUnavailable: when awaited, if the messages cannot be made durable
        """
        ...

    async def store_attachment(self, data: bytes, media_type: str) -> str:
        """Store an attachment of a message, without secrets, and return its reference for the message.

        :raises LogUnavailable: if it cannot be stored
        """
        ...

    async def load_attachment(self, ref: str) -> bytes:
        """Return an attachment that :meth:`store_attachment` stored.

        :raises ToolError: if it is removed or damaged
        """
        ...

    async def record_compaction(self, summary: Mapping[str, Any]) -> None:
        """Record that older messages are left out of what the model sees from now on.

        Texts that the model gets once in a conversation may be given again.

        :param summary: how much is left out and how much is kept, for the record
        :raises HandrailError: if that cannot be stored
        """

    async def record_turn(self, usage: Mapping[str, Any]) -> None:
        """Record what one request to the model used.

        :param usage: the model, the tokens, the end of the reply and the times, for the record
        :raises HandrailError: if that cannot be stored
        """

    async def record_provider_tool_use(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        """Store the output of a provider tool and record its use.

        ``content`` becomes one artifact, without secrets, and each binary part of it another.

        :param about: the tool, its provider and its arguments
        :return: the references, in that order
        :raises LogUnavailable: if it cannot be stored
        """
        ...


# The transcript: a search in the conversation and calls of a session so far.

PassageKind = Literal["user", "assistant", "notice", "call"]
"""A message of the user, a message of the model, a notification to the agent, or a call with its result."""


class TranscriptPassage(Struct, frozen=True):
    """One message or call of a session. ``at_ns`` is wall-clock time.

    :param id: ``message/<position>`` in the conversation, or a call's id
    :param text: for a search, the part around the match; else the whole text, or as much as was requested
    :param tool: the tool of a call
    :param untrusted: the origin of a call's result, if that is not the operator or the user
    :param next: where the text continues, in characters; None at its end
    """

    id: str
    kind: PassageKind
    at_ns: int
    text: str
    tool: str | None = None
    untrusted: str | None = None
    next: int | None = None


class TranscriptSearchResult(Struct, frozen=True):
    """The result of a search in the transcript.

    :param passages: the best ones first
    :param total: how many match
    :param searched: how many were searched
    :param is_partial: whether older passages were not searched
    """

    passages: tuple[TranscriptPassage, ...]
    total: int
    searched: int
    is_partial: bool = False


class SessionArtifact(Struct, frozen=True):
    """A stored output of a call of the session, or an image that a user showed in it.

    :param media_type: as its producer stated it
    :param untrusted: its origin, if that is not the operator or the user
    """

    ref: str
    media_type: str
    data: bytes
    untrusted: str | None = None


class TranscriptService(Protocol):
    """The past of one session: its conversation, its calls and their artifacts.

    It has nothing of other sessions, nor of sub-agents. A fork has what its parent had at the time of the fork.
    """

    async def search(self, query: str, *, limit: int = 10, kinds: Sequence[PassageKind] = ()) -> TranscriptSearchResult:
        """Find passages by words, or by phrases in double quotes. Case is ignored, and parts of words match.

        :param kinds: only these; all if left out
        :raises ToolError: ``invalid_input`` for a query without any word
        :raises LogUnavailable: if the store cannot be read
        """
        ...

    async def read_passage(self, id: str, *, start: int = 0, most: int = 16_000) -> TranscriptPassage:
        """Return one passage, whole or in part.

        :param start: the first character
        :param most: the maximum number of characters
        :raises ToolError: ``invalid_input`` for an unknown id
        :raises LogUnavailable: if the store cannot be read
        """
        ...

    async def read_artifact(self, ref: str) -> SessionArtifact:
        """Read an artifact of this session as a whole.

        :param ref: ``sha256:`` and 64 hexadecimal digits
        :raises ToolError: ``invalid_input`` if this session has no such artifact, ``denied`` if its tool hides it
            from models, ``unavailable`` or ``backend`` if it is removed or damaged
        :raises LogUnavailable: if the store cannot be read
        """
        ...


# Skills: instructions for one kind of work, each in a folder with a ``SKILL.md``. The prompt lists each in one line, and
# the model reads the whole text on demand.
#
# A skill is text and grants no permission: the policy checks calls that follow a skill like all other calls.

SkillLayer = Literal["workspace", "user", "shipped"]
"""The author of a skill: whoever writes in the workspace (not trusted), the operator, or Handrail."""


class SkillInfo(Struct, frozen=True):
    """One skill that was found.

    :param path: the path of its ``SKILL.md``
    :param notes: keys of its front matter that have no effect here
    :param problem: why it cannot be read, or ``""``
    :param shadowed_by: the path of a nearer skill of the same name, or ``""``
    """

    name: str
    description: str
    layer: SkillLayer
    path: str
    notes: tuple[str, ...] = ()
    problem: str = ""
    shadowed_by: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether the skill can be read."""
        return not self.problem and not self.shadowed_by


class SkillInstructions(Struct, frozen=True):
    """The instructions of a skill.

    :param files: the other files in its folder that the session's tools can read, by the paths that they use
    :param was_given: whether the session was given them before; then ``body`` is empty
    :param has_changed: whether they changed since the session began
    """

    skill: SkillInfo
    body: str
    files: tuple[str, ...] = ()
    was_given: bool = False
    has_changed: bool = False


class SkillService(Protocol):
    """The skills of one session, as found on first use."""

    async def list_skills(self) -> Sequence[SkillInfo]:
        """Return the skills that can be read, the nearest first."""
        ...

    async def load_skill(self, name: str) -> SkillInstructions:
        """Return the instructions of a skill, once in a session.

        :raises ToolError: ``invalid_input`` for an unknown name, with the nearest ones; ``unavailable`` if its file
            can no longer be read
        """
        ...


class SessionSkillService(SkillService, Protocol):
    """The skills of a session, for the session itself."""

    @property
    def readable_skills(self) -> Sequence[SkillInfo]:
        """The skills that can be read; see :meth:`SkillService.list_skills`."""
        ...
