"""Patches as models write them: applied right, WRONG or HALF, next to ``git apply``, ``patch`` and the program of Codex.

    python bench/patches.py [--repository PATH] [--commits N] [--codex PROGRAM]

Each commit becomes a unified diff and a patch with ``*** Begin Patch``. Both are changed in nine ways in which models and users
change them, and applied to the files of the parent commit. WRONG: the program says that it succeeded, and the files are not those
of the commit. HALF: it refuses, and some files have changed. ``codex`` comes from the npm package ``@openai/codex``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import Capability
from handrail.runtime.files.joint_changes import MultiFileChangeJournal
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots
from handrail.tools.files.patch_plan import plan_patch

Tree = Mapping[str, bytes]
MOST_FILES, MOST_BYTES = 8, 60_000
INSERTED = b"".join(b"# line %d above\n" % number for number in range(60))


@dataclass(frozen=True)
class Hunk:
    old: int
    new: int
    heading: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    path: str
    kind: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Case:
    """One commit: the files before and after it, and its diff."""

    before: Tree
    after: Tree
    files: tuple[FileDiff, ...]

    def change_hunks(self, change: Callable[[Hunk], Hunk]) -> Case:
        return replace(self, files=tuple(replace(one, hunks=tuple(map(change, one.hunks))) for one in self.files))

    def change_context(self, change: Callable[[str], str]) -> Case:
        def changed(hunk: Hunk) -> Hunk:
            return replace(hunk, lines=tuple(change(line) if line[:1] == " " else line for line in hunk.lines))

        return self.change_hunks(changed)

    def change_files(self, change: Callable[[bytes], bytes]) -> Case:
        """Change the files that exist before and after."""
        both = self.before.keys() & self.after.keys()
        before, after = (
            {path: change(data) if path in both else data for path, data in tree.items()}
            for tree in (self.before, self.after)
        )
        return replace(self, before=before, after=after)


# The two formats.


def write_unified(case: Case) -> str:
    out: list[str] = []
    for file in case.files:
        out.append(f"diff --git a/{file.path} b/{file.path}")
        if file.kind != "M":
            out.append(f"{'new' if file.kind == 'A' else 'deleted'} file mode 100644")
        out.append("--- " + ("/dev/null" if file.kind == "A" else f"a/{file.path}"))
        out.append("+++ " + ("/dev/null" if file.kind == "D" else f"b/{file.path}"))
        for hunk in file.hunks:
            old = sum(line[:1] != "+" and line[:1] != "\\" for line in hunk.lines)
            new = sum(line[:1] != "-" and line[:1] != "\\" for line in hunk.lines)
            out.append(f"@@ -{hunk.old},{old} +{hunk.new},{new} @@ {hunk.heading}".rstrip())
            out += hunk.lines
    return "\n".join(out) + "\n"


def write_marked(case: Case) -> str:
    out = ["*** Begin Patch"]
    for file in case.files:
        out.append(f"*** { ({'A': 'Add', 'D': 'Delete'}.get(file.kind, 'Update')) } File: {file.path}")
        if file.kind == "D":
            continue
        for hunk in file.hunks:
            out += ["@@"] if file.kind == "M" else []
            out += [line for line in hunk.lines if line[:1] != "\\"]
    return "\n".join((*out, "*** End Patch")) + "\n"


# The commits.


def run_git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(("git", "-C", str(repository), *arguments), capture_output=True, check=True).stdout


def read_case(repository: Path, commit: str, context: int) -> Case | None:
    """Return a commit that changes a few text files; None for others."""
    names = run_git(repository, "diff", "--no-renames", "--name-status", "-z", f"{commit}^", commit).split(b"\0")
    changed = [
        (kind.decode(), path.decode("utf-8", "replace")) for kind, path in zip(names[::2], names[1::2], strict=False)
    ]
    if not 0 < len(changed) <= MOST_FILES or any(kind not in "MAD" for kind, _ in changed):
        return None
    before, after = (
        {path: run_git(repository, "show", f"{at}:{path}") for kind, path in changed if kind != missing}
        for at, missing in ((f"{commit}^", "A"), (commit, "D"))
    )
    if any(b"\0" in data or b"\r" in data or not data.endswith(b"\n") for data in (*before.values(), *after.values())):
        return None
    text = run_git(repository, "diff", "--no-renames", f"-U{context}", f"{commit}^", commit).decode("utf-8", "replace")
    if len(text) > MOST_BYTES or "\ufffd" in text or "\nold mode" in text or " file mode 120000" in text:
        return None
    files = tuple(parse_diff(text, {path: kind for kind, path in changed}))
    return Case(before, after, files) if len(files) == len(changed) and all(one.hunks for one in files) else None


def parse_diff(text: str, kinds: Mapping[str, str]) -> Iterator[FileDiff]:
    for part in ("\n" + text).split("\ndiff --git ")[1:]:
        lines = part.removesuffix("\n").split("\n")
        path = lines[0].rpartition(" b/")[2]
        hunks: list[Hunk] = []
        for line in lines[1:]:
            if line.startswith("@@ "):
                _, old, new, rest = line.split(" ", 3)
                start, end = int(old[1:].partition(",")[0]), int(new[1:].partition(",")[0])
                hunks.append(Hunk(start, end, rest.removeprefix("@@").strip(), ()))
            elif hunks:
                hunks[-1] = replace(hunks[-1], lines=(*hunks[-1].lines, line))
        yield FileDiff(path, kinds.get(path, "M"), tuple(hunks))


# The ways in which patches and files are changed.


def halve_indentation(line: str) -> str:
    body = line[1:]
    blanks = len(body) - len(body.lstrip(" "))
    return " " + " " * (blanks // 2) + body[blanks:]


def spoil_last_hunk(case: Case) -> Case | None:
    at = max((number for number, file in enumerate(case.files) if file.kind == "M"), default=None)
    if at is None:
        return None
    *earlier, last = case.files[at].hunks
    lines = tuple(
        line if line[:1] == "+" else f"{line[:1]}no such line {number}" for number, line in enumerate(last.lines)
    )
    files = list(case.files)
    files[at] = replace(files[at], hunks=(*earlier, replace(last, lines=lines)))
    return replace(case, files=tuple(files))


ROWS: Mapping[str, Callable[[Mapping[int, Case]], Case | None]] = {
    "exact": lambda cases: cases[3],
    "blank context lines empty": lambda cases: cases[3].change_context(
        lambda line: line.rstrip(" ") if not line.strip() else line
    ),
    "line numbers off by 37": lambda cases: cases[3].change_hunks(
        lambda hunk: replace(hunk, old=hunk.old + 37, new=hunk.new + 37) if hunk.old and hunk.new else hunk
    ),
    "trailing blanks in context": lambda cases: cases[3].change_context(lambda line: f"{line}  "),
    "CRLF file": lambda cases: cases[3].change_files(lambda data: data.replace(b"\n", b"\r\n")),
    "context indented by half": lambda cases: cases[3].change_context(halve_indentation),
    "60 lines inserted above": lambda cases: cases[3].change_files(lambda data: INSERTED + data),
    "1 line of context": lambda cases: cases[1],
    "no context": lambda cases: cases[0],
    "last hunk wrong": lambda cases: spoil_last_hunk(cases[3]),
}


# The programs. Each returns whether it says that the patch is applied.


def apply_with_git(root: Path, patch: str) -> bool:
    return run(("git", "apply", "-p1", "-"), root, patch)


def apply_with_patch(root: Path, patch: str) -> bool:
    return run(("patch", "-p1", "-s", "-f", "--no-backup-if-mismatch", "-r", "-"), root, patch)


def run(command: tuple[str, ...], root: Path, text: str = "") -> bool:
    environment = {
        "PATH": "/usr/bin:/bin",
        "GIT_CEILING_DIRECTORIES": str(root.parent),
        "HOME": str(root.parent),
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        command, cwd=root, input=text.encode(), capture_output=True, env=environment, timeout=60, check=False
    )
    return done.returncode == 0


def allow_all(capability: Capability, target: str | Sequence[str]) -> str | None:
    return None


def apply_with_handrail(root: Path, patch: str) -> bool:
    async def apply() -> None:
        journal = MultiFileChangeJournal(root.parent / "journal")
        files = RootedFiles(SessionRoots(root), SeenFileHashes(), allow_all, journal=journal)
        plan = await plan_patch(patch, files)
        if changes := plan.list_changes():
            await files.change_atomically(changes)

    try:
        asyncio.run(apply())
    except ToolError as error:
        explain(error)
        return False
    return True


def is_verbose() -> bool:
    return "--verbose" in sys.argv


def explain(error: ToolError) -> None:
    if is_verbose():
        print(f"    {error.text}", file=sys.stderr)


def judge(case: Case, patch: str, apply: Callable[[Path, str], bool]) -> str:
    """Return what came of a patch: right, refused, WRONG or HALF."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made, "files")
        root.mkdir()
        for path, data in case.before.items():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        said = apply(root, patch)
        paths = case.before.keys() | case.after.keys()
        found = {path: (root / path).read_bytes() for path in paths if (root / path).is_file()}
    if said:
        return "right" if found == case.after else "WRONG"
    return "refused" if found == case.before else "HALF"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--commits", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codex", default=shutil.which("codex"))
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()

    def apply_with_codex(root: Path, patch: str) -> bool:
        return run((given.codex, "--codex-run-as-apply-patch", patch), root)

    commits = run_git(given.repository, "rev-list", "--no-merges", "--min-parents=1", "HEAD").decode().split()
    random.Random(given.seed).shuffle(commits)
    cases: list[Mapping[int, Case]] = []
    for commit in commits:
        if len(cases) >= given.commits:
            break
        found = {context: read_case(given.repository, commit, context) for context in (3, 1, 0)}
        if all(found.values()):
            cases.append({context: one for context, one in found.items() if one is not None})
    files = sum(len(one[3].files) for one in cases)
    hunks = sum(len(file.hunks) for one in cases for file in one[3].files)
    print(
        f"{len(cases)} commits, {files} files, {hunks} hunks of {given.repository.resolve()}; percent right, WRONG and HALF if any"
    )
    programs: dict[str, tuple[Callable[[Case], str], Callable[[Path, str], bool]]] = {
        "git apply": (write_unified, apply_with_git),
        "patch": (write_unified, apply_with_patch),
        "handrail (diff)": (write_unified, apply_with_handrail),
        "codex": (write_marked, apply_with_codex),
        "handrail (***)": (write_marked, apply_with_handrail),
    }
    if given.codex is None:
        del programs["codex"]
    if given.only:
        programs = {name: one for name, one in programs.items() if given.only in name}
    print(f"{'':28}" + "".join(f"{name:>24}" for name in programs))
    missed = False
    for row, change in ROWS.items():
        cells: dict[str, Counter[str]] = {name: Counter() for name in programs}
        for number, one in enumerate(cases):
            case = change(one)
            if case is None:
                continue
            for name, (write, apply) in programs.items():
                outcome = judge(case, write(case), apply)
                cells[name][outcome] += 1
                if is_verbose() and "handrail" in name and (outcome == "refused") != (row == "last hunk wrong"):
                    print(f"  {row}: {name}: case {number}: {outcome}", file=sys.stderr)
        wanted = "refused" if row == "last hunk wrong" else "right"
        texts: list[str] = []
        for cell in cells.values():
            total = max(cell.total(), 1)
            bad = "".join(f" {kind} {100 * cell[kind] / total:.0f}" for kind in ("WRONG", "HALF") if cell[kind])
            texts.append(f"{wanted if wanted == 'refused' else ''} {100 * cell[wanted] / total:.1f}{bad}")
        print(f"{row:28}" + "".join(f"{text:>24}" for text in texts), flush=True)
        share = {name: found[wanted] / max(found.total(), 1) for name, found in cells.items()}
        ours = [name for name in cells if "handrail" in name]
        missed |= any(cells[name]["WRONG"] or cells[name]["HALF"] for name in ours)
        missed |= max(share[name] for name in ours) < share.get("codex", 0)
    if missed:
        sys.exit("a bar is not met: right at least as often as Codex in one of both formats, WRONG 0, HALF 0")


if __name__ == "__main__":
    main()
