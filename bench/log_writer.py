"""Durable commits a second: the commit log against a file with group fdatasync, in one run.

    python bench/log_writer.py [--callers 64] [--rounds 25] [--calls 3200] [--appends 20000]
                               [--folder DIR]

Both go through the same group writer (one thread, batches form while the previous sync runs). The file takes the
same records as JSON lines and nothing else; the commit log hash-chains them, salts and commits to their bodies, and
keeps them in SQLite with an index by call. Rounds are interleaved; the figure is the median of each round's ratio to
the file in the same round, since disks have moods. The cheaper a sync, the more the figure shows of the processor's
work alone; the first line says how cheap it was.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import orjson

from handrail.record.commit_log import CommitLog, Record
from handrail.record.hash_chain import GENESIS, SALT_BYTES, EntryHeader, hash_group, new_commitment
from handrail.store.database.group_writer import GroupWriter, SinkUnavailable
from handrail.store.workspace_store import WorkspaceStore

Entry = tuple[int, Sequence[Record]]


class FileSink:
    """Appends JSON lines and syncs once a batch. With ``chained``, it does the chain's arithmetic as well."""

    def __init__(self, path: Path, *, chained: bool = False) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._chained = chained
        self._previous = GENESIS
        self._sequence = 0

    def write_ahead(self, batch: Sequence[Entry]) -> bool:
        return False

    def warm_up(self) -> None:
        pass

    def write(self, batch: Sequence[Entry]) -> None:
        lines: list[bytes] = []
        headers: list[EntryHeader] = []
        commitments: list[bytes] = []
        first = self._sequence + 1
        for at_ns, records in batch:
            for kind, session, call, body in records:
                self._sequence += 1
                encoded = orjson.Fragment(body) if isinstance(body, bytes) else body
                line = orjson.dumps((self._sequence, at_ns, kind, session, call, encoded))
                lines.append(line)
                if self._chained:
                    commitment = new_commitment()
                    commitment.update(os.urandom(SALT_BYTES) + line)
                    headers.append((at_ns, kind, session, call))
                    commitments.append(commitment.digest())
        if self._chained:
            self._previous = hash_group(first, self._previous, headers, commitments)
            lines.append(self._previous.hex().encode())
        lines.append(b"")
        try:
            os.write(self._descriptor, b"\n".join(lines))
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise SinkUnavailable(str(error)) from error

    def reopen(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._descriptor)


class FileLog:
    """What the arbiter needs of a commit log, with a file behind it: the peer of whole-pipeline figures too."""

    def __init__(self, path: Path, *, chained: bool = False) -> None:
        self.writer: GroupWriter[Entry] = GroupWriter(FileSink(path, chained=chained))

    @property
    def unavailable_reason(self) -> str | None:
        return self.writer.unavailable_reason

    def record_soon(self, records: Sequence[Record]) -> None:
        self.writer.queue_without_waiting((time.time_ns(), records))

    def record_call_soon(self, session_id: str, call_id: str, kinds: str, body: bytes) -> None:
        self.record_soon((Record(kinds, session_id, call_id, body),))  # type: ignore[arg-type]

    async def commit(self, records: Sequence[Record]) -> None:
        await self.writer.commit((time.time_ns(), records))

    def start_commit(self, records: Sequence[Record]) -> asyncio.Future[None]:
        return self.writer.start_commit((time.time_ns(), records))

    def start_journalled_commit(self, records: Sequence[Record]) -> asyncio.Future[None]:
        return self.start_commit(records)  # what it writes is all in one write and one sync already

    async def wait_for_backlog(self, count: int) -> None:
        await self.writer.wait_for_backlog(count)

    def close(self) -> None:
        self.writer.close()


def record(call: int) -> Record:
    """About 800 bytes as JSON, like the outcome of reading a small file."""
    body = {
        "tool": "read",
        "result": {
            "type": "output",
            "data": {"text": f"line {call:07} of some source text that a model has asked for; " * 10, "next": None},
            "metadata": {"duration_ms": 1.25, "sha256": f"{call:064x}"},
        },
    }
    return Record("committed", "ses_0123456789abcdef", f"ses_0123456789abcdef.{call // 8:05}.{call % 8}", body)


async def one_round(
    commit: Callable[[Sequence[Record]], Coroutine[None, None, None]], callers: int, calls: int, first: int = 0
) -> float:
    """Commits a second of ``callers`` tasks that share ``calls`` commits, numbered on from ``first``."""
    numbers = iter(range(first, first + calls))

    async def caller() -> None:
        for number in numbers:
            await commit((record(number),))

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return calls / (time.perf_counter() - began)


def raw_syncs(path: Path, count: int = 200) -> float:
    """How many 800-byte appends a second the disk makes durable one by one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    began = time.perf_counter()
    for _ in range(count):
        os.write(descriptor, b"x" * 800)
        os.fdatasync(descriptor)
    took = time.perf_counter() - began
    os.close(descriptor)
    return count / took


async def measure(folder: Path, callers: int, rounds: int, calls: int) -> None:
    (folder / "workspace").mkdir()
    store = WorkspaceStore.open(folder / "workspace", folder / "state")
    ours = CommitLog(store.database)
    plain, chained = FileLog(folder / "plain.jsonl"), FileLog(folder / "chained.jsonl", chained=True)
    writers = {"file + fdatasync": plain.commit, "file + chain": chained.commit, "commit log": ours.commit}
    figures: dict[str, list[float]] = {name: [] for name in writers}
    for commit in writers.values():
        await one_round(commit, callers, calls // 4)
    syncs: list[float] = []
    for number in range(rounds):
        syncs.append(raw_syncs(folder / "raw"))
        order = list(writers.items())
        for name, commit in order[number % 3 :] + order[: number % 3]:
            figures[name].append(await one_round(commit, callers, calls, (number + 1) * calls))
    print(
        f"{callers} callers, {calls} commits a round, {rounds} interleaved rounds, {len(orjson.dumps(record(1)[3]))}-byte bodies"
    )
    print(f"raw fdatasync: {statistics.median(syncs):,.0f}/s")
    base = figures["file + fdatasync"]
    for name, values in figures.items():
        median = statistics.median(values)
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        print(
            f"{name:18} {median:10,.0f} commits/s   {ratio:6.1%} of the file   (least {min(values):,.0f}, most {max(values):,.0f})"
        )
    group = store.database.writer
    print(f"commits in one transaction: {group.commits / max(1, group.transactions):.1f}")
    await asyncio.to_thread(plain.close)
    await asyncio.to_thread(chained.close)
    await store.aclose()


def cost_of_append(folder: Path, count: int) -> None:
    """What `append` takes of its caller, writer thread at work beside it."""

    async def run() -> None:
        (folder / "workspace2").mkdir()
        store = WorkspaceStore.open(folder / "workspace2", folder / "state")
        log = CommitLog(store.database)
        entries = [(record(number),) for number in range(count)]
        took: list[float] = []
        for start in range(0, count, 100):
            chunk = entries[start : start + 100]
            began = time.perf_counter()
            for entry in chunk:
                log.record_soon(entry)
            took.append((time.perf_counter() - began) / 100)
            await log.wait_for_backlog(200)
        print(f"append: {statistics.median(took) * 1e6:.2f} µs in the caller")
        await store.aclose()

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=3_200)
    parser.add_argument("--appends", type=int, default=20_000, help="without a wait for the disk, at the end")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        asyncio.run(measure(Path(name), options.callers, options.rounds, options.calls))
        cost_of_append(Path(name), options.appends)


if __name__ == "__main__":
    main()
