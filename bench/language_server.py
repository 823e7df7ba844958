"""References of symbols of this repository through lsp next to pyright's, stale diagnostics after edits, and servers that are left.

    python bench/language_server.py [--symbols 50] [--edits 100] [--sessions 200]

The servers are ty and pyright-langserver, both from the .venv of this repository. A copy of ``src`` and ``tests`` is the
workspace. pyright runs without a sandbox and is asked directly. Targets: equal references for each symbol, the first warm answer
within 1 s, no stale diagnostics, no server left.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.services.language_services import SymbolQuery
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.decorator import tool
from handrail.runtime.language_servers.code_positions import parse_locations
from handrail.runtime.language_servers.running_server import RunningLanguageServer, ServerTimeouts
from handrail.runtime.language_servers.server_programs import KNOWN_LANGUAGES
from handrail.runtime.language_servers.workspace_files import WorkspaceFileSnapshot
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / ".venv" / "bin"
FOLDERS = ("src", "tests")
SEED = 7


class Symbol(NamedTuple):
    """A function, class or method, with the line of its name."""

    path: str
    line: int
    name: str


@tool(id="uses.of", side_effect="read", requires={"fs": {"read": ["{workspace}"]}})
async def find_uses(path: str, line: int, name: str, runtime: Runtime) -> dict[str, Any]:
    """Find the uses of a symbol.

    Args:
        path: of its file
        line: of its name
        name: of the symbol
    """
    answer = await runtime.language_servers.find_references(SymbolQuery(path, line, name))
    places = [f"{one.path}:{one.line}:{one.column}" for one in answer.locations]
    return {"places": " ".join(places), "why": answer.quality.incomplete_reason}


class PeerProcess:
    """A process without a sandbox, in the form that a connection needs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def read(self, max_bytes: int) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(max_bytes)

    async def wait(self) -> int:
        return await self._process.wait()

    async def communicate(self, stdin: bytes, max_bytes: int, on_output: Any = None) -> tuple[bytes, bytes, int]:
        return b"", b"", 0

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the program is a wrapper that starts another one
        await self._process.wait()

    async def close_stdin(self) -> None:
        """Keep stdin open."""

    async def read_line(self, max_bytes: int) -> bytes:
        raise NotImplementedError


def list_symbols(workspace: Path) -> Iterator[Symbol]:
    """Yield each class and function of the package, with the line of its name."""
    for path in sorted((workspace / "src").rglob("*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "__"
            ):
                number = next(at for at in range(node.lineno, len(lines) + 1) if node.name in lines[at - 1])
                yield Symbol(str(path.relative_to(workspace)), number, node.name)


async def ask_peer(workspace: Path, symbols: list[Symbol]) -> list[set[str]]:
    """Return the references that pyright finds for each symbol."""
    process = await asyncio.create_subprocess_exec(
        str(PROGRAMS / "pyright-langserver"),
        "--stdio",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=workspace,
        limit=1 << 26,
        start_new_session=True,
    )
    files = WorkspaceFileSnapshot(str(workspace), lambda _: False)
    files.look()
    server = RunningLanguageServer(
        KNOWN_LANGUAGES[0],
        PeerProcess(process),
        str(workspace),
        files,
        lambda path: Path(path).read_text(),
        ServerTimeouts(start_s=120, question_s=600, settling_s=20),
    )
    await server.initialize("pyright")
    found: list[set[str]] = []
    for symbol in symbols:
        await server.sync_files_before_request()
        document = await server.open_document(str(workspace / symbol.path))
        column = document.lines[symbol.line - 1].index(symbol.name)
        position = {"line": symbol.line - 1, "character": column}
        params = {"textDocument": {"uri": document.uri}, "position": position, "context": {"includeDeclaration": True}}
        result, _ = await server.ask_all("textDocument/references", params)
        places = ((Path(path).relative_to(workspace), span) for path, span in parse_locations(result))
        found.append({f"{path}:{span[0] + 1}:{span[1] + 1}" for path, span in places})
    await server.aclose()
    return found


def make_settings() -> str:
    return f"[language_servers.python]\ncommand = {json.dumps([str(PROGRAMS / 'ty'), 'server'])}\n"


async def compare_references(base: Path, count: int) -> bool:
    workspace = base / "ws"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, workspace / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (workspace / "pyproject.toml").write_text('[tool.pyright]\ninclude = ["src", "tests"]\nextraPaths = ["src"]\n')
    symbols = random.Random(SEED).sample(sorted(list_symbols(workspace)), count)
    ours: list[set[str]] = []
    times: list[float] = []
    async with temporary_kernel(base, tools=[find_uses], rules=["allow uses.of"], settings=make_settings()) as kernel:
        session = await kernel.session()
        kernel.components.get_server_pool().times = ServerTimeouts(question_s=300)
        for symbol in symbols:
            begun = time.perf_counter()
            result = await session.call("uses.of", symbol._asdict())
            times.append(time.perf_counter() - begun)
            assert result.error_kind is None, result.error_text
            ours.append(set(result.data["places"].split()))
    theirs = await ask_peer(workspace, symbols)
    equal = 0
    for symbol, own, other in zip(symbols, ours, theirs, strict=True):
        equal += own == other
        if own != other:
            missing, more = sorted(other - own), sorted(own - other)
            print(f"  {symbol.path}:{symbol.line} {symbol.name}: missing {missing[:3]}, more {more[:3]}")
    warm = times[1:] or times
    print(f"references equal to pyright's     {equal} of {count} symbols, {sum(map(len, ours)):,} places")
    print(
        f"answers  cold {times[0]:.2f} s   first warm {warm[0]:.2f} s   median {statistics.median(warm):.2f} s   most {max(warm):.2f} s"
    )
    return equal == count and warm[0] <= 1


async def count_stale_diagnostics(base: Path, edits: int) -> bool:
    """Edit a file, half of the times by a program, and ask for its errors."""
    (base / "ws").mkdir(parents=True)
    file = base / "ws" / "ships.py"
    file.write_text("x = 1\n")
    user = ScriptedApprovalHandler([ApprovalAnswer("once")] * edits)
    stale = 0
    rules = ["allow lsp", "allow bash", "allow write"]
    async with temporary_kernel(base, rules=rules, settings=make_settings()) as kernel:
        session = await kernel.session(approval_handler=user, headless=False)
        for number in range(edits):
            wrong = [f"wrong_{number}_{at}" for at in range(number % 3)]
            text = "".join(f"print({name})\n" for name in wrong) + f"y = {number}\n"
            if number % 2:
                (base / "ws" / "edit.sh").write_text(f"cat > ships.py <<'END'\n{text}END\n")
                done = await session.call("bash", {"command": "sh edit.sh"})
            else:
                await session.call("read", {"path": "ships.py"})
                done = await session.call("write", {"path": "ships.py", "content": text})
            assert done.error_kind is None, done.error_text
            found = await session.call("lsp", {"action": "diagnostics", "path": "ships.py"})
            shown = [one["text"] for one in found.data["diagnostics"]]
            stale += shown != [f"print({name})" for name in wrong]
    print(f"stale diagnostics                 {stale} of {edits} edits")
    return not stale


async def count_left_servers(base: Path, sessions: int) -> bool:
    """Open sessions of which each may see other files, so that each needs a server."""
    (base / "ws").mkdir(parents=True)
    (base / "ws" / "ships.py").write_text("def launch():\n    pass\n")
    seen: set[int] = set()
    async with temporary_kernel(base, rules=["allow lsp"], settings=make_settings()) as kernel:
        pool = kernel.components.get_server_pool()
        for number in range(sessions):
            session = await kernel.session(rules=[f"deny fs.read hidden{number}"])
            found = await session.call("lsp", {"action": "hover", "symbol": "launch"})
            assert found.error_kind is None, found.error_text
            seen.update(one.connection.process.pid for one in pool.list_running_servers())
            await session.close()
    left = sum(Path(f"/proc/{pid}").exists() for pid in seen)
    print(f"servers left                      {left} of {len(seen)} after {sessions} sessions")
    return not left


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--symbols", type=int, default=50)
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=200)
    options = parser.parse_args()
    met = True
    with tempfile.TemporaryDirectory() as made:
        if options.symbols:
            met &= await compare_references(Path(made).resolve() / "references", options.symbols)
        if options.edits:
            met &= await count_stale_diagnostics(Path(made).resolve() / "edits", options.edits)
        if options.sessions:
            met &= await count_left_servers(Path(made).resolve() / "sessions", options.sessions)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
