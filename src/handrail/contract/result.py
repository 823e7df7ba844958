"""The envelope every call answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from handrail.contract.errors import ErrorKind, ToolError

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
