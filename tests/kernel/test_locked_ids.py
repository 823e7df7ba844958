"""A locked ID without a built-in tool is served by the tool that the operator names, in the fixed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD, JOINED, opened

from handrail import Kernel, LoadError, Runtime, tool
from handrail.contract.calls_and_results import Result
from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
from handrail.contract.tool.spec import ConfigKey
from handrail.contract.tool.tool_ids_and_wire_names import LOCKED_IDS
from handrail.testing import ThirdPartySource
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.tools import BUILTINS

HOSTS = {"net": {"hosts": ["*"]}}


@tool(
    id="acme.search",
    side_effect="read",
    locks=[],
    secrets=["ACME"],
    config={"market": ConfigKey("Of the search", default="ch"), "key": ConfigKey("Of it", secret=True)},
    requires={"capabilities": ["state"]},
)
async def search(query: str, runtime: Runtime, *, max_results: int = 10) -> dict[str, Any]:
    """Words of the tool itself."""
    count = int(await runtime.state.get("count") or 0) + 1
    await runtime.state.put("count", count)
    known = f"{len(runtime.secrets.get('ACME'))} {len(runtime.secrets.get('key'))}"
    found = [{"title": f"{query} {n}", "url": "https://example.org", "snippet": ""} for n in range(max_results)]
    return {"results": found, "tool": runtime.tool_id, "count": count, "known": known, **runtime.config}


@tool(id="acme.fetch", side_effect="read", locks=[], requires=HOSTS)
async def fetch(url: str) -> str:
    """Fetch it."""
    return f"text of {url} " + "x" * 300_000


TOOLS = (search, fetch)
SECRETS = {"ACME": "hunter2-of-acme", "OTHER": "hunter2-of-key"}
SETTINGS = """
[secrets]
ACME = { env = "TEST_ACME_TOKEN" }
OTHER = { env = "TEST_OTHER_TOKEN" }
[tools.web_search]
answered_by = "acme.search"
[tools.web_fetch]
answered_by = "acme.fetch"
[tools."acme.search".config]
market = "at"
key = { secret = "OTHER" }
"""


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("TEST_ACME_TOKEN", SECRETS["ACME"])
    monkeypatch.setenv("TEST_OTHER_TOKEN", SECRETS["OTHER"])


async def call(kernel: Kernel, tool_id: str, arguments: dict[str, Any]) -> Result:
    return await (await kernel.session()).call(tool_id, arguments)


@pytest.mark.proves("T-01b")
async def test_a_tool_behind_a_locked_id_keeps_its_settings_and_takes_the_fixed_schema(tmp_path: Path) -> None:
    rules = ["allow web_search", "allow web_fetch"]
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS, rules=rules) as kernel:
        view = kernel.generation.entries["web_search"].spec.build_llm_view()
        assert view["parameters"] == LOCKED_SHAPES["web_search"].parameters and "itself" not in view["description"]
        assert list(view["parameters"]["properties"]) == ["query", "max_results"]
        session = await kernel.session()
        found = await session.call("web_search", {"query": "bern", "max_results": 2})
        assert found.ok, found
        assert [one["title"] for one in found.data["results"]] == ["bern 0", "bern 1"]
        assert {name: found.data[name] for name in ("tool", "market", "count")} == {
            "tool": "acme.search",
            "market": "at",
            "count": 1,
        }
        assert found.data["known"] == f"{len(SECRETS['ACME'])} {len(SECRETS['OTHER'])}"
        again = await session.call("web_search", {"query": "bern", "max_results": 1})
        assert again.data["count"] == 2
        wrong = await session.call("web_search", {"query": "bern", "max_results": 2, "market": "de"})
        assert wrong.error_kind == "invalid_input" and "market" in (wrong.error_text or "")


@pytest.mark.proves("T-01b", "P-02")
async def test_rules_name_the_locked_id_and_a_deny_of_the_answering_tool_still_holds(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS, rules=["allow acme.search"]) as kernel:
        assert (await call(kernel, "web_search", {"query": "bern"})).error_kind == "denied"
    rules = ["allow web_search", "deny acme.search"]
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS, rules=rules) as kernel:
        refused = await call(kernel, "web_search", {"query": "bern"})
        assert refused.error_kind == "denied" and "acme.search" in (refused.error_text or "")
        assert (await kernel.explain_call("web_search", {"query": "bern"})).action == "deny"
    rules = ["allow web_fetch example.org", "deny web_fetch evil.example"]
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS, rules=rules) as kernel:
        assert (await call(kernel, "web_fetch", {"url": "https://example.org/a"})).ok
        assert (await call(kernel, "web_fetch", {"url": "https://evil.example/a"})).error_kind == "denied"
        assert (await call(kernel, "web_fetch", {"url": "https://other.example/a"})).error_kind == "denied"


@pytest.mark.proves("T-01b", "A-01")
async def test_the_log_names_the_locked_id_and_the_tool_that_answered(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS, rules=["allow web_search"]) as kernel:
        await call(kernel, "web_search", {"query": "bern"})
        await kernel.log.flush()
        (proposed,) = [one.body or {} for one in kernel.log.reader.records() if one.kind == "proposed"]
        assert (proposed["tool"], proposed["answered_by"]) == ("web_search", "acme.search")


@pytest.mark.proves("T-01b", "O-01")
async def test_a_locked_id_has_its_own_limits(tmp_path: Path) -> None:
    more = "[tools.web_search]\nanswered_by = 'acme.search'\nmax_entries = 3\n"
    settings = SETTINGS.replace('[tools.web_search]\nanswered_by = "acme.search"\n', more)
    rules = ["allow web_search", "allow web_fetch", "allow net.fetch *"]
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=settings, rules=rules) as kernel:
        page = await call(kernel, "web_fetch", {"url": "https://example.org/"})
        assert page.metadata["truncated"] is True and 190_000 < len(page.data["head"] + page.data["tail"]) <= 200 * 1024
        assert len((await call(kernel, "web_search", {"query": "bern"})).data["head"]) == 3


@pytest.mark.proves("T-01b")
async def test_a_connected_process_resolves_a_locked_id_to_its_own_tool(tmp_path: Path) -> None:
    for door in (HELD, JOINED):
        folder = tmp_path / door
        folder.mkdir()
        async with opened(door, folder, tools=[fetch], settings=SETTINGS, rules=["allow web_fetch"]) as kernel:
            entry = kernel.generation.entries["web_fetch"]
            assert (entry.unavailable_reason, entry.status) == (None, "connected")
            assert entry.answered_by is not None and entry.answered_by.id == "acme.fetch"
            assert (await call(kernel, "web_fetch", {"url": "https://example.org/"})).ok
            missing = kernel.generation.entries["web_search"]
            assert missing.status == "error" and "does not exist" in (missing.unavailable_reason or "")


@tool(id="odd.search", side_effect="read", locks=[])
def odd(query: str, *, count: int = 5) -> str:
    """Search."""
    return query


@tool(id="odd.needs", side_effect="read", locks=[])
def needs(query: str, market: str, *, max_results: int = 5) -> str:
    """Search."""
    return query


@tool(id="odd.local", side_effect="read", locks=[])
def local(url: str) -> str:
    """Fetch."""
    return url


@tool(id="odd.later", side_effect="read", locks=[], mode="background")
def later(query: str, *, max_results: int = 5) -> str:
    """Search."""
    return query


ODD = (odd, needs, local, later)


@pytest.mark.proves("T-01b", "R-04")
@pytest.mark.parametrize(
    ("locked", "by", "problem"),
    [
        ("web_search", "odd.search", "the parameter max_results is missing; web_search requires query, max_results"),
        ("web_search", "odd.needs", "rejects the arguments {'query': 'weather in Bern'} of web_search: `market`"),
        ("web_search", "odd.later", "its mode is 'background'"),
        ("web_fetch", "odd.local", "it declares no hosts"),
        ("web_fetch", "bash", "is a locked id itself"),
        ("web_search", "not an id", "is not an id"),
        ("read", "odd.local", "only web_search and web_fetch can have another tool that answers"),
        ("tool_search", "odd.search", "only web_search and web_fetch can have another tool that answers"),
        ("acme.search", "odd.search", "only web_search and web_fetch can have another tool that answers"),
    ],
)
async def test_a_tool_that_cannot_answer_for_a_locked_id_stops_the_start(
    tmp_path: Path, locked: str, by: str, problem: str
) -> None:
    with pytest.raises(LoadError) as refused:
        async with temporary_kernel(tmp_path, tools=ODD, settings=f'[tools."{locked}"]\nanswered_by = "{by}"\n'):
            pass
    (fault,) = refused.value.diagnostics
    assert fault.source == f"{tmp_path}/config/handrail.toml:2" and problem in fault.problem


@pytest.mark.proves("T-01b", "R-07")
async def test_a_third_party_tool_answers_for_a_locked_id_only_after_its_approval(
    tmp_path: Path,
) -> None:
    from handrail.contract.sandbox_protocol import SandboxTier
    from handrail.contract.tool.operator_tool_settings import ToolSettings, ToolSettingsLayer
    from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition
    from handrail.registry.generation_loader import load_generation

    pins, source = StoredPins(tmp_path / "state"), ThirdPartySource("s", [later, search])
    tier = SandboxTier("bubblewrap", "as if")

    def status(by: str) -> tuple[str, str]:
        layer = ToolSettingsLayer("handrail.toml:1", {"web_search": ToolSettings(answered_by=by)})
        entry = load_generation([source], tier=tier, pins=pins, settings=[layer]).entries["web_search"]
        return entry.status, entry.unavailable_reason or ""

    assert status("acme.search")[0] == "quarantined" and "handrail sources review s" in status("acme.search")[1]
    pins.approve("s", [ThirdPartyDefinition.from_spec(search.spec), ThirdPartyDefinition.from_spec(later.spec)])
    found, reason = status("acme.search")
    assert found == "available" and "answers for it and is unavailable" in reason and "ACME" in reason
    assert status("odd.later")[0] == "error" and "mode is 'background'" in status("odd.later")[1]
    assert (
        status("acme.serch") == ("error", status("acme.serch")[1])
        and "did you mean acme.search?" in status("acme.serch")[1]
    )


@pytest.mark.proves("T-01b", "R-04")
async def test_a_workspace_file_or_a_tool_cannot_claim_a_locked_id(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "handrail.toml").write_text('[tools.web_fetch]\nanswered_by = "acme.fetch"\n')
    with pytest.raises(LoadError, match="cannot set up tools"):
        async with temporary_kernel(tmp_path, tools=TOOLS):
            pass

    @tool(id="web_fetch", side_effect="read", locks=[], requires=HOSTS)
    def own(url: str) -> str:
        """Fetch."""
        return url

    with pytest.raises(LoadError, match="is a locked id"):
        async with temporary_kernel(tmp_path / "other", tools=[own]):
            pass


@pytest.mark.proves("T-01b")
async def test_a_different_tool_behind_a_locked_id_changes_the_definition_hash(tmp_path: Path) -> None:
    @tool(id="other.fetch", side_effect="read", locks=[], requires=HOSTS)
    def other(url: str) -> str:
        """Fetch it otherwise."""
        return url

    hashes: set[str] = set()
    for by, more in (("acme.fetch", ""), ("acme.fetch", "max_output = 5000\ntimeout_ms = 900\n"), ("other.fetch", "")):
        settings = f'[tools.web_fetch]\nanswered_by = "{by}"\n{more}'
        async with temporary_kernel(tmp_path, tools=[fetch, other], settings=settings) as kernel:
            hashes.add(kernel.generation.entries["web_fetch"].definition_hash)
    assert len(hashes) == 2


def test_every_locked_id_has_a_built_in_tool_or_a_shape() -> None:
    built = {one.spec.id for one in BUILTINS}
    assert set(LOCKED_IDS) == {tool_id for tool_id in LOCKED_IDS if tool_id in built} | set(LOCKED_SHAPES)
    for one in BUILTINS:
        if (shape := LOCKED_SHAPES.get(one.spec.id)) is not None:
            assert (one.spec.description, one.spec.parameters) == (shape.description, shape.parameters)


@tool(id="near.fetch", side_effect="read", locks=[], requires={"net": {"hosts": ["example.org"]}})
def near(url: str) -> str:
    """Fetch it."""
    return f"text of {url}"


@pytest.mark.proves("T-01b", "K-10")
async def test_an_agent_grants_hosts_to_a_tool_by_its_locked_id(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "agents" / "far"
    folder.mkdir(parents=True)
    manifest = 'id = "far"\ntools = ["web_fetch"]\n[requires.tools.web_fetch.net]\nhosts = ["other.example"]\n'
    (folder / "agent.toml").write_text(manifest)
    settings = '[tools.web_fetch]\nanswered_by = "near.fetch"\n'
    async with temporary_kernel(tmp_path, tools=[near], settings=settings, rules=["allow web_fetch"]) as kernel:
        far = await kernel.session(agent="far")
        for url, ok in (
            ("https://example.org/", True),
            ("https://other.example/", True),
            ("https://third.example/", False),
        ):
            assert (await far.call("web_fetch", {"url": url})).ok is ok
        assert not (await call(kernel, "web_fetch", {"url": "https://other.example/"})).ok
        assert (await call(kernel, "web_fetch", {"url": "https://example.org/"})).ok
