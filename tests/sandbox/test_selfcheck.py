"""The suite that every sandbox provider has to pass: this machine's passes it, and one that confines nothing does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Process, Profile, Program, Sandbox, Tier
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.selfcheck import CHECKS, NotTried, self_check
from handrail.sandbox.start.spawn import binaries

WITHOUT = """
import asyncio, json, os, sys
mine = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "net", "user")}
if set(mine.values()) & set(json.loads(sys.argv[1])):
    sys.exit("this is no outer sandbox")
from handrail.sandbox.selfcheck import self_check
from handrail.sandbox.selfcheck import CHECKS
from handrail.sandbox.operated import Unconfined
slow = ("memory is to be had up to a bound", "processor time is to be had up to a bound")
quick = [check for check in CHECKS if check.name not in slow]
print(json.dumps([one.to_dict() for one in asyncio.run(self_check(Unconfined(), quick))]))
"""
"""All but two bounds, which take long to reach."""
SUITE = {
    "files": (
        "a program writes in the workspace",
        "its home is the scratch, and what it leaves there stays",
        "nothing outside is read",
        "nothing outside is read by a link",
        "nothing outside is written",
        "without the right to write it changes nothing",
        "hidden and masked files are not read",
        "pinned files are neither written nor put aside",
        "the kernel's settings are not to be written",
    ),
    "network": (
        "a server on this machine's loopback is not reached",
        "there is no device but its own loopback",
        "a server that listens in the workspace is not reached",
    ),
    "processes": (
        "those of this machine are not seen",
        "nothing that it started is left",
        "it has ended when it has, whoever still holds its output",
        "killing it ends it, whatever it ignores",
        "no set-user-id program and no capability gives it more",
        "it makes no user namespace of its own",
    ),
    "environment": (
        "it has what the call says and nothing of Handrail's own",
        "secrets come by a descriptor, and nowhere else",
    ),
    "descriptors": ("it has no descriptor of Handrail's",),
    "limits": (
        "a file grows to its bound",
        "files can be open up to a bound",
        "there are processes up to a bound",
        "memory is to be had up to a bound",
        "processor time is to be had up to a bound",
        "the folder /tmp is its own and is full at its bound",
        "output is kept up to a bound and counted beyond",
    ),
}
"""By group, the name of each check: a check that is removed is missed."""


@pytest.mark.proves("S-11")
def test_the_suite_has_every_check() -> None:
    assert [(one.group, one.name) for one in CHECKS] == [(group, name) for group in SUITE for name in SUITE[group]]


@pytest.mark.proves("S-11")
async def test_this_machines_sandbox_holds_all_of_it(sandbox: Sandbox) -> None:
    outcomes = await self_check(sandbox)
    assert [one.name for one in outcomes] == [name for names in SUITE.values() for name in names]
    assert [one for one in outcomes if one.state == "open"] == []
    assert sum(one.state == "held" for one in outcomes) > len(CHECKS) - 3


def _again(*places: str) -> list[str]:
    """What Python needs, where it lies beneath what is mounted over."""
    found = sorted({place for place in places if place.startswith("/tmp/") and Path(place).exists()})
    return [word for place in found for word in ("--ro-bind", place, place)]


@pytest.mark.proves("S-11")
def test_a_provider_that_confines_nothing_is_found_out(sandbox: Sandbox) -> None:
    """In an outer sandbox, where it can only reach what is that one's."""
    spaces = json.dumps([os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "net", "user")])
    ran = subprocess.run(
        [
            *(next(binaries()), "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent"),
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
        "nothing outside is read",
        "nothing outside is read by a link",
        "nothing outside is written",
        "without the right to write it changes nothing",
        "hidden and masked files are not read",
        "pinned files are neither written nor put aside",
        "a server on this machine's loopback is not reached",
        "a server that listens in the workspace is not reached",
        "those of this machine are not seen",
        "nothing that it started is left",
        "a file grows to its bound",
        "files can be open up to a bound",
        "the folder /tmp is its own and is full at its bound",
    }


class Broken:
    """A provider whose every start fails, in the way that it is told."""

    tier = Tier("broken", "")

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        raise self.error


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (ToolError("no container engine is running", kind="unavailable"), "open", "no container engine is running"),
        (RuntimeError("a defect"), "open", "RuntimeError: a defect"),
        (NotTried("there is no bash"), "not tried", "there is no bash"),
    ],
)
async def test_a_provider_that_fails_is_no_provider_that_holds(error: Exception, state: str, said: str) -> None:
    outcomes = await self_check(Broken(error), CHECKS[:2])
    assert [one.state for one in outcomes] == [state, state]
    assert all(said in one.detail for one in outcomes)
