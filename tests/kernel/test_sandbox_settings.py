"""The sandbox settings apply in the whole kernel, and every exception is visible."""

from __future__ import annotations

import asyncio
import json
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_configured import put_tool

from handrail import LoadError, Result, StartError
from handrail.config import load_configuration
from handrail.contract.sandbox_protocol import Sandbox
from handrail.contract.tool_generation import UNCONFINED
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.sandbox_selection import (
    ENTRY_POINT_GROUP,
    choose_unlimited_sandbox,
    make_limited_sandbox,
    make_limited_sandbox_in_thread,
)
from handrail.record.log_reader import LogReader
from handrail.sandbox import tier_probe
from handrail.sandbox.configured_sandbox import UnconfinedSandbox
from handrail.testing.scripted_kernel import temporary_kernel

confined = pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="this machine cannot confine programs")
SPACE = {"command": "readlink /proc/self/ns/net"}


async def call_in_new_session(kernel: LocalKernel, tool: str, arguments: dict[str, Any]) -> Result:
    return await (await kernel.session()).call(tool, arguments)


@confined
@pytest.mark.proves("S-04")
async def test_operator_limits_apply_and_a_call_that_reaches_one_names_it(tmp_path: Path) -> None:
    settings = "[sandbox]\ncpu_s = 1\nfile_mib = 1\nopen_files = 50\n"
    put_tool(tmp_path / "config" / "tools", "spins")
    (tmp_path / "config" / "tools" / "spins").write_text("#!/bin/sh\nwhile :; do :; done\n")
    writes = "dd if=/dev/zero of=big bs=1M count=3"
    async with temporary_kernel(tmp_path, rules=["allow *", f"allow bash {writes}"], settings=settings) as kernel:
        shown = await call_in_new_session(kernel, "bash", {"command": "ulimit -n"})
        assert shown.data["output"] == "50\n"
        written = await call_in_new_session(kernel, "bash", {"command": writes})
        assert written.ok and "sandbox.file_mib" in written.data["limit"], written
        alone = await call_in_new_session(kernel, "spins", {})
        assert alone.error_kind == "limit" and alone.error_text is not None and "sandbox.cpu_s" in alone.error_text


@confined
@pytest.mark.proves("S-08")
async def test_results_and_log_mark_a_tool_that_runs_without_a_sandbox(tmp_path: Path) -> None:
    here = str(Path("/proc/self/ns/net").readlink())
    put_tool(tmp_path / "config" / "tools", "free")
    (tmp_path / "config" / "tools" / "free").write_text(
        '#!/bin/sh\nprintf \'{"space": "%s"}\' $(readlink /proc/self/ns/net)\n'
    )
    settings = '[sandbox]\nunconfined = ["free"]\n'
    async with temporary_kernel(tmp_path, rules=["allow *"], settings=settings) as kernel:
        free, bash = await call_in_new_session(kernel, "free", {}), await call_in_new_session(kernel, "bash", SPACE)
        assert free.data == {"space": here} and free.metadata["sandbox"] == UNCONFINED
        assert bash.data["output"].strip() != here and bash.metadata["sandbox"].endswith("bubblewrap")
        state = Path(kernel.state_folder)
    with LogReader.open_database(state / "handrail.db") as log:
        records = list(log.records())
    (generation,) = [one for one in records if one.kind == "generation"]
    assert generation.body is not None and generation.body["tools"]["free"]["sandbox"] == UNCONFINED
    committed = [json.dumps(one.body) for one in records if one.kind == "committed"]
    assert sum(UNCONFINED in body for body in committed) == 1


@pytest.mark.proves("S-08")
async def test_only_tools_listed_as_unconfined_run_when_no_sandbox_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_probe, "find_bubblewrap_programs", lambda: iter(()))
    tier_probe.choose_sandbox.cache_clear()
    try:
        for name in ("free", "other"):
            put_tool(tmp_path / "config" / "tools", name)
        settings = '[sandbox]\nunconfined = ["free"]\n'
        async with temporary_kernel(tmp_path, rules=["allow *"], settings=settings) as kernel:
            free = await call_in_new_session(kernel, "free", {})
            assert free.ok and free.metadata["sandbox"] == UNCONFINED
            for tool, arguments in (("other", {}), ("bash", SPACE)):
                refused = await call_in_new_session(kernel, tool, arguments)
                assert refused.error_kind == "unavailable"
                assert refused.error_text is not None and "apt install bubblewrap" in refused.error_text
    finally:
        monkeypatch.undo()
        tier_probe.choose_sandbox.cache_clear()


def offered(name: str, value: str) -> list[metadata.EntryPoint]:
    return [metadata.EntryPoint(name, value, ENTRY_POINT_GROUP)]


def configured(folder: Path, provider: str) -> Any:
    (folder / "handrail.toml").write_text(f'[sandbox]\nprovider = "{provider}"\ntmp_mib = 3\n')
    return load_configuration(folder / "handrail.toml", environment={})


@pytest.mark.proves("R-09")
def test_an_operator_selects_a_sandbox_of_an_installed_package_by_name(tmp_path: Path) -> None:
    points = offered("box", "handrail.sandbox.configured_sandbox:UnconfinedSandbox")
    chosen = make_limited_sandbox(configured(tmp_path, "box"), lambda: points)
    assert chosen.tier.name == UnconfinedSandbox().tier.name
    assert isinstance(choose_unlimited_sandbox(configured(tmp_path, "box"), lambda: points), UnconfinedSandbox)


@pytest.mark.proves("R-09")
@pytest.mark.parametrize(
    ("provider", "value", "wanted"),
    [
        (
            "bix",
            "handrail.sandbox.configured_sandbox:UnconfinedSandbox",
            r"Unknown sandbox provider: 'bix'.*to one of: machine, box",
        ),
        ("box", "handrail.no_such_module:Box", "ModuleNotFoundError"),
        ("box", "builtins:dict", "AttributeError"),
        ("box", "tests.kernel.test_sandbox_settings:UnstartableSandbox", "Expected an object with `tier` and `start`"),
    ],
)
def test_an_invalid_sandbox_stops_the_start_with_a_clear_error(
    tmp_path: Path, provider: str, value: str, wanted: str
) -> None:
    with pytest.raises(StartError, match=wanted):
        make_limited_sandbox(configured(tmp_path, provider), lambda: offered("box", value))


tried_in_loop = threading.Event()


def provide_after_the_loop_has_run() -> UnconfinedSandbox:
    assert tried_in_loop.wait(60), "the event loop stood still"
    return UnconfinedSandbox()


async def test_the_event_loop_keeps_running_while_a_sandbox_is_probed(tmp_path: Path) -> None:
    points = offered("box", "tests.kernel.test_sandbox_settings:provide_after_the_loop_has_run")
    asyncio.get_running_loop().call_soon(tried_in_loop.set)
    chosen = await make_limited_sandbox_in_thread(configured(tmp_path, "box"), lambda: points)
    assert chosen.tier.name == UnconfinedSandbox().tier.name
    with pytest.raises(StartError, match="Unknown sandbox provider"):
        await make_limited_sandbox_in_thread(configured(tmp_path, "bix"), lambda: points)


class UnstartableSandbox:
    """Has a tier and cannot start anything."""

    tier: Any = "strong"


def test_the_sandbox_of_this_machine_is_the_default(tmp_path: Path) -> None:
    found: Sandbox = choose_unlimited_sandbox(configured(tmp_path, "machine"))
    assert found is tier_probe.choose_sandbox(frozenset[str]())


@pytest.mark.proves("S-09")
async def test_an_unconfined_command_requires_a_rule_or_approval_in_every_mode(tmp_path: Path) -> None:
    """Programs that a repository configures for git would run unconfined without a request."""
    settings = '[sandbox]\nunconfined = ["bash"]\n'
    async with temporary_kernel(tmp_path, settings=settings) as kernel:
        for mode in ("plan", "accept-edits"):
            session = await kernel.session(mode=mode)
            assert (await session.call("bash", {"command": "git status"})).error_kind == "denied"
        allowed = await kernel.session(rules=["allow bash git status"])
        done = await allowed.call("bash", {"command": "git status"})
        assert done.ok and "read_only" not in done.metadata, "it says so only where it is held to it"
    with pytest.raises(LoadError, match="run without a sandbox"):
        async with temporary_kernel(tmp_path, settings=settings, rules=["allow bash {read-only}"]):
            pass
