"""A proposed call, its result, the answer for model and user, and the events of a running call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from handrail.contract.errors import ErrorKind, ToolError

# The result envelope, which every call is answered with.

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Blob:
    """Binary output, anywhere in a tool's data: an image, a sound. The arbiter stores it as an artifact and
    puts ``{"artifact": "sha256:…", "media_type": …, "bytes": n}`` in its place."""

    data: bytes
    media_type: str


@dataclass(slots=True)
class Result:
    """One call's answer: ``output`` with :attr:`data`, or ``error`` with :attr:`error_text`.

    ``metadata`` always has ``duration_ms`` once the arbiter has answered; ``truncated`` and
    ``output_path`` where the data was cut, ``error_kind`` on errors. An error may carry ``data``
    too: the partial output from before it failed.

    A value: make another instead of changing one. It is not frozen only because that would cost a microsecond in
    each call; the log keeps a copy of its own.
    """

    type: Literal["output", "error"]
    data: Any = None
    error_text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)

    @staticmethod
    def output(data: Any, **metadata: Any) -> Result:
        """A success carrying JSON-able ``data``."""
        return Result("output", data, None, metadata)

    @staticmethod
    def error(kind: ErrorKind, text: str, data: Any = None, **metadata: Any) -> Result:
        """A failure of a closed ``kind``; ``text`` is written for a model to act on."""
        metadata["error_kind"] = kind
        return Result("error", data, text, metadata)

    @staticmethod
    def of(error: ToolError) -> Result:
        """The result a tool's exception stands for."""
        return Result.error(error.kind, error.text, error.data)

    @property
    def ok(self) -> bool:
        return self.type == "output"

    @property
    def error_kind(self) -> ErrorKind | None:
        """Which of the closed kinds, or None on an output."""
        return self.metadata.get("error_kind")

    def with_metadata(self, **more: Any) -> Result:
        """The same answer with further metadata."""
        return Result(self.type, self.data, self.error_text, {**self.metadata, **more})

    def to_dict(self) -> dict[str, Any]:
        """The wire form: ``{type, data | error_text, metadata}``; ``data`` beside an error only if there is some."""
        wire: dict[str, Any] = {"type": self.type}
        if self.type == "output":
            wire["data"] = self.data
        else:
            wire["error_text"] = self.error_text
            if self.data is not None:
                wire["data"] = self.data
        wire["metadata"] = dict(self.metadata)
        return wire

    @staticmethod
    def from_dict(wire: Mapping[str, Any]) -> Result:
        """The inverse of :meth:`to_dict`."""
        return Result(wire["type"], wire.get("data"), wire.get("error_text"), wire.get("metadata", _EMPTY))


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


# Events that a frontend can follow while calls run: one ordered stream for each session.

EventKind = Literal[
    "proposed",
    "refused",
    "asking",
    "approved",
    "parked",  # nobody is there to ask now: it goes on when its session is taken up again
    "waiting",  # for locks
    "detached",  # it was answered with a job, under job, and goes on in the background
    "started",
    "progress",  # message, fraction; or a piece of what it gives so far, under output
    "log",  # a message of the tool's: level, data, logger
    "finished",  # type, error_kind; of a program that ended by itself its exit_code, or the signal
    "offers-changed",  # of the session, no call's: which tools, resources or prompts there are, or are in view
    "resource-updated",  # of the session: a resource that it has subscribed to, under uri
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one call, or to the session itself, where ``call_id`` and ``tool_id`` are empty.
    ``at_ns`` is wall-clock time in nanoseconds."""

    kind: EventKind
    session_id: str
    call_id: str
    tool_id: str
    at_ns: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
