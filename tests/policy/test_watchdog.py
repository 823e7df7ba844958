"""Watchdogs narrow, in order, and every failure of one denies the call."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from tests.policy.desk import BASH, TRANSFER, AuthorizerFixture, book

from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.decision_explanation import trace_decision
from handrail.policy.rule_suggestions import suggest_rule
from handrail.policy.watchdogs.api import ExternalWatchdog, Watchdog, WatchdogCall, WatchdogDecision, allow, ask, deny

ALLOWED = book("allow bank.transfer", "allow bash")
ARGUMENTS: dict[str, Any] = {"source": "alice", "amount": 5}


async def watched(desk: AuthorizerFixture, *watchdogs: Watchdog, rules: str = "allow bank.transfer") -> PolicyVerdict:
    own = AuthorizerFixture(desk.workspace, watchdogs)
    verdict = own.judge(TRANSFER, ARGUMENTS, rules)
    return await own.authority.ask_watchdogs(verdict, TRANSFER, ARGUMENTS, "ses_1", call_id="call_1")


@pytest.mark.proves("P-11")
async def test_a_watchdog_sees_the_tool_the_arguments_the_agent_and_the_session(desk: AuthorizerFixture) -> None:
    seen: list[WatchdogCall] = []

    async def look(call: WatchdogCall) -> WatchdogDecision:
        seen.append(call)
        return allow()

    verdict = await watched(desk, look)
    assert verdict.action == "allow"
    (call,) = seen
    assert (call.tool_id, call.arguments, call.session_id, call.call_id) == (
        "bank.transfer",
        ARGUMENTS,
        "ses_1",
        "call_1",
    )
    assert call.agent == {"id": "default"}
    assert call.tool["side_effect"] == "external"
    assert call.decision == "allow"


@pytest.mark.proves("P-11")
@pytest.mark.parametrize("rules", ["allow bank.transfer", "ask bank.transfer", "deny bank.transfer"])
@pytest.mark.parametrize("opinion", [allow(), ask("why"), deny("no")])
async def test_a_watchdog_can_only_narrow_a_decision(
    desk: AuthorizerFixture, rules: str, opinion: WatchdogDecision
) -> None:
    order = ["allow", "ask", "deny"]
    verdict = await watched(desk, lambda call: opinion, rules=rules)
    assert verdict.action == max(rules.split()[0], opinion.action, key=order.index)


@pytest.mark.proves("P-11")
async def test_several_watchdogs_answer_in_order_until_the_first_deny(desk: AuthorizerFixture) -> None:
    asked: list[str] = []

    def one(name: str, opinion: WatchdogDecision) -> Watchdog:
        def answer(call: WatchdogCall) -> WatchdogDecision:
            asked.append(f"{name}:{call.decision}")
            return opinion

        answer.__name__ = name
        return answer

    verdict = await watched(
        desk, one("a", allow()), one("b", ask("look")), one("c", allow()), one("d", deny("no")), one("e", allow())
    )
    assert verdict.action == "deny"
    assert [name.partition(":")[0] for name in asked] == ["a", "b", "c", "d"]
    assert verdict.reason == "The watchdog d denied this call of bank.transfer: no."
    assert [(step.outcome, step.text) for step in trace_decision(verdict) if step.stage == "watchdog"] == [
        ("allow", "a"),
        ("ask", "b: look"),
        ("allow", "c"),
        ("deny", "d: no"),
    ]


@pytest.mark.proves("P-11")
async def test_a_watchdog_does_not_see_a_denied_call(desk: AuthorizerFixture) -> None:
    def never(call: WatchdogCall) -> WatchdogDecision:
        raise AssertionError("it was asked")

    assert "watchdog" not in (await watched(desk, never, rules="deny bank.transfer")).reason


@pytest.mark.proves("P-11")
async def test_no_rule_is_suggested_to_answer_a_watchdogs_question(desk: AuthorizerFixture) -> None:
    verdict = await watched(desk, lambda call: ask("is it right?"), rules="ask bank.transfer source=alice")
    assert verdict.action == "ask"
    assert suggest_rule(verdict) is not None  # the rule asked first, and the watchdog would be asked again
    verdict = await watched(desk, lambda call: ask("is it right?"))
    assert suggest_rule(verdict) is None
    assert "is it right?" in verdict.reason


class Odd(Exception):
    pass


def _raises(call: WatchdogCall) -> WatchdogDecision:
    raise Odd("broken")


async def _raises_later(call: WatchdogCall) -> WatchdogDecision:
    await asyncio.sleep(0)
    raise Odd("broken")


async def _cancels(call: WatchdogCall) -> WatchdogDecision:
    raise asyncio.CancelledError


async def _exits(call: WatchdogCall) -> WatchdogDecision:
    raise SystemExit(0)


def _exits_in_a_thread(call: WatchdogCall) -> WatchdogDecision:
    raise SystemExit(0)


def _changes(call: WatchdogCall) -> WatchdogDecision:
    cast("dict[str, Any]", call.arguments).clear()
    raise Odd("changed")


@pytest.mark.proves("P-11")
@pytest.mark.parametrize("broken", [_raises, _raises_later, _cancels, _exits, _exits_in_a_thread, _changes])
async def test_an_error_of_a_watchdog_denies_the_call(desk: AuthorizerFixture, broken: Watchdog) -> None:
    verdict = await watched(desk, broken)
    assert verdict.action == "deny"
    assert "watchdog" in verdict.reason
    assert "Traceback" not in verdict.reason
    assert ARGUMENTS == {"source": "alice", "amount": 5}


@pytest.mark.proves("P-11")
@pytest.mark.parametrize(
    "answer",
    [
        None,
        True,
        "deny",
        "yes",
        0,
        {"decision": "allow"},
        WatchdogDecision(cast("Any", "perhaps")),
        WatchdogDecision("allow", cast("Any", 5)),
    ],
)  # type: ignore[arg-type]  # pyright: ignore
async def test_an_invalid_watchdog_answer_denies_the_call(desk: AuthorizerFixture, answer: Any) -> None:
    verdict = await watched(desk, lambda call: answer)
    assert verdict.action == "deny"
    assert "expected one of allow()" in verdict.reason


@pytest.mark.proves("P-11")
async def test_a_watchdog_that_does_not_answer_in_time_denies_the_call(desk: AuthorizerFixture) -> None:
    class Slow:
        timeout_ms = 1
        name = "slow"

        async def __call__(self, call: WatchdogCall) -> WatchdogDecision:
            await asyncio.Event().wait()
            return allow()

    release = threading.Event()

    def stuck(call: WatchdogCall) -> WatchdogDecision:
        release.wait(60)
        return allow()

    cast("Any", stuck).timeout_ms = 1
    for one in (Slow(), stuck):
        verdict = await watched(desk, one)
        assert verdict.action == "deny"
        assert "did not answer within 1 ms" in verdict.reason
    release.set()


async def test_a_cancelled_caller_does_not_count_as_a_watchdog_failure(desk: AuthorizerFixture) -> None:
    began = asyncio.Event()

    async def waits(call: WatchdogCall) -> WatchdogDecision:
        began.set()
        await asyncio.Event().wait()
        return allow()

    task = asyncio.ensure_future(watched(desk, waits))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def script(folder: Path, text: str, **options: Any) -> ExternalWatchdog:
    file = folder / "watchdog.py"
    file.write_text(text)
    options.setdefault("timeout_ms", 60_000)
    return ExternalWatchdog([sys.executable, "-S", "-E", str(file)], **options)


@pytest.mark.proves("P-11")
async def test_an_external_watchdog_reads_the_call_and_decides(desk: AuthorizerFixture, tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    dog = script(
        tmp_path,
        "import json, sys\n"
        "call = json.load(sys.stdin)\n"
        f"open({str(out)!r}, 'w').write(json.dumps(call))\n"
        "bad = call['arguments'].get('amount', 0) > 3\n"
        "print(json.dumps({'decision': 'deny', 'reason': 'too much'} if bad else {'decision': 'allow'}))\n",
    )
    verdict = await watched(desk, dog)
    assert verdict.action == "deny"
    assert "too much" in verdict.reason
    seen = json.loads(out.read_text())
    assert seen["tool_id"] == "bank.transfer"
    assert seen["arguments"] == ARGUMENTS
    assert seen["session_id"] == "ses_1"
    assert seen["agent"] == {"id": "default"}
    assert seen["decision"] == "allow"


@pytest.mark.proves("P-11")
@pytest.mark.parametrize(
    ("text", "action", "reason"),
    [
        ("""print('{"decision": "allow"}')""", "allow", ""),
        ("""print('{"decision": "ask", "reason": "look"}')""", "ask", "look"),
        ("""print('{"decision": "deny"}')""", "deny", "no reason given"),
        ("""print('')""", "deny", "not JSON"),
        ("""print('allow')""", "deny", "not JSON"),
        ("""print('{"decision": "perhaps"}')""", "deny", "not of the form"),
        ("""print('{"decision": "allow", "reason": 5}')""", "deny", "not of the form"),
        ("""print('{"decision": "allow", "extra": 5}')""", "deny", "not of the form"),
        ("""print('{"decision": "deny", "decision": "allow"}')""", "deny", "not of the form"),
        ("""print('["allow"]')""", "deny", "not of the form"),
        ("""print('{"decision": "allow"}'); raise SystemExit(3)""", "deny", "exit code 3"),
        ("""import os; print('{"decision": "allow"}', flush=True); os.kill(os.getpid(), 9)""", "deny", "exit code -9"),
        ("""print('{"decision": "allow"}' + ' ' * 100_000)""", "deny", "longer than"),
    ],
)
async def test_an_external_watchdog_needs_a_complete_answer_and_a_successful_exit(
    desk: AuthorizerFixture, tmp_path: Path, text: str, action: str, reason: str
) -> None:
    verdict = await watched(desk, script(tmp_path, text))
    assert verdict.action == action
    assert reason in verdict.reason


@pytest.mark.proves("P-11")
async def test_a_missing_watchdog_program_denies_the_call(desk: AuthorizerFixture) -> None:
    verdict = await watched(desk, ExternalWatchdog(["/nonexistent/watchdog"]))
    assert verdict.action == "deny"
    with pytest.raises(ValueError, match="needs a command"):
        ExternalWatchdog([])


@pytest.mark.proves("P-11")
async def test_a_watchdog_command_runs_in_a_separate_process_session_without_the_kernels_secrets(
    desk: AuthorizerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    dog = script(
        tmp_path,
        "import json, os\n"
        "fine = 'SECRET_TOKEN' not in os.environ and os.environ['MINE'] == '1' and os.getsid(0) == os.getpid()\n"
        "print(json.dumps({'decision': 'allow' if fine else 'deny'}))\n",
        environment={"MINE": "1"},
    )
    assert (await watched(desk, dog)).action == "allow"


@pytest.mark.proves("P-11")
async def test_an_external_watchdog_need_not_read_the_call(desk: AuthorizerFixture, tmp_path: Path) -> None:
    own = AuthorizerFixture(desk.workspace, (script(tmp_path, """print('{"decision": "allow"}')"""),))
    arguments = {"command": "echo " + "x" * 500_000}
    verdict = own.judge(BASH, arguments, "allow bash")
    narrowed = await own.authority.ask_watchdogs(verdict, BASH, arguments, "ses")
    assert narrowed.action == verdict.action == "ask"  # too long to be judged, and the watchdog did not mind


async def _end_of(pid: int) -> None:
    """Wait until the system says that a process has ended, or for long."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await asyncio.to_thread(select.select, [ended], [], [], 300)
    finally:
        os.close(ended)


def _gone(pid: int) -> bool:
    """No such process, or one that is dead and only waits for its parent to look."""
    try:
        return (
            f"{pid} (" in (stat := Path(f"/proc/{pid}/stat").read_text()) and stat.rpartition(")")[2].split()[0] == "Z"
        )
    except OSError:
        return True


@pytest.mark.proves("P-11")
@pytest.mark.parametrize("leaves_its_group", [False, True])
async def test_a_timeout_ends_an_external_watchdog_with_all_its_child_processes(
    desk: AuthorizerFixture, tmp_path: Path, leaves_its_group: bool
) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        f"    {'os.setsid()' if leaves_its_group else 'pass'}\n"
        "    if os.fork() == 0:\n"
        f"        open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)\n"
    )
    started: list[int] = []
    begun: list[int] = []
    for given_ms in (1_500, 15_000, 150_000):  # on a machine that is busy it takes longer to begin
        pids.write_text("")
        verdict = await watched(desk, script(tmp_path, program, timeout_ms=given_ms))
        assert verdict.action == "deny"
        assert "did not answer" in verdict.reason
        begun = [int(line) for line in pids.read_text().split()]
        started += begun
        if len(begun) == 2:
            break
    assert len(begun) == 2
    for pid in started:
        await _end_of(pid)  # SIGKILL was sent; the system needs a moment to carry it out
        assert _gone(pid), pid


@pytest.mark.proves("P-11")
async def test_a_child_process_that_keeps_the_pipe_open_does_not_delay_the_answer(
    desk: AuthorizerFixture, tmp_path: Path
) -> None:
    dog = script(
        tmp_path,
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    time.sleep(600)\n"
        """print('{"decision": "allow"}', flush=True)\n"""
        "os._exit(0)\n",
        timeout_ms=60_000,
    )
    assert (await watched(desk, dog)).action == "allow"
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and _runs(int(name), tmp_path)]:
        await _end_of(pid)  # likewise
        assert _gone(pid), pid


def _runs(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and not _gone(pid)
    except OSError:
        return False
