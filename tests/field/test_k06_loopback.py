"""Reports about a server in a background job that other calls of the session do not reach."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.test_agents import confined

from handrail.contract.session_protocols import Session
from handrail.testing.scripted_kernel import temporary_kernel

SERVER = "python3 -m http.server 8765 --bind 0.0.0.0"
WAIT = "until curl -s 127.0.0.1:8765 > /dev/null; do sleep 0.1; done"


async def run(session: Session, command: str, **arguments: object) -> dict[str, object]:
    result = await session.call("bash", {"command": command, **arguments})
    assert result.ok, result.error_text
    return result.data


@confined
async def test_each_spelling_of_the_own_machine_reaches_a_server_of_the_session(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow *", "allow bash *"]) as kernel:
        session = await kernel.session()
        Path(session.workdir, "index.html").write_text("served\n")
        await run(session, SERVER, background=True)
        await run(session, WAIT)
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "127.0.0.9"):
            assert (await run(session, f"curl -sS http://{host}:8765/"))["output"] == "served\n", host


@confined
async def test_a_call_with_another_loopback_than_the_server_is_told_so(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow *", "allow bash *"]) as kernel:
        session = await kernel.session()
        await run(session, SERVER, background=True)
        await run(session, WAIT)
        code = "import urllib.request as u; u.urlopen('http://localhost:8765/')"
        answer = await run(session, f'python3 -c "{code}"')
        assert "this call runs without hosts, and calls with hosts have others" in str(answer["notes"])
