"""The self-check for sandbox providers: this machine's passes, and one without confinement fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, ProgramSpec, Sandbox, SandboxProfile, SandboxTier
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.selfcheck import CHECKS, CheckCannotRun, self_check
from handrail.sandbox.start.spawn import find_bubblewrap_programs

WITHOUT = """
import asyncio, json, os, sys
mine = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "net", "user")}
if set(mine.values()) & set(json.loads(sys.argv[1])):
    sys.exit("this is no outer sandbox")
from handrail.sandbox.selfcheck import self_check
from handrail.sandbox.selfcheck import CHECKS
from handrail.sandbox.configured_sandbox import UnconfinedSandbox
slow = ("memory is limited", "processor time is limited")
quick = [check for check in CHECKS if check.name not in slow]
print(json.dumps([one.to_dict() for one in asyncio.run(self_check(UnconfinedSandbox(), quick))]))
"""
"""All but two bounds, which take long to reach."""
SUITE = {
    "files": (
        "a program can write in the workspace",
        "the home folder is the scratch folder, and files in it persist",
        "files outside cannot be read",
        "files outside cannot be read through a link",
        "files outside cannot be written",
        "a call without write access changes nothing",
        "hidden and masked files cannot be read",
        "pinned files cannot be written or moved away",
        "kernel settings cannot be written",
    ),
    "network": (
        "a server on the loopback of this machine cannot be reached",
        "the only network device is the loopback of the sandbox",
        "a server that listens in the workspace cannot be reached",
    ),
    "processes": (
        "processes of this machine cannot be seen",
        "no process is left after the call",
        "a call ends with its program, even if another process holds its output",
        "a killed program ends, whatever signals it ignores",
        "set-user-ID programs and capabilities give no more rights",
        "a program cannot create a user namespace",
    ),
    "environment": (
        "the environment has the variables of the call, and none of Handrail",
        "secrets arrive by a descriptor only",
    ),
    "descriptors": ("no descriptor of Handrail is inherited",),
    "limits": (
        "a file cannot grow beyond its limit",
        "the number of open files is limited",
        "the number of processes is limited",
        "memory is limited",
        "processor time is limited",
        "the folder /tmp is private and limited",
        "output is kept up to a limit, and counted beyond it",
    ),
}
"""By group, the name of each check: a check that is removed is missed."""


@pytest.mark.proves("S-11")
def test_the_suite_has_every_check() -> None:
    assert [(one.group, one.name) for one in CHECKS] == [(group, name) for group in SUITE for name in SUITE[group]]


@pytest.mark.proves("S-11")
async def test_the_sandbox_of_this_machine_passes_the_suite(sandbox: Sandbox) -> None:
    outcomes = await self_check(sandbox)
    assert [one.name for one in outcomes] == [name for names in SUITE.values() for name in names]
    assert [one for one in outcomes if one.state == "open"] == []
    assert sum(one.state == "held" for one in outcomes) > len(CHECKS) - 3


def _again(*places: str) -> list[str]:
    """Mount what Python needs again if it is under a hidden folder."""
    found = sorted({place for place in places if place.startswith("/tmp/") and Path(place).exists()})
    return [word for place in found for word in ("--ro-bind", place, place)]


@pytest.mark.proves("S-11")
def test_a_provider_that_confines_nothing_fails_the_suite(sandbox: Sandbox) -> None:
    """In an outer sandbox, where it can only reach what is that one's."""
    spaces = json.dumps([os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "net", "user")])
    ran = subprocess.run(
        [
            *(
                next(find_bubblewrap_programs()),
                "--unshare-all",
                "--unshare-user",
                "--cap-drop",
                "ALL",
                "--die-with-parent",
            ),
            *("--ro-bind", "/", "/", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"),
            *("--tmpfs", "/tmp", *_again(sys.prefix, *sys.path)),
            *("--new-session", "--", sys.executable, "-c", WITHOUT, spaces),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    opened = {one["name"] for one in json.loads(ran.stdout) if one["state"] == "open"}
    assert opened >= {
        "files outside cannot be read",
        "files outside cannot be read through a link",
        "files outside cannot be written",
        "a call without write access changes nothing",
        "hidden and masked files cannot be read",
        "pinned files cannot be written or moved away",
        "a server on the loopback of this machine cannot be reached",
        "a server that listens in the workspace cannot be reached",
        "processes of this machine cannot be seen",
        "no process is left after the call",
        "a file cannot grow beyond its limit",
        "the number of open files is limited",
        "the folder /tmp is private and limited",
    }


class FailingSandbox:
    """A provider whose starts all fail in a given way."""

    tier = SandboxTier("broken", "")

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        raise self.error


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (ToolError("no container engine is running", kind="unavailable"), "open", "no container engine is running"),
        (RuntimeError("a defect"), "open", "RuntimeError: a defect"),
        (CheckCannotRun("there is no bash"), "not tried", "there is no bash"),
    ],
)
async def test_a_provider_that_raises_an_error_does_not_pass_the_self_check(
    error: Exception, state: str, said: str
) -> None:
    outcomes = await self_check(FailingSandbox(error), CHECKS[:2])
    assert [one.state for one in outcomes] == [state, state]
    assert all(said in one.detail for one in outcomes)
