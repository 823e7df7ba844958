"""Calls that use the network, by every service: limited by their tool, agent and rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD, JOINED, Opens
from tests.kernel.test_agents import confined, opening, put_agent
from tests.kernel.test_configured import put_tool
from tests.sandbox.test_network import get
from tests.web import LoopbackServer, ok, redirect

from handrail import Runtime, tool
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("S-02", "K-10", "K-11b")

FETCHES = """#!/usr/bin/env python3
import json, sys, urllib.error, urllib.request
found = {}
for line in sys.stdin:
    given = json.loads(line)
    for url in given.get("arguments", given)["urls"]:
        try:
            found[url] = urllib.request.urlopen(url).read().decode()
        except urllib.error.HTTPError as error:
            found[url] = f"{error.code} {error.read().decode()}"
    print(json.dumps({"id": given["id"], "result": found} if "id" in given else found), flush=True)
    found = {}
"""


@pytest.fixture(params=[HELD, JOINED])
def opened(request: pytest.FixtureRequest) -> Opens:
    return opening(request.param)


def put_fetching(folder: Path, name: str, hosts: list[str], **runtime: Any) -> None:
    """An executable that fetches the URLs it is given."""
    put_tool(folder, name, requires={"net": {"hosts": hosts}}, **runtime)
    text = (folder / f"{name}.json").read_text()
    urls = '"properties": {"urls": {"type": "array", "items": {"type": "string"}}}'
    (folder / f"{name}.json").write_text(text.replace('"properties": {}', urls))
    (folder / name).write_text(FETCHES)


SCRIPT = {"command": "bash fetch.sh"}


def put_script(folder: Path, *urls: str) -> None:
    """Write the program that :data:`SCRIPT` runs."""
    (folder / "ws").mkdir()
    (folder / "ws" / "fetch.sh").write_text('echo "proxy:$http_proxy"\n' + "\n".join(map(get, urls)))


def put_fetching_agent(folder: Path, host: str) -> None:
    put_agent(folder, "fetcher", f'[requires.tools.bash.net]\nhosts = ["{host}"]')


@confined
async def test_bash_reaches_a_host_that_its_agent_grants_and_other_hosts_return_403(
    tmp_path: Path, opened: Opens
) -> None:
    async with LoopbackServer({"*": ok(b"FROM-THE-GRANTED")}) as site, LoopbackServer({"*": ok(b"NEVER")}) as other:
        put_fetching_agent(tmp_path, site.authority)
        put_script(tmp_path, site.url(), other.url())
        async with opened(tmp_path, "fetcher", rules=["allow bash bash fetch.sh", "allow net.fetch"]) as kernel:
            session = await kernel.session()
            answer = await session.call("bash", SCRIPT)
            plain = await kernel.session(agent="default")
            without = await plain.call("bash", SCRIPT)
    assert "FROM-THE-GRANTED" in answer.data["output"], answer
    assert "403 Forbidden" in answer.data["output"]
    assert "Tool bash cannot reach" in answer.data["output"]
    assert other.asked == []
    assert answer.metadata["network"]["reached"] == [site.authority]
    assert [one["host"] for one in answer.metadata["network"]["refused"]] == [other.authority]
    assert "FROM-THE-GRANTED" not in without.data["output"], "no rule opens an address that is not public"
    assert "network" in without.metadata and without.metadata["network"]["reached"] == []


@confined
@pytest.mark.proves("P-01")
@pytest.mark.parametrize("rules", [["deny net.fetch 127.0.0.1"], ["ask net.fetch"], []])
async def test_a_host_that_rules_deny_or_omit_returns_403_despite_the_agents_hosts(
    tmp_path: Path, rules: list[str]
) -> None:
    async with LoopbackServer({"*": ok(b"NEVER")}) as site:
        put_fetching_agent(tmp_path, site.authority)
        put_script(tmp_path, site.url())
        async with opening(HELD)(tmp_path, "fetcher", rules=["allow shell.run bash fetch.sh", *rules]) as kernel:
            answer = await (await kernel.session()).call("bash", SCRIPT)
    assert "403 Forbidden" in answer.data["output"], answer
    assert "net.fetch" in answer.data["output"]
    assert site.asked == []


@confined
async def test_the_ceiling_overrides_the_hosts_of_a_tool_and_an_agent(tmp_path: Path) -> None:
    async with LoopbackServer({"*": ok(b"NEVER")}) as site:
        put_fetching_agent(tmp_path, site.authority)
        put_script(tmp_path, site.url())
        ceiling = '[ceiling]\nnet.hosts = ["*"]\nshell = [{cmd = "*"}]\nfs.read = ["{workspace}"]\nfs.write = ["{workspace}"]\n'
        async with opening(HELD)(
            tmp_path, "fetcher", ceiling, rules=["allow bash bash fetch.sh", "allow net.fetch"]
        ) as kernel:
            answer = await (await kernel.session()).call("bash", SCRIPT)
    assert "the host's ceiling" in answer.data["output"], answer
    assert site.asked == []


@confined
@pytest.mark.parametrize("persistent", [False, True])
async def test_a_program_reaches_the_hosts_that_its_tool_requires_and_rules_allow(
    tmp_path: Path, persistent: bool
) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site, LoopbackServer({"*": ok(b"NEVER")}) as other:
        put_fetching(tmp_path / "config" / "tools", "fetches", [site.authority], persistent=persistent)
        urls = {"urls": [site.url(), other.url()]}
        async with temporary_kernel(tmp_path, rules=["allow fetches", "allow net.fetch"]) as kernel:
            session = await kernel.session()
            barred = await kernel.session(rules=[f"deny net.fetch {site.authority}"])
            answer = await session.call("fetches", urls)
            refused = await barred.call("fetches", urls)
            again = await session.call("fetches", urls)
    for one in (answer, again):
        assert one.data[site.url()] == "FETCHED", one
        assert one.data[other.url()].startswith("403 handrail:")
        assert one.metadata["network"]["reached"] == [site.authority]
    assert refused.data[site.url()].startswith("403 handrail:")
    assert f"deny net.fetch {site.authority}" in refused.data[site.url()]
    assert len(site.asked) == 2
    assert other.asked == []


async def _fetching(site: LoopbackServer, other: LoopbackServer) -> Any:
    @tool(id="web.get", side_effect="read", locks=[], requires={"net": {"hosts": [site.authority]}})
    async def fetch(url: str, runtime: Runtime) -> dict[str, Any]:
        """Fetch."""
        heard: list[bytes] = []
        answer = await runtime.net.request("GET", url, headers={"X-One": "1"}, on_body=heard.append)
        return {"status": answer.status, "text": answer.body.decode(), "heard": b"".join(heard).decode()}

    return fetch


async def test_a_function_tool_fetches_only_its_required_hosts_through_the_runtime(
    tmp_path: Path, opened: Opens
) -> None:
    async with LoopbackServer({"*": ok(b"NEVER")}) as other, LoopbackServer({"/": ok(b"FETCHED")}) as site:
        site.routes |= {"/away": redirect(other.url()), "/in": redirect("http://169.254.169.254/")}
        fetch = await _fetching(site, other)
        async with opened(tmp_path, tools=[fetch], rules=["allow web.get", "allow net.fetch"]) as kernel:
            session = await kernel.session()
            answer = await session.call("web.get", {"url": site.url()})
            assert answer.data == {"status": 200, "text": "FETCHED", "heard": "FETCHED"}, answer
            assert answer.metadata["network"]["reached"] == [site.authority]
            for url in (other.url(), site.url("/away"), site.url("/in")):
                refused = await session.call("web.get", {"url": url})
                assert refused.error_kind == "denied", refused
                assert "Tool web.get cannot reach" in (refused.error_text or "")
            barred = await kernel.session(rules=[f"deny net.fetch {site.authority}"])
            assert (await barred.call("web.get", {"url": site.url()})).error_kind == "denied"
    assert other.asked == []
    assert site.asked[0].fields["x-one"] == "1"


async def test_a_tool_without_required_hosts_is_denied_network_requests(tmp_path: Path) -> None:
    @tool(id="plain", side_effect="read", locks=[])
    async def plain(runtime: Runtime) -> int:
        """Fetch without having asked for it."""
        return (await runtime.net.request("GET", "http://127.0.0.1/")).status

    async with temporary_kernel(tmp_path, tools=[plain], rules=["allow *"]) as kernel:
        refused = await (await kernel.session()).call("plain", {})
    assert refused.error_kind == "denied"
    assert '"hosts"' in (refused.error_text or "")
