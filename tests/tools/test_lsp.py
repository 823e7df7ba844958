"""``lsp`` with a small language server: positions, current files, and faulty servers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel
from tests.tools.scripted_language_server import LanguageServerProgram

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.services.language_services import LocationQueryResult, SymbolQuery
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.session_protocols import Session
from handrail.contract.tool.decorator import tool
from handrail.kernel.local_kernel import LocalKernel
from handrail.runtime.language_servers.running_server import UNUSED_QUESTIONS, ServerTimeouts
from handrail.runtime.language_servers.server_connection import LanguageServerConnection
from handrail.runtime.language_servers.server_pool import MAX_SERVERS, LanguageServerPool
from handrail.sandbox.tier_probe import choose_sandbox
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = [
    pytest.mark.proves("T-06l"),
    pytest.mark.skipif(not choose_sandbox().tier.is_confining, reason="programs cannot be confined here"),
]
RULES = ("allow lsp", "allow bash", "allow write", "allow edit", "allow file.delete")
SHORT = ServerTimeouts(start_s=20, question_s=2, settling_s=1, pushed_s=1)
PATIENT = ServerTimeouts(pushed_s=20)


class LanguageFixture:
    """A session with a language server, and its workspace."""

    def __init__(self, kernel: LocalKernel, session: Session, folder: Path, program: LanguageServerProgram) -> None:
        self.kernel = kernel
        self.session = session
        self.folder = folder
        self.program = program

    @property
    def pool(self) -> LanguageServerPool:
        return self.kernel.components.get_server_pool()

    @property
    def connections(self) -> list[LanguageServerConnection]:
        return [one.connection for one in self.pool.list_running_servers()]

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self.connections]

    def put(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    async def ask(self, action: str, **arguments: object) -> Result:
        return await self.session.call("lsp", {"action": action, **arguments})

    async def get(self, action: str, **arguments: object) -> Any:
        """The data of an answer, which has to succeed."""
        result = await self.ask(action, **arguments)
        assert result.error_kind is None, result.error_text
        return result.data

    async def run(self, command: str) -> None:
        done = await self.session.call("bash", {"command": command})
        assert done.error_kind is None, done.error_text
        assert done.data["exit_code"] == 0, done.data

    async def fail(self, kind: str, *parts: str, action: str = "", **arguments: object) -> str:
        """The text of a refusal; without an action that of a hover."""
        given = arguments if action else {"path": "a.words", "symbol": "ship"}
        result = await self.ask(action or "hover", **given)
        assert result.error_kind == kind, (result.error_kind, result.error_text, result.data)
        text = result.error_text or ""
        for part in parts:
            assert part in text
        return text


@asynccontextmanager
async def working(
    folder: Path,
    files: Mapping[str, str] | None = None,
    *,
    rules: tuple[str, ...] = (),
    settings: str = "",
    times: ServerTimeouts | None = None,
    **plan: Any,
) -> AsyncGenerator[LanguageFixture]:
    program = LanguageServerProgram(folder, **plan)
    for name, text in (files or {"a.words": "def ship\nuse ship\n", "b.words": "see the ship\nshipment\n"}).items():
        path = folder / "ws" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    async with temporary_kernel(folder, rules=(*RULES, *rules), settings=settings or program.settings_toml()) as kernel:
        user = ScriptedApprovalHandler([ApprovalAnswer("once")] * 500)
        kernel.components.get_server_pool().times = times or PATIENT
        yield LanguageFixture(
            kernel, await kernel.session(approval_handler=user, headless=False), (folder / "ws").resolve(), program
        )


def lines_of(found: Any, key: str = "locations") -> list[tuple[str, int, int, str]]:
    return [(one["path"], one["line"], one["column"], one["text"]) for one in found[key]]


USES = [("a.words", 1, 5, "def ship"), ("a.words", 2, 5, "use ship"), ("b.words", 1, 9, "see the ship")]


# Questions.


async def test_a_symbol_is_found_by_name_and_by_position(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        by_name = await work.get("definition", symbol="ship")
        assert lines_of(by_name) == [("a.words", 1, 5, "def ship")]
        assert by_name["servers"] == ["words"]
        for named in ({"path": "b.words", "line": 1, "symbol": "ship"}, {"path": "b.words", "symbol": "ship"}):
            assert lines_of(await work.get("definition", **named)) == [("a.words", 1, 5, "def ship")]
        for named in (
            {"symbol": "ship"},
            {"path": "a.words", "line": 1},
            {"path": "b.words", "line": 1, "symbol": "ship"},
        ):
            found = await work.get("references", **named)
            assert lines_of(found) == USES
            assert found["total"] == 3
            assert not found.keys() & {"incomplete", "hidden", "files"}


async def test_hover_symbols_and_rename_preview_return_the_matching_lines(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"
        symbols = await work.get("symbols", path="a.words")
        assert lines_of(symbols, "symbols") == [("a.words", 1, 5, "def ship")]
        assert symbols["symbols"][0]["kind"] == "function"
        assert lines_of(await work.get("symbols", symbol="ship"), "symbols") == [("a.words", 1, 5, "def ship")]
        renaming = await work.get("rename_preview", symbol="ship", new_name="boat")
        assert [one["new_text"] for one in renaming["edits"]] == ["def boat", "use boat", "see the boat"]
        assert (work.folder / "a.words").read_text() == "def ship\nuse ship\n"


async def test_columns_count_characters(tmp_path: Path) -> None:
    async with working(tmp_path, {"a.words": "def ship\n", "ä b.words": "😀é ship\n"}) as work:
        assert lines_of(await work.get("references", symbol="ship"))[1] == ("ä b.words", 1, 4, "😀é ship")


async def test_locations_above_the_result_limit_are_counted_by_file(tmp_path: Path) -> None:
    files = {"a.words": "def ship\n", **{f"u{number}.words": "ship\n" * 30 for number in range(10)}}
    async with working(tmp_path, files) as work:
        found = await work.get("references", symbol="ship")
    assert (len(found["locations"]), found["total"], found["files"]["u3.words"]) == (200, 301, 30)


async def test_a_request_without_a_clear_symbol_is_refused_with_the_arguments_to_pass(tmp_path: Path) -> None:
    files = {"a.words": "def ship\nuse ship\n", "b.words": "def ship\n", "notes.txt": "ship"}
    async with working(tmp_path, files) as work:
        bad = "invalid_input"
        await work.fail(
            bad, "2 symbols", "a.words:1", "b.words:1", "`path` and `line`", action="references", symbol="ship"
        )
        assert lines_of(await work.get("definition", symbol="ship")) == [
            ("a.words", 1, 5, "def ship"),
            ("b.words", 1, 5, "def ship"),
        ]
        await work.fail(bad, "No symbol `boat`", action="definition", symbol="boat")
        await work.fail(bad, "`boat` is not in a.words", action="definition", path="a.words", symbol="boat")
        await work.fail(bad, "not in line 2", "use ship", action="definition", path="a.words", line=2, symbol="boat")
        await work.fail(bad, "Line 2 of a.words defines no symbol", action="hover", path="a.words", line=2)
        await work.fail(bad, "has 2 lines", action="hover", path="a.words", line=9)
        await work.fail(bad, "The symbol is missing", action="hover", path="a.words")
        await work.fail(bad, "`symbol`", action="references")
        await work.fail(bad, "`path` is missing", action="diagnostics", symbol="ship")
        await work.fail(bad, "`new_name` is missing", action="rename_preview", symbol="ship")
        await work.fail(bad, "`path` is missing for `line`", action="hover", line=1, symbol="ship")
        await work.fail(bad, "is a folder", action="symbols", path=".")
        await work.fail("failed", "does not exist", action="symbols", path="none.words")
        await work.fail("unavailable", "No language server handles `notes.txt`", action="symbols", path="notes.txt")
        await work.fail("denied", "outside", action="symbols", path="/etc/passwd")


# Files as they are now.


async def test_every_file_change_appears_in_the_next_result(tmp_path: Path) -> None:
    async with working(tmp_path, {"a.words": "def ship\n", "b.words": "BAD x\n", "c.words": "fine\n"}) as work:
        assert len((await work.get("diagnostics", path="b.words"))["diagnostics"]) == 1
        await work.run("echo fine > b.words")
        assert (await work.get("diagnostics", path="b.words"))["diagnostics"] == []
        await work.run("touch -r b.words stamp; echo 'BAD!' > b.words; touch -r stamp b.words")
        assert [one["text"] for one in (await work.get("diagnostics", path="b.words"))["diagnostics"]] == ["BAD!"]
        await work.run("cp b.words new.words; mv new.words b.words; echo 'the ship' >> b.words")
        assert lines_of(await work.get("references", symbol="ship"))[1] == ("b.words", 2, 5, "the ship")
        await work.run("echo 'ship again' > d.words; rm b.words")
        assert [one[0] for one in lines_of(await work.get("references", symbol="ship"))] == ["a.words", "d.words"]
        await work.fail("failed", "does not exist", action="diagnostics", path="b.words")
        await work.run("echo 'BAD here' > b.words")
        assert len((await work.get("diagnostics", path="b.words"))["diagnostics"]) == 1


async def test_a_changed_document_in_a_package_folder_is_read_again(tmp_path: Path) -> None:
    async with working(tmp_path, {"a.words": "fine\n", "node_modules/b.words": "BAD x\n"}) as work:
        path = "node_modules/b.words"
        assert len((await work.get("diagnostics", path=path))["diagnostics"]) == 1
        await work.run(f"echo fine > {path}")
        assert (await work.get("diagnostics", path=path))["diagnostics"] == []


async def test_new_packages_restart_the_language_server(tmp_path: Path) -> None:
    async with working(tmp_path, {"a.words": "def ship\n", "node_modules/b.words": "x\n"}) as work:
        await work.get("hover", symbol="ship")
        before = work.pids
        await work.run("mkdir node_modules/more")
        assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"
        assert work.pids != before


@pytest.mark.parametrize("pull", [True, False])
async def test_diagnostics_are_never_stale_after_edits_by_tools_and_programs(tmp_path: Path, pull: bool) -> None:
    await edit_and_diagnose(tmp_path, 12, pull=pull)


@pytest.mark.slow
@pytest.mark.parametrize("pull", [True, False])
async def test_diagnostics_are_never_stale_after_a_hundred_edits(tmp_path: Path, pull: bool) -> None:
    await edit_and_diagnose(tmp_path, 100, pull=pull)


async def edit_and_diagnose(folder: Path, edits: int, *, pull: bool) -> None:
    """Half of the edits are those of a program, and half those of a tool; each is followed by a question."""
    async with working(folder, {"a.words": "start\n"}, pull=pull) as work:
        await work.session.call("read", {"path": "a.words"})
        for number in range(edits):
            text = f"BAD {number % 10}\n" * (number % 3) + "fine\n"
            if number % 2:
                await work.run(f"printf %s '{text}' > a.words")
                await work.session.call("read", {"path": "a.words"})
            else:
                done = await work.session.call("write", {"path": "a.words", "content": text})
                assert done.error_kind is None, done.error_text
            found = await work.get("diagnostics", path="a.words")
            assert [one["text"] for one in found["diagnostics"]] == [f"BAD {number % 10}"] * (number % 3)
            assert "stale" not in found


async def test_outdated_diagnostics_are_marked_as_stale(tmp_path: Path) -> None:
    for name in ("late", "silent"):
        plan: dict[str, Any] = {name: True}
        async with working(tmp_path / name, {"a.words": "BAD\n"}, times=SHORT, **plan) as work:
            await work.ask("diagnostics", path="a.words")
            await work.run("echo fine > a.words")
            found = await work.get("diagnostics", path="a.words")
            assert (found["stale"], found["diagnostics"]) == (True, [])
            assert "current content" in found["why"]
    async with working(tmp_path / "unversioned", {"a.words": "BAD\n"}, times=SHORT, unversioned=True) as work:
        found = await work.get("diagnostics", path="a.words")
        assert found["stale"] is True
        assert "for which version" in found["why"]


async def test_diagnostics_are_requested_after_a_server_registers_for_them(tmp_path: Path) -> None:
    async with working(tmp_path, {"a.words": "BAD\n"}, registers=True) as work:
        found = await work.get("diagnostics", path="a.words")
        assert [one["text"] for one in found["diagnostics"]] == ["BAD"]
        assert "stale" not in found


async def test_unused_documents_are_closed(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        await work.get("symbols", path="b.words")
        for _ in range(UNUSED_QUESTIONS + 1):
            await work.get("symbols", path="a.words")
        (server,) = work.pool.list_running_servers()
        assert [Path(path).name for path in server.documents] == ["a.words"]


# What rules hide.


async def test_hidden_files_appear_in_no_result_and_the_server_cannot_read_them(tmp_path: Path) -> None:
    files = {"a.words": "def ship\n", "secret.words": "the secret ship\n"}
    plan: dict[str, Any] = {"reads": [str((tmp_path / "ws" / "secret.words").resolve())]}
    async with working(tmp_path, files, rules=("deny fs.read secret.words",), **plan) as work:
        found = await work.get("references", symbol="ship")
        assert lines_of(found) == [("a.words", 1, 5, "def ship")]
        assert "the secret ship" not in (await work.get("hover", symbol="ship"))["hover"]
        for action in ("symbols", "diagnostics"):
            await work.fail("denied", action=action, path="secret.words")


async def test_a_running_server_cannot_read_a_hidden_file_created_later(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"reads": [str((tmp_path / "ws" / "secret.words").resolve())]}
    async with working(tmp_path, {"a.words": "def ship\n"}, rules=("deny fs.read secret.words",), **plan) as work:
        await work.get("hover", symbol="ship")
        before = work.pids
        work.put("secret.words", "the secret ship\n")
        found = await work.get("hover", symbol="ship")
        assert "the secret ship" not in found["hover"]
        assert work.pids != before
        assert lines_of(await work.get("references", symbol="ship")) == [("a.words", 1, 5, "def ship")]


async def test_a_hidden_file_stays_hidden_after_another_file_replaces_it(tmp_path: Path) -> None:
    secret = (tmp_path / "ws" / "secret.words").resolve()
    plan: dict[str, Any] = {"reads": [str(secret)]}
    files = {"a.words": "def ship\n", "secret.words": "the secret ship\n"}
    async with working(tmp_path, files, rules=("deny fs.read secret.words",), **plan) as work:
        await work.get("hover", symbol="ship")
        work.put("new.txt", "another secret ship\n").replace(secret)
        assert "secret ship" not in (await work.get("hover", symbol="ship"))["hover"]


async def test_results_that_rules_hide_from_the_call_are_left_out_and_counted(tmp_path: Path) -> None:
    async with working(tmp_path, rules=("deny lsp b.words",)) as work:
        found = await work.get("references", symbol="ship")
        assert lines_of(found) == USES[:2]
        assert found["hidden"] == 1
        await work.fail("denied", action="symbols", path="b.words")
        work.put("a.words", "use ship\nuse harbour\ndef harbour\n")
        work.put("b.words", "def ship\n")
        await work.fail("denied", "declared in a file that a rule hides")
        assert (await work.get("hover", path="a.words", symbol="harbour"))["hover"] == "the word harbour"


async def test_a_language_server_can_only_read_the_workspace(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("TOP-SECRET")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        written = str((tmp_path / "ws" / "written.words").resolve())
        plan: dict[str, Any] = {"writes": [written], "reads": [str(outside.resolve())], "connects": [port]}
        async with working(tmp_path, **plan) as work:
            said = (await work.get("hover", symbol="ship"))["hover"]
    assert "cannot write" in said
    assert "cannot read" in said
    assert "cannot connect" in said
    assert not Path(written).exists()


async def test_sessions_share_a_server_only_if_their_rules_show_the_same_files(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        await work.get("hover", symbol="ship")
        same = await work.kernel.session()
        assert (await same.call("lsp", {"action": "hover", "symbol": "ship"})).error_kind is None
        assert len(work.pids) == 1
        narrower = await work.kernel.session(rules=["deny fs.read b.words"])
        found = await narrower.call("lsp", {"action": "references", "symbol": "ship"})
        assert lines_of(found.data) == USES[:2]
        assert len(work.pids) == 2


async def test_a_file_tool_can_replace_a_hidden_file_while_a_server_runs(tmp_path: Path) -> None:
    files = {"a.words": "def ship\n", "secret.words": "x\n"}
    rules = ("deny fs.read secret.words", "allow fs.write secret.words")
    async with working(tmp_path, files, rules=rules) as work:
        await work.get("hover", symbol="ship")
        done = await work.session.call("file.delete", {"path": "secret.words"})
        assert done.error_kind is None, done.error_text
        assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"


# Servers that misbehave.


@pytest.mark.parametrize("method", ["initialize", "textDocument/hover"])
async def test_a_silent_server_fails_the_call_after_a_time_limit(tmp_path: Path, method: str) -> None:
    times = ServerTimeouts(start_s=3, question_s=3)
    async with working(tmp_path, times=times, mute=[method]) as work:
        if method == "initialize":
            await work.fail("unavailable", "did not initialise within 3 s", "grep")
            await work.fail("unavailable", "The next start is possible")
        else:
            await work.fail("timeout", "did not answer in time", "grep")
            work.program.set_plan()
            assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"dies": ["initialize"]}, "exit code 3: the plan ends this server"),
        ({"dies": ["textDocument/hover"]}, "exit code 3: the plan ends this server"),
        ({"garbage": ["textDocument/hover"]}, "'Starting up, please wait"),
        ({"garbage": ["initialize"]}, "is not the header of a message"),
        ({"huge": ["textDocument/hover"]}, "1,073,741,824 bytes"),
        ({"asks": ["textDocument/hover"]}, "whose id has 1,000,000 characters"),
    ],
)
async def test_a_server_that_fails_twice_is_unavailable_with_the_reason(
    tmp_path: Path, plan: dict[str, Any], why: str
) -> None:
    async with working(tmp_path, **plan) as work:
        await work.fail("unavailable", why, "The next start is possible in", "grep")
        assert work.pids == []


async def test_a_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        await work.get("hover", symbol="ship")
        (pid,) = work.pids
        kill_with_children(pid)
        assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"
        assert work.pids not in ([], [pid])


async def test_a_server_that_uses_too_much_memory_is_ended_with_the_reason(tmp_path: Path) -> None:
    async with working(tmp_path, grows=["textDocument/hover"]) as work:
        text = await work.fail("unavailable", "memory")
    assert "The next start is possible" in text


async def test_endless_reports_of_a_server_use_bounded_memory(tmp_path: Path) -> None:
    async with working(tmp_path, floods=["textDocument/hover"]) as work:
        assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"
        (connection,) = work.connections
        assert 0 < sum(len(str(one.diagnostics)) for one in connection.diagnostics.values()) < 70_000_000
        assert "file:///flood/99" in connection.diagnostics and connection.progress == {}


async def test_results_of_a_server_that_is_still_indexing_are_marked_incomplete(tmp_path: Path) -> None:
    async with working(tmp_path / "long", times=SHORT, progress=1000) as work:
        found = await work.get("references", symbol="ship")
        assert found["incomplete"] is True
        assert "is still indexing (Indexing, 40 %)" in found["why"]
    async with working(tmp_path / "short", progress=2, partial=1) as work:
        found = await work.get("references", symbol="ship")
        assert (lines_of(found), "incomplete" in found) == (USES, False)


async def test_a_new_server_is_queried_until_its_results_stay_equal(tmp_path: Path) -> None:
    async with working(tmp_path, partial=1) as work:
        found = await work.get("references", path="a.words", line=1)
    assert (lines_of(found), "incomplete" in found) == (USES, False)


async def test_a_missing_server_is_unavailable_with_the_next_step(tmp_path: Path) -> None:
    settings = '[language_servers.words]\ncommand = ["no-such-server"]\nfiles = ["*.words"]\n'
    async with working(tmp_path, settings=settings) as work:
        await work.fail("unavailable", "no-such-server", "[language_servers.words]", "grep")
        await work.fail("unavailable", "no-such-server", action="definition", symbol="ship")


async def test_a_server_in_the_workspace_is_refused(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        own = work.put("server", "#!/bin/sh\nexec cat\n")
        own.chmod(0o755)
    settings = f'[language_servers.words]\ncommand = ["{own}"]\nfiles = ["*.words"]\n'
    async with working(tmp_path, settings=settings) as work:
        await work.fail("unavailable", "a call could change it")


def kill_with_children(pid: int) -> None:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            kill_with_children(int(child))
    os.kill(pid, 9)


# Several questions and several processes.


async def test_parallel_requests_of_sessions_are_all_answered_by_one_server(tmp_path: Path) -> None:
    async with working(tmp_path) as work:
        other = await work.kernel.session()
        asked = [("hover", work.session), ("references", other), ("definition", other), ("symbols", work.session)] * 5
        found = await asyncio.gather(*(one.call("lsp", {"action": what, "symbol": "ship"}) for what, one in asked))
        assert [one.error_text for one in found if one.error_kind is not None] == []
        assert len(work.pids) == 1


async def test_a_tool_of_a_joined_process_uses_the_servers_of_the_holder(tmp_path: Path) -> None:
    @tool(id="uses.of", side_effect="read", requires={"fs": {"read": ["{workspace}"]}})
    async def find_uses(runtime: Runtime) -> list[str]:
        """Find the uses of ships."""
        found = await runtime.language_servers.find_references(SymbolQuery(symbol="ship"))
        assert isinstance(found, LocationQueryResult)
        with pytest.raises(ToolError, match="No symbol `boat`"):
            await runtime.language_servers.describe_symbol(SymbolQuery(symbol="boat"))
        return [f"{one.path}:{one.line}" for one in found.locations]

    async with working(tmp_path) as work, joined_kernel(tmp_path, tools=[find_uses], rules=["allow *"]) as joined:
        session = await joined.session()
        assert (await session.call("uses.of", {})).data == ["a.words:1", "a.words:2", "b.words:1"]
        assert lines_of((await session.call("lsp", {"action": "references", "symbol": "ship"})).data) == USES
        assert len(work.pids) == 1


async def start_hanging_question(work: LanguageFixture) -> asyncio.Task[Result]:
    """A question that the server does not answer, after the server has got it."""
    await work.get("symbols", path="a.words")
    (server,) = work.pool.list_running_servers()
    asking = asyncio.ensure_future(work.ask("hover", path="a.words", symbol="ship"))
    async with asyncio.timeout(30):
        while not server.connection.pending_request_count:
            await asyncio.sleep(0.01)
    return asking


async def test_a_cancelled_request_leaves_the_server_usable(tmp_path: Path) -> None:
    async with working(tmp_path, mute=["textDocument/hover"]) as work:
        asking = await start_hanging_question(work)
        asking.cancel()
        await asyncio.wait({asking})
        before = work.pids
        assert lines_of(await work.get("references", symbol="ship")) == USES
        assert work.pids == before


async def test_a_closing_kernel_ends_a_server_during_an_open_request(tmp_path: Path) -> None:
    async with working(tmp_path, mute=["textDocument/hover"]) as work:
        asking = await start_hanging_question(work)
        (pid,) = work.pids
    await asyncio.wait({asking})
    assert not is_alive(pid)


# The end of servers.


async def test_an_idle_server_is_stopped_and_started_again_by_the_next_request(tmp_path: Path) -> None:
    async with working(tmp_path, times=ServerTimeouts(idle_s=0.05)) as work:
        await work.get("hover", symbol="ship")
        async with asyncio.timeout(30):
            while work.pids:
                await asyncio.sleep(0.01)
        assert (await work.get("hover", symbol="ship"))["hover"] == "the word ship"


async def test_no_language_server_is_left_running_after_many_sessions(tmp_path: Path) -> None:
    await open_many_sessions(tmp_path, MAX_SERVERS + 2)


@pytest.mark.slow
async def test_no_language_server_is_left_running_after_two_hundred_sessions(tmp_path: Path) -> None:
    await open_many_sessions(tmp_path, 200)


async def open_many_sessions(folder: Path, sessions: int) -> None:
    """Each session may see other files, so each needs another server."""
    seen: set[int] = set()
    async with working(folder) as work:
        for number in range(sessions):
            session = await work.kernel.session(rules=[f"deny fs.read hidden{number}.words"])
            found = await session.call("lsp", {"action": "hover", "symbol": "ship"})
            assert found.error_kind is None, found.error_text
            seen.update(work.pids)
            assert len(work.pids) <= MAX_SERVERS
            await session.close()
        assert len(seen) == sessions
    assert [pid for pid in seen if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False
