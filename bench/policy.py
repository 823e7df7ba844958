"""What deciding a call costs: one without targets, about a path, a host, a URL, a shell text, one touched file.

    python bench/policy.py         prints a table; exit code 1 if a target is missed

µs for one decision with the shipped rules and forty of an operator's. Every path and text is a new one, so nothing
is answered from a memory of the last. The rounds of all cases are interleaved; the middle of the best round counts.
Targets are ratios to ``os.path.realpath`` of one path in the same run (about 15 µs when the machine is idle): they stand
for 5, 10, 10, 10 and 150 µs. To resolve the path is the runtime's part and left out of the others.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.tool.requires import FsRequires, NetRequires, PathVariables, Requires, ShellRequires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.call_targets import agent_layer
from handrail.policy.rules.rules_and_modes import build_default_rule_book, parse_rule
from handrail.runtime.files.session_roots import SessionRoots

CALLS = 1_500
ROUNDS = 9
YARDSTICK = "(os.path.realpath)"
TARGETS = {
    "no target": 0.33,
    "path": 0.67,
    "file found by a search": 0.67,
    "host": 0.67,
    "shell: git diff --stat src": 10.0,
}

PATH = {"type": "object", "properties": {"path": {"type": "string", "format": "path"}}}
COMMAND = {"type": "object", "properties": {"command": {"type": "string", "format": "command"}}}
READS = Requires(fs=FsRequires(read=("{workspace}",)))

ADD = ToolSpec("add", "Add.", side_effect="read", locks=())
READ = ToolSpec("read", "Read.", PATH, READS, side_effect="read")
URL = {"type": "object", "properties": {"url": {"type": "string", "format": "uri"}}}
FETCH = ToolSpec("fetch", "Fetch.", URL, Requires(net=NetRequires(hosts=("*",))), side_effect="read")
BASH = ToolSpec("bash", "Run.", COMMAND, Requires(shell=(ShellRequires(cmd="*"),)))

RULES = [
    "allow add",
    "allow bash git diff *",
    "allow bash git diff --stat *",
    "allow bash ls *",
    "allow bash head *",
    "deny bash rm *",
    "deny fs.read private/**",
    "deny fs.write **/*.lock",
    *(f"allow bash tool-{n} *" for n in range(12)),
    *(f"deny fs.read **/hidden-{n}/**" for n in range(10)),
    "allow fetch",
    "allow net.fetch *.example.org",
    *(f"deny net.fetch hidden-{n}.example.org" for n in range(10)),
]


class Resolved:
    """Roots that know the answer already, to leave the file system out."""

    def __init__(self, workspace: str) -> None:
        self.workspace = workspace

    def resolve_path(self, path: str) -> ResolvedPath:
        return ResolvedPath(f"{self.workspace}/{path}", path, True, self.workspace, relative_path=path)

    resolve_exact_path = resolve_path


def cases(workspace: str) -> dict[str, Callable[[], object]]:
    variables = PathVariables(workspace=(workspace,))
    authority = CallAuthorizer(variables, agent_layer("default", Requires(), (ADD, READ, FETCH, BASH), variables))
    book = build_default_rule_book().with_rules(*(parse_rule(text, scope="project") for text in RULES))
    roots, resolved = SessionRoots(workspace), Resolved(workspace)
    number = itertools.count()
    search = authority.make_access_check(
        authority.evaluate(READ, {"path": "."}, rules=book, roots=roots), READ, rules=book, roots=roots
    )

    def shell(text: str) -> Callable[[], object]:
        return lambda: authority.evaluate(BASH, {"command": text.format(next(number))}, rules=book, roots=resolved)

    return {
        "no target": lambda: authority.evaluate(ADD, {"a": next(number)}, rules=book, roots=resolved),
        "path": lambda: authority.evaluate(READ, {"path": f"src/pkg/m{next(number)}.py"}, rules=book, roots=resolved),
        YARDSTICK: lambda: os.path.realpath(f"{workspace}/src/pkg/m{next(number)}.py"),
        "file found by a search": lambda: search("fs.read", f"{workspace}/src/pkg/m{next(number)}.py"),
        "host": lambda: authority.evaluate(FETCH, {"url": f"m{next(number)}.example.org"}, rules=book, roots=resolved),
        "URL": lambda: authority.evaluate(
            FETCH, {"url": f"https://m{next(number)}.example.org/a"}, rules=book, roots=resolved
        ),
        "shell: git diff --stat src": shell("git diff --stat src/m{}.py"),
        "shell: three commands, quotes": shell("git diff 'a {}' && ls \"src dir\" 2>&1 | head x"),
        "shell: not understood": shell("for i in a b; do echo $i {}; done"),
    }


def middle_us(call: Callable[[], object]) -> float:
    taken: list[int] = []
    for _ in range(CALLS):
        began = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - began)
    return statistics.median(taken) / 1_000


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        workspace = str(Path(folder).resolve())
        (Path(workspace) / "src" / "pkg").mkdir(parents=True)
        # An empty folder cannot show whether it ignores case, and would be looked at again for each path.
        (Path(workspace) / "src" / "pkg" / "start.py").touch()
        measured = cases(workspace)
        figures: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(ROUNDS):
            for name, call in measured.items():
                figures[name].append(middle_us(call))
    missed = False
    yardstick = min(figures[YARDSTICK])
    print(f"{'decision':<34}{'µs p50':>8}{'ratio':>8}{'target':>8}")
    for name, rounds in figures.items():
        target, figure = TARGETS.get(name), min(rounds)
        ratio = figure / yardstick
        missed = missed or (target is not None and ratio > target)
        print(f"{name:<34}{figure:>8.1f}{ratio:>8.2f}{'' if target is None else f'{target:.2f}':>8}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
