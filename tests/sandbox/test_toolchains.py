"""The interpreters of a project are available read-only; home folders are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.sandbox.view import toolchains

pytestmark = pytest.mark.proves("S-01")


def install(place: Path, *programs: str) -> Path:
    """A made-up installation: ``bin`` with programs, and a ``lib``."""
    (place / "bin").mkdir(parents=True)
    (place / "lib").mkdir()
    for name in programs:
        (place / "bin" / name).write_text(f"#!/bin/sh\necho {name} of {place.name}\n")
        (place / "bin" / name).chmod(0o755)
    return place


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path.resolve() / "home" / "ada"
    folder.mkdir(parents=True)
    (folder / "diary").write_text("TOP-SECRET")
    monkeypatch.setattr(toolchains, "list_home_folders", lambda: frozenset({str(folder)}))
    return folder


async def test_the_python_on_path_runs_in_the_sandbox(ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(os.path.realpath(sys.executable)), prepend=os.pathsep)
    ran = await ground.bash("python3 -c 'import json, sys; print(json.dumps(sys.version_info[:2]))'")
    assert ran.out.strip() == f"[{sys.version_info[0]}, {sys.version_info[1]}]"


async def test_an_unreadable_folder_on_path_is_skipped(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example, the home of another user who started the shell; too long a name also fails for root."""
    long = "x" * 300
    shut = tmp_path / "shut"
    (shut / "bin").mkdir(parents=True)
    shut.chmod(0)
    shims = install(tmp_path / "pyenv") / "shims"
    (shims.parent / "versions").mkdir()
    shims.mkdir()
    (ground.workspace / ".python-version").write_text(f"{long}\n3.99\n")
    monkeypatch.setenv("PATH", f"/{long}:{shut / 'bin'}:{shims}:/dev/null/bin", prepend=os.pathsep)
    monkeypatch.setenv("RUSTUP_HOME", f"/{long}")
    try:
        assert (await ground.bash("echo runs")).out == "runs\n"
    finally:
        shut.chmod(0o700)


async def test_the_virtual_environment_of_the_workspace_runs(ground: SandboxFolders) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(ground.workspace / ".venv")], check=True)
    ran = await ground.bash(".venv/bin/python -c 'import sys; print(sys.prefix)'")
    assert ran.out.strip() == str(ground.workspace / ".venv")


def activate(monkeypatch: pytest.MonkeyPatch, environment: Path, *, on_path: bool = True) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    if on_path:
        monkeypatch.setenv("PATH", f"{environment}/bin", prepend=os.pathsep)


async def test_an_activated_virtual_environment_provides_the_python(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ground.workspace / "env of mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (environment / "bin" / "pytest").write_text(
        f"#!{environment}/bin/python\nimport sys; print('pytest in', sys.prefix)\n"
    )
    (environment / "bin" / "pytest").chmod(0o755)
    activate(monkeypatch, environment)
    ran = await ground.bash(
        "python -c 'import sys; print(sys.prefix)'; echo $VIRTUAL_ENV; command -v python ls; head -1 $(command -v pytest)"
    )
    shown = str(environment)
    assert ran.out.splitlines()[:4] == [shown, shown, f"{shown}/bin/python", "/usr/bin/ls"], ran
    monkeypatch.delenv("VIRTUAL_ENV")
    ran = await ground.bash("command -v python; echo $VIRTUAL_ENV")
    assert shown not in ran.out, "a folder of the workspace on PATH alone comes last"


@pytest.mark.parametrize("fault", ["not on PATH", "no environment", "another folder"])
def test_a_folder_that_is_not_an_activated_environment_comes_last_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    workspace = tmp_path.resolve() / "ws"
    environment = install(workspace / ".venv", "ls")
    if fault != "no environment":
        (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    named = environment if fault != "another folder" else install(workspace / "other")
    monkeypatch.setenv("PATH", f"{environment}/bin" if fault != "not on PATH" else "/usr/bin", prepend=os.pathsep)
    activate(monkeypatch, named, on_path=False)
    found = toolchains.find_toolchains(str(workspace))
    assert f"{environment}/bin" not in found.path[: found.path.index("/usr/bin")]
    assert fault == "no environment" or "VIRTUAL_ENV" not in found.environment


def test_installation_variables_are_set_only_for_folders_that_programs_see(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = install(home / ".sdkman" / "java", "java")
    conda = install(home / "miniconda3", "python")
    monkeypatch.setenv("PATH", f"{java}/bin:{conda}/bin", prepend=os.pathsep)
    monkeypatch.setenv("JAVA_HOME", str(java))
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    monkeypatch.setenv("GOROOT", str(home))
    found = toolchains.find_toolchains(str(tmp_path.resolve() / "ws")).environment
    assert found["JAVA_HOME"] == str(java) and found["CONDA_PREFIX"] == str(conda)
    assert "GOROOT" not in found


@pytest.mark.parametrize(
    "program", ["cargo --version", "node --version", "go version", "npm --version", "rustc --version"]
)
async def test_an_installed_toolchain_runs(ground: SandboxFolders, program: str) -> None:
    if shutil.which(program.split()[0]) is None:
        pytest.skip(f"{program.split()[0]} is not installed")
    ran = await ground.bash(program)
    assert ran.code == 0, ran


async def test_a_toolchain_in_a_home_is_visible_and_other_home_files_are_hidden(
    ground: SandboxFolders, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = install(home / ".nvm" / "versions" / "node" / "v99", "node-of-test")
    cargo = install(home / ".cargo", "cargo-of-test")
    (cargo / "credentials.toml").write_text("TOP-SECRET")
    local = install(home / ".local", "tool-of-test")
    (local / "lib" / "keys").write_text("TOP-SECRET")
    folders = [node / "bin", cargo / "bin", local / "bin", home, home.parent]
    monkeypatch.setenv("PATH", ":".join(map(str, folders)), prepend=os.pathsep)
    ran = await ground.bash("node-of-test; cargo-of-test; tool-of-test")
    assert ran.out.splitlines() == ["node-of-test of v99", "cargo-of-test of .cargo", "tool-of-test of .local"]
    ran = await ground.bash(
        f"cat {home}/diary {cargo}/credentials.toml {local}/lib/keys; touch {node}/bin/new; ls -A {home}"
    )
    assert set(ran.out.split()) == {".nvm", ".cargo", ".local"}
    assert not (node / "bin" / "new").exists()


def test_an_installation_that_contains_a_home_or_the_workspace_is_not_mounted_completely(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = tmp_path.resolve() / "home"
    (around / "bin").mkdir()
    (around / "lib").mkdir()
    work = install(tmp_path.resolve() / "work", "x")
    (work / "ws").mkdir()
    monkeypatch.setenv("PATH", f"{around}/bin:{work}/bin")
    mounts = toolchains.find_toolchains(str(work / "ws")).mounts
    assert str(around) not in mounts
    assert str(work) not in mounts
    assert {f"{around}/bin", f"{work}/bin"} <= set(mounts)


def test_workspace_programs_come_after_system_programs_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path.resolve() / "ws"
    venv = install(workspace / ".venv", "git")
    monkeypatch.setenv("PATH", f"{venv}/bin:/usr/bin:.:relative:")
    path = toolchains.find_toolchains(str(workspace)).path
    assert path[-1] == f"{venv}/bin"
    assert path.index("/usr/bin") < len(path) - 1
    assert all(folder.startswith("/") for folder in path)


def test_a_workspace_cannot_name_another_folder_as_an_interpreter_to_have_it_mounted(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path.resolve() / "ws"
    (workspace / ".venv").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin" / "python3").write_text("")
    (home / "lib" / "python3.11").mkdir(parents=True)
    (home / "lib" / "python3.11" / "os.py").write_text("")
    other = install(tmp_path.resolve() / "other", "python3")
    monkeypatch.setenv("PATH", "/usr/bin")
    before = toolchains.find_toolchains(str(workspace)).mounts
    for claimed in (home / "bin", other / "bin", Path("/"), home):
        (workspace / ".venv" / "pyvenv.cfg").write_text(f"home = {claimed}\n")
        os.utime(workspace / ".venv" / "pyvenv.cfg", ns=(0, hash(str(claimed)) % 10**15))
        assert toolchains.find_toolchains(str(workspace)).mounts == before
    (workspace / ".venv" / "pyvenv.cfg").unlink()
    os.mkfifo(workspace / ".venv" / "pyvenv.cfg")
    assert toolchains.find_toolchains(str(workspace)).mounts == before


def test_the_pyenv_version_is_read_from_its_files_without_running_pyenv(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path.resolve() / "ws"
    workspace.mkdir()
    pyenv = home / ".pyenv"
    for name in ("3.99.1", "3.99.2"):
        install(pyenv / "versions" / name, "python3")
    (pyenv / "shims").mkdir()
    (pyenv / "version").write_text("3.99.1\n")
    monkeypatch.setenv("PATH", f"{pyenv}/shims:/usr/bin")
    monkeypatch.delenv("PYENV_VERSION", raising=False)
    found = toolchains.find_toolchains(str(workspace))
    assert found.path[:2] == (f"{pyenv}/versions/3.99.1/bin", f"{pyenv}/shims")
    assert str(pyenv) in found.mounts
    (workspace / ".python-version").write_text("../../../../etc\n3.99.2\n")
    assert toolchains.find_toolchains(str(workspace)).path[0] == f"{pyenv}/versions/3.99.2/bin"


def test_the_commit_identity_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchains.read_git_identity.cache_clear()
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "ada@example.org")
    try:
        assert set(toolchains.read_git_identity(str(tmp_path)).values()) == {"Ada", "ada@example.org"}
    finally:
        toolchains.read_git_identity.cache_clear()


async def test_a_commit_can_be_made_in_the_sandbox(ground: SandboxFolders) -> None:
    ran = await ground.bash("git init -q . && echo x > f && git add f && git commit -qm first && git log --format=%an")
    assert (ran.code, ran.errors) == (0, "")
    assert ran.out.strip()


async def test_a_program_with_secrets_finds_no_program_of_the_workspace(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter would read them; other programs still find what the workspace brings."""
    (programs := ground.workspace / "bin").mkdir()
    (programs / "only-here").write_text("#!/bin/sh\necho planted\n")
    (programs / "only-here").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert (await ground.bash("only-here")).out == "planted\n"
    assert (await ground.bash("only-here || echo none", secrets={"KEY": "sesame"})).out == "none\n"


def test_a_program_in_an_npm_package_is_visible_with_its_sibling_packages(tmp_path: Path, home: Path) -> None:
    packages = tmp_path.resolve() / "tools" / "node_modules"
    for name in ("typescript", "@typescript/native"):
        install(packages / name, "run")
    (packages / ".bin").mkdir()
    (packages / ".bin" / "tsc").symlink_to("../typescript/bin/run")
    assert toolchains.find_installation_mounts(str(packages / ".bin" / "tsc"), str(tmp_path / "ws")) == (str(packages),)
    own = install(packages / "ours", "run")
    assert toolchains.find_installation_mounts(str(own / "bin" / "run"), str(packages / "app")) == (str(own / "bin"),)
