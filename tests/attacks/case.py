"""One attack: its source, the attempt, and the expected outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.attacks.victim import VictimHome

Group = Literal[
    "files",
    "shell",
    "configuration",
    "network",
    "processes",
    "ipc",
    "environment",
    "model-facing",
    "permission",
    "sandbox",
    "secrets",
    "layers",
]
Probe = Callable[["VictimHome"], Awaitable[str | None]]
"""Tries something and gives how it succeeded; None where it held."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack.

    :param source: what is known to have been done to other systems, in a few words
    :param expected: what must come of it here
    :param control: a shell text that reaches its aim where nothing confines it, printing ``sign``; run in the outer
        sandbox only, to see that the probe would notice an open door. None: it has none, as with what would exhaust the
        machine
    :param harmless: only looks (``access_token(2)``, an error's number), so that it may also be tried as real root
    :param slow: too long for every day
    """

    id: str
    group: Group
    source: str
    expected: str
    tried: Probe
    control: str | None = None
    sign: str = "REACHED"
    harmless: bool = False
    slow: bool = False


def shell(
    id: str,
    group: Group,
    source: str,
    expected: str,
    text: str,
    *,
    sign: str = "REACHED",
    control: bool = True,
    harmless: bool = False,
) -> Case:
    """An approved command that prints ``sign`` only if it reached a forbidden resource."""

    async def tried(home: VictimHome) -> str | None:
        from tests.attacks.victim import TRIED

        said = await home.shell(f"{text}\necho; echo {TRIED}")
        if TRIED not in said:
            return f"the probe did not run to its end: {said[-600:]!r}"
        return f"{said[-600:]!r}" if sign in said else None

    return Case(id, group, source, expected, tried, text if control else None, sign, harmless)


def python(
    id: str,
    group: Group,
    source: str,
    expected: str,
    code: str,
    *,
    control: bool = True,
    harmless: bool = False,
) -> Case:
    """A Python program that prints ``REACHED`` only where it reached what it must not.

    Its errors are caught: each line of ``code`` is a step of its own only if it is written so.
    """
    whole = _PROLOGUE + code + f"\nprint({_TRIED!r})\n"

    async def tried(home: VictimHome) -> str | None:
        said = await home.python(whole)
        if _TRIED not in said:
            return f"the probe did not run to its end: {said[-600:]!r}"
        return f"{said[-600:]!r}" if "REACHED" in said else None

    text = f"python3 - <<'END-OF-PROBE'\n{whole}\nEND-OF-PROBE\n"
    return Case(id, group, source, expected, tried, text if control else None, "REACHED", harmless)


_TRIED = "TRIED-TO-ITS-END"
_PROLOGUE = '''\
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, work):
    """Tell which way worked, and why the others did not."""
    try:
        found = work()
    except BaseException as error:
        print(f"{what}: {type(error).__name__}: {error}")
    else:
        print(f"REACHED {what}: {found!r}"[:300])

def syscall(what, number, *arguments):
    """REACHED unless the kernel refuses; a fault in the arguments is as good as a way in."""
    ctypes.set_errno(0)
    found = libc.syscall(ctypes.c_long(number), *arguments)
    code = ctypes.get_errno()
    refused = found < 0 and code in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOSPC)
    print(f"{'' if refused else 'REACHED '}{what}: {found} {errno.errorcode.get(code, code)}")

'''


def breach(found: Iterable[Any], what: str) -> str | None:
    """None where nothing was found, else what was."""
    listed = list(found)
    return f"{what}: {listed!r}"[:1500] if listed else None
