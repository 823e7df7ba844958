"""A program reaches an unlisted host after the user has allowed it, and the request is durable."""

from __future__ import annotations

import asyncio
import io
import shutil
import zipfile
from pathlib import Path

import pytest
from tests.kernel.doors import HELD, JOINED, Opens
from tests.kernel.test_agents import confined, opening, put_agent
from tests.sandbox.test_network import get
from tests.tools.githost import GitHost
from tests.tools.repositories import create_repository
from tests.web import LoopbackServer, ok

from handrail.arbiter.approvals import host_requests
from handrail.contract.approval_requests import Approval, ApprovalAnswer, DeferApprovals
from handrail.contract.calls_and_results import Result
from handrail.kernel.local_kernel import LocalKernel
from handrail.record.call_timeline import CallTimeline, read_timeline
from handrail.record.log_reader import LoggedCallSummary, LogReader
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import ScriptedApprovalHandler

pytestmark = [confined, pytest.mark.proves("K-10", "S-02")]

RULES = ["allow bash bash fetch.sh"]
SCRIPT = {"command": "bash fetch.sh"}


@pytest.fixture(params=[HELD, JOINED])
def opened(request: pytest.FixtureRequest) -> Opens:
    return opening(request.param)


def prepare(folder: Path, *urls: str, hosts: list[str] | None = None) -> None:
    """A script that fetches the URLs, and an agent that opens the loopback's hosts by name, since they are private."""
    (folder / "ws").mkdir(exist_ok=True)
    (folder / "ws" / "fetch.sh").write_text("\n".join(map(get, urls)) + "\nexit 3\n")
    if hosts:
        put_agent(folder, "fetcher", f"[requires.tools.bash.net]\nhosts = {hosts}".replace("'", '"'))


async def test_a_host_is_requested_once_and_a_session_answer_becomes_a_rule(tmp_path: Path, opened: Opens) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session")])
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        prepare(tmp_path, site.url("/a"), site.url("/b"), hosts=[site.authority])
        async with opened(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=person)
            first = await session.call("bash", SCRIPT)
            second = await session.call("bash", SCRIPT)
    assert first.data["output"].count("FETCHED") == 2, first
    assert second.data["output"].count("FETCHED") == 2
    (asked,) = person.requests
    assert asked.tool_id == "bash" and asked.arguments == SCRIPT
    assert asked.suggested_rule == f"allow net.fetch {site.authority}"
    assert asked.targets == (f"net.fetch {site.authority}",)
    assert first.metadata["network"]["reached"] == [site.authority]


async def test_many_connections_wait_for_one_host_request_without_a_call_timeout(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("once")])
    person.may_answer.clear()
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        prepare(tmp_path, hosts=[site.authority])
        loads = " ".join(f"({get(site.url(f'/{one}'))}) &" for one in range(8))
        (tmp_path / "ws" / "fetch.sh").write_text(f"{loads} wait\n")
        async with opening(HELD)(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=person)
            call = asyncio.ensure_future(session.call("bash", SCRIPT | {"timeout_ms": 20_000}))
            await person.request_received.wait()
            person.may_answer.set()
            answer = await call
            assert answer.data["output"].count("FETCHED") == 8, answer
            assert len(person.requests) == 1
            again = await session.call("bash", SCRIPT)
    assert again.data["output"].count("FETCHED") == 8
    assert len(person.requests) == 2, "once is for one call"


async def test_a_rejected_host_stays_rejected_in_the_session_and_the_result_explains_it(
    tmp_path: Path, opened: Opens
) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("reject", "not that mirror")])
    async with LoopbackServer({"*": ok(b"NEVER")}) as site:
        prepare(tmp_path, site.url(), hosts=[site.authority])
        async with opened(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=person)
            first = await session.call("bash", SCRIPT)
            second = await session.call("bash", SCRIPT)
    assert len(person.requests) == 1
    assert site.asked == []
    for answer in (first, second):
        (note,) = answer.data["notes"]
        assert site.authority in note and "not that mirror" in note
        (refused,) = answer.metadata["network"]["refused"]
        assert refused["host"] == site.authority and "rejected" in refused["reason"]


async def test_hosts_that_rules_allow_or_deny_are_not_asked_about(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session")] * 9)
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site, LoopbackServer({"*": ok(b"NEVER")}) as other:
        prepare(tmp_path, site.url(), other.url(), hosts=[site.authority, other.authority])
        rules = [*RULES, f"allow net.fetch {site.authority}", f"deny net.fetch {other.authority}"]
        async with opening(HELD)(tmp_path, "fetcher", rules=rules) as kernel:
            answer = await (await kernel.session(approval_handler=person)).call("bash", SCRIPT)
    assert "FETCHED" in answer.data["output"], answer
    assert person.requests == [] and other.asked == []


@pytest.mark.parametrize("rules", [["allow bash"], ["allow *"], ["allow shell.run"]])
async def test_a_tool_rule_allows_no_host_and_the_note_names_the_missing_rule(tmp_path: Path, rules: list[str]) -> None:
    async with LoopbackServer({"*": ok(b"NEVER")}) as site:
        prepare(tmp_path, site.url(), hosts=[site.authority])
        async with opening(HELD)(tmp_path, "fetcher", rules=rules) as kernel:
            answer = await (await kernel.session()).call("bash", SCRIPT)
    assert site.asked == []
    (note,) = answer.data["notes"]
    assert f'rules = ["allow net.fetch {site.authority}"]' in note


async def test_a_private_address_that_no_manifest_names_is_refused_without_a_request(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("project")])
    async with LoopbackServer({"*": ok(b"NEVER")}) as site:
        prepare(tmp_path, site.url())
        async with opening(HELD)(tmp_path, rules=RULES) as kernel:
            answer = await (await kernel.session(approval_handler=person)).call("bash", SCRIPT)
    assert site.asked == [] and person.requests == [], "no answer could open it"
    assert "private, local or reserved" in answer.data["notes"][0]


async def test_a_deferred_host_request_answered_elsewhere_allows_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_requests, "DEFERRED_S", 0.0)
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        prepare(tmp_path, site.url(), hosts=[site.authority])
        async with opening(HELD)(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=DeferApprovals())
            first = await session.call("bash", SCRIPT)
            again = await session.call("bash", SCRIPT)
            (row,) = kernel.approvals.list_pending()
            assert row.kind == "host"
            assert f"handrail approve {row.id}" in first.data["notes"][0]
            assert f"handrail approve {row.id}" in again.data["notes"][0]
            await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
            third = await session.call("bash", SCRIPT)
            assert "FETCHED" in third.data["output"], third
            await session.call("bash", SCRIPT)
            (fresh,) = kernel.approvals.list_pending()
            assert fresh.id != row.id, "the answer was for one call"


async def test_a_host_request_outlives_its_session_and_accepts_a_project_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_requests, "DEFERRED_S", 0.0)
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        prepare(tmp_path, site.url(), hosts=[site.authority])
        async with opening(HELD)(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=DeferApprovals())
            await session.call("bash", SCRIPT)
            await session.close()
        async with opening(HELD)(tmp_path, "fetcher", rules=RULES) as kernel:
            (row,) = kernel.approvals.list_pending()
            await kernel.approvals.decide(row.id, ApprovalAnswer("project"), by="test")
            answer = await (await kernel.session()).call("bash", SCRIPT)
    assert "FETCHED" in answer.data["output"], answer


async def test_an_answer_from_elsewhere_reaches_the_waiting_connection(tmp_path: Path) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        prepare(tmp_path, site.url(), hosts=[site.authority])
        async with opening(HELD)(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=DeferApprovals())
            asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            assert isinstance(kernel, LocalKernel)

            def notice(row: Approval) -> None:
                if not asked.done():
                    asked.set_result(row.id)

            kernel.components.arbiter.approval_broker.subscribe_to_requests(notice)
            call = asyncio.ensure_future(session.call("bash", SCRIPT))
            await kernel.approvals.decide(await asked, ApprovalAnswer("project"), by="test")
            answer = await call
            rules = [rule.text for rule in kernel.approvals.list_rules()]
    assert "FETCHED" in answer.data["output"], answer
    assert rules == [f"allow net.fetch {site.authority}"]


async def test_a_host_request_left_open_by_a_call_is_shown_again_to_the_next(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session")])
    person.may_answer.clear()
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        prepare(tmp_path, site.url(), hosts=[site.authority])
        (tmp_path / "ws" / "fetch.sh").write_text(f"({get(site.url())}) & read -t 0.5 < <(sleep 5); kill $!; exit 4\n")
        async with opening(HELD)(tmp_path, "fetcher", rules=RULES) as kernel:
            session = await kernel.session(approval_handler=person)
            first = await session.call("bash", SCRIPT)
            assert first.data["exit_code"] == 4, first
            assert len(kernel.approvals.list_pending()) == 1
            person.may_answer.set()
            prepare(tmp_path, site.url())
            second = await session.call("bash", SCRIPT)
            assert kernel.approvals.list_pending() == []
    assert "FETCHED" in second.data["output"], second
    assert [request.id for request in person.requests] == [person.requests[0].id] * 2, "one request, shown again"


async def test_explain_lists_the_hosts_a_call_reached_and_why_others_were_refused(tmp_path: Path) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site, LoopbackServer({"*": ok(b"NEVER")}) as other:
        prepare(tmp_path, site.url(), other.url(), hosts=[site.authority, other.authority])
        rules = [*RULES, "allow bash {read-only}", f"allow net.fetch {site.authority}"]
        async with opening(HELD)(tmp_path, "fetcher", rules=rules) as kernel:
            answer = await (await kernel.session()).call("bash", SCRIPT)
            read = await (await kernel.session()).call("bash", {"command": "ls"})
            call_ids = [row.call_id for row in _rows(tmp_path)]
    assert site.authority in answer.metadata["untrusted_source"]
    shown = {one: str(_timeline(tmp_path, one)) for one in call_ids}
    fetched = next(text for text in shown.values() if "fetch.sh" in text)
    assert f"network    reached {site.authority}; refused {other.authority} (" in fetched
    assert f"note       The host {other.authority} was refused" in fetched
    assert read.metadata["read_only"] is True
    assert any("network    none, since the call only read" in text for text in shown.values())


async def test_a_ceiling_without_hosts_disables_the_network_and_the_result_explains_it(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "ws" / "fetch.sh").write_text("curl -sS https://example.org\n")
    ceiling = '[ceiling]\nshell = [{cmd = "*"}]\nfs.read = ["{workspace}"]\nfs.write = ["{workspace}"]\n'
    async with opening(HELD)(tmp_path, None, ceiling, rules=[*RULES, "allow net.fetch"]) as kernel:
        answer = await (await kernel.session()).call("bash", SCRIPT)
    assert answer.metadata["network"]["unavailable"] == "the host's ceiling has no hosts"
    assert "the host's ceiling has no hosts" in answer.data["notes"][0]


def _rows(folder: Path) -> list[LoggedCallSummary]:
    with LogReader.open_database(_database(folder)) as reader:
        return list(reader.calls(limit=10))


def _timeline(folder: Path, call_id: str) -> CallTimeline | None:
    with LogReader.open_database(_database(folder)) as reader:
        return read_timeline(reader, call_id)


def _database(folder: Path) -> Path:
    return locate_folders(folder / "ws", folder / "state").database_file


def make_wheel() -> bytes:
    """An installable wheel of an empty distribution."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("hour-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: hour\nVersion: 1\n")
        file.writestr("hour-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("hour-1.dist-info/RECORD", "")
    return content.getvalue()


PAGE = b'<a href="/hour-1-py3-none-any.whl">hour-1-py3-none-any.whl</a>'
PACKAGE_PAGES = {
    "/simple/hour/": ok(PAGE, "Content-Type: text/html"),
    "/hour-1-py3-none-any.whl": ok(make_wheel()),
    "/hour": ok(
        b'{"name": "hour", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {"name": "hour", "version": "1.0.0"}}}'
    ),
    "/a": ok(b"FETCHED"),
    "/b": ok(b"FETCHED"),
}


PIP = "python3 -m pip --disable-pip-version-check download -q --no-deps --no-cache-dir"
FETCH_SCRIPT = (
    "fetch(process.argv[2]).then(r => r.text()).then(console.log, e => { console.log(e.message); process.exit(1) })"
)


@pytest.mark.parametrize(
    ("program", "command", "shown"),
    [
        ("python3", PIP + " --trusted-host {host} --index-url {url}simple hour && ls", "hour-1-py3-none-any.whl"),
        ("npm", "npm view hour version --registry {url} --fetch-retries=0", "1.0.0"),
        ("git", "git clone -q {url}x.git copy && git -C copy log --format=%s", "first"),
        ("curl", "for f in a b; do curl -sS {url}$f; done", "FETCHEDFETCHED"),
        ("wget", "wget -q -O - {url}a", "FETCHED"),
    ],
)
async def test_each_package_manager_asks_once_for_its_host_and_then_reaches_it(
    tmp_path: Path, program: str, command: str, shown: str
) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")] * 9)
    answer, authority = await run_with_package_server(tmp_path, program, command, person)
    assert shown in answer.data["output"], answer
    assert [one.targets for one in person.requests if one.targets[0].startswith("net.fetch")] == [
        (f"net.fetch {authority}",)
    ]


async def test_a_fetch_of_node_reaches_its_host_or_the_note_names_the_versions_that_can(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")] * 9)
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "fetch.js").write_text(FETCH_SCRIPT)
    answer, _ = await run_with_package_server(tmp_path, "node", "node fetch.js {url}a", person)
    assert "FETCHED" in answer.data["output"] or "from Node 22.21" in " ".join(answer.data["notes"]), answer


async def run_with_package_server(
    folder: Path, program: str, command: str, person: ScriptedApprovalHandler
) -> tuple[Result, str]:
    """Run a command whose program an agent may let reach a server of packages; return the result and the server's address."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    bare = folder / "served" / "x.git"
    bare.parent.mkdir()
    source = create_repository(folder / "source")
    source.commit("first", a="1\n")
    source.git("clone", "-q", "--bare", str(folder / "source"), str(bare))
    async with GitHost(bare.parent, pages=PACKAGE_PAGES) as host:
        (folder / "ws").mkdir(exist_ok=True)
        put_agent(folder, "fetcher", f'[requires.tools.bash.net]\nhosts = ["{host.authority}"]')
        async with opening(HELD)(folder, "fetcher", rules=["allow bash"]) as kernel:
            session = await kernel.session(approval_handler=person)
            text = command.replace("{url}", host.url("")).replace("{host}", host.authority)
            return await session.call("bash", {"command": text}), host.authority
