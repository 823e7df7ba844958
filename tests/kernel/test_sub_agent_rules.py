"""Rights of a sub-agent: limited by the rules and modes of all agents above it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernel.test_configured import put_tool
from tests.kernel.test_sub_agents import WRITER, WRITES, answers, kernel_of, models, task

from handrail.agent.agent_loop import Agent
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler


@pytest.mark.proves("P-12")
async def test_a_sub_agent_cannot_exceed_the_delegation_of_its_parent(tmp_path: Path) -> None:
    parent = "[delegation]\nfs.write = ['out/**']"
    async with kernel_of(tmp_path, {"default": parent, "writer": WRITES}) as kernel:
        writes = call_reply(
            ("write", {"path": "a.txt", "content": "a"}), ("write", {"path": "out/b.txt", "content": "b"})
        )
        writer = PlaybackModel(writes, text_reply("done"))
        top = PlaybackModel(call_reply(task("writer")), text_reply("."))
        await Agent(await kernel.session(), top, models=models(writer=writer)).complete("Go.")
        assert "outside the delegation of agent default" in str(writer.requests[1].messages)
    assert not (tmp_path / "ws" / "a.txt").exists()
    assert (tmp_path / "ws" / "out" / "b.txt").read_text() == "b"


@pytest.mark.proves("P-12")
async def test_the_rules_and_mode_of_a_parent_also_limit_its_sub_agents(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"default": "rules = ['deny fs.write keep/**']", "writer": WRITES}) as kernel:
        replies = [
            call_reply(("write", {"path": "keep/a", "content": "a"}), ("write", {"path": "b", "content": "b"})),
            text_reply("."),
        ]
        writer = PlaybackModel(*replies, *replies)
        top = PlaybackModel(*[call_reply(task("writer")), text_reply(".")] * 2)
        session = await kernel.session()
        agent = Agent(session, top, models=models(writer=writer))
        await agent.complete("Go.")
        assert [(tmp_path / "ws" / name).exists() for name in ("keep/a", "b")] == [False, True]
        (tmp_path / "ws" / "b").unlink()
        session.set_mode("plan")
        await agent.complete("Again.")
        assert not (tmp_path / "ws" / "b").exists()


@pytest.mark.proves("P-12")
async def test_a_specific_sub_agent_rule_does_not_override_a_deny_of_its_parent(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"writer": f"{WRITER}\nrules = ['allow fs.write keep/open/**']"}) as kernel:
        replies = [call_reply(("write", {"path": f"keep/open/{n}", "content": "a"})) for n in range(2)]
        writer = PlaybackModel(replies[0], text_reply("."), replies[1], text_reply("."))
        top = PlaybackModel(*[call_reply(task("writer")), text_reply(".")] * 2)
        session = await kernel.session()
        agent = Agent(session, top, models=models(writer=writer))
        await agent.complete("Go.")
        session.add_rules("deny fs.write keep/**")
        await agent.complete("Again.")
        assert [(tmp_path / "ws" / "keep" / "open" / name).exists() for name in "01"] == [True, False]


@pytest.mark.proves("P-12")
@pytest.mark.parametrize("action", ["deny", "ask"])
async def test_a_project_rule_overrides_an_agents_own_allow_three_levels_down(tmp_path: Path, action: str) -> None:
    between = 'role = "all"\ntools = ["write", "task"]'
    agents = {
        "one": between,
        "two": between,
        "writer": f"{WRITER}\nrules = ['allow fs.write keep/open/**', 'allow write b']",
    }
    async with kernel_of(tmp_path, agents, settings=f"rules = ['{action} fs.write keep/**']") as kernel:
        writes = (("write", {"path": path, "content": "x"}) for path in ("keep/open/a", "b"))
        writer = PlaybackModel(call_reply(*writes), text_reply("."))
        downwards = [call_reply(task(agent)) for agent in ("one", "two", "writer")]
        top = PlaybackModel(*downwards, *(text_reply(".") for _ in range(3)))
        await Agent(await kernel.session(), top, models=models(writer=writer)).complete("Go.")
        assert f"{action} fs.write keep/**" in str(writer.requests[1].messages)
    assert [(tmp_path / "ws" / name).exists() for name in ("keep/open/a", "b")] == [False, True]


@pytest.mark.proves("P-12")
@pytest.mark.parametrize(("hosts", "offered"), [("['a.example']", False), ("[]", False), ("['*']", True)])
async def test_an_agent_that_delegates_hosts_by_name_disables_a_sub_agents_provider_search(
    tmp_path: Path, hosts: str, offered: bool
) -> None:
    searcher = 'role = "all"\nmodel = "played:searcher"\n[native.web_search]\n[native.code_execution]'
    async with kernel_of(tmp_path, {"default": f"[delegation.net]\nhosts = {hosts}", "searcher": searcher}) as kernel:
        pause = ReplyPause()
        top = PlaybackModel(call_reply(task("searcher", background=True)), text_reply("."))
        session = await kernel.session()
        model = PlaybackModel([pause, *text_reply(".")])
        await Agent(session, top, models=models(searcher=model)).complete("Go.")
        await pause.reached.wait()
        (child,) = session.tree_node.children
        for native in (child.provider_tools, child.start_turn().provider_tools):
            refused = {offer.spec.id: offer.unavailable_reason for offer in native}
            assert refused["native.code_execution"] is None
            assert (refused["native.web_search"] is None) is offered
            assert offered or "Agent default delegates hosts by name" in str(refused["native.web_search"])
        pause.proceed.set()


@pytest.mark.proves("P-12")
async def test_rule_and_mode_changes_of_a_parent_apply_at_once_to_running_sub_agents(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("reject-always", "never")])
    async with kernel_of(tmp_path, {"writer": f"{WRITER}\nrules = ['allow fs.write a/b']"}) as kernel:
        pause = ReplyPause()
        writer = PlaybackModel([pause, *call_reply(("write", {"path": "a/b", "content": "x"}))], text_reply("."))
        top = PlaybackModel(call_reply(task("writer", background=True)), text_reply("."))
        session = await kernel.session(approval_handler=person)
        await Agent(session, top, models=models(writer=writer)).complete("Go.")
        await pause.reached.wait()
        (child,) = session.tree_node.children
        assert (await session.call("bash", {"command": "curl example.org"})).error_kind == "denied"
        (rule,) = kernel.approvals.list_rules()
        session.set_mode("accept-edits")
        session.add_rules("deny fs.write a/**")
        above = child.rules.parent
        assert above is not None and (above.rules, above.mode) == (session.rules.rules, session.rules.mode)
        await kernel.approvals.revoke_rule(rule.id)
        above = child.rules.parent
        assert above is not None and (above.rules, above.mode) == (session.rules.rules, session.rules.mode)
        assert (session.rules.mode, child.rules.mode) == ("accept-edits", "ask")
        session.set_mode("plan")
        assert child.rules.mode == "plan"
        session.set_mode("auto")
        assert child.rules.mode == "ask", "its own again, and no wider one"
        pause.proceed.set()
        assert session.notifications is not None
        await session.notifications.wait_until_pending()
        assert "deny fs.write a/**" in str(writer.requests[1].messages)
    assert not (tmp_path / "ws" / "a").exists()


@pytest.mark.proves("K-13")
@pytest.mark.parametrize("rule", ["allow own.tool", "deny own.tool", "allow agent.writer", "ask native.web_search"])
async def test_a_project_rule_may_name_a_tool_that_only_one_agent_has(tmp_path: Path, rule: str) -> None:
    put_tool(tmp_path / "config" / "agents" / "writer" / "tools", "own.tool")
    agents = {
        "writer": f"{WRITES}\n[native.web_search]",
        "other": 'role = "all"\ntools = ["read"]\nmodel = "played:other"',
    }
    async with kernel_of(tmp_path, agents, rules=[rule], settings=f"rules = [{rule!r}]") as kernel:
        writer = PlaybackModel(call_reply(("write", {"path": "a", "content": "a"})), text_reply("."))
        top = PlaybackModel(call_reply(task("writer")), call_reply(task("other")), text_reply("."))
        session = await kernel.session()
        session.add_rules(rule)
        other = PlaybackModel(text_reply("."))
        await Agent(session, top, models=models(writer=writer, other=other)).complete("Go.")
        assert len(other.requests) == 1
    assert (tmp_path / "ws" / "a").read_text() == "a"


async def test_a_delegation_to_a_faulty_agent_returns_the_reason(tmp_path: Path) -> None:
    agents = {"writer": WRITES, "broken": 'role = "all"\ntools = ["raed"]'}
    async with kernel_of(tmp_path, agents) as kernel:
        top = PlaybackModel(call_reply(task("broken")), text_reply("."))
        (answer,) = await answers(Agent(await kernel.session(), top))
        assert "tool 'raed' does not exist; did you mean read" in str(answer.error_text)
