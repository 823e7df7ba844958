"""Registered secrets do not appear in any stored or shown text, whatever a model writes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Event
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = [pytest.mark.proves("O-07"), pytest.mark.attack("secrets")]

SECRET = "hunter2-Zx81-€-top"
BASE64 = base64.b64encode(f"user:{SECRET}".encode()).decode()
CALLS: list[tuple[str, dict[str, Any] | str]] = [
    ("bash", {"command": f"cat {SECRET} && true"}),
    ("bash", {"command": f"ls '{SECRET}'"}),
    ("bash", {"command": f"printf '{SECRET}'"}),
    ("bash", {"command": f"echo '{SECRET}'"}),
    ("bash", {"command": f"sleep 100 # {SECRET}"}),
    ("read", {"path": f"{SECRET}.txt"}),
    ("read", {"path": f"../{SECRET}"}),
    ("read", {SECRET: 1}),
    ("read", f'{{"path": "{SECRET}", broken'),
    ("write", {"path": f"../{SECRET}", "content": "x"}),
    ("write", {"path": "a.txt", "content": f"key = {SECRET}\n"}),
    ("read", {"path": "a.txt"}),
    ("write", {"path": "b.txt", "content": f"{BASE64}\n{SECRET.encode().hex()}\n{quote(SECRET)}\n"}),
    ("read", {"path": "b.txt"}),
    ("bash", {"command": f"echo '{BASE64}'"}),
    ("grep", {"pattern": "hunter2"}),
    ("todo", {"todos": [{"content": SECRET, "status": "pending"}]}),
    ("todo", {}),
    ("question", {"questions": [{"question": "which?"}]}),
    (f"tool_{SECRET}", {SECRET: SECRET}),
]


@pytest.mark.usefixtures("confining")
async def test_no_secret_is_in_results_events_approval_requests_or_stored_files(tmp_path: Path) -> None:
    """Source: tokens found in audit logs, traces and approval dialogues of agent products."""
    told: list[Event] = []
    said: list[str] = []
    answers = [ApprovalAnswer("session"), ApprovalAnswer("session"), ApprovalAnswer("reject", f"not {SECRET}")]
    person = ScriptedApprovalHandler(answers, [[[SECRET]]])
    rules = ["allow write", "allow bash echo *"]
    async with temporary_kernel(tmp_path, rules=rules, secrets={"token": SECRET}) as kernel:
        session = await kernel.session(approval_handler=person)
        session.watch_events(told.append)
        said += [repr(await session.call(name, arguments)) for name, arguments in CALLS]
        said.append(repr(await session.call_all([("read", {"path": f"{SECRET}.txt"})] * 2)))
        said.append(repr(await (await kernel.session()).call(*CALLS[0])))
        assert len(person.requests) >= 3
    said += map(repr, (*told, *person.requests))
    assert not [text for text in said if "hunter2" in text.replace("'pattern': 'hunter2'", "")]
    assert "[secret:token]" in repr(person.requests[0].arguments)
    assert person.requests[0].suggested_rule is None, (
        "a rule is stored as it is shown, so none is offered that would hold a secret"
    )
    forms = (BASE64[8:-4], SECRET.encode().hex(), quote(SECRET))
    assert not [form for form in forms for text in said if form in text]
    assert any("registered secret" in text for text in said), "no argv has it"
    kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert not [path for path in kept for form in forms if form.encode() in path.read_bytes()]
    assert kept
    assert not [path for path in kept if b"hunter2-" in path.read_bytes()]
