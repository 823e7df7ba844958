"""Properties of the whole code: import cost, allowed imports, and the form of files."""

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
DEMOS = ROOT / "demos"
COSTLY = (
    "anthropic",
    "anyio",
    "click",
    "httpx",
    "httpx2",
    "jsonschema_rs",
    "mcp",
    "mcp_types",
    "numpy",
    "onnxruntime",
    "openai",
    "rich",
    "sqlite3",
    "starlette",
    "tree_sitter",
    "tree_sitter_bash",
    "uvicorn",
)
"""What nobody pays for before using the feature that needs it."""

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
def test_importing_the_library_loads_no_unused_feature() -> None:
    loaded = loaded_by("import handrail")
    assert "handrail" in loaded
    assert not [name for name in COSTLY if name in loaded]


def test_importing_the_command_line_loads_no_kernel() -> None:
    loaded = loaded_by("import handrail.frontends.cli")
    assert not [name for name in ("pydantic", "jsonschema_rs", "rich", "asyncio", "mcp") if name in loaded]
    own = {name for name in loaded if name.startswith("handrail.") and not name.startswith("handrail.frontends")}
    assert own == {"handrail.contract"}, "the module that loads exported names on first use"


def test_a_simple_call_loads_only_what_every_call_needs(tmp_path: Path) -> None:
    """Each of these made a call from a shell slower for whoever types it: what a call does not use is loaded later."""
    (workspace := tmp_path / "workspace").mkdir()
    place = f"['--workspace', {str(workspace)!r}, '--state', {str(tmp_path / 'state')!r}]"
    (file := tmp_path / "handrail.toml").write_text('[mcp.servers.never_listed]\nurl = "http://127.0.0.1:9/mcp"\n')
    call = "assert run(['call', 'glob', '{\"pattern\": \"*\"}', '--json',"
    loaded = loaded_by(
        f"from handrail.frontends.cli.command_group import run_command_line as run\n{call} *{place}]) == 0\n"
        "import handrail.ipc.codec.protocol_rpc as interfaces\nassert interfaces.inspect_method_signature.cache_info().currsize == 0\n"
        "assert 'handrail.upstream.upstream_connection' not in sys.modules\n"
        f"import handrail.upstream.upstream_registry\nhandrail.upstream.upstream_registry.FIRST_CONNECT_WAIT_S = 3600\n{call} '--config', {str(file)!r}, *{place}]) == 0\n"
        "assert 'handrail.upstream.upstream_connection' in sys.modules, 'the server is there'\n"
        "before = set(sys.modules)\nimport handrail.frontends.mcp.mcp_stdio_server\n"
        "assert not {'mcp', 'mcp_types'} & sys.modules.keys(), 'an MCP client is answered without'\n"
        "for name in set(sys.modules) - before: del sys.modules[name]"
    )
    assert "handrail.kernel.local_kernel" in loaded
    assert not [name for name in COSTLY if name in loaded and name not in ("click", "jsonschema_rs", "sqlite3")]
    features = (
        "agent.agent_loop",
        "agent.providers",
        "authoring",
        "kernel.doctor",
        "frontends.mcp",
        "kernel.upstream_mcp_servers",
        "kernel.remote_kernel",
    )
    assert not [name for name in features if f"handrail.{name}" in loaded]


def test_packages_import_only_lower_packages() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["src", "demos", "tests", "bench"])
def test_every_file_begins_with_a_docstring(folder: str) -> None:
    faults: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if ".venv" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        if text.strip() and not text.lstrip().removeprefix("#!/usr/bin/env python3\n").startswith(('"""', 'r"""')):
            faults.append(f"{path.relative_to(ROOT)} does not begin with what it does")
    assert not faults, "\n".join(faults)


def test_every_package_that_mcp_code_imports_is_in_the_mcp_extra() -> None:
    """Nothing of it is only there because something else of it happens to need it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["mcp"]]
    there = {re.split(r"[\[><=;! ]", one)[0].lower().replace("-", "_") for one in asked}
    known_as = {"jwt": "pyjwt", "mcp_types": "mcp"}  # a part of the SDK, whose versions go with it
    lacking: set[str] = set()
    for folder in ("frontends/mcp", "upstream"):
        for path in (SOURCE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                roots = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"handrail"}
                lacking |= {f"{path.name}: {root}" for root in roots if known_as.get(root, root) not in there}
    assert not lacking


def test_no_committed_file_has_unfinished_parts_or_development_bookkeeping() -> None:
    faults: list[str] = []
    for path in committed():
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        patterns = [BOOKKEEPING, UNFINISHED] if SOURCE in path.parents else [BOOKKEEPING]
        for pattern in patterns:
            faults += [f"{path.relative_to(ROOT)}: {match.group()!r}" for match in pattern.finditer(text)]
    assert not faults, "\n".join(faults)


def test_no_committed_file_names_this_machine() -> None:
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


def test_every_source_folder_is_a_package_and_the_type_marker_exists() -> None:
    assert (SOURCE / "py.typed").is_file()
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    without = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]
    assert not without, f"folders without __init__.py: {', '.join(without)}"


_OWN = "find_program"
STARTING = {
    "config/secret_references.py": _OWN,
    "kernel/doctor/machine_checks.py": "a bubblewrap or ripgrep that was found before",
    "demos/demonstration.py": _OWN,
    "demos/doors/opened.py": "this interpreter, with a safe search path",
    "frontends/cli/__init__.py": "this very interpreter, in UTF-8",
    "frontends/cli/commands/mcp.py": _OWN,
    "policy/watchdogs/api.py": _OWN,
    "upstream/server_programs.py": _OWN,
    "origins/bounded_program.py": "this interpreter, as its caller found it outside of every workspace",
    "runtime/search_service.py": "a ripgrep that was found before",
    "sandbox/bubblewrap.py": "a bubblewrap by its absolute path, outside of every workspace",
    "sandbox/view/sandbox_user.py": "perl by its absolute path",
    "sandbox/start/launcher_python.py": "what a call asks for, in its sandbox",
    "sandbox/network/sandbox_network.py": _OWN,
    "sandbox/network/session_network.py": "the bubblewrap of the sandbox, and nsenter by its absolute path",
    "sandbox/selfcheck.py": "the system's shell by its absolute path",
    "sandbox/start/spawn.py": "what it is given",
    "sandbox/view/toolchains.py": _OWN,
    "sandbox/configured_sandbox.py": "the system's shell by its absolute path, for a tool that its operator has named",
}
"""The modules that start programs, and where each has its program from; nothing else starts any."""
_STARTS = re.compile(
    r"(subprocess\.(Popen|run|call|check_\w+|get\w*output)|asyncio\.create_subprocess_exec|os\.(exec\w+|spawn\w+|posix_spawn\w*)"
    r"|handrail\.sandbox\.start\.spawn\.spawn|mcp\.StdioServerParameters|_libc\.posix_spawn|pty\.spawn|multiprocessing\.\w+"
    r"|concurrent\.futures\.ProcessPoolExecutor)\Z"
)
_LOOKS_UP = re.compile(
    r"(shutil\.which|os\.(system|popen|startfile|get_exec_path|exec\w*p|exec\w*pe|spawn\w*p|spawn\w*pe|posix_spawnp)"
    r"|subprocess\.get\w*output|asyncio\.create_subprocess_shell|ctypes\.util\.find_library|webbrowser\.\w+|pydoc\.\w+"
    r"|click\.(launch|edit|echo_via_pager)|platform\.(processor|architecture)|uuid\.(uuid1|getnode))\Z"
)


def _calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    """``(full name, call)`` of a module's calls, whatever it imports a function as."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
                for one in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    found: list[tuple[str, ast.Call]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            found.append((known.get(head, head) + dot + rest, node))
    return found


def test_only_listed_modules_start_programs_and_never_by_a_bare_name() -> None:
    starting: set[str] = set()
    faults: list[str] = []
    for path in sorted([*SOURCE.rglob("*.py"), *DEMOS.rglob("*.py")]):
        name = str(path.relative_to(SOURCE if SOURCE in path.parents else ROOT))
        for function, call in _calls_of(path):
            place = f"{name}:{call.lineno} {function}"
            if _LOOKS_UP.match(function) and name != "sandbox/start/launcher_python.py":
                faults.append(f"{place} looks a program up by itself; use handrail.origins.program_lookup.find_program")
            if any(key.arg == "shell" and not _is_false(key.value) for key in call.keywords) and _STARTS.match(
                function
            ):
                faults.append(f"{place} starts a shell")
            if _STARTS.match(function):
                starting.add(name)
                words = [
                    *call.args[:1],
                    *(key.value for key in call.keywords if key.arg in ("command", "executable", "args")),
                ]
                faults += [f"{place} names its program {word!r}" for one in words if (word := _bare(one)) is not None]
    assert not faults, "\n".join(faults)
    assert starting == set(STARTING), "say in the table where a new program comes from"
    for name, where in STARTING.items():
        names = (_OWN, "resolve_command_program", "find_own_interpreter")
        assert where != _OWN or any(
            f"{one}(" in (ROOT / name if name.startswith("demos/") else SOURCE / name).read_text() for one in names
        ), f"{name} looks up nothing"


def test_the_path_variable_is_read_in_one_module_and_the_launcher_only() -> None:
    reading = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(r"environb?(\.get\(|\.pop\(|\[)b?\"PATH\"|getenv\(\"PATH\"|defpath", path.read_text())
    }
    assert reading == {"origins/program_lookup.py", "sandbox/start/launcher_python.py"}, (
        "use handrail.origins.program_lookup"
    )


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _bare(node: ast.expr) -> str | None:
    """A program that is written down as anything but an absolute path, alone or as the first of a list."""
    while isinstance(node, (ast.List, ast.Tuple, ast.Starred)):
        if isinstance(node, ast.Starred):
            node = node.value
        elif node.elts:
            node = node.elts[0]
        else:
            return None
    text = node.value if isinstance(node, ast.Constant) else None
    return text if isinstance(text, str) and not text.startswith("/") else None


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.run(['git', 'status'])",
        "from subprocess import Popen as start\nstart(('git',))",
        "import asyncio\nasyncio.create_subprocess_exec('git', 'status')",
        "import asyncio\nasyncio.create_subprocess_exec(*('git', 'status'))",
        "import shutil as files\nfiles.which('git')",
        "from shutil import which\nwhich('git')",
        "import os\nos.execvp('git', ['git'])",
        "import webbrowser\nwebbrowser.open('https://example.org')",
        "import click\nclick.launch('https://example.org')",
        "import ctypes.util\nctypes.util.find_library('c')",
    ],
)
def test_a_program_started_by_a_bare_name_is_detected(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(code)
    ((function, call),) = _calls_of(tmp_path / "module.py")
    assert _LOOKS_UP.match(function) or (_STARTS.match(function) and _bare(call.args[0]) == "git")
