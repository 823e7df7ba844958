"""Commands that a ``{confined}`` rule allows run in a narrow sandbox, and the result says so."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from handrail import open_kernel
from handrail.contract.calls_and_results import Result
from handrail.contract.session_protocols import Session
from handrail.sandbox import tier_probe

pytestmark = [
    pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"),
    pytest.mark.proves("P-16"),
]


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    (tmp_path / "handrail.toml").write_text("")
    for words in (("init", "-q"), ("config", "user.name", "a"), ("config", "user.email", "a@b")):
        subprocess.run(["git", *words], cwd=workspace, check=True, capture_output=True)
    (workspace / "a.txt").write_text("a\n")
    subprocess.run(["git", "add", "."], cwd=workspace, check=True)
    subprocess.run(["git", "commit", "-qm", "first"], cwd=workspace, check=True, capture_output=True)
    return tmp_path


@pytest.fixture
async def session(ground: Path) -> AsyncIterator[Session]:
    async with open_kernel(
        ground / "ws", state=ground / "state", config=ground / "handrail.toml", rules=["allow bash {confined}"]
    ) as kernel:
        yield await kernel.session()


async def bash(session: Session, command: str) -> Result:
    return await session.call("bash", {"command": command})


async def test_a_confined_call_works_in_the_workspace_and_its_result_is_marked_confined(session: Session) -> None:
    done = await bash(session, 'mkdir -p out && python3 -c \'open("out/made", "w").write("x")\'')
    assert done.ok and done.data["exit_code"] == 0, done
    assert done.metadata["confined"] is True
    assert Path(session.workdir, "out/made").read_text() == "x"


async def test_a_confined_call_that_needs_a_host_says_which_rules_would_give_it_one(ground: Path) -> None:
    (ground / "ws" / "fetch.sh").write_text("curl -sS https://example.org\n")
    calls = (
        ("bash", {"command": "sh fetch.sh"}),
        ("python", {"code": "import socket; socket.create_connection(('example.org', 80))"}),
    )
    for rules in ([], ["allow net.fetch example.org"]):
        async with open_kernel(
            ground / "ws", state=ground / "state", config=ground / "handrail.toml", rules=rules
        ) as one:
            session = await one.session()
            for tool, arguments in calls:
                done = await session.call(tool, arguments)
                assert done.metadata["network"]["unavailable"] == "the call ran confined"
                assert any(
                    "it runs confined" in note and "`allow net.fetch HOST`" in note for note in done.data["notes"]
                )


async def test_a_single_program_tool_runs_confined_under_a_confined_rule(ground: Path) -> None:
    """No target of such a call is a command: the rule about the tool covers the program that the tool declares."""
    for rules in ([], ["allow python {confined}"], ["allow python {confined}", "allow shell.run {confined}"]):
        async with open_kernel(
            ground / "ws", state=ground / "state", config=ground / "handrail.toml", rules=rules
        ) as one:
            done = await (await one.session()).call("python", {"code": "open('made', 'w').write('x'); print(6 * 7)"})
        assert done.ok and done.data == {"exit_code": 0, "output": "42\n"}, done
        assert done.metadata["confined"] is True
        assert (ground / "ws/made").read_text() == "x"
    for rule in ("deny shell.run python3 **", "ask shell.run python3 **"):
        rules = ["allow python {confined}", rule]
        async with open_kernel(
            ground / "ws", state=ground / "state", config=ground / "handrail.toml", rules=rules
        ) as one:
            assert not (await (await one.session()).call("python", {"code": "print(1)"})).ok, rule


async def test_an_undecidable_command_runs_confined(session: Session) -> None:
    done = await bash(session, 'run="python3 --version"; $run')
    assert done.ok, done.error_text
    assert done.metadata["confined"] is True


async def test_a_program_of_a_confined_call_cannot_destroy_the_git_history(session: Session) -> None:
    """The text does not show what the program does: version control data is read-only for it."""
    Path(session.workdir, "wreck.py").write_text(
        "import shutil; shutil.rmtree('.git', ignore_errors=True); print('tried')"
    )
    done = await bash(session, "python3 wreck.py")
    assert done.ok and "tried" in done.data["output"]
    log = subprocess.run(["git", "log", "--format=%s"], cwd=session.workdir, capture_output=True, text=True, check=True)
    assert log.stdout == "first\n"
    assert subprocess.run(["git", "fsck"], cwd=session.workdir, capture_output=True, check=True).returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf .git",
        "git reset --hard",
        "git clean -fdx",
        "eval 'rm -rf x'",
        "python3 -c 'import shutil; shutil.rmtree(\"x\")'",
        "truncate -s 0 a.txt",
        "curl example.org",
        "git push",
        "pip install x",
        "find . -delete",
        "touch .vscode/x",
    ],
)
async def test_a_command_that_destroys_or_leaves_the_workspace_still_requires_approval(
    session: Session, command: str
) -> None:
    refused = await bash(session, command)
    assert refused.error_kind == "denied"
    assert "requires approval" in str(refused.error_text)


async def test_a_refusal_explains_why_a_call_is_not_confined(session: Session) -> None:
    assert "It does not stay confined: " in str((await bash(session, "pip install x")).error_text)


async def test_a_git_command_in_a_confined_call_can_change_the_repository(session: Session) -> None:
    Path(session.workdir, "b.txt").write_text("b")
    done = await bash(session, "git add b.txt && git commit -qm second")
    assert done.ok and done.data["exit_code"] == 0, done
    assert done.metadata["confined"] is True


@pytest.mark.parametrize("command", ["sh commit.sh", "python3 -V && git commit --allow-empty -m x && python3 run.py"])
async def test_a_confined_call_that_runs_other_code_cannot_commit(session: Session, command: str) -> None:
    Path(session.workdir, "commit.sh").write_text("git commit --allow-empty -m x\n")
    Path(session.workdir, "run.py").write_text("")
    await bash(session, command)
    log = subprocess.run(["git", "log", "--format=%s"], cwd=session.workdir, capture_output=True, text=True, check=True)
    assert log.stdout == "first\n"


async def test_a_failed_repository_change_by_a_confined_program_adds_a_note(session: Session) -> None:
    Path(session.workdir, "commit.sh").write_text("git commit --allow-empty -m x\n")
    done = await bash(session, "sh commit.sh")
    assert done.ok and done.data["exit_code"] != 0
    assert "runs confined" in " ".join(done.data["notes"])


async def test_a_stricter_rule_overrides_a_confined_allow(ground: Path) -> None:
    async with open_kernel(
        ground / "ws",
        state=ground / "state",
        config=ground / "handrail.toml",
        rules=["allow bash {confined}", "deny bash make *", "ask bash touch *"],
    ) as kernel:
        session = await kernel.session()
        assert (await bash(session, "make all")).error_kind == "denied"
        assert (await bash(session, "ls && touch x")).error_kind == "denied"
        explained = await kernel.explain_call("bash", {"command": "touch x"})
        assert explained.confined is False
        assert "'ask bash touch *' is stricter" in explained.confinement_note


async def test_a_confined_rule_never_applies_without_a_sandbox_and_explain_gives_the_reason(ground: Path) -> None:
    (ground / "handrail.toml").write_text('[sandbox]\nunconfined = ["bash"]\n')
    async with open_kernel(
        ground / "ws", state=ground / "state", config=ground / "handrail.toml", mode="auto"
    ) as kernel:
        session = await kernel.session()
        assert (await bash(session, "touch made")).error_kind == "denied"
        explained = await kernel.explain_call("bash", {"command": "touch made"})
        assert explained.confined is False
        assert "listed it in [sandbox] unconfined" in explained.confinement_note
        assert "confined: no" in str(explained)


async def test_the_explanation_and_the_result_of_a_confined_call_report_its_confinement(ground: Path) -> None:
    async with open_kernel(
        ground / "ws", state=ground / "state", config=ground / "handrail.toml", mode="auto"
    ) as kernel:
        session = await kernel.session()
        explained = await kernel.explain_call("bash", {"command": "touch made"})
        assert explained.confined is True
        assert "runs confined" in explained.reason
        done = await bash(session, "touch made")
        assert done.metadata["confined"] is True


async def test_a_confined_call_cannot_use_extra_roots_or_hosts_of_its_agent(ground: Path) -> None:
    further = ground / "further"
    further.mkdir()
    agents = ground / "agents" / "wide"
    agents.mkdir(parents=True)
    (agents / "agent.toml").write_text(
        f'id = "wide"\n[[roots]]\npath = "{further}"\naccess = "write"\n[requires.tools.bash.net]\nhosts = ["127.0.0.1"]\n'
    )
    options: dict[str, Any] = {"state": ground / "state", "config": ground / "handrail.toml", "agent": "wide"}
    command = f"touch {further}/made; printenv | grep -c PROXY; python3 -m unittest -q; ls {further}"
    outputs: list[str] = []
    for rules in (["allow bash {confined}"], ["allow bash", "allow fs.* **"]):
        async with open_kernel(ground / "ws", **options, rules=rules) as kernel:
            done = await bash(await kernel.session(), command)
            assert done.ok, done.error_text
            outputs.append(done.data["output"])
    confined, free = outputs
    assert "Read-only file system" in confined and not confined.rstrip().endswith("made")
    assert free.rstrip().endswith("made"), "without the word, the call writes there"
    assert "\n0\n" in confined and "\n0\n" not in f"\n{free}", "a call with hosts has a proxy in its environment"
