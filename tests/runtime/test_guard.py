"""Files that a program creates under a protected name are moved away, and its call fails with the reason."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, SandboxProfile
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.policy.rules.rules_and_modes import build_default_rule_book
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, GuardedSandbox, ProtectedPathViolation
from handrail.runtime.shell_service import SandboxedShell
from handrail.sandbox import tier_probe
from handrail.store.state_folders import remove_tree

pytestmark = pytest.mark.proves("S-07")


@dataclass
class GuardFixture:
    """A workspace, and programs in it under guard."""

    workspace: Path
    place: Path
    sandbox: GuardedSandbox
    vcs: bool = False

    @property
    def capabilities(self) -> CapabilitySet:
        whole = str(self.workspace)
        named = frozenset({"vcs.config"} if self.vcs else ())
        program = ShellRequires.model_validate({"cmd": "*"})
        return CapabilitySet(
            (CapabilityLayer("test", (whole, str(self.place / "other")), (whole,), (), (program,), named),)
        )

    @property
    def quarantine(self) -> Path:
        return self.place / "output" / "quarantine"

    @property
    def profile(self) -> SandboxProfile:
        return SandboxProfile(
            *(str(self.workspace), str(self.place / "scratch")),
            denials=build_hidden_path_rules(build_default_rule_book(), str(self.workspace)),
            quarantine=str(self.quarantine),
        )

    def shell(self) -> SandboxedShell:
        return SandboxedShell(
            self.sandbox, self.profile, self.capabilities, SessionRoots(self.workspace), lambda capability, target: None
        )

    async def run(self, script: str) -> tuple[int, str]:
        done = await self.shell().run(script)
        return done.exit_code, done.output.decode()

    async def vetoed(self, script: str) -> ToolError:
        with pytest.raises(ToolError) as caught:
            await self.shell().run(script)
        assert caught.value.kind == "denied", caught.value.text
        return caught.value

    def kept(self) -> list[str]:
        """Relative paths of the files in the quarantine, without the folder of each case."""
        files = [path for path in self.quarantine.rglob("*") if path.is_symlink() or not path.is_dir()]
        return sorted(path.relative_to(self.quarantine).as_posix().partition("/")[2] for path in files)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.workspace.iterdir())


@pytest.fixture
def ground(tmp_path: Path) -> GuardFixture:
    chosen = tier_probe.choose_sandbox()
    if not chosen.tier.is_confining:
        pytest.skip(chosen.tier.detail)
    place = tmp_path.resolve()
    for name in ("ws", "scratch", "output", "other"):
        (place / name).mkdir()
    return GuardFixture(place / "ws", place, GuardedSandbox(chosen))


@pytest.mark.parametrize(
    ("script", "name", "kept"),
    [
        ("mkdir -p .git/hooks && echo evil > .git/hooks/pre-commit", ".git", None),
        ("mkdir .vscode && echo '{}' > .vscode/tasks.json", ".vscode", [".vscode.quarantined/tasks.json"]),
        ("echo evil > .envrc", ".envrc", [".envrc.quarantined"]),
        ("echo evil > .ENVRC", ".ENVRC", [".ENVRC.quarantined"]),
        ("mkdir -p a/b && echo evil > a/b/.mcp.json", "a/b/.mcp.json", [".mcp.json.quarantined"]),
        ("echo evil > handrail.toml", "handrail.toml", ["handrail.toml.quarantined"]),
        ("echo 'gitdir: evil' > .git", ".git", [".git.quarantined"]),
        ("mkdir evil; ln -s evil .git", ".git", [".git.quarantined"]),
        ("ln -s /etc .vscode", ".vscode", [".vscode.quarantined"]),
        ("mkfifo .bashrc", ".bashrc", [".bashrc.quarantined"]),
        ("mkdir x && echo evil > x/.envrc && mv x y", "y/.envrc", [".envrc.quarantined"]),
        ("mkdir -p x/y && echo evil > x/y/.envrc && chmod 000 x/y", "x/y/.envrc", [".envrc.quarantined"]),
        ("mkdir x && echo evil > x/.envrc && chmod 500 x", "x/.envrc", [".envrc.quarantined"]),
        ("(sleep 300 > /dev/null & disown); echo evil > .envrc", ".envrc", [".envrc.quarantined"]),
    ],
)
async def test_a_new_file_with_a_protected_name_is_quarantined_and_the_call_fails(
    ground: GuardFixture, script: str, name: str, kept: list[str] | None
) -> None:
    error = await ground.vetoed(f"echo before; echo fine > beside; {script}; echo after")
    assert not os.path.lexists(ground.workspace / name)
    assert name in error.text and str(ground.quarantine) in error.text and "No program can write" in error.text
    assert error.data == {"exit_code": 0, "output": "before\nafter\n"}
    assert (ground.workspace / "beside").read_text() == "fine\n"
    if kept is not None:
        assert ground.kept() == kept
    again = await ground.run("echo still works")
    assert again == (0, "still works\n")


async def test_existing_protected_files_are_neither_moved_nor_changed(ground: GuardFixture) -> None:
    (ground.workspace / ".vscode").mkdir()
    (ground.workspace / ".vscode" / "tasks.json").write_text("theirs")
    (ground.workspace / ".git").mkdir()
    (ground.workspace / ".git" / "config").write_text("theirs")
    code, _ = await ground.run("echo x > fine; echo x > .vscode/new; echo x >> .git/config; rm -rf .vscode; true")
    assert code == 0
    assert (ground.workspace / ".vscode" / "tasks.json").read_text() == "theirs"
    assert os.listdir(ground.workspace / ".vscode") == ["tasks.json"]
    assert (ground.workspace / ".git" / "config").read_text() == "theirs"
    assert not ground.quarantine.exists()


@pytest.mark.parametrize("where", [".", "sub/project", "bare.git"])
async def test_a_repository_created_by_bash_is_quarantined_and_the_error_names_vcs_config(
    ground: GuardFixture, where: str
) -> None:
    option = "--bare " if where == "bare.git" else ""
    error = await ground.vetoed(f"git init -q {option}{where} && echo made && echo x > a")
    repository = "bare.git" if option else os.path.normpath(f"{where}/.git")
    assert not (ground.workspace / repository).exists() and (ground.workspace / "a").exists()
    assert f"{repository} is a new repository" in error.text and "vcs.config" in error.text
    kept = ground.kept()
    assert any(name.endswith(".quarantined/config") for name in kept)
    assert not any(name.endswith("/HEAD") for name in kept), "git would take it for a repository"
    assert error.data == {"exit_code": 0, "output": "made\n"}


async def test_an_existing_folder_that_becomes_a_repository_keeps_its_own_files(ground: GuardFixture) -> None:
    (ground.workspace / "mine").mkdir()
    (ground.workspace / "mine" / "work.txt").write_text("theirs")
    error = await ground.vetoed("git init -q --bare mine")
    assert (ground.workspace / "mine" / "work.txt").read_text() == "theirs"
    assert not (ground.workspace / "mine" / "config").exists() and not (ground.workspace / "mine" / "hooks").exists()
    assert "mine/config" in error.text


async def test_hooks_and_included_configuration_outside_the_git_folder_are_protected(ground: GuardFixture) -> None:
    for name in (".git/objects", ".git/refs", "tools/hooks"):
        (ground.workspace / name).mkdir(parents=True)
    (ground.workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (ground.workspace / ".git" / "config").write_text(
        '[core]\n\thooksPath = tools/hooks\n[include]\n\tpath = ../common.ini\n[includeIf "gitdir:/"]\n\tpath = ../later.ini\n'
    )
    (ground.workspace / "tools" / "hooks" / "pre-commit").write_text("theirs")
    (ground.workspace / "common.ini").write_text("[user]\n\tname = One\n")
    script = (
        "echo evil > tools/hooks/pre-commit; echo evil > tools/hooks/post-checkout; mv tools t2; mkdir -p tools/hooks;"
        "echo '[core] fsmonitor = evil' >> common.ini; mv common.ini s2; true"
    )
    assert (await ground.run(script))[0] == 0
    assert os.listdir(ground.workspace / "tools" / "hooks") == ["pre-commit"]
    assert (ground.workspace / "tools" / "hooks" / "pre-commit").read_text() == "theirs"
    assert (ground.workspace / "common.ini").read_text() == "[user]\n\tname = One\n"
    error = await ground.vetoed("echo '[core] fsmonitor = evil' > later.ini")
    assert "later.ini was moved to" in error.text and not (ground.workspace / "later.ini").exists()


async def test_all_of_many_protected_files_are_moved_and_some_are_named(ground: GuardFixture) -> None:
    error = await ground.vetoed("for i in $(seq 30); do mkdir d$i; echo x > d$i/.envrc; done")
    assert "and 22 more" in error.text
    assert len(ground.kept()) == 30
    assert not list(ground.workspace.rglob(".envrc"))


async def test_a_replaced_protected_link_is_restored(ground: GuardFixture) -> None:
    (ground.workspace / "conf").mkdir()
    (ground.workspace / "conf" / "tasks.json").write_text("theirs")
    (ground.workspace / ".vscode").symlink_to("conf")
    error = await ground.vetoed("rm .vscode; mkdir .vscode; echo evil > .vscode/tasks.json; echo x > conf/tasks.json")
    assert (ground.workspace / ".vscode").readlink() == Path("conf")
    assert (ground.workspace / "conf" / "tasks.json").read_text() == "theirs"
    assert "restored" in error.text
    error = await ground.vetoed("ln -sfn /etc .vscode")
    assert (ground.workspace / ".vscode").readlink() == Path("conf")


async def test_a_cancelled_programs_protected_file_is_moved_and_reported_in_the_output(ground: GuardFixture) -> None:
    said = bytearray()
    begun = asyncio.Event()

    def heard(piece: bytes) -> None:
        said.extend(piece)
        if b"made" in said:
            begun.set()

    running = asyncio.ensure_future(ground.shell().run("echo x > .envrc; echo made; sleep 300", on_output=heard))
    await begun.wait()
    assert (ground.workspace / ".envrc").exists()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (ground.workspace / ".envrc").exists()
    assert b".envrc was moved to" in said


async def test_a_quarantine_on_another_file_system_gets_copies(ground: GuardFixture) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == ground.place.stat().st_dev:
        pytest.skip("there is no second file system here")
    folder = elsewhere / f"handrail-test-{os.getpid()}"
    try:
        profile = SandboxProfile(str(ground.workspace), str(ground.place / "scratch"), quarantine=str(folder))
        shell = SandboxedShell(
            ground.sandbox, profile, ground.capabilities, SessionRoots(ground.workspace), lambda c, t: None
        )
        script = "mkdir -p .vscode/a && echo one > .vscode/a/b && ln -s /etc .vscode/c && mkfifo .vscode/d"
        with pytest.raises(ToolError, match="was moved to"):
            await shell.run(script)
        assert ground.names() == []
        assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["one\n"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_protected_file_that_cannot_be_quarantined_is_removed(ground: GuardFixture) -> None:
    ground.place.joinpath("output", "quarantine").write_text("in the way")
    error = await ground.vetoed("mkdir -p .vscode/deep && echo x > .vscode/deep/f")
    assert ground.names() == [] and ".vscode was removed" in error.text


async def test_a_protected_folder_fifteen_hundred_levels_deep_is_moved_completely(ground: GuardFixture) -> None:
    deep = "import os\nos.mkdir('.vscode'); os.chdir('.vscode')\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    try:
        await ground.vetoed(f'python3 -c "{deep}"')
        assert ground.names() == []
    finally:
        remove_tree(ground.place)


def make_deep(folder: Path, levels: int, name: str = "d") -> None:
    """Make folders within folders, deeper than any path is long, with a protected file in the innermost."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open(".envrc", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)


async def test_programs_run_without_access_to_folders_too_deep_to_inspect(ground: GuardFixture) -> None:
    make_deep(ground.workspace, 1500)
    try:
        code, output = await ground.run("echo works; touch beside; cd $(printf 'd/%.0s' $(seq 128)) && ls d; true")
        assert code == 0 and output.startswith("works\n") and "Permission denied" in output
        assert (ground.workspace / "beside").exists()
        without_rules = dataclasses.replace(ground.profile, denials=None)
        process = await ground.sandbox.start(
            ground.capabilities,
            without_rules,
            ProgramSpec(["/bin/bash", "-c", "cd $(printf 'd/%.0s' $(seq 128)); touch d/x"]),
        )
        assert await process.wait() != 0
        await process.kill()
    finally:
        remove_tree(ground.place)


@pytest.mark.parametrize(
    ("levels", "name"),
    [(200, "d"), (1500, "d"), (30, "n" * 200), (127, "m" * 40)],
)
async def test_folders_too_deep_to_scan_are_moved_away(ground: GuardFixture, levels: int, name: str) -> None:
    made = f"for _ in range({levels}): os.mkdir('{name}'); os.chdir('{name}')"
    deep = f"import os\n{made}\nos.makedirs('.vscode'); open('.vscode/tasks.json', 'w').write('x')"
    try:
        error = await ground.vetoed(f'python3 -c "{deep}"; echo fine > beside')
        assert "cannot read it" in error.text or ".vscode was moved" in error.text
        assert (ground.workspace / "beside").exists()
        left = [folder for folder, folders, _ in os.walk(ground.workspace) if ".vscode" in folders]
        deepest = max((folder for folder, _, _ in os.walk(ground.workspace)), key=len)
        assert left == [] and len(deepest) < 4096
        assert (await ground.run("echo works")) == (0, "works\n")
    finally:
        remove_tree(ground.place)


async def test_protected_files_inside_nested_closed_folders_are_found(ground: GuardFixture) -> None:
    code = (
        "import os\nways = []\n"
        "for _ in range(100): os.mkdir('d'); os.chdir('d'); ways.append(os.getcwd())\n"
        "open('.envrc', 'w').write('x')\n"
        "for way in reversed(ways): os.chmod(way, 0)"
    )
    try:
        await ground.vetoed(f'python3 -c "{code}"')
        assert not [folder for folder, _, files in os.walk(ground.workspace) if ".envrc" in files]
    finally:
        remove_tree(ground.place)


async def test_a_persistent_process_is_checked_after_each_call(ground: GuardFixture) -> None:
    script = "read a; echo x > .envrc; echo one; read b; echo two; read c; echo x > .envrc; echo three; read d"
    process = await ground.sandbox.start(ground.capabilities, ground.profile, ProgramSpec(["/bin/bash", "-c", script]))
    assert isinstance(process, GuardedProcess)
    try:
        for line, bad in ((b"one", True), (b"two", False), (b"three", True)):
            await process.begin_call()
            if line == b"two":  # what others do between its calls is not its doing
                (ground.workspace / ".mcp.json").write_text("theirs")
                await process.begin_call()
            await process.write(b"go\n")
            assert await process.read_line(100) == line + b"\n"
            if bad:
                with pytest.raises(ProtectedPathViolation, match=r"\.envrc"):
                    await process.end_call()
            else:
                await process.end_call()
            assert not (ground.workspace / ".envrc").exists()
    finally:
        await process.kill()
    assert (ground.workspace / ".mcp.json").read_text() == "theirs"


async def test_a_program_with_a_read_only_workspace_writes_nothing_and_reads_no_hidden_file(
    ground: GuardFixture,
) -> None:
    (ground.workspace / ".env").write_text("TOP-SECRET")
    profile = dataclasses.replace(ground.profile, workspace_writable=False)
    process = await ground.sandbox.start(
        ground.capabilities, profile, ProgramSpec(["/bin/bash", "-c", "echo x > .envrc; cat .env; true"])
    )
    out, _, _ = await process.communicate(b"", 100)
    assert await process.wait() == 0 and ground.names() == [".env"] and out == b""
    await process.kill()


# ── with vcs.config ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def versioned(ground: GuardFixture) -> GuardFixture:
    ground.vcs = True
    return ground


GIT = "git -c protocol.file.allow=always"


async def test_ordinary_git_commands_work_with_the_vcs_capability(versioned: GuardFixture) -> None:
    """init, clone from a bare repository, checkout --track, push -u, submodules and further work trees."""
    script = (
        "git init -q -b main src && cd src && echo 1 > a && git add a && git commit -qm one && git branch feature && cd .."
        " && git clone -q --bare src hub.git && git clone -q hub.git work && cd work"
        " && git checkout -q --track origin/feature && echo 2 > b && git add b && git commit -qm two"
        " && git checkout -qb mine && git push -q -u origin mine && git config user.name 'A. Person'"
        " && git branch -vv && git config --get branch.mine.remote"
        f" && {GIT} submodule --quiet add ../hub.git lib && git commit -qm lib && git worktree add -q ../tree feature"
        " && cd ../tree && git status --short && git log --oneline | wc -l && ls ../work/.git/hooks"
    )
    code, output = await versioned.run(script)
    assert code == 0, output
    assert "[origin/mine]" in output and "pre-commit.sample" in output
    assert not versioned.quarantine.exists()
    # What was made stays what it is: pinned from now on, for those without the capability.
    versioned.vcs = False
    code, output = await versioned.run(
        "cd work && git config core.fsmonitor evil; git status --short; git log --oneline -1"
    )
    assert code == 0 and "lib" in output
    assert "fsmonitor" not in (versioned.workspace / "work" / ".git" / "config").read_text()


HARMFUL = {
    "core.fsmonitor": "git config core.fsmonitor 'touch owned'",
    "core.hookspath": "git config core.hooksPath tools",
    "core.sshcommand": "printf '[core]\\n\\tsshCommand = evil\\n' >> .git/config",
    "alias.st": "git config alias.st '!evil'",
    "include.path": "git config include.path ../evil",
    "filter.x.clean": "git config filter.x.clean evil",
    "remote.evil.url": "git remote add evil 'ext::sh -c evil'",
    "core.worktree": "git config core.worktree /etc",
    "url.evil.insteadof": "git config url.evil.insteadOf https://",
    "git cannot read": "echo '[broken' >> .git/config",
    "not a regular file": "mv .git/config c2; ln -s ../c2 .git/config",
    "regular file with one name": "ln .git/config .git/alias",
}


@pytest.mark.parametrize("told", HARMFUL)
async def test_a_git_key_outside_the_safe_list_is_restored_and_named(versioned: GuardFixture, told: str) -> None:
    assert (await versioned.run("git init -q && git config user.name One && git remote add origin ../x"))[0] == 0
    config = versioned.workspace / ".git" / "config"
    before = config.read_text()
    error = await versioned.vetoed(f"git config user.email a@b.c; {HARMFUL[told]}; true")
    assert config.read_text() == before and not config.is_symlink() and config.stat().st_nlink == 1
    assert told in error.text and ".git/config" in error.text and "restored" in error.text
    assert (await versioned.run("git config user.email a@b.c && git config --get remote.origin.url")) == (0, "../x\n")


async def test_git_settings_made_by_the_user_are_restored_after_a_program_removes_them(versioned: GuardFixture) -> None:
    assert (await versioned.run("git init -q"))[0] == 0
    config = versioned.workspace / ".git" / "config"
    config.write_text(config.read_text() + '[core]\n\thooksPath = tools\n[remote "o"]\n\turl = ext::theirs\n')
    before = config.read_text()
    assert (await versioned.run("git config user.name One && git remote add p ../x"))[0] == 0
    assert "hooksPath = tools" in config.read_text()
    for script in (
        "git config --unset core.hooksPath",
        "git remote set-url o ../x",
        "rm .git/config",
        ": > .git/config",
    ):
        error = await versioned.vetoed(script)
        assert "restored" in error.text
        assert "hooksPath = tools" in config.read_text() and "ext::theirs" in config.read_text()
    assert before in config.read_text()


async def test_git_hooks_other_than_samples_are_removed(versioned: GuardFixture) -> None:
    template = versioned.workspace / "template" / "hooks"
    template.mkdir(parents=True)
    (template / "post-checkout").write_text("#!/bin/sh\ntouch /tmp/owned\n")
    (template / "update.sample").write_text("a sample")
    error = await versioned.vetoed(
        "git init -q --template=template mine && cd mine && git commit -q --allow-empty -m x"
    )
    assert "post-checkout would be run" in error.text
    assert (versioned.workspace / "mine" / ".git" / "HEAD").exists()
    assert not (versioned.workspace / "mine" / ".git" / "hooks").exists()
    assert (await versioned.run("git init -q plain && ls plain/.git/hooks | grep -vc sample"))[1] == "0\n"
    error = await versioned.vetoed(
        "echo evil > plain/.git/hooks/post-checkout; rm -rf plain/.git/hooks; "
        "mkdir -p plain/.git/modules/x/hooks; echo x > plain/.git/modules/x/hooks/update"
    )
    assert not (versioned.workspace / "plain" / ".git" / "modules" / "x" / "hooks").exists()


@pytest.mark.parametrize(
    "script",
    [
        "echo 'gitdir: ../../other' > .git",
        "echo 'gitdir: /etc' > .git",
        "mkdir t && echo 'gitdir: ../nothing' > t/.git",
        "git init -q x && echo ../../../other > x/.git/commondir",
        "git init -q x && git config --file x/.git/config core.fsmonitor evil",
        "mkdir .vscode && echo x > .vscode/tasks.json",
        "echo x > .gitconfig",
        "mkdir -p .hg && echo x > .hg/hgrc",
        "mkdir .git && ln -s ../evil .git/config && mkdir .git/objects .git/refs && echo 'ref: x' > .git/HEAD",
    ],
)
async def test_a_vcs_program_can_change_git_settings_but_no_other_protected_file(
    versioned: GuardFixture, script: str
) -> None:
    error = await versioned.vetoed(script)
    assert "was moved to" in error.text
    left = {path.name for path in versioned.workspace.rglob("*")}
    assert not left & {".git", ".vscode", ".gitconfig", "hgrc", "commondir"}


async def test_a_note_explains_a_git_configuration_change_refused_in_bash(versioned: GuardFixture) -> None:
    script = "git init -q -b main src && cd src && git commit -q --allow-empty -m one && git branch other && cd .. && "
    assert (await versioned.run(script + "git clone -q --bare src hub.git && git clone -q hub.git work"))[0] == 0
    versioned.vcs = False
    for script in ("git checkout -q --track origin/other", "git push -u origin HEAD:mine", "git config user.name x"):
        done = await versioned.shell().run(script, cwd="work")
        assert done.exit_code != 0 or b"could not" in done.output, done.output
        assert any("work/.git/config" in note and "vcs.config" in note for note in done.notes), done
    done = await versioned.shell().run("git checkout -qb fine && git push -q origin fine && git fetch -q", cwd="work")
    assert done.exit_code == 0 and done.notes == ()


async def test_a_program_that_makes_many_secret_files_does_not_block_later_programs(ground: GuardFixture) -> None:
    """Neither in folders of their own, nor all in one place."""
    (ground.workspace / ".env").write_text("theirs")
    error = await ground.vetoed("for i in $(seq 1200); do echo x > $i.pem; done")
    assert "a sandbox can hide at most" in error.text and ground.names() == [".env"]
    assert (await ground.run("for i in $(seq 451); do mkdir d$i; echo x > d$i/.env; done; echo made"))[1] == "made\n"
    code, output = await ground.run("echo works; cat .env d7/.env")
    assert code == 1 and output.startswith("works\n") and "theirs" not in output
    assert (ground.workspace / ".env").read_text() == "theirs"
