"""``python -m tests.mcp_suite [--json FILE] [ROW …]``: the official MCP conformance suite, and its table.

Rows: ``server`` (our tools, through the kernel), ``gateway`` (ours in front of a plain SDK server), ``client`` (ours), ``sdk``
(the SDK's own server) and ``sdk-client``; without any, all. Each scenario that has not passed is named. Ends with 1 where a bound of ours is missed, with 2 where nothing could be counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mcp_suite.suites import NEW, OLD, Counted, Suite, Unfit, installed

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Leg:
    """:param least: how many scenarios are to pass
    :param of: how many there are
    :param plain: how many where what is served makes no tasks, as the plain SDK server does not"""

    title: str
    version: str
    which: tuple[str, ...]
    least: int
    of: int
    plain: int | None = None


SERVER = (
    Leg("0.1.16 --suite all", OLD, ("--suite", "all"), 32, 32),
    Leg("alpha.12 2025-11-25", NEW, ("--suite", "all", "--spec-version", "2025-11-25"), 33, 33),
    Leg("alpha.12 2026-07-28", NEW, ("--suite", "all", "--spec-version", "2026-07-28"), 40, 40),
    Leg("alpha.12 --requirements 2026-07-28", NEW, ("--requirements", "2026-07-28"), 50, 50, plain=41),
)
CLIENT = (
    Leg("0.1.16", OLD, (), 26, 26),
    Leg("alpha.12 2025-11-25", NEW, ("--spec-version", "2025-11-25"), 19, 19),
    Leg("alpha.12 2026-07-28", NEW, ("--spec-version", "2026-07-28"), 33, 33),
)
SERVERS: Mapping[str, tuple[str, ...]] = {
    "server": ("tests.mcp_suite.our_server",),
    "gateway": ("tests.mcp_suite.our_server", "--gateway"),
    "sdk": ("tests.mcp_suite.plain_server",),
}
CLIENTS: Mapping[str, tuple[str, ...]] = {
    "client": ("tests.mcp_suite.client",),
    "sdk-client": ("tests.mcp_suite.client", "--sdk"),
}
THEIRS = frozenset({"sdk", "sdk-client"})
"""Rows that are only compared with."""


@contextlib.contextmanager
def served(module: Sequence[str]) -> Generator[str]:
    """A server in its own process on a free port.

    :return: its address
    :raises Unfit: when it does not come up
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", *module, "--port", str(port)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + READY_S
        while True:
            if process.poll() is not None:
                raise Unfit(f"{' '.join(module)} ended with {process.returncode} before it served")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > until:
                raise Unfit(f"{' '.join(module)} did not listen within {READY_S:.0f} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measured(row: str, suites: Callable[[str], Suite]) -> Iterator[tuple[Leg, Counted]]:
    if row in CLIENTS:
        command = (sys.executable, "-m", *CLIENTS[row])
        for leg in CLIENT:
            yield leg, suites(leg.version).client(command, *leg.which)
        return
    for leg in SERVER:
        with served(SERVERS[row]) as url:  # each leg begins with a fresh one
            yield leg, suites(leg.version).server(url, *leg.which)


def main(arguments: list[str]) -> int:
    to = None
    if "--json" in arguments:
        at = arguments.index("--json")
        if at + 1 == len(arguments):
            print("conformance: --json needs a file to write to", file=sys.stderr)
            return 2
        to = arguments[at + 1]
        del arguments[at : at + 2]
    rows = arguments or [*SERVERS, *CLIENTS]
    if unknown := [row for row in rows if row not in {**SERVERS, **CLIENTS}]:
        print(f"conformance: no row {unknown[0]!r}; there are {', '.join([*SERVERS, *CLIENTS])}", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    suites: dict[str, Suite] = {}
    table: list[dict[str, object]] = []
    worst = 0
    for row in rows:
        try:
            for leg, found in measured(row, lambda version: suites.setdefault(version, installed(version))):
                least = leg.least if row == "server" or leg.plain is None else leg.plain
                fits = len(found.passed) >= least and found.total == leg.of
                worst = max(worst, 0 if fits or row in THEIRS else 1)
                mark = "" if row in THEIRS else "  ok" if fits else f"  MISSED: {least}/{leg.of} is to be reached"
                print(f"{row:10} {leg.title:36} {len(found.passed):>3}/{found.total}{mark}", flush=True)
                for name, why in found.failed.items():
                    print(f"{'':10} - {name}: {why}", flush=True)
                table.append(
                    {
                        "row": row,
                        "suite": leg.title,
                        "passed": len(found.passed),
                        "of": found.total,
                        "failed": dict(found.failed),
                    }
                )
        except Unfit as problem:
            print(f"{row:10} not counted: {problem}", flush=True)
            worst = max(worst, 0 if row in THEIRS else 2)
    if to is not None:
        Path(to).write_text(json.dumps(table, indent=2) + "\n")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
