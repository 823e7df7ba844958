"""Loading only reads: it opens no connection and starts no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ExecutableFixture

LOADING = """
import sys
from importlib.metadata import EntryPoint
from handrail.contract.errors import LoadError
from handrail.contract.sandbox_protocol import SandboxProfile, SandboxTier
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import BuiltinSource
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.registry.sources.tool_folder_source import ToolFolderSource
from handrail.registry.sources.code_sources import ToolEntryPointsSource
from handrail.registry.sources.code_sources import PassedToolsSource

def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "urllib.", "ensurepip")):
        raise SystemExit(f"{event}: {arguments}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise SystemExit(f"writes {arguments[0]}")

class NoSandbox:
    tier = SandboxTier("bubblewrap", "as if")

def sources(*points):
    confinement = ToolConfinement(NoSandbox(), lambda runtime: SandboxProfile("/", "/"), lambda spec: (None, None))
    return [
        BuiltinSource(),
        ToolFolderSource(sys.argv[1], "global", confinement),
        PassedToolsSource(()),
        ToolEntryPointsSource(lambda: [EntryPoint(f"p{n}", value, "handrail.tools") for n, value in enumerate(points)]),
    ]

sys.dont_write_bytecode = True
sys.addaudithook(watch)
print(*load_generation(sources(), tier=NoSandbox.tier).entries)
try:
    load_generation(sources("handrail_is_not_there:tools", "requests_of_another_day:x"), tier=NoSandbox.tier)
except LoadError as error:
    print(error)
"""


@pytest.mark.proves("R-14", "R-01")
def test_loading_fetches_nothing_starts_no_process_and_writes_no_file(place: ExecutableFixture) -> None:
    place.put("ext", "#!/bin/sh\necho > started\n")
    place.put("srv", "#!/bin/sh\necho > started\n", persistent=True)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(place.tools)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=place.scratch,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    tools, head, *faults = done.stdout.splitlines()
    assert {"read", "bash", "ext", "srv"} <= set(tools.split())
    assert head == "2 faults:" and all("ModuleNotFoundError" in fault for fault in faults)
    assert list(Path(place.scratch).iterdir()) == []
