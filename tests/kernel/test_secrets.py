"""Secrets of ``open_kernel(secrets=…)`` appear in no output, whichever way they were passed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail import ApprovalAnswer, Blob, Event, ProposedCall, Runtime, ToolError, tool
from handrail.policy.watchdogs.api import WatchdogCall, WatchdogDecision
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

SECRET = 'hunter2-KkQ9/"x'


@tool(id="vault.open", side_effect="external", locks=["vault:{key}:X"])
async def open_vault(key: str, runtime: Runtime) -> dict[str, object]:
    """Open the vault."""
    runtime.report_progress(f"trying {key}")
    return {"opened": f"with {SECRET}", "scan": Blob(f"scan {SECRET}".encode(), "text/plain"), "long": SECRET * 10_000}


@tool(id="vault.fail", side_effect="read", locks=[])
async def fail(how: str) -> str:
    """Fail, and say too much."""
    if how == "tool":
        raise ToolError(f"the key {SECRET} does not fit", kind="failed", data={"tried": SECRET})
    raise RuntimeError(f"defect with {SECRET}")


@tool(
    id="vault.look",
    side_effect="read",
    locks=[],
    requires={"net": {"hosts": ["*"]}},
    targets={"net.fetch": "{url}"},
)
async def look(url: str) -> str:
    """Look there."""
    return url


@pytest.mark.proves("O-07")
async def test_a_truncated_watchdog_error_contains_no_part_of_a_secret(tmp_path: Path) -> None:
    async def fails(call: WatchdogCall) -> WatchdogDecision:
        raise RuntimeError("x" * 286 + SECRET)

    async def babbles(call: WatchdogCall) -> Any:
        return "x" * 185 + SECRET

    for watchdog in (fails, babbles):
        async with temporary_kernel(
            tmp_path, tools=[open_vault], rules=["allow vault.*"], secrets={"vault": SECRET}, watchdogs=[watchdog]
        ) as kernel:
            session = await kernel.session()
            answer = await session.call("vault.open", {"key": "x"})
            assert answer.error_kind == "denied" and "xxx" in str(answer.error_text)
            assert "hunter2" not in str(answer.error_text)
            await session.close()
    assert b"hunter2" not in repr(_on_disk(tmp_path / "state")).encode()


@pytest.mark.proves("O-07")
async def test_no_answer_record_event_file_or_request_contains_a_registered_secret(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler(
        [ApprovalAnswer("session", f"because of {SECRET}"), ApprovalAnswer("reject", f"no {SECRET}")]
    )
    seen: list[Event] = []
    async with temporary_kernel(tmp_path, tools=[open_vault, fail, look], secrets={"vault": SECRET}) as kernel:
        session = await kernel.session(approval_handler=person, rules=["allow vault.fail"])
        session.watch_events(seen.append)
        answers = await session.start_turn().call_all(
            [
                ProposedCall("vault.open", {"key": SECRET}),
                ProposedCall("vault.open", {"key": f"no {SECRET}"}),
                ProposedCall("vault.fail", {"how": "tool"}),
                ProposedCall("vault.fail", {"how": SECRET}),
                ProposedCall("vault.fail", {SECRET: 1}),
                ProposedCall("vault.fail", f'{{"how": {SECRET}'),
                ProposedCall(f"vault.{SECRET}", {}),
                # Whatever is cut for a message or the record is cut in the middle of it.
                ProposedCall("v" * 66 + SECRET, {}),
                ProposedCall("vault.fail", '{"how": ' + "v" * 1978 + SECRET),
                ProposedCall("vault.fail", "{%s: 1, %s: 1}" % ((json.dumps("v" * 66 + SECRET),) * 2)),
                ProposedCall("vault.look", {"url": "http:// " + "v" * 178 + SECRET}),
                ProposedCall("vault.look", {"url": "git@" + "v" * 181 + ":" + SECRET}),
                ProposedCall("vault.fail", "{", f"call {SECRET}", problem=f"cut at {SECRET}"),
                ProposedCall("read", {"path": SECRET}),
                ProposedCall("read", {"path": f"/etc/{SECRET}"}),
                ProposedCall("bash", {"command": f"echo {SECRET}"}),
            ]
        )
        assert answers[0].result.ok and answers[1].result.error_kind == "denied"
        # What waits for the next process lies on the disk as well.
        everything = _on_disk(tmp_path / "state")
        results = repr([(answer.result, answer.model) for answer in answers])
    everything += _on_disk(tmp_path / "state")
    assert {"approval-requested", "progress", "rejected", "finished"} <= {event.kind for event in seen}
    assert len(person.requests) >= 2 and "[secret:vault]" in repr(person.requests)
    said = {"results": results, "events": repr(seen), "requests": repr(person.requests), "files": repr(everything)}
    for form in (SECRET, SECRET.replace('"', '\\"'), "hunter2-KkQ9"):
        assert [where for where, text in said.items() if form in text] == [], form


async def test_an_approval_request_suggests_no_rule_that_would_contain_a_secret(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("once")])
    async with temporary_kernel(tmp_path, tools=[open_vault], secrets={"vault": SECRET}) as kernel:
        session = await kernel.session(approval_handler=person)
        assert (await session.call("vault.open", {"key": SECRET})).ok
        assert (await session.call("vault.open", {"key": "harmless"})).ok
    assert [request.suggested_rule is None for request in person.requests] == [True, False]


def _on_disk(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.proves("O-07")
async def test_truncated_or_joined_texts_contain_no_part_of_a_long_secret(tmp_path: Path) -> None:
    """A cut secret is not found as one, nor is one whose ends of lines were spelled in a way of our own."""
    long, lines = "tok-" + "Ab1Cd2Ef3" * 30, "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA\n-----END KEY-----"
    async with temporary_kernel(tmp_path, secrets={"long": long, "lines": lines}) as kernel:
        session = await kernel.session()
        answers = await session.call_all(
            [
                ("bash", {"command": f"touch {'a' * 380} {long}"}),
                ("bash", {"command": f"touch {'a ' * 190}{long}"}),
                ("bash", {"command": f"touch '{lines}'"}),
                ("read", {f"{long}": 1}),
                ("read", {"path": "a", f"no name {long}": 1}),
            ]
        )
        assert all(not answer.ok for answer in answers)
        told = repr([answer.to_dict() for answer in answers])
        await kernel.log.flush()
        told += repr([record.body for record in kernel.log.reader.records()])
        assert "tok-Ab1" not in told and "MIIEp" not in told
