"""Run a tool as a background job, read its output and its result.

Output::

    other calls run meanwhile: output
    test 3 passed
    result: {'failed': 0}
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from handrail import Runtime, open_kernel, tool


@tool(id="suite.run", side_effect="external", mode="background", locks=[])
async def run_suite(runtime: Runtime) -> dict[str, int]:
    """Run the whole test suite."""
    for number in range(1, 4):
        await asyncio.sleep(0.1)  # the work
        runtime.write_output(f"test {number} passed\n")
    return {"failed": 0}


async def main(folder: Path) -> None:
    workspace = folder / "workspace"
    workspace.mkdir()
    async with open_kernel(workspace, state=folder / "state", tools=[run_suite], rules=["allow suite.run"]) as kernel:
        session = await kernel.session(headless=True)

        # A call of a background tool returns at once, with the id of its job.
        started = await session.call("suite.run", {})
        job_id: str = started.data["job_id"]

        other = await session.call("glob", {"pattern": "*"})
        print(f"other calls run meanwhile: {other.type}")

        result = await session.jobs.wait(job_id, timeout_ms=60_000)
        last = await session.jobs.read_line_range(job_id, offset=-1)
        print(last.text, end="")
        assert result is not None
        print(f"result: {result.data}")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
