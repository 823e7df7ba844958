"""State that is full, read-only, damaged, newer or of another user: one clear error, and nothing runs."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.prefork import command as prefork

from handrail import Kernel, tool
from handrail.contract.errors import LogUnavailable, StartError
from handrail.frontends.cli.command_group import CANNOT_START, ERROR, OUTPUT, run_command_line
from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.store.database.schema_migrations import VERSION
from handrail.testing.scripted_kernel import temporary_kernel

PATIENCE_S = 300
_PAGE = 4096

ran: list[str] = []


@tool(id="test.send", side_effect="external", locks=["outbox:X"])
async def send(to: str) -> str:
    """Send."""
    ran.append(to)
    return to


@tool(id="test.look", side_effect="read", locks=[])
async def look(at: str) -> str:
    """Look."""
    ran.append(at)
    return at


@pytest.fixture(autouse=True)
def afresh() -> None:
    ran.clear()


async def used(folder: Path, calls: int = 40) -> Path:
    """A workspace in which calls were made; gives its database."""
    async with temporary_kernel(folder, tools=[send, look], rules=["allow test.*"]) as kernel:
        session = await kernel.session("ses_used")
        for number in range(calls):
            assert (await session.call("test.send", {"to": f"{number}" * 50}, key=f"k{number}")).ok
        (folder / "ws" / "a.txt").write_text("text\n")
    ran.clear()
    return next((folder / "state").rglob("handrail.db"))


def options(folder: Path) -> list[str]:
    return ["--workspace", str(folder / "ws"), "--state", str(folder / "state")]


def cli(folder: Path, *arguments: str, start: Sequence[str] | None = None) -> list[str]:
    return [*(start or prefork.handrail()), *arguments, *options(folder)]


def process(command: list[str], before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        preexec_fn=before,
        check=False,
    )


def one_line(text: str) -> str:
    """The one line of a failure; a traceback or a second line is none."""
    (line,) = text.splitlines()
    assert line.startswith("handrail") and "internal error" not in line
    return line


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


def damage(database: Path, chance: random.Random) -> str:
    """Do something to the file that a bad disk, an editor or a restore could do."""
    data = bytearray(database.read_bytes())
    at = chance.randrange(100, len(data))
    match chance.randrange(6):
        case 0:
            what = f"{at} cut off"
            del data[at:]
        case 1:
            what = f"a bit at {at}"
            data[at] ^= 1 << chance.randrange(8)
        case 2:
            what = f"zeros at {at}"
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case 3:
            page = at // _PAGE * _PAGE
            what = f"noise in the page at {page}"
            data[page : page + _PAGE] = chance.randbytes(len(data[page : page + _PAGE]))
        case 4:
            page, other = (n // _PAGE * _PAGE for n in (at, chance.randrange(len(data))))
            what = f"page {other} over page {page}"
            data[page : page + _PAGE] = data[other : other + _PAGE]
        case _:
            what = f"noise in the header at {at % 100}"
            data[16 + at % 84] ^= 0xFF
    database.write_bytes(data)
    return what


async def tried(folder: Path) -> str:
    """Open a damaged workspace and call: it works, says what is wrong, or refuses; it never fails in another way."""
    try:
        async with temporary_kernel(folder, tools=[send, look], rules=["allow test.*"]) as kernel:
            return await _called(kernel)
    except StartError as error:
        assert str(kernel_database(folder)) in str(error)
        return "start refused"
    except LogUnavailable:
        return "log refused"


async def _called(kernel: Kernel) -> str:
    session = await kernel.session("ses_used")
    results = [
        await session.call("test.send", {"to": "x"}),
        await session.call("test.look", {"at": "x"}),
        await session.call("test.send", {"to": "0" * 50}, key="k0"),
    ]
    assert {result.error_kind for result in results} <= {None, "unavailable", "conflict", "interrupted"}, results
    for result, name in zip(results, ("x", "x"), strict=False):
        assert result.ok or name not in ran
    return "worked" if results[0].ok else "calls refused"


def kernel_database(folder: Path) -> Path:
    return next((folder / "state").rglob("handrail.db"))


def _any_damage(tmp_path: Path, count: int, seed: int, capsys: pytest.CaptureFixture[str]) -> set[str]:
    whole = tmp_path / "whole"
    asyncio.run(used(whole))
    seen: set[str] = set()
    chance = random.Random(seed)
    broken = tmp_path / "broken"
    for number in range(count):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole, broken)
        # The state's folder is named for the workspace's path.
        (key,) = (broken / "state" / "ws").iterdir()
        asyncio.run(used(broken, calls=0))
        (own,) = [each for each in (broken / "state" / "ws").iterdir() if each != key]
        shutil.copy(key / "handrail.db", own / "handrail.db")
        shutil.rmtree(key)
        what = damage(own / "handrail.db", chance)
        for arguments in (["log"], ["log", "verify"], ["log", "--records"], ["doctor"], ["tools"]):
            code = run_command_line([*arguments, *options(broken)])
            told = capsys.readouterr().err
            assert code in (OUTPUT, ERROR, CANNOT_START), (number, what, arguments, told)
            assert "internal error" not in told and "Traceback" not in told, (number, what, arguments, told)
            assert code != ERROR or arguments[:2] == ["log", "verify"], (number, what, arguments, told)
        try:
            seen.add(asyncio.run(tried(broken)))
        except Exception as error:
            raise AssertionError(f"damage {number}, {what}") from error
    return seen


@pytest.mark.proves("G-10", "G-09a")
def test_damaged_state_is_reported_in_plain_text_and_no_call_runs_unrecorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = _any_damage(tmp_path, 12, 7, capsys)
    assert "start refused" in seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_kinds_of_damage_are_reported_in_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _any_damage(tmp_path, 400, 8, capsys)


@pytest.mark.proves("G-02", "G-10")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE record SET body = 'x' WHERE sequence = (SELECT max(sequence) FROM record)",
        "UPDATE record SET call = 'ses_x/1.0' WHERE sequence = (SELECT sequence FROM record ORDER BY sequence DESC LIMIT 1 OFFSET 3)",
        "DELETE FROM record WHERE sequence = (SELECT sequence FROM record ORDER BY sequence DESC LIMIT 1 OFFSET 1)",
        "UPDATE record SET seal = x'00' WHERE sequence = (SELECT max(sequence) FROM record)",
    ],
)
async def test_the_kernel_does_not_start_on_a_log_with_a_damaged_end(tmp_path: Path, statement: str) -> None:
    database = await used(tmp_path)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(StartError, match="verify"):
        async with temporary_kernel(tmp_path):
            pass
    for command in (["call", "read", '{"path": "a.txt"}'], ["mcp"]):
        ended = process(cli(tmp_path, *command))
        assert ended.returncode == CANNOT_START and ended.stdout == ""
        assert "damaged" in one_line(ended.stderr)
    assert run_command_line(["log", "verify", *options(tmp_path)]) == ERROR
    assert run_command_line(["log", *options(tmp_path)]) == OUTPUT


@pytest.mark.proves("G-09a")
async def test_state_of_a_newer_version_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    database = await used(tmp_path)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = database.read_bytes()
    for command in (["call", "read", '{"path": "a.txt"}'], ["log"], ["log", "verify"]):
        ended = process(cli(tmp_path, *command))
        assert ended.returncode == CANNOT_START and f"schema {VERSION + 1}" in one_line(ended.stderr)
    assert database.read_bytes() == before


# ── no room, no right to write ───────────────────────────────────────────────────────────────────


def room(size: int) -> Callable[[], None]:
    """No file of the process may grow beyond ``size`` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.proves("G-10")
@pytest.mark.parametrize("size", [0, 1, 4_096, 33_000, 45_000, 60_000, 80_000])
def test_a_command_started_on_a_full_disk_reports_it_in_one_line(tmp_path: Path, size: int) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("text\n")
    ended = process(cli(tmp_path, "call", "read", '{"path": "a.txt"}'), room(size))
    if ended.returncode == OUTPUT:  # there was room enough
        assert ended.stdout == "text\n" or "text" in ended.stdout
    else:
        assert ended.returncode == CANNOT_START, ended
        assert "Free some disk space" in one_line(ended.stderr)
    again = process(cli(tmp_path, "call", "read", '{"path": "a.txt"}'))
    assert again.returncode == OUTPUT, again
    assert run_command_line(["log", "verify", *options(tmp_path)]) == OUTPUT


async def test_a_full_disk_refuses_all_calls_and_calls_run_again_once_space_is_free(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with temporary_kernel(tmp_path, tools=[send, look], rules=["allow test.*"]) as kernel:
        session = await kernel.session()
        assert (await session.call("test.send", {"to": "before"})).ok
        (database,) = (tmp_path / "state").rglob("handrail.db")
        resource.setrlimit(resource.RLIMIT_FSIZE, (database.stat().st_size, hard))
        try:
            full = await session.call("test.send", {"to": "full"}, key="k")
            for _ in range(3):
                assert (await session.call("test.look", {"at": "full"})).error_kind == "unavailable"
            assert (
                full.error_kind == "unavailable" and full.error_text is not None and "check the disk" in full.error_text
            )
            with pytest.raises(LogUnavailable):
                await kernel.session()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ran == ["before"]
        await kernel.log.flush()
        assert (await session.call("test.look", {"at": "room"})).ok
        assert (await session.call("test.send", {"to": "full"}, key="k")).ok  # it was refused, not run
        other = await kernel.session()
        assert (await other.call("test.look", {"at": "other"})).ok
        assert ran == ["before", "room", "full", "other"]
    assert run_command_line(["log", "verify", *options(tmp_path)]) == OUTPUT


@pytest.mark.proves("G-10")
async def test_a_read_only_state_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    await used(tmp_path)
    state = tmp_path / "state"
    bwrap = next(find_bubblewrap_programs(), None)
    if bwrap is None:
        pytest.skip("nothing here can mount a folder read-only")
    for part in (state, *(state / "ws").iterdir()):
        around = [bwrap, "--dev-bind", "/", "/", "--ro-bind", str(part), str(part), "--"]
        if process([*around, "true"]).returncode != 0:
            pytest.skip("nothing here can mount a folder read-only")
        ended = process([*around, *cli(tmp_path, "call", "read", '{"path": "a.txt"}', start=prefork.COLD)])
        assert ended.returncode == CANNOT_START and ended.stdout == ""
        assert "cannot be written" in one_line(ended.stderr)
        shown = process([*around, *cli(tmp_path, "log", start=prefork.COLD)])
        assert shown.returncode == OUTPUT and shown.stdout.count("ses_used/key:k") == 40, shown
        assert process([*around, *cli(tmp_path, "log", "verify", start=prefork.COLD)]).returncode == OUTPUT


# ── somebody else's ──────────────────────────────────────────────────────────────────────────────

HOLDER = """
import asyncio, sys
from pathlib import Path
from handrail.testing.scripted_kernel import temporary_kernel

async def main():
    async with temporary_kernel(Path(sys.argv[1])) as kernel:
        session = await kernel.session()
        while await asyncio.to_thread(sys.stdin.readline):
            result = await session.call("read", {"path": "a.txt"})
            print(result.type, flush=True)

asyncio.run(main())
"""


@pytest.mark.proves("L-07")
async def test_a_second_process_joins_the_first_until_the_first_exits_or_is_killed(tmp_path: Path) -> None:
    await used(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None and holder.stdout is not None

        def held() -> bool:
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.write("\n")
            holder.stdin.flush()
            return holder.stdout.readline() == "output\n"

        assert held()
        for command in (["call", "read", '{"path": "a.txt"}'], ["tools"], ["mcp"]):
            ended = process(cli(tmp_path, *command))
            known = ("handrail: mode ask", "handrail: category")
            told = [line for line in ended.stderr.splitlines() if not line.startswith(known)]
            assert ended.returncode == OUTPUT and told == []
            assert held()
        assert process(cli(tmp_path, "log")).returncode == OUTPUT
        holder.kill()
        holder.wait()
        assert process(cli(tmp_path, "call", "read", '{"path": "a.txt"}')).returncode == OUTPUT
