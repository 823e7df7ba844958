"""Damaged rows in any table of a running kernel: a clear error where they are read, never a traceback."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from tests.kernel.doors import HELD, JOINED, opened

from handrail import Kernel, tool
from handrail.contract.approval_requests import ApprovalAnswer, DeferApprovals
from handrail.contract.calls_and_results import CallAnswer, Result
from handrail.contract.errors import LogUnavailable, StartError, ToolError
from handrail.contract.services.tool_runtime import Runtime
from handrail.frontends.cli.command_group import CANNOT_START, OUTPUT, run_command_line
from handrail.kernel.local_kernel import LocalKernel
from handrail.session.local_session import LocalSession
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

TOLD = {None, "unavailable", "conflict", "interrupted", "denied"}

AT_THE_END = 12
"""Calls after what is damaged: the records near the log's end are checked before anything is written."""

ran: list[str] = []


@tool(id="test.pay", side_effect="external", locks=["account:X"])
async def pay(to: str) -> str:
    """Pay."""
    ran.append(to)
    return to


@tool(id="test.count", side_effect="write", locks=["count:X"], requires={"capabilities": ["state"]})
async def count(runtime: Runtime) -> int:
    """Count."""
    counted = (await runtime.state.get("count") or 0) + 1
    await runtime.state.put("count", counted)
    return counted


@tool(id="test.lend", side_effect="external", locks=["account:X"])
async def lend(to: str) -> str:
    """Lend."""
    return to


@tool(id="test.give", side_effect="external", locks=["account:X"])
async def give(to: str) -> str:
    """Give."""
    return to


@tool(id="test.keep", side_effect="external", locks=["outbox:X"])
async def keep(to: str) -> str:
    """Keep."""
    return to


TOOLS = [pay, lend, give, count, keep]
RULES = ["allow test.count", "allow test.keep", "ask test.pay", "ask test.lend", "ask test.give"]


async def used(folder: Path) -> Path:
    """Fill every table of a workspace, and return its database. One call of ``ses_used`` awaits an approval."""
    async with temporary_kernel(folder, tools=TOOLS, rules=RULES) as kernel:
        (folder / "ws" / "a.txt").write_text("text\n")
        person = ScriptedApprovalHandler([ApprovalAnswer("session"), ApprovalAnswer("project")])
        session = await kernel.session("ses_used", headless=False, approval_handler=person)
        assert (await session.call("test.lend", {"to": "x"})).ok
        assert (await session.call("test.give", {"to": "x"})).ok
        assert (await session.call("test.count", {})).ok
        assert (await session.call("read", {"path": "a.txt"})).ok
        assert (await session.call("test.keep", {"to": "k"}, key="k")).ok
        await session.suspend()
        session = await kernel.session("ses_used", headless=False, approval_handler=DeferApprovals())
        parked = await session.call("test.pay", {"to": "parked"})
        assert parked.metadata.get("awaiting_approval"), parked
        for _ in range(AT_THE_END):
            assert (await session.call("read", {"path": "a.txt"})).ok
        await kernel.components.store.messages.queue_message_writes(
            "ses_used", [(0, {"role": "user", "text": "a task"})], 1
        )
    ran.clear()
    return next((folder / "state").rglob("handrail.db"))


async def attempt_on_damaged_log(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result or error; damage may only cause a clear error."""
    try:
        found: object = await attempt()
    except (LogUnavailable, StartError) as error:
        assert "log" in str(error) or "rule" in str(error), error
        return error
    except ToolError as error:
        assert error.kind in ("invalid_input", "conflict"), error
        return error
    for result in results_in(found):
        assert result.error_kind in TOLD, result
    return found


def results_in(found: object) -> list[Result]:
    each = cast("list[object]", found if isinstance(found, list) else [found])
    results = [one.result if isinstance(one, CallAnswer) else one for one in each]
    return [result for result in results if isinstance(result, Result)]


async def everything(kernel: Kernel) -> list[Any]:
    """Each way in which a running kernel reads its rows."""

    async def pending() -> Any:
        return kernel.approvals.list_pending()

    async def rules() -> Any:
        return kernel.approvals.list_rules()

    seen = [
        await attempt_on_damaged_log(pending),
        await attempt_on_damaged_log(rules),
        await attempt_on_damaged_log(lambda: kernel.fork_session("ses_used")),
    ]
    session = await attempt_on_damaged_log(
        lambda: kernel.session("ses_used", headless=False, approval_handler=DeferApprovals())
    )
    seen.append(session)
    if isinstance(session, Exception):
        return seen
    for approval in () if isinstance(seen[0], Exception) else seen[0]:
        seen.append(
            await attempt_on_damaged_log(
                lambda id=approval.id: kernel.approvals.decide(id, ApprovalAnswer("once"), by="test")
            )
        )
    if isinstance(session, LocalSession):
        seen.append(await attempt_on_damaged_log(session.list_calls_awaiting_approval))
    seen.append(await attempt_on_damaged_log(session.resume_suspended_calls))
    seen.append(await attempt_on_damaged_log(lambda: session.call("test.count", {})))
    seen.append(await attempt_on_damaged_log(lambda: session.call("test.keep", {"to": "k"}, key="k")))
    seen.append(await attempt_on_damaged_log(lambda: session.call("test.pay", {"to": "another"})))
    seen.append(await attempt_on_damaged_log(lambda: kernel.explain_call("test.pay", {"to": "x"})))
    if isinstance(kernel, LocalKernel):
        seen.append(await attempt_on_damaged_log(lambda: kernel.components.store.messages.read("ses_used")))
    return seen


async def seen_by(door: str, folder: Path, begin: Callable[[], object] = lambda: None) -> list[Any]:
    try:
        async with opened(door, folder, tools=TOOLS, rules=RULES) as kernel:
            begin()
            return await everything(kernel)
    except (StartError, LogUnavailable) as error:
        return [error]


def options(folder: Path) -> list[str]:
    return ["--workspace", str(folder / "ws"), "--state", str(folder / "state")]


def check_reading_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that only reads ends in output or one line."""
    for arguments in (
        ["approve", "list"],
        ["approve", "--rules"],
        ["sessions"],
        ["sessions", "show", "ses_used"],
        ["log"],
        ["doctor"],
    ):
        code = run_command_line([*arguments, *options(folder)])
        said = capsys.readouterr().err
        assert "internal error" not in said and "Traceback" not in said, (arguments, said)
        assert code in (OUTPUT, CANNOT_START, 1, 2), (arguments, code, said)


NOT_JSON, NO_TEXT = "X'FF00'", "X'00FF'"

ROWS = [
    ("approval", f"UPDATE approval SET request = {NOT_JSON}"),
    ("approval", "UPDATE approval SET request = X'7B7D'"),
    ("approval", "UPDATE approval SET request = '[]'"),
    ("approval", "UPDATE approval SET request = replace(CAST(request AS TEXT), '\"tool_id\":', '\"tool_ie\":')"),
    ("approval", "UPDATE approval SET request = CAST(replace(CAST(request AS TEXT), '\"reason\":', '\"r\":') AS BLOB)"),
    ("approval", f"UPDATE approval SET decision = {NOT_JSON}, state = 'approved'"),
    ("approval", "UPDATE approval SET decision = X'7B7D', state = 'approved', grant_expires_ns = 9e18"),
    ("approval", "UPDATE approval SET state = 'qending'"),
    ("approval", "UPDATE approval SET kind = 'bpproval'"),
    ("project_rule", "UPDATE project_rule SET text = 'deny ('"),
    ("project_rule", f"UPDATE project_rule SET text = {NO_TEXT}"),
    ("session_rule", f"UPDATE session_rule SET text = {NO_TEXT}"),
    ("session", "UPDATE session SET used_ns = 'then'"),
    ("session", f"UPDATE session SET topic = {NO_TEXT}"),
    ("session", "UPDATE session SET lease_token = 'x'"),
    ("state", f"UPDATE state SET value = {NOT_JSON}"),
    ("state", "UPDATE state SET value = 7"),
    ("message", "UPDATE message SET position = 'first'"),
    ("record", "UPDATE record SET body = X'FF00' WHERE call = 'ses_used/key:k' AND kinds LIKE '%committed'"),
    ("record", "UPDATE record SET body = X'7B7D' WHERE call = 'ses_used/key:k' AND kinds LIKE '%committed'"),
]


@pytest.fixture(scope="module")
def used_workspace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A used workspace with its state, and a copy of both."""
    place = tmp_path_factory.mktemp("used")
    asyncio.run(used(place / "here"))
    shutil.copytree(place / "here", place / "kept", symlinks=True)
    return place / "here", place / "kept"


@pytest.fixture
def here(used_workspace: tuple[Path, Path]) -> Path:
    """The same, as it was: always in one place, since state is found by its workspace's."""
    here, copy = used_workspace
    shutil.rmtree(here)
    shutil.copytree(copy, here, symlinks=True)
    ran.clear()
    return here


@pytest.mark.proves("G-10")
@pytest.mark.parametrize("door", [HELD, JOINED])
@pytest.mark.parametrize(("table", "statement"), ROWS)
def test_a_damaged_row_is_refused_with_a_clear_error(
    here: Path, capsys: pytest.CaptureFixture[str], table: str, statement: str, door: str
) -> None:
    database = next((here / "state").rglob("handrail.db"))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute(statement).rowcount > 0, table
        connection.commit()
    if door == HELD:  # commands that only read come through no door
        check_reading_commands(here, capsys)
    seen = asyncio.run(seen_by(door, here))
    refused = [each for each in seen if isinstance(each, (LogUnavailable, StartError))]
    refused += [each for each in seen if isinstance(each, Result) and each.error_kind == "unavailable"]
    assert refused, seen
    assert "parked" not in ran or table not in ("approval", "session")


def pages_of(database: Path) -> dict[str, int]:
    with closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"))


@pytest.mark.proves("G-10")
def test_a_damaged_page_of_any_table_is_reported_at_the_start_and_while_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = asyncio.run(used(tmp_path))
    chance = random.Random(3)
    whole = tmp_path / "whole.db"
    shutil.copy(database, whole)
    pages = pages_of(database)
    assert {"approval", "project_rule", "session_rule", "message", "read_file", "session", "state", "record"} <= set(
        pages
    )
    for table, page in pages.items():
        for running in (False, True):
            noise = chance.choice([chance.randbytes(4096), bytes(4096), b"\x0d" + chance.randbytes(4095)])

            def damaged(page: int = page, noise: bytes = noise) -> None:
                with database.open("r+b") as file:
                    file.seek((page - 1) * 4096)
                    file.write(noise)

            for beside in database.parent.glob("handrail.db-*"):
                beside.unlink()
            shutil.copy(whole, database)
            if not running:
                damaged()
                check_reading_commands(tmp_path, capsys)

            def while_it_runs(running: bool = running) -> None:
                if running:
                    with closing(sqlite3.connect(database)) as connection:
                        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    damaged()

            try:
                seen = asyncio.run(seen_by(HELD, tmp_path, while_it_runs))
            except Exception as error:
                raise AssertionError((table, running)) from error
            if table in ("approval", "project_rule", "session_rule", "session", "read_file", "state") and not running:
                assert any(isinstance(e, Exception) or getattr(e, "error_kind", None) for e in seen), (table, seen)


async def test_a_session_that_failed_to_close_can_be_reopened_and_closed(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        with closing(sqlite3.connect(kernel.components.store.folders.database_file)) as other:
            other.execute("ALTER TABLE approval RENAME TO elsewhere")
            with pytest.raises(LogUnavailable):
                await session.close()
            other.execute("ALTER TABLE elsewhere RENAME TO approval")
        again = await kernel.session("ses_1")
        await again.close()
