"""Sessions can do what their agent manifest says, whatever rules, flags and answers say."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD, JOINED, Opens
from tests.kernel.doors import opened as opened_by
from tests.kernel.test_configured import put_tool

from handrail import Kernel, LoadError, UsageError, tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.policy.watchdogs.api import WatchdogCall, WatchdogDecision, allow
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import ScriptedApprovalHandler

confined = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)


ONLINE = ("git.clone", "git.push", "git.pr", "web_search", "web_fetch", "http.post")
"""The built-in tools that may ask for any public host."""


@tool(id="notes.add", side_effect="read", locks=[])
def add(text: str) -> str:
    """Add a note."""
    return text


@tool(id="mail.send", side_effect="external", locks=[])
def send(to: str) -> str:
    """Send a mail."""
    return to


def put_agent(folder: Path, name: str, text: str) -> Path:
    file = folder / "config" / "agents" / name / "agent.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    for made in (file.parent, file.parent.parent):
        made.chmod(0o755)
    file.write_text(f'id = "{name}"\n{text}')
    file.chmod(0o644)
    return file


def opening(door: str) -> Opens:
    def opened(
        folder: Path, agent: str | None = None, settings: str = "", **options: Any
    ) -> AbstractAsyncContextManager[Kernel]:
        given: dict[str, Any] = {"tools": [add, send], **options}
        return opened_by(door, folder, settings=settings, agent=agent, **given)

    return opened


held_only = opening(HELD)


@pytest.fixture(params=[HELD, JOINED])
def opened(request: pytest.FixtureRequest) -> Opens:
    """A kernel of an agent, behind either door."""
    return opening(request.param)


@pytest.mark.proves("K-13", "P-03")
async def test_a_manifest_deny_overrides_rules_of_every_other_scope_and_user_answers(
    tmp_path: Path,
    opened: Opens,
) -> None:
    put_agent(tmp_path, "reviewer", 'rules = ["deny fs.write final/**", "allow write drafts/**"]')
    person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("session")])
    project = 'rules = ["allow write final/a.md", "allow fs.write final/a.md"]'
    async with opened(tmp_path, "reviewer", project, rules=["allow write final/a.md"]) as kernel:
        session = await kernel.session(approval_handler=person, rules=["allow fs.write final/a.md"])
        session.add_rules("allow write final/a.md", "allow fs.write final/a.md")
        assert (await session.call("write", {"path": "drafts/a.md", "content": "x"})).ok
        refused = await session.call("write", {"path": "final/a.md", "content": "x"})
        assert refused.error_kind == "denied"
        assert "manifest scope" in (refused.error_text or "")
        assert not (tmp_path / "ws" / "final").exists()
        assert person.requests == []
        explained = await kernel.explain_call("write", {"path": "final/a.md", "content": "x"}, rules=["allow write"])
        assert explained.action == "deny"
        assert "reviewer/agent.toml" in str(explained)


@pytest.mark.proves("K-13")
async def test_a_tool_outside_the_agents_manifest_is_unknown_under_every_name(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "reviewer", 'tools = ["read", "notes.*"]')
    async with opened(tmp_path, "reviewer", rules=["allow *", "deny mail.send to=eve"]) as kernel:
        session = await kernel.session()
        assert [spec.id for spec in session.start_turn().tool_specs] == ["read", "notes.add"]
        assert (await session.call("notes.add", {"text": "x"})).ok
        for name in ("mail.send", "mail__send", "bash", "write"):
            refused = await session.call(name, {"to": "ann"})
            assert refused.error_kind == "unknown_tool", name
            assert "write" not in (refused.error_text or "").replace(f"`{name}`", "")


@pytest.mark.proves("K-13")
async def test_an_alias_follows_the_rules_of_its_tool_and_logs_the_tool_id(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "reviewer", '[aliases]\n"choir.mail" = "mail.send"')
    async with opened(tmp_path, "reviewer", rules=["allow mail.send to=ann"]) as kernel:
        session = await kernel.session()
        assert (await session.call("choir.mail", {"to": "ann"})).data == "ann"
        refused = await session.call("choir.mail", {"to": "eve"})
        assert refused.error_kind == "denied"
        await kernel.log.flush()
        logged = [record for record in kernel.log.reader.records() if record.call_id]
        assert {record.body["tool"] for record in logged if record.body and "tool" in record.body} == {"mail.send"}


@pytest.mark.proves("K-13", "R-04")
async def test_tools_in_an_agents_folder_belong_to_that_agent_only(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "reviewer", "")
    put_agent(tmp_path, "other", "")
    put_tool(tmp_path / "config" / "agents" / "reviewer" / "tools", "own")
    async with opened(tmp_path, "reviewer") as kernel:
        assert "own" in kernel.generation.entries
        other = await kernel.session(agent="other")
        assert "own" not in [spec.id for spec in other.start_turn().tool_specs]
        assert (await other.call("own", {})).error_kind == "unknown_tool"


@pytest.mark.proves("K-13")
async def test_sessions_of_several_agents_coexist_with_their_own_tools_and_rules(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "writer", 'rules = ["allow write"]')
    put_agent(tmp_path, "reader", 'tools = ["read"]')
    async with opened(tmp_path) as kernel:
        assert kernel.default_agent.id == "default"
        sessions = {name: await kernel.session(agent=name) for name in ("writer", "reader", "default")}
        results = {name: await one.call("write", {"path": "a", "content": "x"}) for name, one in sessions.items()}
        assert {name: result.error_kind for name, result in results.items()} == {
            "writer": None,
            "reader": "unknown_tool",
            "default": "denied",
        }
        await kernel.log.flush()
        bodies = [record.body or {} for record in kernel.log.reader.records() if record.kind == "session-opened"]
        assert [body["agent"] for body in bodies] == ["writer", "reader", "default"]


@pytest.mark.proves("K-13")
async def test_an_unknown_agent_error_lists_the_existing_agents(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "reviewer", "")
    with pytest.raises(
        UsageError, match=r"'reviewr' does not exist. Did you mean 'reviewer'\? Agents: default, reviewer"
    ):
        async with opened(tmp_path, "reviewr"):
            pass
    async with opened(tmp_path) as kernel:
        with pytest.raises(UsageError, match="'nobody' does not exist"):
            await kernel.session(agent="nobody")
        assert (await (await kernel.session()).call("glob", {"pattern": "*"})).ok


@pytest.mark.proves("K-13")
async def test_a_faulty_agent_is_refused_with_all_its_faults_and_other_agents_work(
    tmp_path: Path, opened: Opens
) -> None:
    put_agent(tmp_path, "broken", 'tools = ["raed"]\npromt = 1\nrules = ["deny bahs"]\nroots = [{path = "~"}]\n')
    (tmp_path / "config" / "tools").mkdir(parents=True)
    with pytest.raises(LoadError) as caught:
        async with opened(tmp_path, "broken"):
            pass
    assert [fault.location for fault in caught.value.diagnostics] == ["promt", "roots[0].path", "tools[0]", "rules[0]"]
    assert all(fault.source.endswith("broken/agent.toml") for fault in caught.value.diagnostics)
    async with opened(tmp_path) as kernel:
        with pytest.raises(LoadError):
            await kernel.session(agent="broken")
        assert (await (await kernel.session()).call("glob", {"pattern": "*"})).ok


async def test_a_rule_for_all_agents_may_name_a_tool_that_one_agent_lacks(tmp_path: Path) -> None:
    put_agent(tmp_path, "reviewer", 'tools = ["read"]')
    async with held_only(tmp_path, "reviewer", 'rules = ["deny mail.send", "deny bash rm *"]') as kernel:
        assert len(kernel.generation) == 1
    with pytest.raises(LoadError, match="not a tool or a capability"):
        async with held_only(tmp_path, "reviewer", 'rules = ["deny mail.sned"]'):
            pass


async def test_the_configured_agent_is_used_when_the_program_names_none(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "reviewer", "")
    async with opened(tmp_path, None, 'agent = "reviewer"') as kernel:
        assert kernel.default_agent.id == "reviewer"
    async with opened(tmp_path, "default", 'agent = "reviewer"') as kernel:
        assert kernel.default_agent.id == "default"


async def test_watchdogs_see_the_manifest_as_data(tmp_path: Path) -> None:
    put_agent(tmp_path, "reviewer", 'description = "Reads."\ntools = ["notes.*"]')
    seen: list[dict[str, object]] = []

    def watchdog(call: WatchdogCall) -> WatchdogDecision:
        seen.append(dict(call.agent))
        return allow()

    external = tmp_path / "watchdog.py"
    external.write_text(
        "import json, sys\ncall = json.load(sys.stdin)\n"
        "ok = call['agent']['id'] == 'reviewer' and call['agent']['tools'] == ['notes.*']\n"
        "print(json.dumps({'decision': 'allow' if ok else 'deny', 'reason': str(call['agent'])}))\n"
    )
    settings = f"[[watchdogs]]\ncommand = {json.dumps([sys.executable, str(external)])}\ntimeout_ms = 60000\n"
    async with held_only(tmp_path, "reviewer", settings, rules=["allow notes.add"], watchdogs=[watchdog]) as kernel:
        result = await (await kernel.session()).call("notes.add", {"text": "x"})
        assert result.ok, result.error_text
    assert [(one["id"], one["description"]) for one in seen] == [("reviewer", "Reads.")]


@pytest.mark.proves("K-10")
@confined
async def test_hosts_for_bash_apply_only_in_the_agent_that_requires_them(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "builder", '[requires.tools.bash.net]\nhosts = ["pypi.org"]')
    async with opened(tmp_path, "builder") as kernel:
        entries = kernel.generation.entries
        assert entries["bash"].spec.requires.net.hosts == ("pypi.org",)
        assert entries["bash"].unavailable_reason is None
        online = {tool_id for tool_id, entry in entries.items() if entry.spec.requires.net.hosts}
        assert online == {"bash", *ONLINE}
        ordinary = await kernel.session(agent="default", rules=["allow bash echo fine"])
        assert (await ordinary.call("bash", {"command": "echo fine"})).ok


@pytest.mark.proves("K-10")
async def test_the_requirements_of_an_agent_extend_its_capability_set_and_not_its_tools(tmp_path: Path) -> None:
    put_agent(tmp_path, "builder", '[requires]\nnet.hosts = ["pypi.org"]\ncapabilities = ["ask"]')
    put_agent(tmp_path, "narrow", 'tools = ["read"]')
    async with held_only(tmp_path, "builder") as kernel:
        assert isinstance(kernel, LocalKernel)
        wide = kernel.own_context.authority.agent_layer
        narrow = kernel.components.create_agent_environment("narrow").authority.agent_layer
        assert (wide.hosts, narrow.hosts) == (("pypi.org", "*"), ())
        assert not narrow.fs_write and not narrow.shell
        for tool_id, entry in kernel.generation.entries.items():
            assert entry.spec.requires.net.hosts == (("*",) if tool_id in ONLINE else ())


# ── roots ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One to read and one to write, each with a file, as roots of the agent ``builder``."""
    made = (tmp_path.resolve() / "specs", tmp_path.resolve() / "notes")
    for folder in made:
        folder.mkdir()
        (folder / "a.txt").write_text(f"{folder.name}\n")
        (folder / ".env").write_text("KEY=1\n")
    roots = f'[[roots]]\npath = "{made[0]}"\n[[roots]]\npath = "{made[1]}"\naccess = "write"\n'
    put_agent(tmp_path, "builder", f'rules = ["allow fs.write {made[1]}/**", "allow bash"]\n{roots}')
    return made


async def test_file_tools_reach_the_declared_roots_of_their_agent_only(
    tmp_path: Path, opened: Opens, folders: tuple[Path, Path]
) -> None:
    specs, notes = folders
    async with opened(tmp_path, "builder") as kernel:
        session = await kernel.session()
        for folder in folders:
            assert (await session.call("read", {"path": str(folder / "a.txt")})).ok
            assert (await session.call("read", {"path": str(folder / ".env")})).error_kind == "denied"
        assert (await session.call("write", {"path": str(notes / "new.txt"), "content": "x"})).ok
        refused = await session.call("write", {"path": str(specs / "new.txt"), "content": "x"})
        assert refused.error_kind == "denied"
        assert (notes / "new.txt").read_text() == "x"
        assert not (specs / "new.txt").exists()
        found = await session.call("glob", {"pattern": "*.txt", "path": str(specs)})
        assert found.ok, found.error_text
        other = await kernel.session(agent="default", rules=["allow *", "allow fs.*"])
        for folder in folders:
            assert (await other.call("read", {"path": str(folder / "a.txt")})).error_kind == "denied"
            assert (await other.call("write", {"path": str(folder / "b"), "content": "x"})).error_kind == "denied"


@confined
async def test_sandboxes_include_the_declared_roots_of_their_agent_only(
    tmp_path: Path, opened: Opens, folders: tuple[Path, Path]
) -> None:
    specs, notes = folders
    command = f"cat {specs}/a.txt {notes}/a.txt; touch {notes}/made && echo made; touch {specs}/made || echo refused"
    async with opened(tmp_path, "builder", rules=["allow fs.*"]) as kernel:
        session = await kernel.session()
        result = await session.call("bash", {"command": command})
        text = json.dumps(result.data)
        assert all(word in text for word in ("specs", "notes", "made", "refused")), text
        assert (notes / "made").exists() and not (specs / "made").exists()
        other = await kernel.session(agent="default", rules=["allow bash", "allow fs.*"])
        unseen = await other.call("bash", {"command": f"ls {notes}"})
        assert "a.txt" not in json.dumps(unseen.data)


async def test_the_configured_ceiling_also_bounds_the_roots_of_an_agent(
    tmp_path: Path, opened: Opens, folders: tuple[Path, Path]
) -> None:
    ceiling = '[ceiling]\nfs = { read = ["{workspace}"], write = ["{workspace}"] }\n'
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a").write_text("x")
    async with opened(tmp_path, "builder", ceiling) as kernel:
        session = await kernel.session()
        assert (await session.call("read", {"path": "a"})).ok
        refused = await session.call("read", {"path": str(folders[0] / "a.txt")})
        assert refused.error_kind == "denied"
        assert "ceiling" in (refused.error_text or "")


async def test_a_changed_manifest_takes_effect_at_the_next_start(tmp_path: Path, opened: Opens) -> None:
    put_agent(tmp_path, "reviewer", 'tools = ["read"]')
    async with opened(tmp_path, "reviewer", tools=[]) as kernel:
        put_agent(tmp_path, "reviewer", 'tools = ["read", "glob"]')
        before = await kernel.session()
        assert [spec.id for spec in before.start_turn().tool_specs] == ["read"]
    async with opened(tmp_path, "reviewer", tools=[]) as kernel:
        assert list(kernel.generation.entries) == ["read", "glob"]


# ── joined ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("K-13")
async def test_a_joined_process_works_as_the_agent_it_names(tmp_path: Path) -> None:
    put_agent(tmp_path, "reviewer", 'prompt = "Review."\ntools = ["read", "write"]\nrules = ["deny write final/**"]')
    put_agent(tmp_path, "noter", 'tools = ["notes.add"]\naliases = { note = "notes.add" }')
    async with held_only(tmp_path), held_only(tmp_path, "reviewer", rules=["allow write", "allow notes.add"]) as joined:
        assert isinstance(joined, RemoteKernel)
        assert (joined.default_agent.id, joined.default_agent.prompt) == ("reviewer", "Review.")
        assert list(joined.generation.entries) == ["read", "write"]
        session = await joined.session(rules=["allow write final/a"])
        assert (await session.call("write", {"path": "a", "content": "x"})).ok
        assert (await session.call("write", {"path": "final/a", "content": "x"})).error_kind == "denied"
        assert (await session.call("bash", {"command": "ls"})).error_kind == "unknown_tool"
        explained = await joined.explain_call(
            "write", {"path": "final/a", "content": "x"}, rules=["allow write final/a"]
        )
        assert explained.action == "deny"

        noter = await joined.session(agent="noter")
        assert [spec.id for spec in noter.start_turn().tool_specs] == ["notes.add"]
        assert (await noter.call("note", {"text": "x"})).data == "x"
        assert (await noter.call("write", {"path": "b", "content": "x"})).error_kind == "unknown_tool"
        assert (await session.call("write", {"path": "b", "content": "x"})).ok
        with pytest.raises(UsageError, match="belongs to agent 'noter'"):
            await noter.suspend()
            await joined.session(noter.id)


@pytest.mark.proves("K-13")
async def test_joining_as_an_unknown_or_faulty_agent_fails_and_the_holder_keeps_working(tmp_path: Path) -> None:
    put_agent(tmp_path, "broken", "promt = 1")
    async with held_only(tmp_path) as held:
        with pytest.raises(UsageError, match=r"Did you mean 'broken'\? Agents: default, broken"):
            async with held_only(tmp_path, "brokn"):
                pass
        with pytest.raises(LoadError) as caught:
            async with held_only(tmp_path, "broken"):
                pass
        assert [fault.location for fault in caught.value.diagnostics] == ["promt"]
        async with held_only(tmp_path) as joined:
            with pytest.raises(LoadError):
                await joined.session(agent="broken")
            assert (await (await joined.session()).call("glob", {"pattern": "*"})).ok
        assert (await (await held.session()).call("glob", {"pattern": "*"})).ok


async def test_new_tools_of_a_joined_process_are_available_to_sessions_of_all_its_agents(tmp_path: Path) -> None:
    put_agent(tmp_path, "noter", 'tools = ["notes.*", "read"]')

    @tool(id="notes.count", side_effect="read", locks=[])
    def count() -> int:
        """Count the notes."""
        return 3

    async with held_only(tmp_path), held_only(tmp_path, rules=["allow notes.*"]) as joined:
        noter = await joined.session(agent="noter")
        assert (await noter.call("notes.count", {})).error_kind == "unknown_tool"
        await joined.reload_tools([add, count])
        assert (await noter.call("notes.count", {})).data == 3
        assert "mail.send" not in joined.generation.entries


async def test_an_agent_manifest_is_read_again_for_each_process_that_joins(tmp_path: Path) -> None:
    put_agent(tmp_path, "reviewer", 'tools = ["read"]')
    async with held_only(tmp_path, "reviewer", tools=[]) as held:
        put_agent(tmp_path, "reviewer", 'tools = ["read", "glob"]')
        async with held_only(tmp_path, "reviewer", tools=[]) as joined:
            assert list(joined.generation.entries) == ["read", "glob"]
            session = await joined.session()
            assert (await session.call("glob", {"pattern": "*"})).ok
        assert list(held.generation.entries) == ["read"]
        assert (await (await held.session()).call("glob", {"pattern": "*"})).error_kind == "unknown_tool"
