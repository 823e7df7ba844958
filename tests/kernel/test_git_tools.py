"""The git tools in a whole kernel: calls without an approval, calls with one, and reachable hosts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD
from tests.kernel.test_agents import confined, opening, put_agent
from tests.tools.githost import GitHost
from tests.tools.repositories import Repo, create_repository

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.session_protocols import Session
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = [pytest.mark.proves("T-05a", "S-02"), confined]


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    found = create_repository(tmp_path / "ws")
    found.commit("first", a="1\n", __env="TOP-SECRET\n")
    return found


@pytest.fixture
async def host(tmp_path: Path) -> AsyncGenerator[GitHost]:
    """A server with one repository, which may be pushed to."""
    source = create_repository(tmp_path / "source")
    source.commit("from the server", a="1\n")
    source.git("clone", "--quiet", "--bare", ".", str(tmp_path / "served" / "x.git"))
    with (tmp_path / "served" / "x.git" / "config").open("a") as file:
        file.write("[http]\n\treceivepack = true\n")
    async with GitHost(tmp_path / "served") as server:
        yield server


def put_git_agent(folder: Path, *hosts: str) -> None:
    given = ", ".join(f'"{one}"' for one in hosts)
    tables = (f'[requires.tools."{name}".net]\nhosts = [{given}]' for name in ("git.clone", "git.push"))
    put_agent(folder, "pusher", "\n".join(tables))


async def test_git_reads_run_without_approval_and_git_changes_require_it(tmp_path: Path, repo: Repo) -> None:
    repo.put("a", "2\n")
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert (await session.call("git.status", {})).data["unstaged"] == [{"path": "a", "change": "modified"}]
        shown = await session.call("git.show", {})
        assert "TOP-SECRET" not in repr(shown)
        assert shown.data["redacted_paths"]["paths"] == [".env"]
        for name, arguments in (
            ("git.show", {"file": ".env"}),
            ("git.blame", {"path": ".env"}),
            ("git.diff", {"paths": [".env"]}),
            ("git.add", {"all": True}),
            ("git.commit", {"message": "x", "all": True}),
            ("git.stash", {}),
            ("git.clone", {"source": ".", "path": "copy"}),
        ):
            refused = await session.call(name, arguments)
            assert refused.error_kind == "denied", (name, refused)
        assert (await session.call("get_git_status", {})).data["branch"] == "main"
        person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("once")])
        asked = await kernel.session(approval_handler=person)
        assert (await asked.call("git.commit", {"message": "by a person's leave", "all": True})).ok
        assert (await asked.call("git.clone", {"source": ".", "path": "copy"})).ok
        assert [request.tool_id for request in person.requests] == ["git.commit", "git.clone"]
        everything = await kernel.session(rules=["allow git.*"])  # speaks of tools, and of no such file
        for name in ("git.status", "git.diff", "git.show"):
            looked = await everything.call(name, {"ref": "HEAD~1"} if name == "git.show" else {})
            assert looked.ok, looked
            assert "TOP-SECRET" not in repr(looked)
            assert looked.data["redacted_paths"]["paths"] == [".env"]
        free = await kernel.session(mode="auto")
        assert (await free.call("git.create_branch", {"name": "more"})).ok
        assert (await free.call("git.clone", {"source": ".", "path": "again"})).error_kind == "denied"
        barred = await kernel.session(rules=["allow git.*", "deny shell.run git commit *"])
        repo.put("a", "3\n")
        refused = await barred.call("git_commit", {"message": "x", "all": True})
        assert refused.error_kind == "denied", refused
        assert "deny shell.run git commit *" in str(refused.error_text)
    assert repo.git("log", "--format=%s") == "by a person's leave\nfirst"


async def test_a_checkout_does_not_write_a_path_that_a_rule_denies(tmp_path: Path, repo: Repo) -> None:
    repo.commit("second", a="2\n")
    async with temporary_kernel(tmp_path, rules=["allow git.*", "deny fs.write a"]) as kernel:
        refused = await (await kernel.session()).call("git.checkout", {"ref": "HEAD~1"})
    assert refused.error_kind == "failed"
    assert "a rule denies it" in str(refused.error_text)
    assert (repo.folder / "a").read_text() == "2\n"


@pytest.fixture
async def session(tmp_path: Path, host: GitHost) -> AsyncGenerator[Session]:
    """A session that may reach the server."""
    put_git_agent(tmp_path, host.authority)
    rules = ["allow git.*", f"allow net.fetch {host.authority}"]
    async with opening(HELD)(tmp_path, "pusher", rules=rules) as kernel:
        yield await kernel.session()  # pyright: ignore[reportReturnType]


async def test_a_repository_is_cloned_over_http_and_pushed_back(
    tmp_path: Path, host: GitHost, session: Session
) -> None:
    async def call(name: str, **arguments: Any) -> Any:
        answer = await session.call(name, arguments)
        assert answer.ok, answer
        return answer.data

    cloned = await call("git.clone", url=host.url("x.git"), depth=1)
    assert (cloned["repository"], cloned["branch"]) == ("x", "main")
    copy = Repo(tmp_path / "ws" / "x")
    copy.configure("[user]\n\tname = Rita Repo\n\temail = rita@example.org\n")
    copy.put("b", "2\n")
    await call("git.add", repository="x", paths=["x/b"])
    await call("git.commit", repository="x", message="From here")
    unsaid = await session.call("git.push", {"repository": "x"})
    assert unsaid.error_kind == "invalid_input"
    assert host.url("x.git") in str(unsaid.error_text)
    other = await session.call("git.push", {"repository": "x", "url": host.url("y.git")})
    assert other.error_kind == "invalid_input", other
    pushed = await call("git.push", repository="x", url=host.url("x.git"), set_upstream=True)
    assert (pushed["branch"], pushed["result"]) == ("main", "updated")
    served = Repo(host.folder / "x.git")
    assert served.git("log", "-1", "--format=%s", "main") == "From here"
    served.git("update-ref", "refs/heads/main", "main~1")
    copy.git("commit", "--quiet", "--amend", "--message", "Rewritten")
    served.git("update-ref", "refs/heads/main", served.git("commit-tree", "main^{tree}", "-m", "theirs", "-p", "main"))
    behind = await session.call("git.push", {"repository": "x", "url": host.url("x.git")})
    assert behind.error_kind == "conflict", behind


async def test_a_local_push_or_clone_runs_no_hook_or_configured_program(tmp_path: Path, repo: Repo) -> None:
    ran = tmp_path / "ws" / "ran"
    target = create_repository(tmp_path / "ws" / "target")
    hook = target.put(".git/hooks/pre-receive", f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    async with temporary_kernel(tmp_path, rules=["allow git.*", "deny shell.run touch *"]) as kernel:
        session = await kernel.session()
        for remote, program in (("plain", "git-receive-pack"), ("evil", f"touch {ran}; git-receive-pack")):
            repo.configure(f'[remote "{remote}"]\n\turl = target\n\treceivepack = "{program}"\n')
            repo.git("branch", remote)
            pushed = await session.call("git.push", {"remote": remote, "branch": remote})
            assert pushed.ok and pushed.data["result"] == "new branch", pushed
            assert target.git("rev-parse", remote) == repo.git("rev-parse", "main")
        repo.configure(f'[uploadpack]\n\tpackObjectsHook = "touch {ran}"\n')
        assert (await session.call("git.clone", {"source": ".", "path": "copy"})).ok
    assert not ran.exists()


async def test_a_host_that_no_rule_allows_is_not_reached(tmp_path: Path, host: GitHost) -> None:
    put_git_agent(tmp_path, host.authority)
    async with opening(HELD)(tmp_path, "pusher", rules=["allow git.clone other.example"]) as kernel:
        session = await kernel.session()
        refused = await session.call("git.clone", {"url": host.url("x.git")})
        plain = await (await kernel.session(agent="default", rules=["allow git.*", "allow net.fetch"])).call(
            "git.clone", {"url": host.url("x.git"), "path": "y"}
        )
        ssh = await session.call("git.clone", {"url": "git@example.org:x.git"})
    assert refused.error_kind == "denied"
    assert host.authority in str(refused.error_text)
    assert not plain.ok, "an address of this machine takes a grant of its own"
    assert "HTTPS URL" in str(ssh.error_text)
    assert host.asked == []


async def test_a_redirect_to_another_host_is_not_followed(tmp_path: Path, host: GitHost, session: Session) -> None:
    async with GitHost(host.folder) as other:
        host.elsewhere = f"http://{other.authority}"
        refused = await session.call("git.clone", {"url": host.url("x.git")})
    assert not refused.ok
    assert other.asked == []
    assert not (tmp_path / "ws" / "x").exists()


async def test_a_git_server_that_requires_a_password_needs_a_configured_header(
    tmp_path: Path, host: GitHost, session: Session
) -> None:
    host.password = "Basic dTpw"
    refused = await session.call("git.clone", {"url": host.url("x.git")})
    assert refused.error_kind == "unavailable"
    assert "http.extraHeader" in str(refused.error_text)
    copy = create_repository(tmp_path / "ws" / "own")
    copy.commit("mine", c="1\n")
    copy.git("remote", "add", "origin", host.url("x.git"))
    copy.configure(f'[http "{host.url("")}"]\n\textraHeader = "Authorization: {host.password}"\n')
    copy.git("checkout", "--quiet", "-b", "mine")
    pushed = await session.call("git.push", {"repository": "own", "url": host.url("x.git")})
    assert pushed.ok, pushed
    assert pushed.data["result"] == "new branch"
