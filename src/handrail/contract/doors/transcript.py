"""What was said and done in a session so far, for whoever looks for a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
