"""A proposed call, and what comes back of it to its two audiences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from handrail.contract.errors import ErrorKind
from handrail.contract.result import Result

DEFAULT_FAULT_KIND: ErrorKind = "invalid_input"


class ProposedCall(NamedTuple):
    """What a model (or a program in its place) asks for. Nothing in it is believed.

    :param name: a wire name, an id or an alias
    :param arguments: an object, or the JSON text of one as the provider streamed it
    :param provider_id: the provider's own id; kept beside the kernel's, never used as a key
    :param fault: why the face or provider already knows it cannot run (a stream cut in its middle, no name);
        it is recorded and answered with this text
    :param fault_kind: the error kind of that answer: ``limit`` for a call that a budget left no room for,
        ``cancelled`` for one that a stop overtook
    """

    name: str
    arguments: Mapping[str, Any] | str | bytes
    provider_id: str | None = None
    fault: str | None = None
    fault_kind: ErrorKind = DEFAULT_FAULT_KIND


class Answer(NamedTuple):
    """One call's one answer: ``result`` for the people and programs at the face, ``model`` for the lane's model.

    The two differ by the tool's ``exposure`` and ``prompt_mask`` only.
    """

    call_id: str
    tool_id: str
    result: Result
    model: Result


def call_id(session_id: str, turn: int, position: int) -> str:
    """The kernel's id of a call that a turn makes, known before it is proposed.

    :param position: among the turn's calls, from 0
    """
    return f"{session_id}/{turn}.{position}"
