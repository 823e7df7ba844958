"""Reports about file systems on which several spellings name one file: APFS, NTFS, vfat, and shared folders of a host."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.field.folding_disk import mounted

from handrail.arbiter.lock_table import LockResolver, do_locks_conflict
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.session_protocols import Session
from handrail.kernel.doctor import run_doctor_checks
from handrail.origins.listed_paths import canonicalize_path_spelling, is_name_folding_folder, resolve_name_folding_path
from handrail.origins.program_lookup import ProgramRefused, find_program, register_open_workspaces
from handrail.runtime.files.session_roots import SessionRoots
from handrail.sandbox import tier_probe
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel
from handrail.tools.files.editing_tools import WriteTool

confined = pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="programs cannot be confined here")
ALL = ("allow *", "allow bash *")
HIDDEN = (*ALL, "deny fs.read secrets/**")


@pytest.fixture(params=["one", "many"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A workspace that ignores case and normal forms, with one inode number for each file, or one for each spelling."""
    with mounted(tmp_path / "disk", tmp_path / "ws", "case", numbers=request.param) as folder:
        (folder / "secrets").mkdir()
        (folder / "secrets" / "key.txt").write_text("TOP-SECRET\n")
        (folder / "Src").mkdir()
        (folder / "Src" / "Main.py").write_text("value = 1\n")
        yield folder


@asynccontextmanager
async def opened(disk: Path, *rules: str, answers: Sequence[ApprovalAnswer] = ()) -> AsyncGenerator[Session]:
    async with temporary_kernel(disk.parent, rules=rules) as kernel:
        yield await kernel.session(approval_handler=ScriptedApprovalHandler(answers) if answers else None)


async def run_python(session: Session, code: str) -> Result:
    """Run a program whose text says nothing about the files that it opens."""
    Path(session.workdir, "run.py").write_text(code)
    return await session.call("bash", {"command": "python3 run.py"})


SPELLINGS = ("SECRETS/key.txt", "secrets/KEY.TXT", "Secrets/Key.Txt", "./x/../SECRETS/key.txt", "\u017fecrets/key.txt")


@pytest.mark.parametrize(
    "rule", ["deny fs.read secrets/**", "deny fs.read SECRETS", "deny read **/key.*", "ask fs.read secrets"]
)
async def test_a_denied_file_cannot_be_read_under_a_name_in_another_case(disk: Path, rule: str) -> None:
    async with opened(disk, "allow *", rule) as session:
        for path in (*SPELLINGS, f"{disk}/SECRETS/KEY.txt"):
            result = await session.call("read", {"path": path})
            assert not result.ok and "TOP-SECRET" not in str(result), path
        assert (await session.call("read", {"path": "SRC/MAIN.PY"})).data["path"] == "Src/Main.py"


async def test_a_file_that_does_not_exist_yet_is_denied_by_its_folded_name(disk: Path) -> None:
    async with opened(
        disk, "allow *", "deny fs.write locked/**", "deny fs.write **/*.lock", "deny fs.write str\u00e4ng"
    ) as s:
        for path in ("LOCKED/new/a.txt", "Locked/b", "a.LOCK", "Src/B.Lock", "STRA\u0308NG/x"):
            result = await s.call("write", {"path": path, "content": "x"})
            assert not result.ok and "is denied by the rule" in (result.error_text or ""), path
        for path in ("Handrail.TOML", ".GIT/hooks/post-commit", "\uff0eEnv", ".Npmrc", "ID_RSA"):
            assert not (await s.call("write", {"path": path, "content": "x"})).ok, path
        assert sorted(os.listdir(disk)) == ["Src", "secrets"]


async def test_an_allow_rule_applies_to_each_spelling_of_a_path(disk: Path) -> None:
    (disk / "Caf\u00e9").mkdir()
    async with opened(
        disk, "allow fs.write src/main.py", "allow fs.write DOCS/**", "allow fs.write cafe\u0301/**"
    ) as session:
        await session.call("read", {"path": "src/main.py"})
        for path in ("sRC/mAIN.py", "docs/a.md", "Caf\u00e9/a", "CAFE\u0301/b"):
            written = await session.call("write", {"path": path, "content": "x\n"})
            assert written.ok, written.error_text
        assert not (await session.call("write", {"path": "\u017frc/new.py", "content": "x"})).ok
    assert (disk / "Src" / "Main.py").read_text() == "x\n" and sorted(os.listdir(disk / "Src")) == ["Main.py"]


async def test_secret_file_names_require_approval_in_any_case(disk: Path) -> None:
    (disk / ".EnV").write_text("TOKEN=TOP-SECRET")
    (disk / "ID_Rsa").write_text("TOP-SECRET")
    (disk / "Src" / "Notes.txt").write_text("TOP-SECRET")
    async with opened(disk) as session:
        for path in (".env", ".ENV", "id_rsa", "Id_RSA", "SECRETS/Key.txt"):
            result = await session.call("read", {"path": path})
            assert not result.ok and "TOP-SECRET" not in str(result), path
        found = await session.call("grep", {"pattern": "TOP-SECRET", "glob": "*"})
        assert [match["path"] for match in found.data["matches"]] == ["Src/Notes.txt"]


async def test_a_search_hides_files_denied_by_a_rule_in_another_spelling(disk: Path) -> None:
    async with opened(disk, "allow *", "deny fs.read SECRETS/**") as session:
        for arguments in ({"pattern": "TOP-SECRET"}, {"pattern": "TOP-SECRET", "path": "Secrets"}):
            found = await session.call("grep", arguments)
            assert "TOP-SECRET" not in str(found.data) and "key.txt" not in str(found.data)
        assert (await session.call("glob", {"pattern": "**/*"})).data["paths"] == ["Src/Main.py"]
        assert (await session.call("glob", {"pattern": "src/*.PY"})).data["paths"] == ["Src/Main.py"]
        found = await session.call("grep", {"pattern": "value", "glob": "*.PY", "path": "SRC"})
        assert [match["path"] for match in found.data["matches"]] == ["Src/Main.py"]


async def test_an_unread_file_cannot_be_overwritten_under_another_spelling(disk: Path) -> None:
    async with opened(disk, *ALL) as session:
        refused = await session.call("write", {"path": "src/MAIN.py", "content": "value = 2\n"})
        assert refused.metadata["error_kind"] == "conflict"
        await session.call("read", {"path": "SRC/main.py"})
        (disk / "Src" / "Main.py").write_text("value = 3\n")
        stale = await session.call("write", {"path": "src/MAIN.py", "content": "value = 2\n"})
        assert stale.metadata["error_kind"] == "conflict"
        await session.call("read", {"path": "Src/Main.py"})
        done = await session.call("edit", {"path": "src/main.PY", "old": "3", "new": "4"})
        assert done.ok and done.data["path"] == "Src/Main.py", done.error_text
    assert (disk / "Src" / "Main.py").read_text() == "value = 4\n"


async def test_undo_restores_files_that_were_changed_under_another_spelling(disk: Path) -> None:
    async with opened(disk, *ALL, answers=[ApprovalAnswer("once")]) as session:
        await session.call("read", {"path": "Src/Main.py"})
        await session.call("write", {"path": "SRC/MAIN.PY", "content": "value = 2\n"})
        await session.undo()
        assert (disk / "Src" / "Main.py").read_text() == "value = 1\n"
        await session.call("read", {"path": "Src/Main.py"})
        assert (await session.call("file.delete", {"path": "SRC/main.py"})).ok
        await session.undo()
        assert os.listdir(disk / "Src") == ["Main.py"]


async def test_a_move_that_changes_only_letter_case_is_refused_with_advice(disk: Path) -> None:
    async with opened(disk, *ALL) as session:
        refused = await session.call("file.move", {"path": "Src/Main.py", "to": "Src/main.py"})
        assert "Move it to another name first" in (refused.error_text or "")
        assert (await session.call("file.move", {"path": "SRC/MAIN.py", "to": "src/x"})).ok
        assert (await session.call("file.move", {"path": "src/X", "to": "src/main.py"})).ok
    assert os.listdir(disk / "Src") == ["main.py"]


@pytest.mark.parametrize("pair", [("Src/Main.py", "SRC/MAIN.PY"), ("new/a", "NEW/A"), ("caf\u00e9", "CAFE\u0301")])
def test_two_spellings_of_one_file_have_one_lock(disk: Path, pair: tuple[str, str]) -> None:
    roots = SessionRoots(disk)
    one, other, folder = (
        LockResolver().resolve(WriteTool().spec, {"path": path, "content": ""}, roots)
        for path in (*pair, pair[1].partition("/")[0])
    )
    assert do_locks_conflict(one, other) and do_locks_conflict(one, folder)


# Programs. A sandbox mounts over a path, and on FUSE, 9p or virtiofs another spelling reaches the file below the mount.


@confined
@pytest.mark.parametrize(
    "command",
    [
        "cat SECRETS/key.txt",
        "cat [sS]*/KEY.txt",
        "grep -r TOP .",
        "python3 run.py",
        "mv secrets x; cat x/*",
        "cat inner/DEEP/Key",
    ],
)
async def test_a_program_cannot_read_a_masked_file_under_another_spelling(disk: Path, command: str) -> None:
    (disk / "run.py").write_text("print(open('SECRETS/KEY.txt').read())")
    (disk / "inner" / "deep").mkdir(parents=True)
    (disk / "inner" / "deep" / "key").write_text("TOP-SECRET")
    (disk / "inner" / "deep" / "other").write_text("known")
    async with opened(disk, *HIDDEN, "deny fs.read inner/deep/key") as session:
        result = await session.call("bash", {"command": command})
        assert "exit_code" in (result.data or {}) and "TOP-SECRET" not in str(result), result
        assert "TOP" not in str((await session.call("grep", {"pattern": "TOP"})).data)
    assert (disk / "secrets" / "key.txt").read_text() == "TOP-SECRET\n"


@confined
async def test_programs_cannot_create_entries_in_a_folder_that_holds_a_hidden_file(disk: Path) -> None:
    """Programs work in the folders below. In a folder around the hidden file, they make no new entry."""
    (disk / "link").symlink_to("Src/Main.py")
    async with opened(disk, *HIDDEN) as session:
        done = await run_python(
            session,
            "import os\nprint(open('Src/Main.py').read(), open('link').read(), sorted(os.listdir('.')))\n"
            "open('Src/new.txt', 'w').write('new')\nopen('Src/Main.py', 'a').write('more')\nopen('beside', 'w')",
        )
        assert "value = 1" in done.data["output"] and "Read-only file system" in done.data["output"]
        assert (disk / "Src" / "new.txt").read_text() == "new" and not (disk / "beside").exists()
        assert (disk / "Src" / "Main.py").read_text().endswith("more")
        (disk / "later").mkdir()
        (disk / "later" / "a").write_text("seen")
        assert "seen" in (await run_python(session, "print(open('later/a').read())")).data["output"]
        for number in range(401):
            (disk / f"file{number}").touch()
        refused = await run_python(session, "print(1)")
        assert "No program was started" in (refused.error_text or "") and "at most 400 entries" in (
            refused.error_text or ""
        )


@confined
async def test_a_program_cannot_write_a_denied_file_under_another_spelling(disk: Path) -> None:
    async with opened(disk, *ALL, "deny fs.write src/**") as session:
        await run_python(session, "open('SRC/main.PY', 'w').write('evil')")
        await run_python(session, "open('Src/Main.py', 'w').write('evil')")
        await run_python(session, "import os; os.rename('Src', 'x'); open('x/main.PY', 'w').write('evil')")
    assert (disk / "Src" / "Main.py").read_text() == "value = 1\n"


@confined
async def test_programs_on_a_case_insensitive_disk_cannot_change_protected_files(disk: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=disk, check=True)
    kept = {".git/config": "", ".vscode/settings.json": "{}", "AGENTS.md": "Be good.", ".git/hooks/pre-push": "true"}
    for name, text in kept.items():
        (disk / name).parent.mkdir(exist_ok=True)
        (disk / name).write_text(text)
    async with opened(disk, *ALL) as session:
        done = await run_python(session, "print(open('SRC/MAIN.py').read()); open('src/new.txt', 'w').write('new')")
        assert done.ok and "value = 1" in done.data["output"] and (disk / "Src" / "new.txt").read_text() == "new"
        for name in (
            ".GIT/CONFIG",
            ".VSCode/settings.json",
            "AGENTS.MD",
            ".GIT/HOOKS/pre-commit",
            ".git/Hooks/PRE-PUSH",
        ):
            await run_python(session, f"open({name!r}, 'w').write('evil')")
            assert {one: (disk / one).read_text() for one in kept} == kept, name
        assert not (disk / ".git" / "hooks" / "pre-commit").exists()
        await run_python(session, "open('HandRail.toml', 'w').write('evil')")
        assert not any(name.lower() == "handrail.toml" for name in os.listdir(disk))


@confined
async def test_rules_apply_to_shell_redirections_and_arguments_in_any_letter_case(disk: Path) -> None:
    async with opened(disk, "allow bash {confined}", "deny fs.write locked/**", "ask fs.read notes/**") as session:
        for command in ("echo x > LOCKED/a", "echo x >> Locked/b", "sort -o LOCKED/c Src/Main.py; echo > locked/D"):
            assert not (await session.call("bash", {"command": command})).ok, command
        (disk / "Notes").mkdir()
        (disk / "Notes" / "a").write_text("TOP-SECRET")
        for command in ("cat NOTES/a", "cat nOTES/A | wc -l"):
            result = await session.call("bash", {"command": command})
            assert not result.ok and "notes" in (result.error_text or ""), command


@confined
async def test_an_approval_is_bound_to_the_content_of_a_script_named_in_another_case(disk: Path) -> None:
    (disk / "Build.sh").write_text("echo approved")
    handler = ScriptedApprovalHandler([ApprovalAnswer("once")])
    handler.may_answer.clear()
    async with temporary_kernel(disk.parent, rules=["ask bash"]) as kernel:
        session = await kernel.session(approval_handler=handler)
        call = asyncio.ensure_future(session.call("bash", {"command": "sh BUILD.SH"}))
        await handler.request_received.wait()
        (disk / "Build.sh").write_text("echo something else")
        handler.may_answer.set()
        result = await call
        assert "`Build.sh` has changed" in (result.error_text or ""), result


# Workspaces, further folders and single folders.


def test_a_workspace_opened_in_another_spelling_is_the_same_workspace(disk: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    (disk / "Project").mkdir()
    one, other = (locate_folders(disk / name, state) for name in ("Project", "PROJECT"))
    assert one.workspace == other.workspace == disk / "Project" and one.key == other.key
    assert SessionRoots(disk / "project").workspace == str(disk / "Project")


def test_a_program_inside_an_open_workspace_is_refused_in_any_spelling(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "Bin").mkdir()
    (disk / "Bin" / "rg").write_text("#!/bin/sh\n")
    (disk / "Bin" / "rg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{disk}/BIN")
    with register_open_workspaces(disk / "Bin"), pytest.raises(ProgramRefused):
        find_program("rg")


def test_the_doctor_names_each_folder_that_ignores_case(disk: Path, tmp_path: Path) -> None:
    def names(workspace: Path) -> list[str]:
        checks = run_doctor_checks(workspace, tmp_path / "state", tmp_path / "config" / "handrail.toml")
        return [check.detail for check in checks if check.name == "file names"]

    (tmp_path / "config").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "config" / "handrail.toml").write_text('agent = "wide"\n')
    (tmp_path / "config" / "agents" / "wide").mkdir(parents=True)
    agent = tmp_path / "config" / "agents" / "wide" / "agent.toml"
    agent.write_text('id = "wide"\n')
    assert names(tmp_path / "plain") == []
    [said] = names(disk)
    assert (
        said.startswith(f"{disk} is on a file system that accepts several spellings")
        and "A program cannot create files" in said
    )
    (disk / "further").mkdir()
    agent.write_text(f'id = "wide"\n[[roots]]\npath = "{disk}/FURTHER"\n')
    [said] = names(tmp_path / "plain")
    assert said.startswith(f"{disk}/further is on a file system")


async def test_rules_for_an_additional_case_insensitive_folder_apply_to_each_spelling(tmp_path: Path) -> None:
    agent = tmp_path / "config" / "agents" / "wide" / "agent.toml"
    agent.parent.mkdir(parents=True)
    with mounted(tmp_path / "disk", tmp_path / "Further", "case") as further:
        agent.write_text(f'id = "wide"\n[[roots]]\npath = "{further}"\naccess = "write"\n')
        (further / "Secrets").mkdir()
        (further / "Secrets" / "key").write_text("TOP-SECRET")
        rules = (
            f"deny fs.read {further}/secrets/**",
            f"allow fs.write {further}/DOCS/**",
            "deny fs.write **/Locked/**",
        )
        async with temporary_kernel(tmp_path, rules=rules, settings='agent = "wide"') as kernel:
            session = await kernel.session()
            assert not (await session.call("read", {"path": f"{further}/SECRETS/key"})).ok
            assert (await session.call("write", {"path": f"{further}/docs/a", "content": "x"})).ok
            assert not (await session.call("write", {"path": f"{further}/LOCKED/a", "content": "x"})).ok
            assert not (await session.call("write", {"path": f"{further}/other", "content": "x"})).ok


async def test_rules_ignore_case_only_inside_a_case_insensitive_mount_of_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "ws" / "Share").mkdir(parents=True)
    (tmp_path / "ws" / "share").mkdir()
    rules = ("deny fs.read Share/keys/**", "allow fs.write SHARE/**", "allow fs.write Share/Docs/**")
    with mounted(tmp_path / "disk", tmp_path / "ws" / "Share", "case") as share:
        (share / "Keys").mkdir()
        (share / "Keys" / "a").write_text("TOP-SECRET")
        async with temporary_kernel(tmp_path, rules=rules) as kernel:
            session = await kernel.session()
            for path in ("Share/KEYS/a", "Share/keys/A"):
                assert not (await session.call("read", {"path": path})).ok
            assert (await session.call("write", {"path": "Share/DOCS/b", "content": "x"})).ok
            assert not (await session.call("write", {"path": "Share/b", "content": "x"})).ok  # SHARE is another folder
            assert not (await session.call("read", {"path": "SHARE/keys/a"})).ok


@confined
async def test_a_program_cannot_read_a_masked_file_in_a_case_insensitive_mount(tmp_path: Path) -> None:
    (tmp_path / "ws" / "Share").mkdir(parents=True)
    (tmp_path / "ws" / "keys").mkdir()
    (tmp_path / "ws" / "keys" / "a").write_text("HIDDEN")
    with mounted(tmp_path / "disk", tmp_path / "ws" / "Share", "case") as share:
        async with opened(tmp_path / "ws", *ALL, "deny fs.read **/keys/**") as session:
            done = await session.call("bash", {"command": "cat Share/KEYS/a; cat keys/a; cat KEYS/a"})
            assert done.ok and "HIDDEN" not in str(done.data)  # a mount suffices on the exact disk
            (share / "Keys").mkdir()
            (share / "Keys" / "a").write_text("TOP-SECRET")
            (share / "other").write_text("known")
            done = await session.call("bash", {"command": "cat Share/KEYS/a; cat Share/other; echo > new"})
            assert "known" in str(done.data) and "TOP-SECRET" not in str(done)
            assert (tmp_path / "ws" / "new").exists()  # only the shared folder takes no new entry


@pytest.mark.parametrize("numbers", ["one", "many"])
def test_case_folding_is_detected_for_each_folder_of_a_disk(tmp_path: Path, numbers: str) -> None:
    with mounted(tmp_path / "disk", tmp_path / "m", "case", numbers=numbers, only="loose") as folder:
        for name in ("Strict", "loose"):
            (folder / name).mkdir()
            (folder / name / "Name").write_text("x")
        assert (
            not is_name_folding_folder(str(folder))
            and not is_name_folding_folder(str(folder / "Strict"))
            and is_name_folding_folder(str(folder / "loose"))
        )
        assert canonicalize_path_spelling(f"{folder}/Strict/NAME") == f"{folder}/Strict/NAME"
        assert canonicalize_path_spelling(f"{folder}/loose/NAME") == f"{folder}/loose/Name"
        assert resolve_name_folding_path(f"{folder}/LOOSE/name") is None


@pytest.mark.parametrize("numbers", ["one", "many"])
async def test_rules_apply_to_both_normal_forms_on_a_disk_that_ignores_normalisation(
    tmp_path: Path, numbers: str
) -> None:
    rules = ("deny fs.read Geha\u0308use/**", "deny fs.write pl\u00e4ne/**")
    with mounted(tmp_path / "disk", tmp_path / "ws", "form", numbers=numbers) as folder:
        (folder / "Geh\u00e4use").mkdir()
        (folder / "Geh\u00e4use" / "a").write_text("TOP-SECRET")
        async with temporary_kernel(tmp_path, rules=("allow *", *rules)) as kernel:
            session = await kernel.session()
            for path in ("Geh\u00e4use/a", "Geha\u0308use/a"):
                assert not (await session.call("read", {"path": path})).ok
            assert not (await session.call("write", {"path": "pla\u0308ne/a", "content": "x"})).ok
            assert (await session.call("write", {"path": "A", "content": "x"})).ok
            assert (await session.call("write", {"path": "a", "content": "y"})).ok
        assert sorted(os.listdir(folder)) == ["A", "Geh\u00e4use", "a"]


@pytest.mark.parametrize("numbers", ["one", "many"])
def test_a_dos_short_name_is_resolved_to_its_file_or_refused(tmp_path: Path, numbers: str) -> None:
    with mounted(tmp_path / "disk", tmp_path / "m", "short", numbers=numbers) as folder:
        (folder / "Secret-letters.text").write_text("TOP-SECRET")
        (folder / "other").write_text("")
        assert (folder / "SECRET~1.TEX").read_text() == "TOP-SECRET"
        if numbers == "one":
            assert SessionRoots(folder).resolve_path("SECRET~1.TEX").relative_path == "Secret-letters.text"
        else:
            with pytest.raises(ToolError, match="it lists no entry that is certainly") as refused:
                SessionRoots(folder).resolve_path("SECRET~1.TEX")
            assert refused.value.kind == "denied"


def test_names_in_two_cases_are_two_files_on_a_case_sensitive_disk(tmp_path: Path) -> None:
    for name in ("a", "A", "Geh\u00e4use", "Geha\u0308use"):
        (tmp_path / name).write_text(name)
        assert resolve_name_folding_path(str(tmp_path / name)) is None
    assert resolve_name_folding_path(str(tmp_path / "new")) is None and not is_name_folding_folder(str(tmp_path))
    roots = SessionRoots(tmp_path)
    one, other = (LockResolver().resolve(WriteTool().spec, {"path": path, "content": ""}, roots) for path in "aA")
    assert not do_locks_conflict(one, other)


async def test_rules_apply_to_a_case_insensitive_disk_mounted_after_the_session_started(tmp_path: Path) -> None:
    (tmp_path / "ws" / "Data").mkdir(parents=True)
    (tmp_path / "ws" / "Data" / "Plain").write_text("x")
    async with temporary_kernel(tmp_path, rules=("deny fs.read Data/keys",)) as kernel:
        session = await kernel.session()
        assert (await session.call("read", {"path": "Data/Plain"})).ok
        with mounted(tmp_path / "disk", tmp_path / "ws" / "Data", "case") as share:
            (share / "Keys").write_text("TOP-SECRET")
            for path in ("Data/KEYS", "Data/Keys"):
                assert not (await session.call("read", {"path": path})).ok
