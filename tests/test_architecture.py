"""Properties of the code as a whole: what an import costs, which room may import which, how files look."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "handrail"
COSTLY = (
    "anthropic",
    "anyio",
    "click",
    "httpx",
    "httpx2",
    "jsonschema_rs",
    "mcp",
    "mcp_types",
    "openai",
    "rich",
    "sqlite3",
    "starlette",
    "tree_sitter",
    "tree_sitter_bash",
    "uvicorn",
)
"""What nobody pays for before using the feature that needs it."""

MOST_LINES = 700
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
BOOKKEEPING = re.compile(r"(?i)\bissue\s+#?\d+\b|\.\." + "/shared")


def committed() -> list[Path]:
    """The text files that a clone would get."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this copy is not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [path for name in names if (path := ROOT / name).is_file() and b"\0" not in path.read_bytes()[:4096]]


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.proves("F-01")
def test_importing_the_library_loads_no_feature_that_is_not_used_yet() -> None:
    loaded = loaded_by("import handrail")
    assert "handrail" in loaded
    assert not [name for name in COSTLY if name in loaded]


def test_the_command_line_loads_no_kernel_before_a_command_runs() -> None:
    loaded = loaded_by("import handrail.faces.cli")
    assert not [name for name in ("pydantic", "jsonschema_rs", "rich", "asyncio", "mcp") if name in loaded]
    assert not [name for name in loaded if name.startswith("handrail.") and not name.startswith("handrail.faces")]


def test_a_simple_call_loads_only_what_every_call_needs(tmp_path: Path) -> None:
    """Each of these made a call from a shell slower for whoever types it: what a call does not use is loaded later."""
    (workspace := tmp_path / "workspace").mkdir()
    place = f"['--workspace', {str(workspace)!r}, '--state', {str(tmp_path / 'state')!r}]"
    (file := tmp_path / "handrail.toml").write_text('[mcp.servers.never_listed]\nurl = "http://127.0.0.1:9/mcp"\n')
    call = "assert run(['call', 'glob', '{\"pattern\": \"*\"}', '--json',"
    loaded = loaded_by(
        f"from handrail.faces.cli.app import run\n{call} *{place}]) == 0\n"
        "import handrail.joining.adapters as adapters\nassert adapters._made == {}\n"
        "assert 'handrail.registry.sources.mcp' not in sys.modules\n"
        f"import handrail.upstreams\nhandrail.upstreams.FIRST_LOOK_S = 3600\n{call} '--config', {str(file)!r}, *{place}]) == 0\n"
        "assert 'handrail.registry.sources.mcp.owner' in sys.modules, 'the server is there'\n"
        "before = set(sys.modules)\nimport handrail.faces.mcp.reception\n"
        "assert not {'mcp', 'mcp_types'} & sys.modules.keys(), 'an MCP client is answered without'\n"
        "for name in set(sys.modules) - before: del sys.modules[name]"
    )
    assert "handrail.holding" in loaded
    assert not [name for name in COSTLY if name in loaded and name not in ("click", "jsonschema_rs", "sqlite3")]
    features = ("agent.loop", "agent.providers", "authoring", "doctor", "faces.mcp", "gateway", "joined")
    assert not [name for name in features if f"handrail.{name}" in loaded]


def test_rooms_import_downwards_only() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["src", "tests", "bench"])
def test_every_file_says_what_it_does_and_stays_readable(folder: str) -> None:
    faults: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if ".venv" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > MOST_LINES:
            faults.append(f"{path.relative_to(ROOT)} has {lines} lines; look for the second thing in it")
        if text.strip() and not text.lstrip().removeprefix("#!/usr/bin/env python3\n").startswith(('"""', 'r"""')):
            faults.append(f"{path.relative_to(ROOT)} does not begin with what it does")
    assert not faults, "\n".join(faults)


def test_what_mcp_needs_comes_with_its_extra() -> None:
    """Nothing of it is only there because something else of it happens to need it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["mcp"]]
    there = {re.split(r"[\[><=;! ]", one)[0].lower().replace("-", "_") for one in asked}
    known_as = {"jwt": "pyjwt", "mcp_types": "mcp"}  # a part of the SDK, whose versions go with it
    lacking: set[str] = set()
    for folder in ("faces/mcp", "registry/sources/mcp"):
        for path in (SOURCE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                roots = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"handrail"}
                lacking |= {f"{path.name}: {root}" for root in roots if known_as.get(root, root) not in there}
    assert not lacking


def test_nothing_committed_is_unfinished_or_speaks_of_how_it_was_made() -> None:
    faults: list[str] = []
    for path in committed():
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        patterns = [BOOKKEEPING, UNFINISHED] if SOURCE in path.parents else [BOOKKEEPING]
        for pattern in patterns:
            faults += [f"{path.relative_to(ROOT)}: {match.group()!r}" for match in pattern.finditer(text)]
    assert not faults, "\n".join(faults)


def test_nothing_committed_names_this_machine() -> None:
    names = {str(ROOT)} if len(ROOT.parts) > 2 else set[str]()
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        for address in os.environ.get(variable, "").split():
            host = urlsplit(address).hostname
            if host and host != "localhost" and not host.endswith("pypi.org"):
                names.add(host)
    faults = [
        f"{path.relative_to(ROOT)} holds {name!r}"
        for path in committed()
        for name in names
        if name in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert not faults, "\n".join(faults)


def test_every_module_has_its_place_in_the_wheel_and_the_type_marker_is_there() -> None:
    assert (SOURCE / "py.typed").is_file()
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    without = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]
    assert not without, f"folders without __init__.py: {', '.join(without)}"
