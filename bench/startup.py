"""Compare start-up: commands and imports with ``import pydantic``, and first answers with those of a bare SDK server.

Commands and servers run interleaved, in the environment of a user (``.venv``), not in the one of the peers. The time of a server
begins with its start. It ends with the answers to ``initialize``, ``tools/list`` and ``tools/call``, each sent at once after the one
before. The servers are ``handrail mcp`` with ``read``, and the SDK's MCPServer with one function. All run with compiled modules, as
installed ones do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, WARMING = 25, 2
BOUND = 2.0
"""``handrail --help`` may take this many times as long as ``python -c "import pydantic"``."""

BOUND_CALL, BOUND_SERVER = 0.45, 0.6
"""``handrail call read``, and the answers of ``handrail mcp``, may take this many times the SDK server's first tool answer."""
SDK_SERVER = """
from mcp.server import MCPServer
server = MCPServer("bare")
@server.tool()
def read(path: str) -> str:
    return open(path).read()
server.run("stdio")
"""
_CLIENT = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}


def commands() -> dict[str, list[str]]:
    users = ROOT / ".venv" / "bin"
    folder = users if (users / "handrail").exists() else Path(sys.executable).parent
    python = str(folder / "python")
    return {
        'python -c "pass"': [python, "-c", "pass"],
        'python -c "import pydantic"': [python, "-c", "import pydantic; pydantic.BaseModel"],
        'python -c "import handrail"': [python, "-c", "import handrail"],
        "handrail --help": [str(folder / "handrail"), "--help"],
    }


def time_server(command: list[str], folder: str) -> dict[str, float]:
    """Return the seconds from the start of a server to its answers to ``initialize``, ``tools/list`` and ``tools/call``."""
    call = {"name": "read", "arguments": {"path": "a.txt"}}
    requests: list[tuple[str, dict[str, object]]] = [("initialize", _CLIENT), ("tools/list", {}), ("tools/call", call)]
    taken: dict[str, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        for id, (method, params) in enumerate(requests):
            message = json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n"
            if id == 1:
                message = b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n' + message
            server.stdin.write(message)
            server.stdin.flush()
            for line in server.stdout:
                if (answer := json.loads(line)).get("id") == id:
                    assert "result" in answer and not answer["result"].get("isError"), answer
                    taken[method] = time.perf_counter() - began
                    break
            else:
                raise SystemExit(f"{command} ended before its answer to {method}")
        server.stdin.close()
        server.wait(60)
    return taken


def measure_first_answers(folder: str) -> bool:
    users = ROOT / ".venv" / "bin"
    bin_folder = users if (users / "handrail").exists() else Path(sys.executable).parent
    handrail, python = str(bin_folder / "handrail"), str(bin_folder / "python")
    Path(folder, "a.txt").write_text("one line\n")
    state = ["--state", str(Path(folder, "state")), "--workspace", str(Path(folder, "ws"))]
    Path(folder, "ws").mkdir()
    Path(folder, "ws", "a.txt").write_text("one line\n")
    taken: dict[str, list[float]] = {}
    for number in range(ROUNDS + WARMING):
        began = time.perf_counter()
        subprocess.run([handrail, "call", *state, "read", '{"path": "a.txt"}'], stdout=subprocess.DEVNULL, check=True)
        found = {"handrail call read": time.perf_counter() - began}
        servers = {"SDK server": [python, "-c", SDK_SERVER], "handrail mcp": [handrail, "mcp", *state]}
        for name, command in servers.items():
            found |= {f"{name}, {method}": seconds for method, seconds in time_server(command, folder).items()}
        if number >= WARMING:
            for name, seconds in found.items():
                taken.setdefault(name, []).append(seconds)
    base = statistics.median(taken["SDK server, tools/call"])
    print(f"\n{'':32} {'ms p50':>8} {'ms min':>8}   × SDK server's first tool answer")
    for name, times in taken.items():
        print(
            f"{name:32} {statistics.median(times) * 1e3:8.1f} {min(times) * 1e3:8.1f}   {statistics.median(times) / base:.2f}"
        )
    met = True
    answers = [(f"handrail mcp, {method}", BOUND_SERVER) for method in ("initialize", "tools/list", "tools/call")]
    for name, bound in (("handrail call read", BOUND_CALL), *answers):
        ratio = statistics.median(taken[name]) / base
        met = met and ratio <= bound
        print(f"{name}: {ratio:.2f} × (bound {bound}): {'met' if ratio <= bound else 'MISSED'}")
    return met


def main() -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    taken: dict[str, list[float]] = {name: [] for name in commands()}
    for number in range(ROUNDS + WARMING):
        for name, command in commands().items():
            began = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            if number >= WARMING:  # the first ones fill the caches
                taken[name].append(time.perf_counter() - began)
    base = statistics.median(taken['python -c "import pydantic"'])
    print(f"{'':32} {'ms p50':>8} {'ms min':>8}   × import pydantic")
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:32} {median * 1e3:8.1f} {min(times) * 1e3:8.1f}   {median / base:.2f}")
    ratio = statistics.median(taken["handrail --help"]) / base
    print(
        f"\nhandrail --help: {ratio:.2f} × import pydantic (bound {BOUND:.1f}): {'met' if ratio <= BOUND else 'MISSED'}"
    )
    with tempfile.TemporaryDirectory() as folder:
        met = measure_first_answers(folder)
    return 0 if ratio <= BOUND and met else 1


if __name__ == "__main__":
    sys.exit(main())
