"""A joined process can do only what its own session could, also if it is faulty, hostile or killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernel.guests import OPENING, call, greeting, guest, joined_kernel, opened, reply_of, sizes

from handrail import Approval, ApprovalAnswer, DeferApprovals, LoadError, StartError, ToolError, tool
from handrail.contract.approval_requests import ApprovalService
from handrail.ipc.codec.wire_encoding import describe_client_tools
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable, RemoteRequestError
from handrail.ipc.wire.socket_handshake import CONTROL_GREETING
from handrail.kernel.approval_client import ApprovalResponder, ApprovalWorkspaceSettings
from handrail.kernel.local_kernel import LocalKernel
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("L-07")
confined = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)

Attempt = Callable[[], Awaitable[object]]


async def refusal(attempt: Awaitable[object]) -> RemoteRequestError:
    with pytest.raises(RemoteRequestError) as raised:
        await attempt
    return raised.value


# ── requests of any shape ────────────────────────────────────────────────────────────────────────

REPLY = ("session", "turn", "token", "generation", "calls")
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_anything = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
_mine = st.sampled_from(["ses_mine", "ses_others", "", "..", "ses_mine/1.0", "x" * 300])


@st.composite
def bodies(draw: st.DrawFn, takes: Collection[str]) -> Any:
    """Of the right fields, mostly; each with a value that is right, nearly right or anything."""
    near = {
        "session": _mine,
        "id": _mine,
        "turn": st.integers(-2, 3) | st.just(2**70),
        "token": st.integers(0, 2),
        "generation": st.integers(-1, 3),
        "calls": st.lists(st.just(call("glob")) | _anything, max_size=2),
        "call": st.just(call("glob")) | _mine,
        "entries": st.lists(st.tuples(st.integers(-1, 2), _anything), max_size=2),
        "mode": st.sampled_from(["plan", "auto", "no mode"]) | _scalars,
        "rules": st.lists(st.sampled_from(["allow write", "deny", "allow manifest:write"]) | _scalars, max_size=2),
        "reason": st.sampled_from(["user", "timeout", "nonsense"]),
        "headless": st.booleans(),
        "client": st.none() | st.lists(st.sampled_from(["form", "roots", "none"]), max_size=3),
        "arguments": st.dictionaries(st.text(max_size=5), _scalars, max_size=2),
        "answer": st.fixed_dictionaries({"choice": st.sampled_from(["once", "x"]), "message": _scalars}),
        "tools": st.none() | st.lists(_anything, max_size=1),
    }
    fields = {field: draw(near.get(field, _anything) | _anything) for field in takes}
    for field in draw(st.lists(st.sampled_from(sorted(fields) or ["none"]), max_size=1)):
        fields.pop(field, None)
    return draw(st.just(fields) | st.just({**fields, "more": 1})) if draw(st.integers(0, 9)) else draw(_anything)


async def test_any_request_of_a_connected_process_is_answered_or_refused_and_leaves_no_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with temporary_kernel(tmp_path) as held, guest(tmp_path) as other:
        await opened(other, "ses_others")
        tasks = asyncio.all_tasks()
        loop = asyncio.get_running_loop()
        (served,) = held.server.clients
        takes = {**{name: tuple(one.field_readers) for name, one in served.requests.items()}, "reply": REPLY}

        async def ask(name: str, body: Any) -> None:
            async with guest(tmp_path) as connection:
                await opened(connection, "ses_mine")
                waits = name.endswith(".wait_until_pending")  # a valid request is answered by the next notification
                try:
                    async with asyncio.timeout(0.2 if waits else 300):
                        await connection.request(name, body)
                except TimeoutError:
                    assert waits, (name, body)
                except RemoteRequestError as refused:
                    assert refused.kind not in ("defect", "cancelled"), (name, body)
                    assert refused.text
                assert connection.lost_reason is None
                assert (
                    await connection.request("list_suspended_calls", {"session": await opened(connection, "ses_after")})
                ) == []
            await until(
                lambda: len(held.server.clients) == 1 and not held.sessions.sessions_by_id.keys() - {"ses_others"}
            )

        def run(name: str, body: Any) -> None:
            asyncio.run_coroutine_threadsafe(ask(name, body), loop).result()

        @settings(
            max_examples=120,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )
        @given(st.data())
        def attack(data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(takes)))
            run(name, data.draw(bodies(takes[name])))

        await asyncio.to_thread(attack)
        assert not [record for record in caplog.records if record.exc_info and record.name.startswith("handrail")]
        await until(lambda: asyncio.all_tasks() <= tasks | {asyncio.current_task()})
        assert (await other.request("history.read_stored_messages", {"session": "ses_others"})) == []


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0)


async def test_a_malformed_notification_does_not_change_the_session_rules(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, guest(tmp_path) as connection:
        await opened(connection, "ses_mine")
        before = held.sessions.sessions_by_id["ses_mine"].rules.rules
        strange: list[object] = [None, 1, [], {}, {"session": 1}, {"session": "ses_mine", "rules": "allow write"}]
        (served,) = held.server.clients
        for name in [*served.notifications, "nothing"]:
            for body in strange:
                connection.notify(name, body)
        connection.notify("rules", {"session": "ses_mine", "rules": ["no rule at all"]})
        await connection.request("flush", {})
        assert held.sessions.sessions_by_id["ses_mine"].rules.rules == before


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"face": 1}, "face"),
        ({"agent": None}, "agent"),
        ({"agent": "nobody"}, "nobody"),
        ({"rules": "allow write"}, "rules"),
        ({"rules": ["permit write"]}, "permit"),
        ({"secrets": ["abcdef"]}, "secrets"),
        ({"secrets": {"KEY": 123456}}, "KEY"),
        ({"secrets": {"KEY": "abc"}}, "KEY"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
    ],
)
async def test_an_invalid_greeting_is_refused_and_the_error_names_the_fault(
    tmp_path: Path, fault: dict[str, Any], named: str
) -> None:
    async with temporary_kernel(tmp_path) as held:
        before = sizes(held)
        with pytest.raises(StartError) as raised:
            async with guest(tmp_path, hello=greeting(**fault)):
                pass
        assert named in str(raised.value)
        assert sizes(held) == before


# ── what belongs to others ───────────────────────────────────────────────────────────────────────


async def test_a_connected_process_cannot_use_a_session_that_another_process_has_open(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, guest(tmp_path) as one, guest(tmp_path) as other:
        held_session = await held.session("ses_held")
        for theirs in (await opened(other, "ses_theirs"), held_session.id):
            attempts: list[tuple[str, dict[str, Any]]] = [
                ("open", {"id": theirs, **OPENING}),
                ("reply", reply_of(one, theirs, 1, call("glob"))),
                ("keyed", {"session": theirs, "call": call("glob"), "key": "k"}),
                ("recall", {"session": theirs, "calls": [f"{theirs}/1.0"]}),
                ("list_suspended_calls", {"session": theirs}),
                ("resume_suspended_calls", {"session": theirs}),
                ("stop", {"session": theirs, "reason": "user"}),
                ("suspend", {"session": theirs, "reason": "user", "why": "x"}),
                ("close", {"session": theirs}),
                ("close-session", {"id": theirs}),
                ("history.read_stored_messages", {"session": theirs}),
                ("keep", {"session": theirs, "entries": [[0, {"role": "user"}]], "number": 1}),
            ]
            for name, body in attempts:
                refused = await refusal(one.request(name, body))
                assert refused.kind == "UsageError" and "open" in refused.text, name
            heard: list[object] = []
            one.notify("watch", {"session": theirs})
            one.notify("rules", {"session": theirs, "rules": ["allow write"]})
            assert heard == []
        await one.request("flush", {})
        answers = await other.request(
            "reply", reply_of(other, "ses_theirs", 1, call("write", '{"path": "a", "content": ""}'))
        )
        assert answers[0][2]["metadata"]["error_kind"] == "denied"
        assert (await held_session.call("write", {"path": "a", "content": ""})).error_kind == "denied"
        assert not held_session._lane.listeners  # pyright: ignore[reportPrivateUsage]


async def test_session_events_reach_only_the_process_of_that_session(tmp_path: Path) -> None:
    heard: dict[str, list[Any]] = {"one": [], "other": []}
    async with temporary_kernel(tmp_path):
        hearing = {name: OperationTable({}, {"event": told.append}) for name, told in heard.items()}
        async with guest(tmp_path, hearing["one"]) as one, guest(tmp_path, hearing["other"]) as other:
            for connection, session in ((one, "ses_one"), (other, "ses_other")):
                await opened(connection, session)
                for asked in ("ses_one", "ses_other"):
                    connection.notify("watch", {"session": asked})
            await one.request("reply", reply_of(one, "ses_one", 1, call("glob", '{"pattern": "*"}')))
            await other.request("flush", {})
    assert [told["kind"] for told in heard["one"]] == ["proposed", "started", "finished"]
    assert heard["other"] == []


async def test_call_ids_cannot_be_forged_or_reused(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow write"]) as held, guest(tmp_path) as connection:
        await opened(connection, "ses_mine")
        look = call("glob", '{"pattern": "*"}')
        assert await connection.request("reply", reply_of(connection, "ses_mine", 1, look))
        for turn in (1, 0, -1, 1.5, "2", True, None, 2**70, "1.0/2", [2]):
            refused = await refusal(connection.request("reply", reply_of(connection, "ses_mine", turn, look)))
            assert "turn" in refused.text
        for key in ("", "a/b", "1.0\n", "x" * 300):
            await refusal(connection.request("keyed", {"session": "ses_mine", "call": look, "key": key}))
        assert await connection.request("reply", reply_of(connection, "ses_mine", 5, look))
        assert await connection.request("reply", reply_of(connection, "ses_mine", 3, look))
        await refusal(connection.request("reply", reply_of(connection, "ses_mine", 3, look)))
        await connection.request("close", {"session": "ses_mine"})
        await opened(connection, "ses_mine")
        await refusal(connection.request("reply", reply_of(connection, "ses_mine", 5, look)))
        assert await connection.request("reply", reply_of(connection, "ses_mine", 6, look))
        await held.log.flush()
        proposed = [record.call_id for record in held.log.reader.records(kind="proposed")]
        assert proposed == [f"ses_mine/{turn}.0" for turn in (1, 5, 3, 6)]


async def test_rules_of_a_joined_process_have_session_scope_only(tmp_path: Path) -> None:
    project = 'rules = ["deny fs.write kept/**"]\n'
    async with (
        temporary_kernel(tmp_path, settings=project),
        joined_kernel(tmp_path, rules=["allow write", "allow fs.write kept/**"]) as joined,
    ):
        allowing = [rule for rule in joined.initial_rules if rule.action == "allow" and "kept" in rule.text]
        assert [rule.scope for rule in allowing] == ["session"]
        session = await joined.session(rules=["allow fs.write kept/**"])
        session.add_rules("allow write", "allow fs.write kept/**")
        refused = await session.call("write", {"path": "kept/a", "content": ""})
        assert refused.error_kind == "denied" and "project" in (refused.error_text or "")
        assert (await session.call("write", {"path": "free", "content": ""})).ok


@pytest.mark.parametrize("taken", ["read", "write", "find_tools"])
async def test_a_joining_process_with_a_tool_named_like_a_built_in_is_refused(tmp_path: Path, taken: str) -> None:
    @tool(id=taken, side_effect="read", locks=[])
    async def impostor(path: str = "") -> str:
        """Pretend."""
        return "owned"

    async with temporary_kernel(tmp_path) as held:
        if taken not in held.generation.entries:
            pytest.skip("there is no such built-in")
        with pytest.raises(StartError, match=taken):
            async with guest(tmp_path, hello=greeting(tools=describe_client_tools([impostor]))):
                pass
        with pytest.raises(LoadError, match=taken):
            async with joined_kernel(tmp_path, tools=[impostor]):
                pass
        assert (await (await held.session()).call("read", {"path": "a"})).error_kind != "unknown_tool"


@pytest.mark.proves("O-07")
async def test_a_secret_of_one_process_is_hidden_from_all_others(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held:
        (tmp_path / "ws" / "a.txt").write_text("the key is hunter2hunter2\n")
        async with (
            joined_kernel(tmp_path, secrets={"KEY": "hunter2hunter2"}) as one,
            joined_kernel(tmp_path) as other,
        ):
            for kernel in (held, one, other):
                told = await (await kernel.session()).call("read", {"path": "a.txt"})
                assert told.ok and "hunter2hunter2" not in json.dumps(told.to_dict())
            async with guest(tmp_path) as bare:
                assert "hunter2hunter2" not in json.dumps(bare.peer_greeting)


async def test_an_oversized_greeting_is_refused_at_once(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held:
        with pytest.raises(StartError, match="bytes"):
            async with joined_kernel(tmp_path, rules=["deny bash " + "x" * 1024 * 1024] * 17):
                pass
        async with joined_kernel(tmp_path, rules=["deny bash " + "x" * 600 + "*"] * 1_900) as joined:
            assert (await (await joined.session()).call("glob", {"pattern": "*"})).ok
        assert (await (await held.session()).call("glob", {"pattern": "*"})).ok


@confined
@pytest.mark.proves("S-01")
async def test_a_sandboxed_program_cannot_reach_the_socket_or_the_state(tmp_path: Path) -> None:
    program = (
        "import glob, os, socket, sys\n"
        "own = sys.argv[1]\n"
        "found = glob.glob(own + '/*')\n"
        "try:\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[2]); print('CONNECTED')\n"
        "except OSError as error: print('refused', type(error).__name__)\n"
        "try: print('READ', len(open(own + '/handrail.db', 'rb').read()))\n"
        "except OSError as error: print('unreadable', type(error).__name__)\n"
        "print('found', found)\n"
    )
    async with temporary_kernel(tmp_path, rules=["allow bash"]) as held:
        (tmp_path / "ws" / "attack.py").write_text(program)
        sockets = list(Path(held.state_folder).glob("*.sock"))
        assert len(sockets) == 1
        async with joined_kernel(tmp_path, rules=["allow bash"]) as joined:
            for kernel in (held, joined):
                session = await kernel.session()
                command = f"python3 attack.py {held.state_folder} {sockets[0]}"
                result = await session.call("bash", {"command": command})
                assert result.ok, result.error_text
                told = json.dumps(result.data)
                assert "refused" in told and "unreadable" in told and "found []" in told, told
                assert "CONNECTED" not in told and "READ" not in told


NO_DECISIONS: list[object] = [
    None,
    1,
    [],
    "once",
    {"choice": "yes"},
    {"choice": ["once"]},
    {"choice": "once"},
    {"choice": "once", "message": 1, "arguments": None},
    {"choice": "once", "message": "", "arguments": [1]},
]


# ── an attendant of any kind ─────────────────────────────────────────────────────────────────────


@pytest.mark.proves("P-07")
@pytest.mark.parametrize("nonsense", NO_DECISIONS)
async def test_an_invalid_approval_answer_denies_the_call(tmp_path: Path, nonsense: object) -> None:
    async def answer(body: object) -> object:
        return nonsense

    attending = OperationTable({"people.approve": OperationSpec(answer), "people.answer": OperationSpec(answer)})
    async with temporary_kernel(tmp_path), guest(tmp_path, attending) as connection:
        await opened(connection, "ses_asks", headless=False)
        calls = [call("write", '{"path": "a", "content": ""}')]
        if nonsense is not None:
            calls.append(call("question", '{"questions": [{"question": "Which?"}]}'))
        answers = await connection.request("reply", reply_of(connection, "ses_asks", 1, *calls))
        assert [told[2]["metadata"]["error_kind"] for told in answers] == ["denied"] * len(calls)
    assert not (tmp_path / "ws" / "a").exists()


@pytest.mark.proves("P-07")
async def test_an_approval_request_stays_pending_when_its_client_disconnects(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def ask(body: object) -> object:
        asked.set()
        await asyncio.Event().wait()

    async with temporary_kernel(tmp_path) as held:
        async with guest(tmp_path, OperationTable({"people.approve": OperationSpec(ask)})) as connection:
            await opened(connection, "ses_asks", headless=False)
            wanted = reply_of(connection, "ses_asks", 1, call("write", '{"path": "a", "content": ""}'))
            reply = asyncio.create_task(connection.request("reply", wanted))
            await asked.wait()
            connection.drop("gone", quietly=True)
            await asyncio.gather(reply, return_exceptions=True)
        await until(lambda: not sizes(held)["sessions"])
        (waiting,) = held.approvals.list_pending()
        await held.approvals.decide(waiting.id, ApprovalAnswer("once"), by="test")
        session = await held.session("ses_asks")
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.ok and answer.call_id == "ses_asks/1.0"


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────


async def test_a_kernel_keeps_no_state_of_ended_sessions_turns_and_processes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with temporary_kernel(tmp_path) as held:
        before = sizes(held)
        for _ in range(3):
            async with joined_kernel(tmp_path) as joined:
                for round_ in range(8):
                    session = await joined.session()
                    stop = session.watch_events(lambda event: None)
                    for _ in range(round_):
                        session.start_turn()  # that is never used
                    assert (await session.call("glob", {"pattern": "*"})).ok
                    if round_ % 3 == 0:
                        stop()
                    await (session.close() if round_ % 2 else session.suspend())
                during = sizes(held)
                assert not joined._sessions and not joined._opening  # pyright: ignore[reportPrivateUsage]
                assert {
                    name: during[name] for name in ("sessions", "closing", "guest._sessions", "guest._watched")
                } == {
                    "sessions": 0,
                    "closing": 0,
                    "guest._sessions": 0,
                    "guest._watched": 0,
                }
        await until(lambda: sizes(held) == before)


async def test_skipped_turn_numbers_are_kept_up_to_a_limit(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, guest(tmp_path) as connection:
        await opened(connection, "ses_mine")
        look = call("glob", '{"pattern": "*"}')
        for turn in range(2_000, 40_000, 2_000):
            await connection.request("reply", reply_of(connection, "ses_mine", turn, look))
        assert len(held.sessions.sessions_by_id["ses_mine"]._skipped) == 1_000  # pyright: ignore[reportPrivateUsage]


async def test_a_reopened_session_can_be_watched_again(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path) as joined:
        for _ in range(2):
            session = await joined.session("ses_again")
            kinds: list[str] = []
            session.watch_events(lambda event, kinds=kinds: kinds.append(event.kind))
            assert (await session.call("glob", {"pattern": "*"})).ok
            assert kinds == ["proposed", "started", "finished"]
            await session.suspend()


async def test_a_control_client_can_only_answer_approval_requests(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held:
        assert isinstance(held, LocalKernel)
        before = sizes(held)
        async with guest(tmp_path):
            (whole,) = held.server.clients
            names = sorted(name for name in whole.operations.requests if not name.startswith("approvals."))
        while sizes(held) != before:  # until nothing of it is left
            await asyncio.sleep(0)
        async with guest(tmp_path, hello=CONTROL_GREETING) as other:
            assert sizes(held) == before and set(other.peer_greeting) == {"handrail", "protocol"}
            assert len(names) > 20
            for name in names:
                assert (await refusal(other.request(name, {}))).kind == "unknown_op"
            wrong = await refusal(other.request("approvals.decide", {"id": "apr_x"}))
            assert wrong.kind == "UsageError" and "answer" in wrong.text
            asked = {"id": "apr_x", "answer": {"choice": "once", "message": "", "arguments": None}, "by": "test"}
            assert "does not exist" in (await refusal(other.request("approvals.decide", asked))).text


async def test_an_answer_that_a_lost_holder_recorded_is_found_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with temporary_kernel(tmp_path) as held:
        session = await held.session(approval_handler=DeferApprovals())
        await session.call("write", {"path": "a", "content": ""})
        (row,) = held.approvals.list_pending()
        decide, gone = held.approvals.decide, list[str]()

        async def taken(approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
            decided = await decide(approval_id, answer, by=by)
            listener = held.server._listener  # pyright: ignore[reportPrivateUsage]
            assert listener is not None
            for connection in tuple(listener.connections):
                gone.append(by)
                connection.drop("it goes")
            return decided

        def no_kernel() -> AbstractAsyncContextManager[ApprovalService]:
            raise AssertionError("nothing has to be judged")

        monkeypatch.setattr(held.approvals, "decide", taken)
        answers = ApprovalResponder(
            ApprovalWorkspaceSettings(tmp_path / "ws", tmp_path / "state"), no_kernel, lambda config, lost: None
        )
        decided = await answers.decide(row.id, ApprovalAnswer("once"), by="test")
        assert (decided.state, decided.choice, decided.decided_by, gone) == ("approved", "once", "test", ["test"])
        with pytest.raises(ToolError, match="was already answered"):
            await answers.decide(row.id, ApprovalAnswer("reject"), by="test")
