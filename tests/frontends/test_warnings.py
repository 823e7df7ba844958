"""Warnings of Handrail during a command look like its other messages."""

from __future__ import annotations

import logging

import pytest

from handrail.frontends.cli.command_runner import InterruptHandler, run_on_event_loop

logger = logging.getLogger("handrail.ipc")


def test_a_warning_is_one_line_with_the_program_name_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    async def warned(interruption: InterruptHandler) -> int:
        logger.info("of no interest")
        logger.warning("a connection was dropped: %s", "\x1b[2J it made no sense")
        try:
            raise ValueError("of a peer")
        except ValueError:
            logger.exception("a message could not be dealt with")
        return 3

    before = list(logging.getLogger("handrail").handlers)
    assert run_on_event_loop(warned) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "handrail: a connection was dropped: \\e[2J it made no sense",
        "handrail: a message could not be dealt with (ValueError: of a peer)",
    ]
    assert logging.getLogger("handrail").handlers == before
