"""What waiting costs: listing and answering one of 1,000 requests, each by a store of its own on disk.

    python bench/approvals.py          prints a table; exit code 1 if the target is missed

The requests are of calls that carry 2 KB of arguments. Answering ends when the answer is durable, so a bare commit of
one record to the same database stands beside it. Target: listing 1,000, finding one and answering one under 50 ms
each (the median).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from handrail.arbiter.approvals.approval_broker import ApprovalBroker
from handrail.arbiter.output.output_files import OutputFileQuota
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.arbiter.output.shaper import OutputShaper
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.record.artifacts import ArtifactStore
from handrail.record.commit_log import CommitLog, Record
from handrail.store.tables.approval_tables import ApprovalTable
from handrail.store.workspace_store import WorkspaceStore

TARGET_MS = 50.0
PENDING = 1_000
ROUNDS = 50


async def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("ws", "artifacts"):
            (folder / part).mkdir()
        store = WorkspaceStore.open(folder / "ws", folder / "state")
        log = CommitLog(store.database)
        room = OutputFileQuota(folder / "output", 1 << 30)
        shaper = OutputShaper(SecretRedactor(), ArtifactStore(folder / "artifacts"), lambda session: folder, room)
        approvals = ApprovalBroker(ApprovalTable(store.database), log, shaper)
        arguments = {"path": "src/main.py", "old": "x" * 1_000, "new": "y" * 1_000}
        rows = [
            approvals.create_unstored_request(
                ApprovalRequest(f"s/1.{n}", "s", "edit", arguments, "hash", "definition", "no rule allows it")
            )
            for n in range(PENDING)
        ]
        await asyncio.gather(*(approvals.store_request_with_records(row, [], whole=True) for row in rows))

        async def listed() -> None:
            assert len(approvals.list_pending()) > PENDING - ROUNDS - 1

        async def found() -> None:
            approvals.get(rows[PENDING // 2].id)

        left = iter(rows)

        async def answered() -> None:
            await approvals.decide(next(left).id, ApprovalAnswer("once"), by="bench")

        async def recorded() -> None:
            await log.commit([Record("approval-responded", "s", "s/1.0", {"choice": "once"})])

        figures = {
            f"list {PENDING} requests, whole": await median_ms(listed),
            "find one": await median_ms(found),
            "answer one": await median_ms(answered),
            "(one record committed)": await median_ms(recorded),
        }
        approvals.close()
        await store.aclose()
    for what, spent in figures.items():
        print(f"{what:32} {spent:8.3f} ms")
    worst = max(spent for what, spent in figures.items() if not what.startswith("("))
    print(f"target {TARGET_MS:g} ms: {'met' if worst < TARGET_MS else 'MISSED'}")
    return 0 if worst < TARGET_MS else 1


async def median_ms(work: Callable[[], Awaitable[None]]) -> float:
    spent: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await work()
        spent.append((time.perf_counter() - began) * 1_000)
    return statistics.median(spent)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
