"""Log messages of Handrail contain no secret, in any form and for any handler."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from tests.kernel.guests import joined_kernel

import handrail
from handrail.arbiter.output.secret_redaction import LOGGERS
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("O-07")
SECRET = "hunter2-of-the-log"


def capture_failure_log(name: str) -> str:
    """Return the log of a failure, formatted by the standard formatter and read from the error."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    logging.getLogger().addHandler(handler)
    records: list[logging.LogRecord] = []
    handler.addFilter(lambda record: records.append(record) or True)
    try:
        try:
            raise RuntimeError(f"it answered {SECRET}")
        except RuntimeError:
            logging.getLogger(name).exception("of %s: %d", SECRET.encode().hex(), 3, stack_info=True)
        logging.getLogger(name).warning("nothing to see: %s", "x")
    finally:
        logging.getLogger().removeHandler(handler)
    return out.getvalue() + repr([(record.__dict__, str(record.exc_info)) for record in records])


@pytest.mark.parametrize("name", LOGGERS)
async def test_log_messages_and_errors_contain_no_secret_while_its_kernel_is_open(tmp_path: Path, name: str) -> None:
    assert SECRET in capture_failure_log(name)
    async with temporary_kernel(tmp_path, secrets={"KEY": SECRET}):
        shown = capture_failure_log(name)
        assert SECRET not in shown and SECRET.encode().hex() not in shown
        assert "of [secret:KEY]: 3" in shown and "RuntimeError: it answered [secret:KEY]" in shown
        assert "Traceback" in shown and "nothing to see: x" in shown
    assert SECRET in capture_failure_log(name)


async def test_log_messages_of_a_connected_process_contain_no_secret(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path, secrets={"KEY": SECRET}):
        assert SECRET not in capture_failure_log("handrail.ipc")


def test_the_list_of_loggers_is_complete() -> None:
    code = Path(str(handrail.__file__)).parent.rglob("*.py")
    named = {name for path in code for name in re.findall(r"getLogger\((?!name\))([^)]*)\)", path.read_text())}
    assert named == {f'"{name}"' for name in (*LOGGERS, "mcp", "mcp.client.auth", "uvicorn")}, (
        "of two libraries, to keep them quiet"
    )
