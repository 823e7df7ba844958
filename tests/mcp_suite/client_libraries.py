"""``python -m tests.mcp_suite.client_libraries [LIBRARY …]``: public client libraries against ``handrail mcp``.

Each library is installed once, in its version below, into the cache (``MCP_CONFORMANCE_CACHE`` names another). Each lists the
tools, calls one, gets a picture and an error, makes a call that needs an approval, and one with progress, and cancels one; once
over stdin and stdout, and once over HTTP. Prints a row for each, and ends with 1 if a cell is not one of :data:`GOOD`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from tests.mcp_suite.suites import Unfit, cache, node_of
from tests.mcp_suite.upstreams import DOT

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "libraries"
UNTIL = "2026-11-28"
"""No package that was published later is installed."""
LIMIT_S = 240.0
COLUMNS = ("list", "call", "image", "error", "ask", "progress", "cancel", "close")
GOOD: Mapping[str, str] = {
    "ok": "as expected",
    "parked": "the library shows no forms; `handrail approve` answered, and the repeated call ran",
    "rule only": "the library connects anew for each call, so the request ends with the connection; a rule can allow the call",
    "-": "the library does not pass progress on",
    "at close": "the library cannot cancel a call; the program ended with its connection",
}
RULES = 'rules = ["allow read", "allow bash", "allow test_tool_with_progress"]\n'

# The library, and the packages of its environment. Some accept an SDK that they do not work with.
PYTHON: Mapping[str, Sequence[str]] = {
    "mcp1": ("mcp==1.30.0",),
    "mcp2": ("mcp==2.3.0",),
    "mcp2-legacy": ("mcp==2.3.0",),
    "fastmcp": ("fastmcp==4.2.3",),
    "langchain": ("langchain-mcp-adapters==0.3.2",),
    "pydantic-ai": ("pydantic-ai-slim[mcp]==2.68.0",),
    "openai-agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[mcp]==1.26.0", "mcp[ws]==1.30.0"),
    "mcp-use": ("mcp-use==1.7.1",),
    "autogen": ("autogen-ext[mcp]==0.7.5", "mcp==1.30.0"),
    "llama-index": ("llama-index-tools-mcp==0.6.0",),
    "agno": ("agno==3.1.10", "mcp", "fastmcp>=4,<5"),
    "strands": ("strands-agents==1.62.0",),
    "adk": ("google-adk[mcp]==2.13.0",),
    "crewai": ("crewai-tools[mcp]==1.15.30",),
    "haystack": ("mcp-haystack==2.1.1",),
    "agent-framework": ("agent-framework-core==1.23.0", "mcp", "tenacity"),
    "semantic-kernel": ("semantic-kernel[mcp]==1.45.0",),
    "dspy": ("dspy[mcp]==3.4.1",),
    "camel": ("camel-ai==0.2.90", "mcp"),
    "beeai": ("beeai-framework[mcp]==0.1.85",),
    "griptape": ("griptape[mcp]==1.13.0", "mcp"),
}
NODE = (
    "ts-sdk",
    "ts-client",
    "ts-client-legacy",
    "ai-sdk",
    "mastra",
    "langchain-js",
    "openai-agents-js",
    "genkit",
)
NODE_PACKAGES = (
    "@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/client@2.4.0",
    "@ai-sdk/mcp@2.0.99",
    "ai@7.0.173",
    "@mastra/mcp@2.0.0",
    "@mastra/core@1.71.0",
    "@langchain/mcp-adapters@1.1.4",
    "@langchain/core@1.4.0",
    "@openai/agents@0.20.0",
    "@genkit-ai/mcp@1.42.0",
    "genkit@1.42.0",
    "zod@4.6.7",
)


def install_python(root: Path, packages: Sequence[str]) -> Path:
    """Return the Python of an environment with these packages.

    :raises Unfit: if they cannot be installed
    """
    folder = root / "clients" / re.sub(r"[^\w.=]+", "-", "_".join(packages))
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        uv = root / "clients" / "uv"
        if not (uv / "bin" / "uv").exists():
            run_installer(sys.executable, "-m", "venv", str(uv))
            run_installer(str(uv / "bin" / "python"), "-m", "pip", "install", "-q", "uv")
        run_installer(str(uv / "bin" / "uv"), "venv", "-q", "--clear", "--python", sys.executable, str(folder))
        run_installer(
            *(str(uv / "bin" / "uv"), "pip", "install", "-q", "--python", str(python), "--exclude-newer", UNTIL),
            *packages,
        )
        done.touch()
    return python


def install_node(root: Path) -> tuple[Path, Path]:
    """Return a Node, and the folder with the libraries for it.

    :raises Unfit: if they cannot be installed
    """
    node = node_of(root)
    folder = root / "clients" / "node"
    wanted = json.dumps(NODE_PACKAGES)
    done = folder / "installed"
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        npm = shutil.which("npm") or "npm"
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", "--prefix", str(folder))
        run_installer(npm, "install", *options, *NODE_PACKAGES)
        done.write_text(wanted)
    return node / "node", folder


def run_installer(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unfit(f"{command[0]} cannot be started: {error}") from None
    if done.returncode != 0:
        raise Unfit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def prepare_workspace(root: Path) -> list[str]:
    """Make a workspace with a configuration, and return the options that name them."""
    workspace, config, state = root / "ws", root / "config" / "handrail.toml", root / "state"
    for folder in (workspace, config.parent, state):
        folder.mkdir(mode=0o700, parents=True)
    (workspace / "notes.txt").write_text("forty-two\n")
    (workspace / "dot.png").write_bytes(DOT)
    config.write_text(RULES)
    shutil.copytree(HERE / "pack" / "fixtures", config.parent / "tools" / "fixtures")
    shutil.copy(HERE / "pack" / "test_tool_with_progress.json", config.parent / "tools")
    return ["-C", str(workspace), "--state", str(state), "--config", str(config)]


@contextlib.contextmanager
def serve_over_http(handrail: Sequence[str], place: Sequence[str]) -> Generator[str]:
    """Yield the URL of a server."""
    command = [*handrail, "mcp", *place, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if (found := re.search(r"http://\S+/mcp", line)) is not None:
                    yield found[0]
                    return
            raise Unfit("handrail mcp --http did not begin to serve")
        finally:
            server.terminate()


def try_library(name: str, root: Path, handrail: Sequence[str], *, http: bool) -> dict[str, str]:
    """Return what each check of one library found.

    :raises Unfit: if the library cannot be installed
    """
    if name in PYTHON:
        command, modules = [str(install_python(root, PYTHON[name])), str(DRIVERS / "python_clients.py")], ""
    else:
        node, folder = install_node(root)
        command, modules = [str(node), str(DRIVERS / "node_clients.mjs")], str(folder)
    with tempfile.TemporaryDirectory(prefix="handrail-clients-") as made, contextlib.ExitStack() as stack:
        place = prepare_workspace(Path(made))
        url = stack.enter_context(serve_over_http(handrail, place)) if http else None
        given = {
            "command": [] if http else [*handrail, "mcp", *place],
            "url": url,
            "workspace": place[1],
            "approve": [*handrail, "approve", *place],
            "modules": modules,
        }
        log = root / "clients" / f"{name}.log"
        with log.open("w") as errors:
            try:
                done = subprocess.run(
                    [*command, name, json.dumps(given)],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    timeout=LIMIT_S,
                    cwd=made,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"close": f"it did not end within {LIMIT_S:.0f} s; see {log}"}
        with contextlib.suppress(ValueError, IndexError):
            return json.loads(done.stdout.splitlines()[-1])
        return {"list": f"it ended with {done.returncode} and no result; see {log}"}


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in PYTHON and name not in NODE]:
        print(f"clients: no library {unknown[0]!r}; there are {', '.join([*PYTHON, *NODE])}", file=sys.stderr)
        return 2
    root = cache()
    handrail = [str(Path(sys.executable).with_name("handrail"))]
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    wrong: list[str] = []
    print(f"{'client library':18} {'over':6} {' '.join(f'{column:9}' for column in COLUMNS)}")
    for name in names or [*PYTHON, *NODE]:
        for over in ("stdio", "http"):
            try:
                found = try_library(name, root, handrail, http=over == "http")
            except Unfit as problem:
                found = {"list": f"not tried: {problem}"}
            found = {"close": "ok", **found}
            cells = [found.get(column, "") for column in COLUMNS]
            shown = [cell if cell in GOOD else "WRONG" for cell in cells]
            print(f"{name:18} {over:6} {' '.join(f'{cell:9}' for cell in shown)}".rstrip(), flush=True)
            wrong += [
                f"{name} over {over}, {column}: {cell[:400] or 'was not reached'}"
                for column, cell in zip(COLUMNS, cells, strict=True)
                if cell not in GOOD
            ]
    print("\n".join(["", *(f"{word}: {meaning}" for word, meaning in GOOD.items()), *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
