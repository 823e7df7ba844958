"""git.add, commit, create_branch, checkout, merge, stash and init, on real repositories in the sandbox."""

from __future__ import annotations

import asyncio

import pytest
from tests.tools.desk import BuiltinToolFixture, refused
from tests.tools.repositories import Repo, create_repository

from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.sandbox.tier_probe import choose_sandbox

pytestmark = pytest.mark.proves("T-05a", "T-02a")


async def test_init_creates_a_repository_without_hooks_and_refuses_an_existing_one(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    assert await desk.call("git.init", path="new/here", branch="trunk") == {"repository": "new/here", "branch": "trunk"}
    folder = desk.workspace / "new/here/.git"
    assert (folder / "HEAD").read_text() == "ref: refs/heads/trunk\n"
    assert not (folder / "hooks").exists()
    await refused(desk.call("git.init", path="new/here"), "conflict", "already")
    await refused(desk.call("git.init"), "conflict", "already")
    await refused(desk.call("git.init", path="../beside"), "denied", "outside the workspace")
    await refused(desk.call("git.init", path="x", branch="--help"), "invalid_input", "The branch name is invalid")
    assert (await desk.call("git.status", repository="new/here"))["branch"] == "trunk"


async def test_add_stages_the_named_files_or_all_changes(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.commit("first", a="1\n", b="1\n", c="1\n", __gitignore="ignored\n")
    create_repository(desk.workspace / "other").commit("another's", x="1\n")
    repo.put("a", "2\n")
    (desk.workspace / "b").unlink()
    (desk.workspace / "c").unlink()
    repo.put("c/now/a/folder", "1\n")
    repo.put("ignored", "")
    found = await desk.call("git.add", paths=["b", "c", "ignored", "nowhere"])
    assert set(found["staged"]) == {"b", "c", "c/now/a/folder"}
    assert set(found["not_staged"]) == {"ignored", "nowhere"}
    assert repo.git("diff", "--cached", "--no-renames", "--name-status").split() == [
        "D",
        "b",
        "D",
        "c",
        "A",
        "c/now/a/folder",
    ]
    found = await desk.call("git.add", all=True)
    assert (found["staged"], list(found["not_staged"])) == (["a"], ["other/"])
    await refused(desk.call("git.add"), "invalid_input", "`all: true`")
    await refused(desk.call("git.add", paths=["a"], all=True), "invalid_input", "`all: true`")


async def test_commit_records_staged_changes_with_the_identity_of_the_repository(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    await refused(desk.call("git.commit", message="x"), "failed", "Nothing is staged")
    repo.put("a", "1\n")
    await refused(desk.call("git.commit", message="x"), "failed", "Nothing is staged")
    await desk.call("git.add", paths=["a"])
    done = await desk.call("git.commit", message="A subject\n\n# no comment\n-- nor an option\n")
    assert (done["branch"], done["subject"]) == ("main", "A subject")
    assert done["author"] == "Rita Repo <rita@example.org>"
    assert done["files"] == [{"path": "a", "change": "added"}]
    assert repo.git("log", "-1", "--format=%B%cn") == "A subject\n\n# no comment\n-- nor an option\nRita Repo"
    repo.put("a", "2\n")
    repo.put("new", "2\n")
    amended = await desk.call("git.commit", message="Another", all=True, amend=True)
    assert repo.git("log", "--format=%s") == "Another"
    assert amended["files"] == [{"path": "a", "change": "added"}]
    await refused(desk.call("git.commit", message=" \n"), "invalid_input", "blank")
    assert (await desk.call("git.commit", message="-m x", amend=True))["subject"] == "-m x"


async def test_a_commit_without_an_author_name_explains_how_to_set_one(
    desk: BuiltinToolFixture, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for who in ("AUTHOR", "COMMITTER"):
        for what in ("NAME", "EMAIL"):
            monkeypatch.delenv(f"GIT_{who}_{what}", raising=False)
    desk.around.sandbox = GuardedSandbox(choose_sandbox.__wrapped__())  # one that has not asked git for the name yet
    bare = create_repository(desk.workspace / "bare")
    config = desk.workspace / "bare/.git/config"
    config.write_text(config.read_text().partition("[user]")[0])
    bare.put("a", "1\n")
    await desk.call("git.add", repository="bare", all=True)
    await refused(desk.call("git.commit", repository="bare", message="x"), "unavailable", "user.name", "user.email")


async def test_branches_are_created_and_checked_out_and_files_are_restored(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    await refused(desk.call("git.create_branch", name="early"), "invalid_input", "no commits yet")
    first = repo.commit("first", a="1\n")
    second = repo.commit("second", a="2\n")
    assert await desk.call("git.create_branch", name="fix/it", start="HEAD~1") == {"branch": "fix/it", "commit": first}
    await refused(desk.call("git.create_branch", name="fix/it"), "conflict", "already exists")
    for name in ("-D", "a b", "a..b", "x.lock", "HEAD", "a~1", "/a", "a/"):
        await refused(desk.call("git.create_branch", name=name), "invalid_input", "The branch name is invalid")
    there = await desk.call("git.checkout", ref="fix/it")
    assert (there["branch"], there["commit"]) == ("fix/it", first)
    repo.put("a", "mine\n")
    error = await refused(desk.call("git.checkout", ref="main"), "conflict", "git.stash")
    assert error.data == {"files": ["a"]}
    assert (await desk.call("git.checkout", paths=["a"]))["restored"] == ["a"]
    assert (desk.workspace / "a").read_text() == "1\n"
    assert (await desk.call("git.checkout", ref="main", paths=["a"]))["branch"] == "fix/it"
    assert (desk.workspace / "a").read_text() == "2\n"
    repo.git("checkout", "--quiet", "--force", "main")
    loose = await desk.call("git.checkout", ref=second)
    assert (loose["branch"], loose["detached"], loose["commit"]) == (None, True, second)
    await refused(desk.call("git.checkout", ref="mian"), "invalid_input", "Did you mean main")
    await refused(desk.call("git.checkout", ref="--orphan"), "invalid_input", "begin with '-'")
    await refused(desk.call("git.checkout"), "invalid_input", "`ref` is missing")
    repo.git("remote", "add", "origin", "https://example.org/x.git")
    repo.git("update-ref", "refs/remotes/origin/theirs", first)
    tracking = await desk.call("git.checkout", ref="origin/theirs", track=True)
    assert (tracking["branch"], repo.git("config", "branch.theirs.remote")) == ("theirs", "origin")
    made_here = await desk.call("git.create_branch", name="ours", start="origin/theirs", track=True)
    assert made_here == {"branch": "ours", "commit": first, "upstream": "origin/theirs"}
    assert (await desk.call("git.create_branch", name="größe", start="origin/theirs", track=True))["upstream"]


async def test_merge_fast_forwards_commits_or_lists_the_conflicts(desk: BuiltinToolFixture, repo: Repo) -> None:
    first = repo.commit("first", a="1\n", b="1\n")
    repo.git("checkout", "--quiet", "-b", "side")
    side = repo.commit("side", a="side\n")
    repo.git("checkout", "--quiet", "main")
    ahead = await desk.call("git.merge", ref="side")
    assert (ahead["result"], ahead["commit"]) == ("fast-forwarded", side)
    assert (await desk.call("git.merge", ref="side"))["result"] == "already up to date"
    repo.git("reset", "--quiet", "--hard", first)
    merged = await desk.call("git.merge", ref="side", fast_forward="never", message="-O Bring it in")
    assert (merged["result"], merged["subject"], merged["author"]) == (
        "merged",
        "-O Bring it in",
        "Rita Repo <rita@example.org>",
    )
    repo.git("reset", "--quiet", "--hard", first)
    main = repo.commit("main", a="main\n")
    await refused(desk.call("git.merge", ref="side", fast_forward="only"), "failed", "fast-forward")
    conflicts = [{"path": "a", "change": "modified by both"}]
    error = await refused(desk.call("git.merge", ref="side"), "conflict", "git.add")
    assert error.data == {"conflicts": conflicts}
    status = await desk.call("git.status")
    assert (status["state"], status["conflicts"]) == ("merging", conflicts)
    await refused(desk.call("git.commit", message="x"), "conflict", "files have conflicts")
    assert (await desk.call("git.add", all=True))["not_staged"].keys() == {"a"}
    assert (await desk.call("git.merge", abort=True))["commit"] == main
    await refused(desk.call("git.merge", ref="side"), "conflict")
    repo.put("a", "both\n")
    assert (await desk.call("git.add", paths=["a"]))["staged"] == ["a"]
    assert (await desk.call("git.commit", message="Both"))["subject"] == "Both"
    await refused(desk.call("git.merge", abort=True), "failed", "MERGE_HEAD")
    await refused(desk.call("git.merge"), "invalid_input", "`abort: true`")
    repo.git("checkout", "--quiet", "side")
    repo.put("b", "mine\n")
    repo.git("branch", "--force", "other", first)
    await refused(desk.call("git.merge", ref="nothing"), "invalid_input", "'nothing'")


async def test_stash_saves_changes_and_restores_them(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.commit("first", a="1\n")
    await refused(desk.call("git.stash"), "failed", "No changes")
    assert await desk.call("git.stash", action="list") == {"stashes": []}
    await refused(desk.call("git.stash", action="pop"), "invalid_input", "no stashes")
    repo.put("a", "2\n")
    repo.put("new", "n\n")
    pushed = await desk.call("git.stash", message="for later", untracked=True)
    assert (pushed["index"], pushed["message"]) == (0, "On main: for later")
    assert (desk.workspace / "a").read_text() == "1\n"
    assert not (desk.workspace / "new").exists()
    assert len((await desk.call("git.stash", action="list"))["stashes"]) == 1
    assert "+2\n" in (await desk.call("git.stash", action="show"))["patch"]
    assert (await desk.call("git.stash", action="apply"))["done"] == "apply"
    assert (desk.workspace / "new").read_text() == "n\n"
    repo.git("add", "--all")
    repo.commit("second", a="3\n")
    error = await refused(desk.call("git.stash", action="pop"), "conflict", "is kept")
    assert error.data is not None
    repo.git("checkout", "--quiet", "--force", "HEAD")
    assert (await desk.call("git.stash", action="drop"))["done"] == "drop"
    await refused(desk.call("git.stash", action="drop", index=3), "invalid_input", "Stash 3 does not exist")
    await refused(desk.call("git.stash", action="list", message="x"), "invalid_input", "apply only to push")


async def test_files_denied_by_a_rule_are_neither_checked_out_nor_stashed(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.commit("first", a="1\n", key="1\n")
    repo.commit("second", a="2\n", key="2\n")
    repo.git("branch", "side", "HEAD~1")
    repo.put("key", "3\n")
    desk.refuse[str(desk.workspace / "key")] = "a rule denies it"
    await refused(desk.call("git.checkout", ref="side"), "denied", "allow fs.read key")
    await refused(desk.call("git.checkout", paths=["key"]), "denied", "key")
    await refused(desk.call("git.stash"), "denied", "key")
    assert (desk.workspace / "key").read_text() == "3\n"
    assert repo.git("branch", "--show-current") == "main"
    assert (await desk.call("git.checkout", ref="side", paths=["a"]))["restored"] == ["a"]


async def test_a_lock_of_another_git_process_is_reported_as_a_conflict(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.put("a", "1\n")
    repo.put(".git/index.lock", "")
    await refused(desk.call("git.add", all=True), "conflict", "index.lock")


async def test_a_git_configuration_protected_by_a_running_program_is_reported_as_a_conflict(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    repo.commit("one", a="1")
    repo.git("branch", "other")
    running = asyncio.ensure_future(desk.call("bash", command="touch up; while [ ! -e go ]; do sleep 0.05; done"))
    async with asyncio.timeout(60):
        while not (repo.folder / "up").exists():
            await asyncio.sleep(0.01)
    before = (repo.folder / ".git" / "config").read_text()
    found = desk.call("git.create_branch", name="mine", start="other", track=True)
    await refused(found, "conflict", "`.git/config` cannot be changed now", "a program of bash (call-")
    assert (await desk.call("git.create_branch", name="plain", start="other"))["branch"] == "plain"
    assert (repo.folder / ".git" / "config").read_text() == before
    (repo.folder / "go").touch()
    await running
    assert (await desk.call("git.create_branch", name="mine2", start="other", track=True))["upstream"] == "other"
