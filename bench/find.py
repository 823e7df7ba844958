"""The real ``handrail find`` on a catalogue of real tool definitions, as an operator would have it: a folder of tools.

    python bench/find.py [--data DIR] [--limit N] [--hits N] [--keep DIR] QUERY...

``DIR`` is one corpus or a folder of them, as for ``bench/retrieval.py``; without it BFCL's definitions are taken. What is
missing to 10,000 are methods of Google's APIs. All definitions become manifests of one program in the ``tools/`` folder of a throw-away configuration, and each query is
put to them by a ``handrail find`` of its own. The first of all waits until every tool has its vector (about 140 a
second); its time is printed apart. ``--keep`` leaves configuration and state in a folder, so that the next run finds
them. What is printed beside the hits: how many tools there are, and how long each command took, start included.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))

from finding.bfcl import bfcl
from finding.google import google

from handrail.contract.tool.tool_ids_and_wire_names import LOCKED_IDS, SESSION_INTERNAL

TYPES = {
    "dict": "object",
    "HashMap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "int": "integer",
    "str": "string",
    "char": "string",
    "bool": "boolean",
    "Boolean": "boolean",
    "String": "string",
    "list": "array",
    "tuple": "array",
    "ArrayList": "array",
    "Array": "array",
}
"""What corpora call JSON Schema's types."""
HANDRAIL = (sys.executable, "-m", "handrail")
"""How the program is started."""
KNOWN = ("object", "number", "integer", "string", "boolean", "array", "null")
KEPT = ("description", "enum", "default", "required", "format")
"""What of a parameter is taken over, beside its type and its parts."""
PROGRAM = "#!/bin/sh\necho '{}'\n"


def definitions(folder: Path | None) -> Iterable[Mapping[str, Any]]:
    """Every tool of every corpus under ``folder``, or BFCL's; then Google's."""
    if folder is None:
        yield from bfcl()[0]
        yield from google()
        return
    found = [folder] if (folder / "tools.jsonl").is_file() else sorted(p.parent for p in folder.glob("*/tools.jsonl"))
    if not found:
        sys.exit(f"bench: {folder} holds no corpus: a folder with tools.jsonl is needed")
    for place in found:
        for line in (place / "tools.jsonl").read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)
    yield from google()


def schema(said: object) -> dict[str, Any]:
    """A corpus's schema as JSON Schema; what is neither is left out."""
    held = cast(Mapping[str, Any], said) if isinstance(said, Mapping) else {}
    out: dict[str, Any] = {name: held[name] for name in KEPT if name in held}
    kind = TYPES.get(str(held.get("type")), held.get("type"))
    if kind in KNOWN:
        out["type"] = kind
    if not isinstance(out.get("description", ""), str):
        del out["description"]
    if not (isinstance(out.get("enum", [0]), list) and out.get("enum", [0])):
        del out["enum"]
    if "enum" in out:
        out["enum"] = list({json.dumps(each): each for each in out["enum"]}.values())
    if isinstance(held.get("properties"), Mapping):
        out["properties"] = {str(name): schema(each) for name, each in held["properties"].items()}
    if "items" in held:
        out["items"] = schema(held["items"])
    required = out.get("required", [])
    out.pop("required", None)
    if isinstance(required, list) and (named := [name for name in required if name in out.get("properties", {})]):
        out["required"] = list(dict.fromkeys(named))
    return out


def write(tools: Iterable[Mapping[str, Any]], folder: Path, limit: int) -> int:
    """The folder of tools; how many there are."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = folder / "none"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    known = {*LOCKED_IDS, *SESSION_INTERNAL}  # ids that are built-in tools' own
    count = 0
    for tool in tools:
        if count >= limit:
            break
        count += 1
        name = identifier(str(tool["name"]), known)
        known.add(name)
        parameters = {**schema(tool.get("parameters")), "type": "object"}
        parameters.setdefault("properties", {})
        about = str(tool.get("description") or "") or name
        manifest = {
            "llm": {"name": name, "description": about[:4_000], "parameters": parameters},
            "runtime": {"exec_path": "none", "side_effect": "read", "locks": []},
        }
        place = folder / f"t{count}.json"
        place.write_text(json.dumps(manifest))
        place.chmod(0o600)
    return count


def identifier(name: str, known: set[str]) -> str:
    """``name`` as an id that nothing else has."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:100]
    parts = [part for part in plain.split(".") if part] or ["tool"]
    base = ".".join(parts)
    base = base if base[0].isalpha() else f"t_{base}"
    taken, number = base, 2
    while taken in known:
        taken, number = f"{base}_{number}", number + 1
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="handrail find on real tool definitions.")
    parser.add_argument("queries", nargs="+", metavar="QUERY")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit", type=int, default=10_000, help="of how many definitions the catalogue is made")
    parser.add_argument("--hits", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a folder for configuration and state, kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = given.keep.absolute() if given.keep else Path(scratch)
        show(place, given.data, given.limit, given.hits, given.queries)


def show(place: Path, data: Path | None, limit: int, hits: int, queries: Sequence[str]) -> None:
    tools, config, workspace = place / "config/tools", place / "config/handrail.toml", place / "workspace"
    if tools.is_dir():
        count = len(list(tools.glob("*.json")))
    else:
        count = write(definitions(data), tools, limit)
        config.write_text("")
        config.chmod(0o600)
    workspace.mkdir(exist_ok=True)
    print(f"{count} tool definitions in {tools}")
    command = [*HANDRAIL, "find"]
    command += ["--config", str(config), "--state", str(place / "state"), "-C", str(workspace), "--limit", str(hits)]
    timed([*command, "--words", queries[0]], "by words, the first time")
    start = time.perf_counter()
    while True:
        shown = subprocess.run([*command, "--wait", "300", queries[0]], check=False, capture_output=True, text=True)
        if "words only" not in shown.stderr or "are encoded" not in shown.stderr:
            break
        print(f"  {shown.stderr.strip().splitlines()[-1]}")
    print(f"every tool encoded after {time.perf_counter() - start:.1f} s")
    for query in queries:
        timed([*command, query], "by words and meaning")


def timed(command: Sequence[str], how: str) -> None:
    start = time.perf_counter()
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    took = time.perf_counter() - start
    print(f"\n$ handrail find {command[-1]!r}   # {how}: {took:.2f} s, start of the process included")
    for line in (*shown.stderr.strip().splitlines(), *shown.stdout.splitlines()):
        print(f"  {line if len(line) <= 200 else line[:199] + '…'}")


if __name__ == "__main__":
    main()
