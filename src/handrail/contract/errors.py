"""The errors that Handrail raises, one branch for each audience, and helpers to quote values in texts.

- A *model* sees :class:`ToolError`, which the arbiter turns into an error result.
- An *operator* sees :class:`LoadError` and :class:`StartError`, with every fault at once.
- A *programmer* who misuses the library sees :class:`UsageError`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal, get_args

from handrail.contract.struct import Struct

ErrorKind = Literal[
    "invalid_input",  # the arguments do not match the schema, or name something that does not exist
    "unknown_tool",  # no tool has that name
    "denied",  # a rule, a watchdog, a capability or the user denied it
    "unavailable",  # the tool, or something that it needs, is not available now
    "conflict",  # something changed since the model last read it
    "timeout",  # a time limit expired
    "cancelled",  # the user or a shutdown stopped it
    "interrupted",  # started, with an unknown outcome
    "limit",  # a size, count or rate bound
    "failed",  # the tool itself reported a failure
    "backend",  # a defect: a crash, a protocol error, an unexpected exception
]
"""The closed set of ``metadata.error_kind``."""

ERROR_KINDS: frozenset[str] = frozenset(get_args(ErrorKind))


class HandrailError(Exception):
    """The base class of every exception that Handrail raises on purpose."""


class UsageError(HandrailError):
    """An error in the calling code: the library was called in a way that cannot work."""


class ToolError(HandrailError):
    """An error that a tool or its runtime raises. It becomes an error result, never a traceback.

    :param text: what failed, what was expected and what the model can do next
    :param kind: one of :data:`ErrorKind`
    :param data: partial output that is worth keeping, JSON-able
    """

    def __init__(self, text: str, *, kind: ErrorKind = "failed", data: Any = None) -> None:
        super().__init__(text)
        self.text = text
        self.kind: ErrorKind = kind
        self.data = data


class Diagnostic(Struct, frozen=True):
    """One problem with a source of tools, an agent or a setting.

    :param source: the file, module or entry point, as the operator knows it
    :param location: the place in it, such as ``runtime.locks[0]``, or ``""``
    :param problem: what is wrong and what was expected
    :param third_party: for a third-party source: the name that its operator gave it
    :param tool: the id of the tool that the problem is about, if it is about one
    """

    source: str
    location: str
    problem: str
    third_party: str = ""
    tool: str = ""

    def __str__(self) -> str:
        named = self.tool if not self.source.endswith(self.tool) else ""
        return ": ".join(part for part in (self.source, named, self.location, self.problem) if part)


class LoadError(HandrailError):
    """An error that lists *all* faults of sources, rules or configuration at once."""

    def __init__(self, faults: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(faults)
        count = len(self.diagnostics)
        head = "1 fault" if count == 1 else f"{count} faults"
        super().__init__(f"{head}:\n" + "\n".join(f"  - {fault}" for fault in self.diagnostics))


class StartError(HandrailError):
    """An error that keeps the kernel from starting: state, lease or sandbox.

    The text gives the reason and the next step.
    """


class LogUnavailable(HandrailError):
    """An error of the commit log: it takes no records, so no call may run (full disk, read-only state)."""


# Long third-party texts: decoding, and quoting in error messages (whole, or not at all).
#
# The code that makes a message does not know the registered secrets. Redaction removes them from the finished message by
# their known forms, which a shortened secret would not have.

_CHUNK_BYTES = 256 * 1024
"""Bytes that one native call decodes. The call holds the interpreter lock meanwhile."""


def quote_text_or_length(text: str, most: int) -> str:
    """Return ``text`` in quotes, or its length if it has more than ``most`` characters."""
    return repr(text) if len(text) <= most else f"a text of {len(text):,} characters"


def decode_text(raw: bytes, errors: str) -> str:
    """Return what ``raw.decode("utf-8", errors)`` returns.

    No step holds the interpreter lock for long, so a worker thread can call this for large data.
    """
    if len(raw) <= _CHUNK_BYTES:
        return raw.decode("utf-8", errors)
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    pieces = [decoder.decode(raw[at : at + _CHUNK_BYTES]) for at in range(0, len(raw), _CHUNK_BYTES)]
    return "".join((*pieces, decoder.decode(b"", final=True)))
