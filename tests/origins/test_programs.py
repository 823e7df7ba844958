"""Programs that the kernel starts: none that a call or another user could have placed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from handrail.origins import program_lookup
from handrail.origins.program_lookup import (
    ProgramRefused,
    build_clean_path,
    build_program_environment,
    find_own_interpreter,
    find_program,
    resolve_command_program,
)


@dataclass(frozen=True)
class Ground:
    """An open workspace, the folder of the real program, and a marker that every planted program writes."""

    workspace: Path
    real: Path
    elsewhere: Path
    marker: Path

    def plant(self, path: Path, first_line: str = "#!/bin/sh") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{first_line}\n: > {self.marker}\n")
        path.chmod(0o755)
        return path


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    place = tmp_path.resolve()
    found = Ground(place / "ws", place / "real", place / "elsewhere", place / "marker")
    for folder in (found.workspace, found.real, found.elsewhere):
        folder.mkdir()
    (found.real / "asked").write_text("#!/bin/sh\necho the real one\n")
    (found.real / "asked").chmod(0o755)
    (place / "nowhere").mkdir()
    monkeypatch.chdir(place / "nowhere")
    with program_lookup.register_open_workspaces(found.workspace):
        yield found


def in_the_workspace(ground: Ground) -> str:
    return str(ground.plant(ground.workspace / ".venv/bin/asked").parent)


def behind_a_link_to_the_folder(ground: Ground) -> str:
    ground.plant(ground.workspace / "bin/asked")
    (ground.elsewhere / "bin").symlink_to(ground.workspace / "bin")
    return str(ground.elsewhere / "bin")


def behind_a_link_to_the_program(ground: Ground) -> str:
    (ground.elsewhere / "asked").symlink_to(ground.plant(ground.workspace / "asked"))
    return str(ground.elsewhere)


def through_a_link_in_the_workspace(ground: Ground) -> str:
    ground.plant(ground.elsewhere / "out/asked")
    (ground.workspace / "hop").symlink_to(ground.elsewhere / "out")
    (ground.elsewhere / "bin").symlink_to(ground.workspace / "hop")
    return str(ground.elsewhere / "bin")


def by_way_of_the_workspace(ground: Ground) -> str:
    ground.plant(ground.elsewhere / "asked")
    return f"{ground.workspace}/../elsewhere"


def in_the_current_folder(ground: Ground) -> str:
    os.chdir(ground.plant(ground.elsewhere / "project/node_modules/.bin/asked").parents[2])
    return os.path.join(os.getcwd(), "node_modules/.bin")


def by_a_relative_entry(ground: Ground) -> str:
    ground.plant(ground.workspace / "bin/asked")
    os.chdir(ground.workspace)
    return "bin"


def by_an_empty_entry(ground: Ground) -> str:
    ground.plant(ground.workspace / "asked")
    os.chdir(ground.workspace)
    return ""


def by_a_dot(ground: Ground) -> str:
    return f"{by_an_empty_entry(ground)}."


def in_a_folder_of_everybody(ground: Ground) -> str:
    ground.plant(ground.elsewhere / "open/asked").parent.chmod(0o1777)
    return str(ground.elsewhere / "open")


def beneath_a_folder_of_everybody(ground: Ground) -> str:
    ground.plant(ground.elsewhere / "open/bin/asked").parents[1].chmod(0o777)
    return str(ground.elsewhere / "open/bin")


def a_file_of_everybody(ground: Ground) -> str:
    ground.plant(ground.elsewhere / "asked").chmod(0o777)
    return str(ground.elsewhere)


def with_an_interpreter_in_the_workspace(ground: Ground) -> str:
    python = ground.plant(ground.workspace / ".venv/bin/python")
    ground.plant(ground.elsewhere / "asked", f"#!{python}")
    return str(ground.elsewhere)


def with_an_interpreter_by_a_relative_name(ground: Ground) -> str:
    os.chdir(ground.plant(ground.workspace / "bin/python").parents[1])
    ground.plant(ground.elsewhere / "asked", "#!bin/python")
    return str(ground.elsewhere)


def with_an_interpreter_that_has_one_in_the_workspace(ground: Ground) -> str:
    inner = ground.plant(ground.elsewhere / "inner", f"#!{ground.plant(ground.workspace / 'python')}")
    ground.plant(ground.elsewhere / "asked", f"#!{inner}")
    return str(ground.elsewhere)


def with_a_script_of_the_workspace_for_its_interpreter(ground: Ground) -> str:
    ground.plant(ground.elsewhere / "asked", f"#!/bin/sh {ground.plant(ground.workspace / 'script')}")
    return str(ground.elsewhere)


def with_env_and_a_path_of_its_own(ground: Ground) -> str:
    ground.plant(ground.workspace / "bin/python3")
    ground.plant(ground.elsewhere / "asked", f"#!/usr/bin/env -S PATH={ground.workspace}/bin python3")
    return str(ground.elsewhere)


def with_env_in_a_folder_of_its_own(ground: Ground) -> str:
    ground.plant(ground.workspace / "bin/python3")
    ground.plant(ground.elsewhere / "asked", f"#!/usr/bin/env -S -C {ground.workspace} bin/python3")
    return str(ground.elsewhere)


PLANTED: list[Callable[[Ground], str]] = [
    in_the_workspace,
    behind_a_link_to_the_folder,
    behind_a_link_to_the_program,
    through_a_link_in_the_workspace,
    by_way_of_the_workspace,
    in_the_current_folder,
    by_a_relative_entry,
    by_an_empty_entry,
    by_a_dot,
    in_a_folder_of_everybody,
    beneath_a_folder_of_everybody,
    a_file_of_everybody,
    with_an_interpreter_in_the_workspace,
    with_an_interpreter_by_a_relative_name,
    with_an_interpreter_that_has_one_in_the_workspace,
    with_a_script_of_the_workspace_for_its_interpreter,
    with_env_and_a_path_of_its_own,
    with_env_in_a_folder_of_its_own,
]


@pytest.mark.parametrize("planted", PLANTED)
def test_the_program_lookup_skips_a_planted_program_and_finds_the_real_one(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, planted: Callable[[Ground], str]
) -> None:
    entry = planted(ground)
    monkeypatch.setenv("PATH", f"{entry}{os.pathsep}{ground.real}")
    found = find_program("asked")
    assert found == str(ground.real / "asked")
    subprocess.run([found], check=True, stdout=subprocess.DEVNULL)
    assert not ground.marker.exists()


@pytest.mark.parametrize("planted", PLANTED)
def test_a_program_that_exists_only_in_the_workspace_is_refused_with_a_reason(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, planted: Callable[[Ground], str]
) -> None:
    monkeypatch.setenv("PATH", planted(ground))
    with pytest.raises(ProgramRefused, match=r"^Program asked was not found\. .*absolute path"):
        find_program("asked")


def test_an_interpreter_behind_env_is_looked_up_as_env_does(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script begins with env: env finds the first on the clean PATH, and the workspace's interpreter is not on it."""
    ground.plant(ground.workspace / ".venv/bin/runner")
    (ground.real / "runner").write_text('#!/bin/sh\nexec /bin/sh "$@"\n')
    (ground.real / "runner").chmod(0o755)
    (ground.real / "script").write_text("#!/usr/bin/env runner\necho by the real one\n")
    (ground.real / "script").chmod(0o755)
    monkeypatch.setenv("PATH", f"{ground.workspace}/.venv/bin:{ground.real}:/usr/bin:/bin")
    program = find_program("script")
    done = subprocess.run([program], env=build_program_environment(), capture_output=True, text=True, check=True)
    assert (done.stdout, ground.marker.exists()) == ("by the real one\n", False)
    monkeypatch.setenv("PATH", f"{ground.workspace}/.venv/bin:/usr/bin:/bin")
    with pytest.raises(ProgramRefused, match="interpreter runner is not on PATH outside the workspace"):
        find_program(str(ground.real / "script"))


@pytest.mark.parametrize("name", ["./asked", "bin/asked", "", "as\0ked", "~/asked", "../asked"])
def test_a_relative_program_path_is_refused(ground: Ground, name: str) -> None:
    with pytest.raises(ProgramRefused, match="absolute path"):
        find_program(name)


def test_an_absolute_path_through_a_link_in_the_workspace_is_refused(ground: Ground) -> None:
    planted = Path(through_a_link_in_the_workspace(ground), "asked")
    with pytest.raises(ProgramRefused, match=f"It is in the workspace {ground.workspace}, or a link there leads to it"):
        find_program(str(planted))
    assert find_program(str(ground.real / "asked")) == str(ground.real / "asked")


def test_an_operators_absolute_path_may_lie_in_the_current_folder(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground.real)
    assert find_program(str(ground.real / "asked")) == str(ground.real / "asked")


def test_a_cycle_of_links_is_refused(ground: Ground) -> None:
    (ground.elsewhere / "one").symlink_to(ground.elsewhere / "two")
    (ground.elsewhere / "two").symlink_to(ground.elsewhere / "one")
    with pytest.raises(ProgramRefused):
        find_program(str(ground.elsewhere / "one"))


@pytest.mark.parametrize("form", ["{}", "--load={}", "-c", "x:{}"])
def test_an_argument_that_names_a_file_of_the_workspace_is_refused(ground: Ground, form: str) -> None:
    script = str(ground.plant(ground.workspace / "script"))
    word = f". {script}" if form == "-c" else form.format(script)
    with pytest.raises(ProgramRefused, match=r"its argument|Its argument"):
        resolve_command_program(["/bin/sh", word])
    assert resolve_command_program(["/bin/sh", str(ground.workspace)])[1] == str(ground.workspace), (
        "as data it may be told of it"
    )


def test_an_argument_that_is_a_link_into_the_workspace_is_refused(ground: Ground) -> None:
    (ground.elsewhere / "script").symlink_to(ground.plant(ground.workspace / "script"))
    with pytest.raises(ProgramRefused):
        resolve_command_program(["/bin/sh", str(ground.elsewhere / "script")])


def test_the_program_environment_has_only_listed_variables_and_no_workspace_path(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = ground.plant(ground.workspace / "lib/evil.so")
    poison = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "NODE_OPTIONS", "PERL5OPT", "BASH_ENV")
    git = ("GIT_DIR", "GIT_CONFIG_GLOBAL", "GIT_EXEC_PATH", "GIT_SSH_COMMAND", "GIT_CONFIG_COUNT")
    for name in (*poison, *git, "XDG_CONFIG_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(inside))
    monkeypatch.setenv("PATH", f"{ground.workspace}:bin::.:{ground.real}")
    monkeypatch.setenv("HOME", str(ground.elsewhere))
    found = build_program_environment()
    assert found["PATH"] == str(ground.real)
    assert found["HOME"] == str(ground.elsewhere)
    assert not [value for value in found.values() if str(ground.workspace) in value]
    assert not {*poison, *git} & found.keys()


def test_a_path_variable_without_trusted_folders_becomes_the_system_default(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ground.workspace}::.")
    assert build_clean_path() == "/bin:/usr/bin"


def test_handrails_own_interpreter_is_not_started_through_a_link_in_the_workspace(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_own_interpreter() == sys.executable
    python = ground.workspace / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "executable", str(python))
    assert find_own_interpreter() == getattr(sys, "_base_executable")  # noqa: B009
    monkeypatch.setattr(sys, "_base_executable", str(ground.plant(ground.workspace / "python")), raising=False)
    with pytest.raises(ProgramRefused, match="is in a workspace"):
        find_own_interpreter()


def test_a_workspace_that_contains_the_system_folders_leaves_their_programs_usable() -> None:
    with program_lookup.register_open_workspaces("/"):
        assert find_program("/bin/sh") == "/bin/sh"
    with program_lookup.register_open_workspaces("/usr/bin"), pytest.raises(ProgramRefused):
        find_program("/usr/bin/env")


def test_the_program_lookup_skips_further_folders_that_calls_may_write(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    further = ground.plant(ground.elsewhere / "further/asked").parent
    monkeypatch.setenv("PATH", f"{further}:{ground.real}")
    assert find_program("asked") == str(further / "asked")
    with program_lookup.register_open_workspaces(further):
        assert find_program("asked") == str(ground.real / "asked")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LD_LIBRARY_PATH", "/opt/lib:{}/lib"),
        ("LD_PRELOAD", "/opt/a.so {}/evil.so"),
        ("SSL_CERT_FILE", "{}/authority.pem"),
        ("OPENSSL_CONF", "openssl.cnf"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "./key.json"),
        ("PYTHONPYCACHEPREFIX", "cache"),
        ("SSLKEYLOGFILE", "{}/keys"),
        ("TMPDIR", "{}/tmp"),
    ],
)
def test_variables_that_make_the_process_trust_the_workspace_are_found(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.chdir(ground.workspace)
    seen = list(program_lookup.find_untrusted_environment_entries({name: value.format(ground.workspace)}))
    assert [one for one, _ in seen] == [name]
    assert not list(program_lookup.find_untrusted_environment_entries({name: "/opt/lib"}))
