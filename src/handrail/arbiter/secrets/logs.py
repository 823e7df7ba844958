"""What Handrail itself logs in Python, without the secrets that a kernel knows: an error's text may hold what a peer sent."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from handrail.arbiter.secrets.redaction import Redactor

LOGGERS = (
    "handrail",
    "handrail.acp",
    "handrail.agent",
    "handrail.arbiter",
    "handrail.ipc",
    "handrail.mcp",
    "handrail.session",
)
"""Every logger of Handrail's own: a filter on one does not see what is logged on those beneath it."""


@contextmanager
def redacted_logs(redactor: Redactor) -> Generator[None]:
    """Redact what is logged until the block ends, also what ``redactor`` learns meanwhile."""
    redaction = _Redaction(redactor)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(redaction)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(redaction)


class _Redaction(logging.Filter):
    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._redactor.active:
            return True
        said = record.getMessage()
        if (shown := self._redactor.text(said)) is not said:
            record.msg, record.args = shown, ()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            traced = record.exc_text or logging.Formatter().formatException(record.exc_info)
            if (shown := self._redactor.text(traced)) is not traced:
                record.exc_text = shown
                # For handlers that look at the error itself: one of the same name, with its redacted text and no frames.
                told = type(type(error).__name__, (Exception,), {})(self._redactor.text(str(error)))
                record.exc_info = (type(told), told, None)
        if record.stack_info:
            record.stack_info = self._redactor.text(record.stack_info)
        return True
