"""Calls and jobs of one session share a loopback; another session and this machine have others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kernel.doors import HELD
from tests.kernel.test_agents import confined, opening, put_agent
from tests.web import Site, ok

from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = [confined, pytest.mark.proves("S-02")]

SERVE = {"command": "python3 -m http.server 8765 --bind 127.0.0.1", "background": True}
FETCH = {"command": "curl -sS --retry 40 --retry-delay 1 --retry-connrefused http://127.0.0.1:8765/"}
ONCE = {"command": "curl -sS http://127.0.0.1:8765/"}


async def test_a_server_in_a_job_is_reached_by_calls_of_its_session_alone(tmp_path: Path) -> None:
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


async def test_a_server_of_this_machine_is_not_reached(tmp_path: Path) -> None:
    async with Site({"*": ok(b"NEVER")}) as site, temporary_kernel(tmp_path, rules=["allow bash"]) as kernel:
        session = await kernel.session()
        await session.call("bash", {"command": "touch begun"})
        answer = await session.call("bash", {"command": f"curl -sS {site.url()}"})
        assert answer.data["exit_code"] == 7, answer
    assert site.asked == []


async def test_jobs_at_once_have_each_their_proxy_and_their_own_record(tmp_path: Path) -> None:
    async with Site({"*": ok(b"FETCHED")}) as site, Site({"*": ok(b"FETCHED")}) as other:
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
