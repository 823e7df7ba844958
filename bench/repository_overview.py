"""How well and how fast repo_overview finds the files for a task: ``python -m bench.repository_overview REPO``.

The task is the message of a commit, and the right files are those that it touched. The workspace is the repository as it was
before all these commits, with its history until then. The script compares recall at 5 and 10 files with plain BM25 over the
whole text. Then it measures the time of a warm call in a folder of 10,000 files.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from handrail.testing.scripted_kernel import temporary_kernel

COMMITS, CONSIDERED = 200, 260
"""The commits that are tasks, and the last commits from which they are taken: some touch no file that there was before."""
MOST_FILES = 20
WORD = re.compile(r"[A-Za-z]+|\d+")


def git(repository: Path, *arguments: str) -> str:
    """Return the output of git."""
    return subprocess.run(
        ["git", "-C", str(repository), *arguments], check=True, capture_output=True, text=True, errors="replace"
    ).stdout


def list_tasks(repository: Path, revision: str) -> tuple[str, list[tuple[str, set[str]]]]:
    """Return the commit before the last commits, and their messages, each with the files of that commit which it touched."""
    log = git(
        repository, "log", "--no-merges", "-n", str(CONSIDERED), "--format=%x01%H%n%B%x02", "--name-only", revision
    )
    entries = [entry.partition("\n") for entry in log.split("\x01")[1:]]
    base = f"{entries[-1][0]}~1" if len(entries) == CONSIDERED else entries[-1][0]
    existing = set(git(repository, "ls-tree", "-r", "-z", "--name-only", base).split("\0"))
    tasks: list[tuple[str, set[str]]] = []
    for _, _, entry in reversed(entries):
        message, _, names = entry.partition("\x02")
        touched = {name for name in names.strip().split("\n") if name in existing and name}
        if 0 < len(touched) <= MOST_FILES and message.strip():
            tasks.append((message.strip()[:4000], touched))
    return base, tasks[:COMMITS]


class PlainBm25:
    """BM25 over the lower-case words of whole files."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.counts = {path: Counter(WORD.findall(text.lower())) for path, text in texts.items()}
        self.lengths = {path: sum(counts.values()) for path, counts in self.counts.items()}
        self.average = sum(self.lengths.values()) / max(1, len(self.lengths))
        self.frequency = Counter(word for counts in self.counts.values() for word in counts)

    def rank(self, query: str, limit: int) -> list[str]:
        """Return the best paths."""
        scores: dict[str, float] = {}
        total = len(self.counts)
        for word in set(WORD.findall(query.lower())):
            weight = math.log(1 + (total - self.frequency[word] + 0.5) / (self.frequency[word] + 0.5))
            for path, counts in self.counts.items():
                if (count := counts[word]) > 0:
                    norm = 1.2 * (0.25 + 0.75 * self.lengths[path] / self.average)
                    scores[path] = scores.get(path, 0.0) + weight * count * 2.2 / (count + norm)
        return sorted(scores, key=lambda path: -scores[path])[:limit]


def recall(found: list[list[str]], tasks: list[tuple[str, set[str]]], at: int) -> float:
    """Return the mean part of the touched files among the first ``at``."""
    return statistics.mean(
        len(touched & {*paths[:at]}) / len(touched) for paths, (_, touched) in zip(found, tasks, strict=True)
    )


async def measure_recall(repository: Path, revision: str) -> None:
    """Print recall at 5 and 10."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "ws"
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(repository), str(workspace)], check=True)
        base, tasks = list_tasks(workspace, revision)
        git(workspace, "checkout", "-q", base)
        found: list[list[str]] = []
        times: list[float] = []
        async with temporary_kernel(Path(folder)) as kernel:
            session = await kernel.session()
            start = time.perf_counter()
            first = await session.call("repo_overview", {})
            built = time.perf_counter() - start
            for message, _ in tasks:
                start = time.perf_counter()
                result = await session.call("repo_overview", {"focus": message})
                times.append(time.perf_counter() - start)
                assert result.ok, result.error_text
                found.append([match["path"] for match in result.data["matches"]])
        texts = {
            name: (workspace / name).read_text("utf-8", "replace")
            for name in git(workspace, "ls-files", "-z").split("\0")
            if name and (workspace / name).is_file() and not (workspace / name).is_symlink()
        }
        plain = PlainBm25({name: text for name, text in texts.items() if "\0" not in text})
        base = [plain.rank(message, 10) for message, _ in tasks]
        print(f"{first.data['files']} files, {len(tasks)} commits; first call {built:.1f} s")
        print(f"repo_overview  recall@5 {recall(found, tasks, 5):.1%}  recall@10 {recall(found, tasks, 10):.1%}")
        print(f"plain BM25     recall@5 {recall(base, tasks, 5):.1%}  recall@10 {recall(base, tasks, 10):.1%}")
        print(f"time of a call: p50 {statistics.median(times) * 1000:.0f} ms, worst {max(times) * 1000:.0f} ms")


async def measure_time(files: int, repeats: int) -> None:
    """Print the time of a warm call in a large folder."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "ws"
        for number in range(files):
            path = workspace / f"part{number % 40}" / f"inner{number % 13}" / f"module{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"def parse_value_{number}_{line}(text):\n    return text.split({line})\n" for line in range(20)]
            path.write_text(f'"""Read values of part {number % 40}."""\n' + "".join(lines))
        async with temporary_kernel(Path(folder)) as kernel:
            session = await kernel.session()
            times: list[float] = []
            for number in range(repeats + 1):
                start = time.perf_counter()
                arguments = {"focus": f"parse_value_{number * 7} fails for values of part {number}"}
                assert (await session.call("repo_overview", arguments)).ok
                times.append(time.perf_counter() - start)
        warm = times[1:]
        print(
            f"{files:,} files: first call {times[0]:.1f} s, then p50 {statistics.median(warm) * 1000:.0f} ms, "
            f"best {min(warm) * 1000:.0f} ms"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path, nargs="?")
    parser.add_argument("--at", default="HEAD", help="commit whose files and history are used")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    if given.repository is not None:
        asyncio.run(measure_recall(given.repository.resolve(), given.at))
    asyncio.run(measure_time(given.files, given.repeats))


if __name__ == "__main__":
    main()
