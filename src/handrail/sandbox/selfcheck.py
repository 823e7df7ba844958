"""A sandbox provider is put to the test: does what a call must not reach stay out of reach?

:func:`self_check` runs the suite of :mod:`handrail.sandbox.selfcheck_suite` against any
:class:`handrail.contract.sandbox.Sandbox`, this machine's own or one of another package. Each check tries from inside a
sandbox and looks from outside, in a temporary folder. None does harm where it is not held, so the suite may be run
against a provider that confines nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Sandbox
from handrail.sandbox.ground import Check, Ground, NotTried

PATIENCE_S = 60.0
_VARIABLE = "HANDRAIL_SELF_CHECK"
_NOBODY = 65_534
_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check.

    :param state: ``open``: what should be out of reach was reached. ``not tried``: this machine lacks what it takes
    """

    group: str
    name: str
    state: Literal["held", "open", "not tried"]
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def self_check(sandbox: Sandbox, checks: Sequence[Check] | None = None) -> list[Outcome]:
    """What a provider holds and what not, check by check.

    :param checks: only these
    """
    if checks is None:
        from handrail.sandbox.selfcheck_suite import CHECKS

        checks = CHECKS
    turns = asyncio.Semaphore(_AT_ONCE)
    with _folders() as place, _marked() as secret:

        async def made(number: int, check: Check) -> Outcome:
            async with turns, _ground(sandbox, place / str(number), secret) as ground:
                return await _outcome(check, ground)

        return await asyncio.gather(*(made(number, check) for number, check in enumerate(checks)))


async def _outcome(check: Check, ground: Ground) -> Outcome:
    try:
        async with asyncio.timeout(PATIENCE_S):
            reached = await check.run(ground)
    except NotTried as reason:
        return Outcome(check.group, check.name, "not tried", str(reason))
    except TimeoutError:
        return Outcome(check.group, check.name, "open", f"it took longer than {PATIENCE_S:.0f} s")
    except ToolError as error:
        return Outcome(check.group, check.name, "open", f"the sandbox could not be used: {error.text}")
    except Exception as error:  # a provider's own failure is its outcome, and the others go on
        return Outcome(check.group, check.name, "open", f"the sandbox failed: {type(error).__name__}: {error}")
    return Outcome(check.group, check.name, "held" if reached is None else "open", reached or "")


@contextlib.contextmanager
def _folders() -> Generator[Path, None, None]:
    """A folder that others can get through but not list, for a sandbox may run as somebody else."""
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="handrail-self-check-")))
    place.chmod(0o711)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _marked() -> Generator[str, None, None]:
    """Something in this process's environment that no program may see."""
    secret = f"secret-{secrets.token_hex(16)}"
    os.environ[_VARIABLE] = secret
    try:
        yield secret
    finally:
        os.environ.pop(_VARIABLE, None)


@contextlib.asynccontextmanager
async def _ground(sandbox: Sandbox, place: Path, secret: str) -> AsyncGenerator[Ground, None]:
    folders = [place / name for name in ("workspace", "scratch", "outside")]
    place.mkdir(mode=0o711)
    for folder in folders:
        folder.mkdir(mode=0o755)
    workspace, scratch, outside = folders
    (outside / "secret").write_text(secret)
    if os.geteuid() == 0:  # as root a sandbox can take the workspace's owner's identity only where that is somebody
        with contextlib.suppress(OSError):  # within another sandbox there is nobody
            os.chown(workspace, _NOBODY, _NOBODY)
    connections: list[str] = []

    def reached(name: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(name)
            writer.close()

        return accept

    tcp = await asyncio.start_server(reached("tcp"), "127.0.0.1", 0)
    here = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"/proc/self/fd/{here}/server")  # an address holds 107 bytes
    finally:
        os.close(here)
    (workspace / "server").chmod(0o777)
    unix = await asyncio.start_unix_server(reached("unix"), sock=listener)
    port: int = tcp.sockets[0].getsockname()[1]
    try:
        yield Ground(sandbox, workspace, scratch, outside, secret, port, connections)
    finally:
        for server in (tcp, unix):
            server.close()
            await server.wait_closed()


def counted(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """How many are held, open and not tried."""
    return {state: sum(one.state == state for one in outcomes) for state in ("held", "open", "not tried")}
