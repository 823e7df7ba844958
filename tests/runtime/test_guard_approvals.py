"""Programs that change paths which always need approval: blocked, allowed by a rule that names them, or reported."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from tests.runtime.test_guard import GuardFixture, ground  # noqa: F401  # pyright: ignore[reportUnusedImport]

from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.policy.rules.rules_and_modes import build_default_rule_book, parse_rule
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.shell_service import CompletedProcess, SandboxedShell

pytestmark = pytest.mark.proves("S-07")


def shell(ground: GuardFixture, *rules: str) -> SandboxedShell:  # noqa: F811
    book = build_default_rule_book().with_rules(*(parse_rule(text, scope="session") for text in rules))
    profile: SandboxProfile = dataclasses.replace(
        ground.profile, denials=build_hidden_path_rules(book, str(ground.workspace))
    )
    return SandboxedShell(
        ground.sandbox, profile, ground.capabilities, SessionRoots(ground.workspace), lambda capability, target: None
    )


async def run(ground: GuardFixture, script: str, *rules: str) -> CompletedProcess:  # noqa: F811
    return await shell(ground, *rules).run(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("echo obey > AGENTS.md", "AGENTS.md"),
        ("echo obey > agents.md", "agents.md"),
        ("mkdir -p sub && echo obey > sub/CLAUDE.md", "sub/CLAUDE.md"),
        ("mkdir -p .agents/skills/a && echo obey > .agents/skills/a/SKILL.md", ".agents"),
        ("echo 'script-shell=./x' > .npmrc", ".npmrc"),
        ("mkdir -p gradle/wrapper && echo x > gradle/wrapper/gradle-wrapper.jar", "gradle/wrapper"),
        ("ln -s notes AGENTS.md", "AGENTS.md"),
        ("mkdir x && echo obey > x/.cursorrules && mv x y", "y/.cursorrules"),
    ],
)
async def test_a_new_always_ask_file_is_moved_and_the_error_names_the_rule(
    ground: GuardFixture,  # noqa: F811
    script: str,
    name: str,
) -> None:
    error = await ground.vetoed(f"{script}; echo fine > beside")
    assert not os.path.lexists(ground.workspace / name) and (ground.workspace / "beside").exists()
    assert f"'allow fs.write {name}'" in error.text and "unless an fs.write rule names the path" in error.text


async def test_existing_instruction_files_are_read_only_for_programs(ground: GuardFixture) -> None:  # noqa: F811
    (ground.workspace / "AGENTS.md").write_text("theirs")
    (ground.workspace / ".github" / "instructions").mkdir(parents=True)
    (ground.workspace / ".github" / "instructions" / "a.instructions.md").write_text("theirs")
    done = await run(
        ground,
        "echo x >> AGENTS.md; rm -f AGENTS.md; mv AGENTS.md b; echo x > .github/instructions/b.instructions.md; "
        "mv .github g; echo x > .github/instructions/a.instructions.md",
        "allow fs.write",
    )
    assert (ground.workspace / "AGENTS.md").read_text() == "theirs"
    assert os.listdir(ground.workspace / ".github" / "instructions") == ["a.instructions.md"]
    assert (ground.workspace / ".github" / "instructions" / "a.instructions.md").read_text() == "theirs"
    assert any("AGENTS.md contains instructions for agents" in note for note in done.notes)


async def test_a_rule_that_names_a_path_opens_it_for_programs(ground: GuardFixture) -> None:  # noqa: F811
    (ground.workspace / "AGENTS.md").write_text("old")
    done = await run(
        ground,
        "echo new > AGENTS.md; mkdir -p .github/instructions; echo x > .github/instructions/a.md",
        "allow fs.write AGENTS.md",
        "allow fs.write .github/instructions",
    )
    assert done.exit_code == 0 and (ground.workspace / "AGENTS.md").read_text() == "new\n"
    assert (ground.workspace / ".github" / "instructions" / "a.md").exists()


async def test_protected_paths_stay_protected_in_a_folder_that_a_rule_opens(ground: GuardFixture) -> None:  # noqa: F811
    (ground.workspace / ".agents" / ".vscode").mkdir(parents=True)
    script = "echo x > .agents/fine; echo x > .agents/.vscode/tasks.json; echo x > .agents/.envrc"
    with pytest.raises(Exception, match=r"\.agents/\.envrc was moved"):
        await run(ground, script, "allow fs.write .agents")
    assert (ground.workspace / ".agents" / "fine").exists()
    assert not os.listdir(ground.workspace / ".agents" / ".vscode")


async def test_a_new_file_loaded_as_code_by_other_tools_is_kept_and_reported(ground: GuardFixture) -> None:  # noqa: F811
    done = await run(ground, "echo x > vite.config.ts; mkdir -p .github/workflows; echo x > .github/workflows/ci.yml")
    assert done.exit_code == 0 and (ground.workspace / "vite.config.ts").exists()
    (note,) = [note for note in done.notes if "vite.config.ts" in note]
    assert ".github/workflows" in note and "run or load code" in note
    again = await run(ground, "echo y > vite.config.ts; echo y > other.txt")
    assert not again.notes and (ground.workspace / "vite.config.ts").read_text() == "y\n"


async def test_instruction_files_of_installed_packages_are_left_alone(ground: GuardFixture) -> None:  # noqa: F811
    done = await run(
        ground, "mkdir -p node_modules/x && cd node_modules/x && touch AGENTS.md .npmrc .eslintrc.js CLAUDE.md"
    )
    assert done.exit_code == 0 and not done.notes
    assert sorted(os.listdir(ground.workspace / "node_modules" / "x")) == [
        ".eslintrc.js",
        ".npmrc",
        "AGENTS.md",
        "CLAUDE.md",
    ]


@pytest.fixture
def hub(ground: GuardFixture, tmp_path: Path) -> GuardFixture:  # noqa: F811
    import subprocess

    source = tmp_path / "source"
    source.mkdir()
    for name in ("AGENTS.md", ".gitattributes", "a.txt"):
        (source / name).write_text("x")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(source)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(source), str(ground.workspace / "hub.git")], check=True)
    return ground


async def test_a_clone_with_the_vcs_capability_keeps_its_instruction_files(hub: GuardFixture) -> None:
    hub.vcs = True
    done = await run(hub, "git clone -q hub.git work")
    assert done.exit_code == 0 and (hub.workspace / "work" / "AGENTS.md").exists()
    with pytest.raises(Exception, match=r"AGENTS\.md was moved"):
        await run(hub, "git clone -q hub.git again && cp again/AGENTS.md AGENTS.md")
    assert not (hub.workspace / "AGENTS.md").exists() and (hub.workspace / "again" / "AGENTS.md").exists()


# ── what git does when a person lets it go on ────────────────────────────────────────────────────


@pytest.fixture
def repository_in_rebase(ground: GuardFixture) -> GuardFixture:  # noqa: F811
    """A user's repository during a rebase that runs one of their tests."""
    state = ground.workspace / ".git" / "rebase-merge"
    state.mkdir(parents=True)
    for name in ("objects", "refs"):
        (ground.workspace / ".git" / name).mkdir()
    (ground.workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (state / "git-rebase-todo").write_text("pick 1 one\nexec make test\n# exec a comment\n")
    return ground


@pytest.mark.parametrize(
    "script",
    [
        "echo 'exec touch owned' >> .git/rebase-merge/git-rebase-todo",
        "echo '   x touch owned' >> .git/rebase-merge/git-rebase-todo",
        "printf 'pick 1 one\\nexec make test\\nof-tomorrow touch owned\\n' > .git/rebase-merge/git-rebase-todo",
        "mkdir .git/sequencer; echo 'exec touch owned' > .git/sequencer/todo",
        "mkdir -p .git/worktrees/w/rebase-merge; echo ../.. > x; "
        "mkdir -p sub/m/objects sub/m/refs sub/m/rebase-merge; echo ref: > sub/m/HEAD; "
        "echo 'exec touch owned' > sub/m/rebase-merge/git-rebase-todo",
    ],
)
async def test_an_exec_step_added_to_a_rebase_by_a_program_is_removed(
    repository_in_rebase: GuardFixture, script: str
) -> None:
    error = await repository_in_rebase.vetoed(script)
    assert "touch owned" in error.text and "this command was removed" in error.text
    for path in repository_in_rebase.workspace.rglob("*todo"):
        assert "owned" not in path.read_text()
    kept = (repository_in_rebase.workspace / ".git" / "rebase-merge" / "git-rebase-todo").read_text()
    assert kept.startswith("pick 1 one\nexec make test\n")


@pytest.mark.parametrize("form", ["ln -sf ../../evil", "mkfifo", "ln -f evil"])
async def test_a_rebase_todo_list_that_is_not_a_regular_file_is_moved_away(
    repository_in_rebase: GuardFixture, form: str
) -> None:
    todo = ".git/rebase-merge/git-rebase-todo"
    await repository_in_rebase.vetoed(f"echo 'exec touch owned' > evil; rm {todo}; {form} {todo}")
    assert not os.path.lexists(repository_in_rebase.workspace / todo)


async def test_a_program_can_keep_the_users_exec_steps_in_a_rebase(repository_in_rebase: GuardFixture) -> None:
    code, _ = await repository_in_rebase.run(
        "printf 'exec make test\\npick 2 two\\n' > .git/rebase-merge/git-rebase-todo"
    )
    assert code == 0
    assert "make test" in (repository_in_rebase.workspace / ".git" / "rebase-merge" / "git-rebase-todo").read_text()
