"""Packages that ``npx``, ``uvx`` and similar commands would install, and their records."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.errors import UsageError
from handrail.upstream import server_programs as installing
from handrail.upstream.server_definition import ServerDefinition
from handrail.upstream.server_programs import (
    ServerCommandRejected,
    ServerPackage,
    find_installed_package,
    identify_server_package,
    install_server,
    resolve_server_program,
)


def server(*words: str) -> ServerDefinition:
    return ServerDefinition("it", "here", "stdio", command=words[0], args=words[1:])


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("npx -y pkg a b", ServerPackage("npm", "pkg", "pkg", "", ("a", "b"))),
        ("npx --yes @o/pkg@1.2.3", ServerPackage("npm", "@o/pkg", "@o/pkg@1.2.3", "", ())),
        ("npx -p pkg program -x", ServerPackage("npm", "pkg", "pkg", "program", ("-x",))),
        ("npm exec -- pkg -x", ServerPackage("npm", "pkg", "pkg", "", ("-x",))),
        ("pnpm dlx pkg", ServerPackage("npm", "pkg", "pkg", "", ())),
        ("bunx pkg", ServerPackage("npm", "pkg", "pkg", "", ())),
        ("/usr/bin/uvx some-pkg --opt", ServerPackage("pypi", "some-pkg", "some-pkg", "some-pkg", ("--opt",))),
        ("uvx some-pkg@1.0", ServerPackage("pypi", "some-pkg", "some-pkg==1.0", "some-pkg", ())),
        ("uvx some-pkg@latest", ServerPackage("pypi", "some-pkg", "some-pkg", "some-pkg", ())),
        ("uvx --from pkg[x]==2 program a", ServerPackage("pypi", "pkg", "pkg[x]==2", "program", ("a",))),
        (
            "uvx --from redis-mcp-server@latest redis-mcp-server -x",
            ServerPackage("pypi", "redis-mcp-server", "redis-mcp-server", "redis-mcp-server", ("-x",)),
        ),
        ("uvx --from=pkg[x]@1.2 program", ServerPackage("pypi", "pkg", "pkg[x]==1.2", "program", ())),
        ("uvx pkg[x]@latest", ServerPackage("pypi", "pkg", "pkg[x]", "pkg", ())),
        ("uvx --with more@latest,mcp@1.9 pkg", ServerPackage("pypi", "pkg", "pkg", "pkg", (), ("more", "mcp==1.9"))),
        ("pipx run --spec pkg@latest program", ServerPackage("pypi", "pkg", "pkg", "program", ())),
        ("uvx --with mcp<2 pkg", ServerPackage("pypi", "pkg", "pkg", "pkg", (), ("mcp<2",))),
        ("uv tool run pkg", ServerPackage("pypi", "pkg", "pkg", "pkg", ())),
        ("pipx run --spec pkg==1 program", ServerPackage("pypi", "pkg", "pkg==1", "program", ())),
    ],
)
def test_the_package_of_a_server_command_is_recognised(words: str, package: ServerPackage) -> None:
    assert identify_server_package(server(*words.split())) == package


@pytest.mark.parametrize("words", ["/usr/bin/server -x", "python -m server", "node server.js"])
def test_a_command_that_fetches_nothing_has_no_package(words: str) -> None:
    assert identify_server_package(server(*words.split())) is None


@pytest.mark.parametrize(
    "words",
    [
        "docker run image",
        "npx",
        "npx -y git+https://example.org/x.git",
        "npx ../x",
        "npx -c rm",
        "uvx --from git+https://example.org/x x",
        "uvx --from",
        "uvx ./x",
        "npx -p --registry=x program",
    ],
)
def test_a_package_from_outside_a_registry_is_refused(words: str) -> None:
    with pytest.raises(UsageError):
        identify_server_package(server(*words.split()))


def fake_npm(folder: Path, **program: str) -> None:
    """Programs in the place of npm and node: npm makes the files that the real one makes."""
    bin_ = folder / "bin"
    bin_.mkdir(mode=0o755)
    script = f"""#!/bin/sh
mkdir -p node_modules/pkg
printf '%s' '{json.dumps({"packages": {"": {}, "node_modules/pkg": {"version": "1.4.2"}}})}' > node_modules/.package-lock.json
printf '%s' '{json.dumps({"bin": program})}' > node_modules/pkg/package.json
echo "$@" > node_modules/pkg/run.js
"""
    for name, text in (("npm", script), ("node", "#!/bin/sh\n")):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "state").mkdir(mode=0o700)
    return tmp_path


@pytest.mark.proves("R-14")
def test_an_installed_package_is_started_from_its_folder_until_a_file_changes(place: Path) -> None:
    fake_npm(place, pkg="run.js")
    it, state, workspace = server("npx", "-y", "pkg", "--flag"), place / "state", str(place / "ws")
    with pytest.raises(ServerCommandRejected, match="handrail mcp install it"):
        resolve_server_program(it, state, workspace)
    package = identify_server_package(it)
    assert package is not None
    done = install_server(it, package, state, workspace)
    assert (done.version, find_installed_package(it, state)) == ("1.4.2", ("pkg", "1.4.2"))
    found = resolve_server_program(it, state, workspace)
    assert found.argv == (
        os.path.realpath(place / "bin" / "node"),
        str(done.folder / "node_modules/pkg/run.js"),
        "--flag",
    )
    found.verify_file_hashes()
    assert "--ignore-scripts" in (done.folder / "node_modules/pkg/run.js").read_text()
    (done.folder / "node_modules/pkg/run.js").write_text("something else")
    with pytest.raises(ServerCommandRejected, match="has changed since the installation"):
        found.verify_file_hashes()


def test_a_package_installed_for_another_command_counts_as_not_installed(place: Path) -> None:
    fake_npm(place, pkg="run.js")
    it, state = server("npx", "-y", "pkg"), place / "state"
    install_server(it, ServerPackage("npm", "pkg", "pkg", "", ()), state, str(place / "ws"))
    other = server("npx", "-y", "pkg@2")
    assert find_installed_package(other, state) is None
    with pytest.raises(ServerCommandRejected):
        resolve_server_program(other, state, str(place / "ws"))


def test_a_reinstallation_replaces_the_package_and_a_failed_one_keeps_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_npm(place, pkg="run.js")
    it, state, workspace = server("npx", "-y", "pkg"), place / "state", str(place / "ws")
    package = ServerPackage("npm", "pkg", "pkg", "", ())
    first = install_server(it, package, state, workspace)
    second = install_server(it, package, state, workspace)
    assert not first.folder.exists()
    assert [path.name for path in (state / "mcp" / "packages").iterdir()] == [second.folder.name]

    def failing(*_given: Any, **_more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "no such package")

    monkeypatch.setattr(installing.subprocess, "run", failing)
    with pytest.raises(UsageError, match="no such package"):
        install_server(it, package, state, workspace)
    resolve_server_program(it, state, workspace).verify_file_hashes()
    assert [path.name for path in (state / "mcp" / "packages").iterdir()] == [second.folder.name]


@pytest.mark.parametrize("programs", [{"pkg": "../../../../bin/sh"}, {"a": "run.js", "b": "run.js"}, {}])
def test_a_package_without_one_unambiguous_program_is_not_recorded(place: Path, programs: dict[str, str]) -> None:
    fake_npm(place, **programs)
    it, state = server("npx", "pkg"), place / "state"
    with pytest.raises(UsageError):
        install_server(it, ServerPackage("npm", "pkg", "pkg", "", ()), state, str(place / "ws"))
    assert find_installed_package(it, state) is None
    assert not list((state / "mcp" / "packages").iterdir())


def test_package_names_are_passed_to_npm_after_the_end_of_options(place: Path) -> None:
    """A package name can never be parsed as an option."""
    fake_npm(place, pkg="run.js")
    done = install_server(
        server("npx", "pkg"), ServerPackage("npm", "pkg", "pkg", "", (), ("other",)), place / "state", "/nowhere"
    )
    said: Sequence[str] = (done.folder / "node_modules/pkg/run.js").read_text().split()
    assert said[said.index("--") + 1 :] == ["pkg", "other"]
