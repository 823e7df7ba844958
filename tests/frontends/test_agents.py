"""``handrail agents``, and ``--agent`` on every command that works with tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.frontends.conftest import Here, Program

from handrail.testing.provider_servers import OpenAIServer, ScriptedReply

pytestmark = pytest.mark.proves("K-13")


@pytest.fixture
def config(handrail: Program) -> str:
    """A configuration file with agents next to it."""
    handrail.config.mkdir()
    file = handrail.config / "handrail.toml"
    file.write_text("")
    return str(file)


def put(handrail: Program, agent: str, text: str) -> None:
    folder = handrail.config / "agents" / agent
    folder.mkdir(parents=True)
    for made in (folder, folder.parent):
        made.chmod(0o755)
    (folder / "agent.toml").write_text(f'id = "{agent}"\n{text}')
    (folder / "agent.toml").chmod(0o644)


def test_agents_are_listed_with_their_tools_and_all_their_faults(handrail: Program, here: Here, config: str) -> None:
    put(handrail, "reviewer", 'description = "Reads.\\nAnd more."\nrole = "subagent"\ntools = ["read", "grep"]')
    put(handrail, "broken", 'tools = ["raed"]\nrules = ["deny bahs"]\npromt = "x"')
    listed = here("agents", "--config", config)
    assert listed.code == 0
    table, *rest = listed.out.split("\n\n")
    title, first, second, last = table.splitlines()
    faults = [line for part in rest for line in part.splitlines()]
    assert title.split()[0] == "AGENT" and first.split()[0] == "default"
    assert second.split()[:4] == ["broken", "primary", "faulty", "(3"]
    assert all(line.startswith("broken:") for line in faults if not line.startswith("  "))
    told = " ".join(" ".join(faults).split())
    assert [name in told for name in ("promt", "tools[0]", "rules[0]")] == [True] * 3
    assert last.split() == ["reviewer", "subagent", "2", "tools", "Reads."]


def test_agents_are_listed_as_json_with_their_manifests(handrail: Program, here: Here, config: str) -> None:
    put(handrail, "broken", 'promt = "x"')
    default, broken = json.loads(here("agents", "--config", config, "--json").out)
    assert (default["id"], default["source"], default["faults"]) == ("default", None, [])
    assert default["manifest"]["tools"] == ["*"]
    assert broken["tools"] is None
    assert broken["faults"] == [
        {
            "source": str(handrail.config / "agents" / "broken" / "agent.toml"),
            "where": "promt",
            "problem": "unknown key; did you mean 'prompt'?",
        }
    ]


def test_agents_are_listed_without_opening_the_workspace(handrail: Program, here: Here, config: str) -> None:
    assert here("agents", "--config", config).code == 0
    assert not (handrail.state / "ws").exists()


def test_a_command_uses_the_tools_and_rules_of_the_agent_option(handrail: Program, here: Here, config: str) -> None:
    put(handrail, "reader", 'tools = ["read"]\nrules = ["deny fs.read secret.txt"]\naliases = { look = "read" }')
    (handrail.workspace / "secret.txt").write_text("x")
    chosen = ("--config", config, "--agent", "reader")
    tools = json.loads(here("tools", *chosen, "--json").out)["tools"]
    assert [tool["id"] for tool in tools] == ["read"]
    looked = here("call", "look", '{"path": "note.txt"}', *chosen)
    assert (looked.code, "first line" in looked.out) == (0, True)
    assert here("call", "glob", '{"pattern": "*"}', *chosen).code == 1
    refused = here("call", "read", '{"path": "secret.txt"}', *chosen, "--rule", "allow fs.read secret.txt")
    assert refused.code == 3
    explained = here("explain", "read", '{"path": "secret.txt"}', *chosen, "--rule", "allow fs.read secret.txt")
    assert "deny" in explained.out and "agent.toml" in explained.out


def test_an_unknown_agent_is_a_usage_error_that_lists_the_existing_agents(
    handrail: Program, here: Here, config: str
) -> None:
    put(handrail, "reviewer", "")
    done = here("tools", "--config", config, "--agent", "reviewr")
    assert done.code == 2
    assert "Did you mean 'reviewer'? Agents: default, reviewer" in done.err


def test_a_faulty_agent_is_refused_with_all_its_faults(handrail: Program, here: Here, config: str) -> None:
    put(handrail, "broken", 'tools = ["raed"]\npromt = "x"')
    done = here("tools", "--config", config, "--agent", "broken")
    assert done.code == 5
    assert "2 faults" in done.err and "promt" in done.err and "tools[0]" in done.err
    assert here("tools", "--config", config).code == 0


def test_a_run_takes_prompt_model_and_budgets_from_the_agent(
    handrail: Program, here: Here, config: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(
        json.dumps({"version": 1, "turns": [{"calls": [{"name": "glob", "arguments": {"pattern": "*"}}]}] * 3})
    )
    put(handrail, "brief", f'prompt = "Speak Dutch."\nmodel = "script:{script}"\n[budgets]\nturns = 2')
    chosen = ("--config", config, "--agent", "brief")
    done = here("run", "look around", *chosen, "--json")
    finished = json.loads(done.out.splitlines()[-1])
    assert (finished["event"], finished["status"], finished["turns"]) == ("finished", "budget", 2)
    done = here("run", "look around", *chosen, "--json", "--max-turns", "1")
    assert json.loads(done.out.splitlines()[-1])["turns"] == 1


async def test_the_model_receives_only_the_prompt_and_tools_of_its_agent(
    handrail: Program, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(handrail, "brief", 'prompt = "Speak Dutch."\nmodel = "openai:any"\ntools = ["read"]')
    async with OpenAIServer(ScriptedReply("Klaar.")) as server:
        monkeypatch.setenv("OPENAI_API_KEY", server.key)
        chosen = ("--config", config, "--agent", "brief", "--base-url", f"{server.address}/v1")
        done = await asyncio.to_thread(handrail, "run", "look around", *chosen)
    assert (done.code, done.out.strip()) == (0, "Klaar."), done.err
    [request] = server.requests
    assert request.body["messages"][0]["content"].endswith("# Instructions\n\nSpeak Dutch.\n")
    assert [tool["function"]["name"] for tool in request.body["tools"]] == ["read"]


def test_a_session_continues_only_as_its_first_agent(
    handrail: Program, here: Here, config: str, tmp_path: Path
) -> None:
    put(handrail, "reader", f'tools = ["read"]\nmodel = "script:{tmp_path / "said.toml"}"')
    (tmp_path / "said.toml").write_text('version = 1\n[[turns]]\ntext = "Said."\n')
    first = here("run", "a task", "--config", config, "--agent", "reader", "--json")
    session = json.loads(first.out.splitlines()[0])["id"]
    for begun in (("--resume", session), ("--resume",), ("--fork", session)):
        done = here("run", "and another", "--config", config, *begun)
        assert (done.code, done.out) == (0, "Said.\n"), done
    put(handrail, "other", "")
    for begun in ("--resume", "--fork"):
        refused = here("run", "and another", "--config", config, "--agent", "other", begun, session)
        assert refused.code == 2 and "belongs to agent 'reader'" in refused.err
    assert len(here("sessions", "--json").out.splitlines()) == 2, "a refused fork leaves nothing behind"


def test_a_waiting_call_resumes_as_the_agent_that_made_it(
    handrail: Program, here: Here, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_HEADLESS", "0")
    put(handrail, "writer", 'tools = ["write"]')
    made = '{"path": "made.txt", "content": "x"}'
    waits = here("call", "write", made, "--config", config, "--agent", "writer")
    assert waits.code == 4
    approval = waits.out.strip()
    assert here("approve", approval, "--once").code == 0
    assert here("call", "--resume", approval, "--config", config).code == 0
    assert (handrail.workspace / "made.txt").read_text() == "x"
