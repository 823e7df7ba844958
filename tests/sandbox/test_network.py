"""The network of a sandbox: one port to the proxy, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.sandbox.conftest import CompletedRun, SandboxFolders
from tests.web import LoopbackServer, authority, ok, redirect

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ConnectionAttempt, ProgramSpec
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.network import sandbox_network

pytestmark = pytest.mark.proves("S-02")

HAS_CURL = Path("/usr/bin/curl").exists()


@dataclass
class Online:
    """Runs scripts in sandboxes of a call set with hosts."""

    ground: SandboxFolders
    hosts: Sequence[str]
    gate: Callable[[str, int], str | None] | None = None
    writable: bool = True
    attempts: list[ConnectionAttempt] = field(default_factory=list[ConnectionAttempt])

    async def start(self, *argv: str):
        layer = self.ground.layer(str(self.ground.workspace))
        layer = CapabilityLayer("tool t", layer.fs_read, layer.fs_write, tuple(self.hosts), layer.shell)
        profile = self.ground.profile(
            check_host=self.gate, on_attempt=self.attempts.append, workspace_writable=self.writable
        )
        return await self.ground.sandbox.start(CapabilitySet((layer,)), profile, ProgramSpec(argv))

    async def bash(self, script: str) -> CompletedRun:
        process = await self.start("/bin/bash", "--noprofile", "--norc", "-c", script)
        try:
            out, errors, dropped = await process.communicate(b"", 1 << 20)
            return CompletedRun(await process.wait(), out.decode(), errors.decode(), dropped)
        finally:
            await process.kill()


def get(url: str) -> str:
    """A script that fetches ``url`` through the proxy with nothing but bash."""
    return (
        'IFS=/: read -r _ _ _ host port <<< "$http_proxy"; exec 3<>"/dev/tcp/$host/$port"; '
        f"printf 'GET %s HTTP/1.1\\r\\n\\r\\n' '{url}' >&3; cat <&3; "
    )


async def test_a_granted_host_is_reached_and_another_host_gets_403(confined: SandboxFolders) -> None:
    async with LoopbackServer({"/a": ok(b"HELLO-FROM-OUTSIDE")}) as site, LoopbackServer({"*": ok(b"NEVER")}) as other:
        online = Online(confined, [site.authority])
        ran = await online.bash(get(site.url("/a")) + get(other.url("/b")))
    assert "HELLO-FROM-OUTSIDE" in ran.out
    assert "403 Forbidden" in ran.out
    assert f"{other.authority} is not an allowed host of tool t" in ran.out
    assert other.asked == []
    assert [(a.port, a.refusal_reason is None) for a in online.attempts] == [(site.port, True), (other.port, False)]


async def test_a_program_with_network_access_reaches_hosts_only_through_the_proxy(confined: SandboxFolders) -> None:
    async with LoopbackServer({"*": ok()}) as site:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
            receiver.bind(("127.0.0.1", 0))
            receiver.setblocking(False)
            heard = receiver.getsockname()[1]
            ran = await Online(confined, ["*", site.authority]).bash(
                "cut -d: -f1 /proc/net/dev | tail -n +3;"
                f"for to in tcp/127.0.0.1/{site.port} tcp/192.0.2.1/80 udp/127.0.0.1/{heard} udp/192.0.2.1/53; do"
                " (exec 3<>/dev/$to && echo > /dev/$to && echo WENT $to) 2>/dev/null; done; echo done"
            )
            with pytest.raises(BlockingIOError):
                receiver.recv(1)
    assert ran.out.split()[0] == "lo"
    assert "WENT tcp" not in ran.out
    assert "192.0.2.1" not in ran.out
    assert site.asked == []


async def test_rules_are_checked_at_each_request_of_the_proxy(confined: SandboxFolders) -> None:
    denied: set[int] = set()

    def gate(host: str, port: int) -> str | None:
        return "the rule 'deny net.fetch' says no" if port in denied else None

    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        online = Online(confined, [site.authority], gate)
        assert "FETCHED" in (await online.bash(get(site.url()))).out
        denied.add(site.port)
        ran = await online.bash(get(site.url()))
    assert "FETCHED" not in ran.out
    assert "deny net.fetch" in ran.out
    assert len(site.asked) == 1


async def test_a_sandbox_with_a_read_only_workspace_reaches_its_hosts(confined: SandboxFolders) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        ran = await Online(confined, [site.authority], writable=False).bash(get(site.url()))
    assert "FETCHED" in ran.out


async def test_two_parallel_sandboxes_have_separate_network_rights(confined: SandboxFolders) -> None:
    async with LoopbackServer({"*": ok(b"ONE")}) as one, LoopbackServer({"*": ok(b"TWO")}) as two:
        script = get(one.url()) + get(two.url())
        first, second = await asyncio.gather(
            Online(confined, [one.authority]).bash(script), Online(confined, [two.authority]).bash(script)
        )
    assert ("ONE" in first.out, "TWO" in first.out) == (True, False)
    assert ("ONE" in second.out, "TWO" in second.out) == (False, True)


@pytest.mark.skipif(not HAS_CURL, reason="curl is not installed")
async def test_curl_uses_the_proxy_for_http_https_and_redirects(confined: SandboxFolders) -> None:
    trust = authority("127.0.0.1")
    (confined.workspace / "ca.pem").write_text(trust.pem)
    async with LoopbackServer({"*": ok(b"OVER-TLS")}, trust.server) as secure:
        routes = {"/there": redirect(secure.url("/x")), "/away": redirect("http://169.254.169.254/latest/")}
        async with LoopbackServer(routes) as site:
            ran = await Online(confined, [site.authority, secure.authority]).bash(
                f"curl -sSL --cacert ca.pem {site.url('/there')}; curl -sSL {site.url('/away')}"
            )
    assert ran.out.startswith("OVER-TLS")
    assert "169.254.169.254" in ran.out
    assert secure.asked[0].line == "GET /x HTTP/1.1"


async def test_a_python_program_uses_the_proxy(confined: SandboxFolders) -> None:
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        code = f"import urllib.request as u; print(u.urlopen('{site.url()}').read().decode())"
        ran = await Online(confined, [site.authority]).bash(f'python3 -c "{code}"')
    if "command not found" in ran.errors:
        pytest.skip("python3 is not on the PATH of this machine")
    assert ran.out.strip() == "FETCHED"


def test_loopback_addresses_bypass_the_proxy_unless_a_loopback_address_is_granted() -> None:
    own = sandbox_network.build_proxy_environment(CapabilitySet((CapabilityLayer("t", hosts=("example.org",)),)))
    assert own["no_proxy"] == own["NO_PROXY"] == "localhost,127.0.0.1,::1,0.0.0.0,127.0.0.0/8"
    for granted in ("127.0.0.1:8080", "[::1]:80", "127.0.0.1:*"):
        assert (
            sandbox_network.build_proxy_environment(CapabilitySet((CapabilityLayer("t", hosts=(granted,)),)))[
                "no_proxy"
            ]
            == "localhost"
        )


async def test_the_proxy_ends_with_its_sandbox_and_leaves_no_descriptor(confined: SandboxFolders) -> None:
    async with LoopbackServer({"*": ok()}) as site:
        online = Online(confined, [site.authority])
        await online.bash("true")
        before = _descriptors()
        await online.bash("true")
        process = await online.start(
            "/bin/bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{sandbox_network.PROXY_PORT}; read -u3"
        )
        await process.kill()
        assert isinstance(process, sandbox_network.ProxiedProcess)
    while _descriptors() > before:  # the last one goes when bubblewrap has been buried
        await asyncio.sleep(0)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_a_listener_in_the_machines_network_namespace_is_refused() -> None:
    with pytest.raises(ToolError, match="shares the net namespace"):
        await sandbox_network.open_listener_in_sandbox(os.getpid(), os.getppid())


async def test_a_listener_in_the_namespace_of_a_foreign_process_is_refused(confined: SandboxFolders) -> None:
    process = await confined.start("/bin/sleep", "60")
    try:
        assert await process.wait_until_pid_known()  # type: ignore[attr-defined]
        with pytest.raises(ToolError, match="started by another process"):
            await sandbox_network.open_listener_in_sandbox(process.first_process_pid, os.getpid())  # type: ignore[attr-defined]
    finally:
        await process.kill()
    with pytest.raises(ToolError, match="could not be set up"):
        await sandbox_network.open_listener_in_sandbox(process.first_process_pid or (1 << 22) - 1, process.pid)  # type: ignore[attr-defined]


async def test_the_network_listener_runs_in_python_when_perl_is_missing(
    confined: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_network, "_build_listener_argv", sandbox_network.build_python_listener_argv)
    assert sandbox_network.build_python_listener_argv()[0] == sys.executable
    async with LoopbackServer({"*": ok(b"FETCHED")}) as site:
        ran = await Online(confined, [site.authority]).bash(get(site.url()))
    assert "FETCHED" in ran.out


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
