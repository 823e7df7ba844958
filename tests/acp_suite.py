"""Run ``handrail acp`` under a public ACP client: ``make acp``.

``acpx`` comes from npm, with the Node that it needs, into the cache of the conformance suite (``MCP_CONFORMANCE_CACHE``). It
is told once to approve whatever is asked and once to deny it: what the calls do is there afterwards in the one workspace and
not in the other.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mcp_suite.suites import Unfit, add, cache, node_of

CLIENT, VERSION = "acpx", "0.19.1"
TURNS: list[dict[str, Any]] = [
    {
        "text": "I look, and then I write.",
        "calls": [
            {"name": "read", "arguments": {"path": "note.txt"}},
            {"name": "todo", "arguments": {"todos": [{"content": "write", "status": "in_progress"}]}},
            {"name": "write", "arguments": {"path": "made.txt", "content": "made\n"}},
            {"name": "bash", "arguments": {"command": "mkdir made-by-bash"}},
        ],
    },
    {"text": "That was all."},
]


def driven(folder: Path, how: str, client: Path, node: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """One prompt by the client; what is in the workspace afterwards, and every message between the two.

    :raises Unfit: when the client does not come to its end
    """
    workspace = folder / how
    workspace.mkdir()
    (workspace / "note.txt").write_text("first\n")
    script = folder / "script.json"
    script.write_text(json.dumps({"version": 1, "turns": TURNS}))
    ours = [
        sys.executable,
        "-m",
        "handrail",
        "acp",
        "--model",
        f"script:{script}",
        "--state",
        f"{folder}/state",
    ]
    command = [str(node / "node"), str(client), f"--{how}", "--format", "json", "--cwd", str(workspace)]
    done = subprocess.run(
        [*command, "--agent", shlex.join(ours), "exec", "look and write"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "CI": "", "HANDRAIL_HEADLESS": "0"},
        check=False,
    )
    messages: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        try:
            messages.append(json.loads(line))
        except ValueError:
            continue
    if not any("stopReason" in str(message.get("result")) for message in messages):
        raise Unfit(f"{CLIENT} {how} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {path.name for path in workspace.iterdir()}, messages


def main() -> int:
    try:
        root = cache()
        node = node_of(root)
        folder = root / f"{CLIENT}-{VERSION}"
        add(folder, CLIENT, VERSION, node)
        client = folder / "node_modules" / CLIENT / "dist" / "cli.js"
        with tempfile.TemporaryDirectory(prefix="handrail-acp-") as made:
            found = {how: driven(Path(made), how, client, node) for how in ("approve-all", "deny-all")}
    except Unfit as problem:
        print(f"make acp: {problem}", file=sys.stderr)
        return 2
    wanted = {"approve-all": {"note.txt", "made.txt", "made-by-bash"}, "deny-all": {"note.txt"}}
    good = True
    for how, (files, messages) in found.items():
        kinds = [message.get("method") or "answer" for message in messages]
        asked = kinds.count("session/request_permission")
        held = files == wanted[how] and asked == 2
        good = good and held
        told = f"{asked} permission requests, {kinds.count('session/update')} updates, then {', '.join(sorted(files))}"
        print(f"{'✓' if held else '✗'} {CLIENT} {VERSION} --{how}: {told}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
