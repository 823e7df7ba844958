"""Calls and jobs of one session share a loopback network, separate from other sessions and the machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD
from tests.kernel.test_agents import confined, opening, put_agent
from tests.web import LoopbackServer, ok

from handrail.runtime.call_runtime import CallRuntime
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = [confined, pytest.mark.proves("S-02")]

SERVE = {"command": "python3 -m http.server 8765 --bind 127.0.0.1", "background": True}
FETCH = {"command": "curl -sS --retry 40 --retry-delay 1 --retry-connrefused http://127.0.0.1:8765/"}
ONCE = {"command": "curl -sS http://127.0.0.1:8765/"}


async def test_only_calls_of_the_same_session_reach_a_server_that_runs_in_a_job(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash", "allow python", "allow stop_task"]) as kernel:
        session, other = await kernel.session(), await kernel.session()
        job = await session.call("bash", SERVE)
        assert job.ok, job
        found = await session.call("bash", FETCH)
        assert found.ok and found.data["exit_code"] == 0, found
        again = await session.call("bash", ONCE)
        assert again.data["exit_code"] == 0, "a ready sandbox of the session has the same loopback"
        code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8765/').status)"
        program = await session.call("python", {"code": code})
        assert program.data["output"] == "200\n", program
        apart = await other.call("bash", ONCE)
        assert apart.data["exit_code"] == 7, apart
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", 8765)
        stopped = await session.call("stop_task", {"job_id": job.data["job_id"]})
        assert stopped.ok, stopped
        ended = await session.call("bash", ONCE)
    assert ended.data["exit_code"] == 7
    (note,) = ended.data["notes"]
    assert "127.0.0.1" in note and "job" in note


async def test_a_sandboxed_program_cannot_reach_a_server_on_this_machine(tmp_path: Path) -> None:
    async with LoopbackServer({"*": ok(b"NEVER")}) as site, temporary_kernel(tmp_path, rules=["allow bash"]) as kernel:
        session = await kernel.session()
        await session.call("bash", {"command": "touch begun"})
        answer = await session.call("bash", {"command": f"curl -sS {site.url()}"})
        assert answer.data["exit_code"] == 7, answer
    assert site.asked == []


async def test_concurrent_jobs_each_have_their_own_proxy(tmp_path: Path) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site, LoopbackServer({"*": ok(b"FETCHED")}) as other:
        put_agent(tmp_path, "fetcher", f'[requires.tools.bash.net]\nhosts = ["{site.authority}", "{other.authority}"]')
        rules = ["allow bash", f"allow net.fetch {site.authority}", f"allow net.fetch {other.authority}"]
        async with opening(HELD)(tmp_path, "fetcher", rules=rules) as kernel:
            session = await kernel.session()
            for one in (site, other):
                (tmp_path / "ws" / f"{one.port}.sh").write_text(
                    f"echo $http_proxy; curl -sS --noproxy x {one.url()}; touch {one.port}.done\n"
                    f"until test -e {site.port}.done -a -e {other.port}.done; do sleep 0.05; done\n"
                )
            jobs = [
                await session.call("bash", {"command": f"bash {one.port}.sh", "background": True})
                for one in (site, other)
            ]
            ends = [await session.call("wait", {"job_id": job.data["job_id"]}) for job in jobs]
    outputs = [end.data["result"]["data"]["output"] for end in ends]
    assert all(text.endswith("FETCHED") for text in outputs), ends
    assert len({text.split("\n")[0] for text in outputs}) == 2, "each has its own port"


async def test_a_call_without_hosts_cannot_reach_the_proxy_of_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "hold.sh").write_text("touch up; until test -e down; do sleep 0.05; done\n")
    (tmp_path / "ws" / "find.sh").write_text(
        "until test -e up; do sleep 0.05; done\ncurl -sS http://127.0.0.1:3128/; echo $?\n"
    )
    rules = ["allow bash bash hold.sh", "allow bash bash find.sh", "allow bash touch down"]
    async with temporary_kernel(tmp_path, rules=rules) as kernel:
        session = await kernel.session()
        job = await session.call("bash", {"command": "bash hold.sh", "background": True})
        with monkeypatch.context() as narrowed:
            limited = CallRuntime.__init__

            def without_hosts(self: CallRuntime, *given: Any) -> None:
                limited(self, *given)
                self.capabilities = self.capabilities.without_hosts()

            narrowed.setattr(CallRuntime, "__init__", without_hosts)
            found = await session.call("bash", {"command": "bash find.sh"})
        await session.call("bash", {"command": "touch down"})
        await session.call("wait", {"job_id": job.data["job_id"]})
    assert found.data["output"].splitlines()[-1] == "7", found


async def test_programs_that_occupy_proxy_ports_do_not_cut_later_calls_off_from_their_hosts(tmp_path: Path) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        put_agent(tmp_path, "fetcher", f'[requires.tools.bash.net]\nhosts = ["{site.authority}"]')
        rules = ["allow bash bash occupy.sh", "allow bash bash fetch.sh", f"allow net.fetch {site.authority}"]
        async with opening(HELD)(tmp_path, "fetcher", rules=rules) as kernel:
            # A sandbox that waits for the next call has one of the ports already.
            (tmp_path / "ws" / "occupy.py").write_text(
                "import contextlib, socket, time, os\nmade = [socket.socket() for _ in range(40)]\n"
                "for n, s in enumerate(made, 1):\n    with contextlib.suppress(OSError):\n"
                "        s.bind(('127.0.0.1', 3128 + n)) or s.listen()\n"
                "open('up', 'w').close()\nwhile not os.path.exists('down'): time.sleep(0.05)\n"
            )
            (tmp_path / "ws" / "occupy.sh").write_text("python3 occupy.py\n")
            (tmp_path / "ws" / "fetch.sh").write_text(
                f"until test -e up; do sleep 0.05; done\ncurl -sS --noproxy x {site.url()}\ntouch down\n"
            )
            session = await kernel.session()
            job = await session.call("bash", {"command": "bash occupy.sh", "background": True})
            while not (tmp_path / "ws" / "up").exists():
                await asyncio.sleep(0.02)
            answer = await session.call("bash", {"command": "bash fetch.sh"})
            await session.call("wait", {"job_id": job.data["job_id"]})
    assert answer.data["output"] == "FETCHED", answer
