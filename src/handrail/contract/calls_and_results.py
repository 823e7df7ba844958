"""A proposed call, its result, the answer for model and user, and the events of a running call."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, NamedTuple

from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.struct import Struct, field

# The result envelope: the answer of every call.

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Blob(Struct, frozen=True):
    """Binary output, such as an image or a sound, anywhere in a tool's data.

    The arbiter stores it as an artifact and replaces it with ``{"artifact": "sha256:…", "media_type": …, "bytes":
    n}``.
    """

    data: bytes
    media_type: str


LONGEST_SECRET_BYTES = 256 * 1024
"""A secret in any form is shorter. So many bytes after a missing part are not shown: they may have the rest of a secret."""


class LargeText(Struct, frozen=True):
    """A long text in UTF-8, as a member of a tool's data. The arbiter copies it in pieces to the output file.

    The answer gets its ends as ``head`` and ``tail``, as of any truncated text.

    :param file: the beginning; the arbiter closes it
    :param rest_bytes: how many bytes follow after the beginning
    :param tail: the last of these
    """

    file: BinaryIO
    rest_bytes: int = 0
    tail: bytes = b""

    @property
    def omitted_byte_count(self) -> int:
        """The bytes between the beginning and the shown part of the end."""
        missing = self.rest_bytes - len(self.tail)
        return 0 if missing <= 0 else missing + min(len(self.tail), LONGEST_SECRET_BYTES)


class Result(Struct):
    """The answer of one call: an ``output`` with :attr:`data`, or an ``error`` with :attr:`error_text`.

    ``metadata`` always has ``duration_ms`` after the arbiter has answered. It has ``truncated`` and ``output_path``
    if the data was cut, and ``error_kind`` on errors. An error may carry ``data`` too: the partial output from before
    the failure.

    Treat a result as a value: create another one instead of changing it. It is not frozen only because freezing costs
    a microsecond in each call. The log keeps its own copy.
    """

    type: Literal["output", "error"]
    data: Any = None
    error_text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)

    @staticmethod
    def output(data: Any, **metadata: Any) -> Result:
        """Return a success that carries JSON-able ``data``."""
        return Result("output", data, None, metadata)

    @staticmethod
    def error(kind: ErrorKind, text: str, data: Any = None, **metadata: Any) -> Result:
        """Return a failure of a closed ``kind``.

        :param text: what failed, what was expected and what the model can do next
        :param data: partial output, JSON-able
        """
        metadata["error_kind"] = kind
        return Result("error", data, text, metadata)

    @staticmethod
    def from_error(error: ToolError) -> Result:
        """Return the result of a tool's exception."""
        return Result.error(error.kind, error.text, error.data)

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.type == "output"

    @property
    def error_kind(self) -> ErrorKind | None:
        """The kind of the error, or None for an output."""
        return self.metadata.get("error_kind")

    def with_metadata(self, **more: Any) -> Result:
        """Return a copy with additional metadata."""
        return Result(self.type, self.data, self.error_text, {**self.metadata, **more})

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form: ``{type, data | error_text, metadata}``.

        An error has ``data`` only if it has partial output.
        """
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
        """Create a result from its wire form; the inverse of :meth:`to_dict`."""
        return Result(wire["type"], wire.get("data"), wire.get("error_text"), wire.get("metadata", _EMPTY))


DEFAULT_PROBLEM_KIND: ErrorKind = "invalid_input"


class ProposedCall(NamedTuple):
    """A call that a model, or a program in its place, proposes. The kernel trusts nothing in it.

    :param name: a wire name, an id or an alias
    :param arguments: an object, or the JSON text of one as the provider streamed it
    :param provider_id: the provider's id of the call; the kernel stores it and never uses it as a key
    :param problem: why the frontend or provider already knows that the call cannot run, such as an interrupted stream;
        the call is recorded and answered with this text
    :param problem_kind: the error kind of that answer: ``limit`` if no budget is left for the call, ``cancelled`` if a
        stop came first
    :param client_meta: the ``_meta`` of an MCP client's request, for an MCP server that the call reaches
    """

    name: str
    arguments: Mapping[str, Any] | str | bytes
    provider_id: str | None = None
    problem: str | None = None
    problem_kind: ErrorKind = DEFAULT_PROBLEM_KIND
    client_meta: Mapping[str, Any] | None = None


class CallAnswer(NamedTuple):
    """The one answer of one call, for its two readers.

    ``result`` is for the people and programs at the frontend, ``model`` for the model of the lane. The two differ
    only by the tool's ``exposure`` and ``prompt_mask``.
    """

    call_id: str
    tool_id: str
    result: Result
    model: Result


def make_call_id(session_id: str, turn: int, position: int) -> str:
    """Return the kernel's id of a call of a turn. It is known before the call is proposed.

    :param position: among the calls of the turn, from 0
    """
    return f"{session_id}/{turn}.{position}"


# Events that a frontend can follow while calls run: one ordered stream for each session.

EventKind = Literal[
    "proposed",
    "rejected",
    "approval-requested",
    "approved",
    "awaiting-approval",  # no user is present: the call continues when its session is resumed
    "awaiting-locks",  # for its locks
    "backgrounded",  # answered with a job (data: job), and continues in the background
    "started",
    "progress",  # data: message, fraction; or a piece of the output so far, under output
    "log",  # a message of the tool; data: level, data, logger
    "finished",  # data: type, error_kind; for a program its exit_code or signal
    "list-changed",  # of the session: the available or active tools, resources or prompts
    "mode-changed",  # of the session: its permission mode (data: mode, previous_mode)
    "resource-updated",  # of the session: a subscribed resource (data: uri)
]


class Event(Struct, frozen=True):
    """An event of one call, or of the session itself if ``call_id`` and ``tool_id`` are empty.

    :param at_ns: wall-clock time in nanoseconds
    :param data: details, by the kind of the event
    """

    kind: EventKind
    session_id: str
    call_id: str
    tool_id: str
    at_ns: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
