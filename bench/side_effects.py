"""Whole calls with side effects, a second: the kernel as it is against the same pipeline with a file as its log.

    python bench/side_effects.py

64 callers, nine steps each, two durable records per call (intent and outcome). Only the writer differs: SQLite with
the hash chain, or JSON lines in a file with group fdatasync. Interleaved rounds; the figure is the median of each
round's ratio.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from log_writer import FileLog

from handrail import Session, open_kernel, tool

CALLERS, CALLS, ROUNDS = 64, 1_500, 15


@tool(id="bench.put", side_effect="external", locks=[])
async def put(key: str, value: str) -> dict[str, str]:
    """Pretend to store a value; the work around it is what is measured."""
    return {"stored": key, "value": value}


async def one_round(session: Session) -> float:
    """Calls a second."""
    numbers = iter(range(CALLS))

    async def caller() -> None:
        for number in numbers:
            result = await session.call("bench.put", {"key": f"k{number}", "value": "x" * 400})
            assert result.ok

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return CALLS / (time.perf_counter() - began)


async def main() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
        folder = Path(made)
        (folder / "ws").mkdir()
        (folder / "handrail.toml").touch()
        async with open_kernel(
            folder / "ws",
            tools=[put],
            rules=["allow bench.put"],
            state=folder / "state",
            config=folder / "handrail.toml",
        ) as kernel:
            session = await kernel.session()
            arbiter: Any = vars(kernel)["components"].arbiter
            file = FileLog(folder / "log.jsonl")
            logs: dict[str, Any] = {"file with group fdatasync": file, "commit log": kernel.log}
            figures: dict[str, list[float]] = {name: [] for name in logs}
            for round_number in range(ROUNDS + 1):
                for name, log in logs.items():
                    arbiter.log = log
                    rate = await one_round(session)
                    if round_number:
                        figures[name].append(rate)
            arbiter.log = kernel.log
            file.close()
    ratio = statistics.median(o / f for f, o in zip(*figures.values(), strict=True))
    print(f"{'whole calls with side effects, 64 callers':45} {'calls/s':>9}")
    for name, rates in figures.items():
        print(f"{name:45} {statistics.median(rates):9.0f}")
    print(f"{'commit log, share of the file':45} {ratio:9.0%}   (bound: at least 60 %)")


if __name__ == "__main__":
    asyncio.run(main())
