"""A machine without a layer, simulated by an outer sandbox: refusals, reasons and remedies."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.sandbox_protocol import Sandbox
from handrail.sandbox.start.spawn import find_bubblewrap_programs

OUTER = "/usr/bin/bwrap"
BASH = ("call", "bash", '{"command": "true"}', "--rule", "allow bash *", "--headless", "--json")
pytestmark = pytest.mark.skipif(not os.access(OUTER, os.X_OK), reason="needs a bubblewrap around the whole of Handrail")


def answering(call: int, number: int) -> bytes:
    """A filter by which one system call answers with an error, whoever makes it."""
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | number), (0x06, 0, 0, 0x7FFF0000)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


@dataclass
class OuterSandbox:
    """A workspace, and an outer sandbox around each command."""

    folder: Path

    def __call__(self, outer: Sequence[str], *command: str, configuration: str = "", filter: bytes = b"") -> Done:
        (self.folder / "config").mkdir(exist_ok=True)
        (self.folder / "config" / "handrail.toml").write_text(configuration)
        descriptor = os.memfd_create("filter")
        os.write(descriptor, filter)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seccomp = ("--seccomp", str(descriptor)) if filter else ()
        handrail = (sys.executable, "-m", "handrail", *command)
        places = ("--workspace", str(self.folder / "ws"), "--config", str(self.folder / "config" / "handrail.toml"))
        try:
            ran = subprocess.run(
                [OUTER, "--dev-bind", "/", "/", "--die-with-parent", *outer, *seccomp, "--", *handrail, *places],
                env={**os.environ, "HANDRAIL_STATE": str(self.folder / "state")},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=(descriptor,),
                timeout=300,
                check=False,
            )
        finally:
            os.close(descriptor)
        assert b"Traceback" not in ran.stderr
        return Done(ran.returncode, json.loads(ran.stdout) if ran.stdout.strip() else None, ran.stderr.decode())


@dataclass
class Done:
    code: int
    out: Any
    errors: str

    @property
    def checks(self) -> dict[str, dict[str, str]]:
        return {check["name"]: check for check in self.out}

    @property
    def said(self) -> str:
        return json.dumps(self.out) + self.errors


@pytest.fixture
def machine(tmp_path: Path, sandbox: Sandbox) -> OuterSandbox:
    (tmp_path / "ws").mkdir()
    return OuterSandbox(tmp_path.resolve())


NO_NAMESPACES = ("--unshare-user", "--disable-userns")
NO_LANDLOCK = answering(444, errno.ENOSYS)


@pytest.mark.proves("S-08")
def test_programs_are_refused_without_user_namespaces_and_the_doctor_names_the_remedy(machine: OuterSandbox) -> None:
    found = machine(NO_NAMESPACES, "doctor", "--json")
    checks = found.checks
    assert found.code == 5 and checks["sandbox"]["state"] == "problem"
    assert checks["sandbox namespaces"]["state"] == "problem" and "namespaces" in checks["sandbox"]["remedy"]
    assert checks["sandbox seccomp"]["detail"] == "not tried without namespaces"
    (tools,) = [check["detail"] for name, check in checks.items() if name.split()[0].isdigit()]
    assert (
        tools.startswith("unavailable: bash, lsp, python, ") and tools.count("it starts programs, which cannot be") == 1
    )
    refused = machine(NO_NAMESPACES, *BASH)
    assert refused.code != 0 and "cannot be confined on this machine" in refused.said and "namespaces" in refused.said


@pytest.mark.proves("S-08")
def test_programs_are_refused_without_bubblewrap_and_the_error_names_the_package(machine: OuterSandbox) -> None:
    gone = [word for binary in find_bubblewrap_programs() for word in ("--ro-bind", "/dev/null", binary)]
    found = machine(gone, "doctor", "--json")
    assert found.code == 5
    assert found.checks["sandbox"]["detail"] == "none: bubblewrap is not installed"
    assert "apt install bubblewrap" in found.checks["sandbox"]["remedy"]
    assert found.checks["sandbox landlock"]["state"] == "warning"  # it is there, and nothing stands on it
    refused = machine(gone, *BASH)
    assert refused.code != 0 and "apt install bubblewrap" in refused.said


@pytest.mark.proves("S-08")
@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSYS, "has no Landlock"), (errno.EOPNOTSUPP, "started without Landlock")]
)
def test_programs_are_refused_without_landlock_and_the_doctor_names_both_remedies(
    machine: OuterSandbox, number: int, reason: str
) -> None:
    found = machine((), "doctor", "--json", filter=answering(444, number))
    checks = found.checks
    assert found.code == 5 and checks["sandbox"]["detail"].startswith("none: landlock: ")
    assert reason in checks["sandbox landlock"]["detail"]
    assert "Linux 5.13" in checks["sandbox landlock"]["remedy"]
    assert '[sandbox] without = ["landlock"]' in checks["sandbox landlock"]["remedy"]
    assert checks["sandbox namespaces"]["state"] == checks["sandbox seccomp"]["state"] == "ok"
    if number == errno.ENOSYS:
        refused = machine((), *BASH, filter=NO_LANDLOCK)
        assert refused.code != 0 and reason in refused.said and "Linux 5.13" in refused.said


@pytest.mark.proves("S-08")
def test_an_operator_can_opt_out_of_landlock_and_the_result_metadata_names_it(machine: OuterSandbox) -> None:
    without = '[sandbox]\nwithout = ["landlock"]\n'
    found = machine((), "doctor", "--json", configuration=without, filter=NO_LANDLOCK)
    assert found.code == 0
    assert found.checks["sandbox"]["detail"].startswith("bubblewrap without landlock: ")
    assert found.checks["sandbox landlock"]["state"] == "warning"
    ran = machine((), *BASH, configuration=without, filter=NO_LANDLOCK)
    assert ran.code == 0 and ran.out["metadata"]["sandbox"] == "runtime+bubblewrap without landlock"


@pytest.mark.proves("S-08")
def test_an_available_sandbox_layer_is_used_even_if_the_operator_opted_out(machine: OuterSandbox) -> None:
    without = '[sandbox]\nwithout = ["landlock", "seccomp"]\n'
    ran = machine((), *BASH, configuration=without)
    assert ran.code == 0 and ran.out["metadata"]["sandbox"] == "runtime+bubblewrap"


def test_the_namespaces_layer_cannot_be_omitted(machine: OuterSandbox) -> None:
    refused = machine((), "doctor", "--json", configuration='[sandbox]\nwithout = ["namespaces"]\n')
    assert refused.code == 5 and "'landlock' or 'seccomp'" in refused.checks["configuration"]["detail"]
