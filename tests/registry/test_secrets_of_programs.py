"""Secrets of programs: only the declared ones, on a descriptor, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.registry.conftest import ExecutableFixture, SimpleTool

from handrail.contract.errors import LoadError, ToolError
from handrail.contract.sandbox_protocol import CallConfinement, SandboxTier
from handrail.contract.tool_generation import ToolEntry
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import PassedToolsSource
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.registry.sources.tool_folder_source import ToolFolderSource
from handrail.runtime.secret_store import SecretStore
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("S-06")
VALUES = {"TOKEN": "hunter2-token", "OTHER": "hunter2-other"}
LOOK = """
def look():
    import glob, os
    fd = os.environ.get("HANDRAIL_SECRETS_FD")
    given = json.loads(os.read(int(fd), 100_000)) if fd else None
    seen = [str(dict(os.environ)), str(sys.argv)]
    for name in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        try:
            seen.append(open(name, "rb").read().decode("utf-8", "replace"))
        except OSError:
            pass
    return {"given": given, "elsewhere": any("hunter2" in text for text in seen), "looked": len(seen)}
"""
ONCE = f"#!/usr/bin/env python3\nimport json, sys\n{LOOK}\njson.load(sys.stdin)\nprint(json.dumps(look()))\n"
STAYS = (
    f"#!/usr/bin/env python3\nimport json, sys\n{LOOK}\nfound = look()\nfor line in sys.stdin:\n"
    "    print(json.dumps({'id': json.loads(line)['id'], 'result': found}), flush=True)\n"
)


def load(place: ExecutableFixture, store: SecretStore) -> dict[str, ToolEntry]:
    sandbox = tier_probe.choose_sandbox()
    if not sandbox.tier.is_confining:
        pytest.skip("this machine cannot confine programs")
    confinement = ToolConfinement(
        sandbox,
        lambda runtime: runtime.profile,  # type: ignore[attr-defined]
        lambda spec: (
            place.capabilities(spec),
            replace(place.profile(), secrets=store.get_secret_values_for_tool(spec)),
        ),
    )
    source = ToolFolderSource(place.tools, "global", confinement)
    return dict(load_generation([source], tier=sandbox.tier, secrets=store).entries)


async def called(place: ExecutableFixture, entry: ToolEntry, store: SecretStore) -> Any:
    runtime = place.runtime(entry.spec)
    runtime._environment.secrets = store  # pyright: ignore[reportPrivateUsage]
    try:
        return await entry.tool.execute({}, runtime)
    finally:
        await entry.tool.aclose()


@pytest.mark.parametrize("persistent", [False, True])
async def test_a_program_reads_its_declared_secrets_only_from_a_descriptor(
    place: ExecutableFixture, persistent: bool
) -> None:
    """Source: tokens in environments and argv, which every process of the user can read."""
    place.put("fetch", STAYS if persistent else ONCE, secrets=["TOKEN"], persistent=persistent)
    place.put("plain", STAYS if persistent else ONCE, persistent=persistent)
    store = SecretStore(VALUES)
    entries = load(place, store)
    found = await called(place, entries["fetch"], store)
    assert found["given"] == {"TOKEN": VALUES["TOKEN"]}
    assert found["elsewhere"] is False and found["looked"] > 2
    assert (await called(place, entries["plain"], store))["given"] is None


def test_a_tool_with_missing_secrets_is_withheld_with_the_reason_and_remedy(place: ExecutableFixture) -> None:
    place.put("fetch", ONCE, secrets=["TOKEN", "GONE", "BROKEN"])
    store = SecretStore(VALUES, {"BROKEN": "the variable X is not set; set it"})
    withheld = load(place, store)["fetch"].unavailable_reason
    assert withheld is not None and withheld.startswith("it needs configuration")
    assert "GONE (not set; add GONE = {" in withheld and "BROKEN (the variable X is not set" in withheld
    assert "TOKEN" not in withheld and "hunter2" not in withheld
    assert (
        load(place, store.with_added_secrets({"GONE": "hunter2-gone", "BROKEN": "hunter2-b"}))[
            "fetch"
        ].unavailable_reason
        is None
    )


@pytest.mark.proves("K-03")
@pytest.mark.parametrize("persistent", [False, True])
async def test_a_secret_setting_reaches_a_program_under_its_key_with_the_chosen_secret(
    place: ExecutableFixture, persistent: bool
) -> None:
    config = {"password": {"description": "Of the account.", "secret": True}}
    place.put("mail", STAYS if persistent else ONCE, secrets=["TOKEN"], config=config, persistent=persistent)
    withheld = load(place, SecretStore(VALUES))["mail"].unavailable_reason
    assert withheld is not None and 'add password = { secret = "…" } under [tools."mail".config]' in withheld
    gone = SecretStore(VALUES, settings={"mail": {"password": "GONE"}})
    assert "GONE (not set" in (load(place, gone)["mail"].unavailable_reason or "")
    store = SecretStore(VALUES).with_secret_settings({"mail": {"password": "OTHER", "no such": "TOKEN"}, "else": {}})
    found = await called(place, load(place, store)["mail"], store)
    assert found["given"] == {"TOKEN": VALUES["TOKEN"], "password": VALUES["OTHER"]}
    assert found["elsewhere"] is False


def test_a_missing_optional_secret_setting_does_not_withhold_a_tool(place: ExecutableFixture) -> None:
    config = {"password": {"description": "Of the account.", "secret": True, "required": False}}
    place.put("mail", ONCE, config=config)
    assert load(place, SecretStore(VALUES))["mail"].unavailable_reason is None


def test_a_client_process_tool_has_only_the_secrets_of_the_client_process() -> None:
    theirs = SimpleTool("theirs", secrets=("TOKEN",))
    theirs.own_secrets = frozenset({"OTHER"})
    mine = SimpleTool("mine", secrets=("TOKEN",))
    entries = load_generation(
        [PassedToolsSource((theirs, mine))], tier=SandboxTier("none", ""), secrets=SecretStore(VALUES)
    ).entries
    assert entries["mine"].unavailable_reason is None
    assert "TOKEN (the client process that registered the tool has no secret" in (
        entries["theirs"].unavailable_reason or ""
    )


def test_a_tool_in_this_process_reads_only_its_declared_secrets_by_name(place: ExecutableFixture) -> None:
    spec = SimpleTool("fetch", secrets=("TOKEN", "GONE")).spec
    runtime = place.runtime(spec)
    runtime._environment.secrets = SecretStore(VALUES)  # pyright: ignore[reportPrivateUsage]
    assert runtime.secrets.get("TOKEN") == VALUES["TOKEN"]
    for name, kind, why in (("OTHER", "denied", "did not declare"), ("GONE", "unavailable", "not set")):
        with pytest.raises(ToolError, match=why) as refused:
            runtime.secrets.get(name)
        assert refused.value.kind == kind
    assert dict(runtime.profile.secrets) == {"TOKEN": VALUES["TOKEN"]}
    runtime.read_only = True
    assert not runtime.profile.secrets
    with pytest.raises(ToolError, match="the call runs read-only"):
        runtime.secrets.get("TOKEN")
    assert not any("hunter2" in repr(shown) for shown in (runtime.secrets, runtime.profile, SecretStore(VALUES)))


def test_an_executable_of_a_read_only_or_confined_call_gets_its_narrow_sandbox(place: ExecutableFixture) -> None:
    runtime = place.runtime(SimpleTool("store", side_effect="write").spec)
    assert runtime.profile.workspace_writable and not runtime.profile.confined
    runtime.confinement = CallConfinement(changes_repository=False)
    assert runtime.profile.confined and runtime.profile.repositories_read_only
    runtime.read_only = True
    assert not runtime.profile.workspace_writable


async def test_a_program_started_by_the_shell_gets_no_secrets(place: ExecutableFixture) -> None:
    spec = SimpleTool(
        "fetch",
        secrets=("TOKEN",),
        requires=SimpleTool("x").spec.requires.model_validate(
            {"shell": [{"cmd": "sh"}], "fs": {"read": ["{workspace}"]}}
        ),
    ).spec
    if not tier_probe.choose_sandbox().tier.is_confining:
        pytest.skip("this machine cannot confine programs")
    runtime = place.runtime(spec)
    runtime._environment.secrets = SecretStore(VALUES)  # pyright: ignore[reportPrivateUsage]
    done = await runtime.shell.run(["sh", "-c", "env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'; ls -l /proc/self/fd/"])
    assert b"PATH=" in done.output and b"hunter2" not in done.output
    assert b"SECRETS_FD" not in done.output and b"handrail-secrets" not in done.output


def test_a_manifest_with_secrets_that_are_not_strings_is_refused(place: ExecutableFixture) -> None:
    place.put("fetch", ONCE, secrets=[1])
    with pytest.raises(LoadError, match="secrets"):
        load(place, SecretStore())
    assert json.dumps(VALUES)
