"""Open a kernel, call tools, and read a denial.

Output::

    read: output, 2 lines of notes
    write: denied
    write with a rule: output
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from handrail import open_kernel


async def main(folder: Path) -> None:
    workspace = folder / "workspace"
    workspace.mkdir()
    (workspace / "notes.txt").write_text("buy bread\ncall Ann\n")

    async with open_kernel(workspace, state=folder / "state") as kernel:
        # A headless session has no user to ask, so a call that needs approval is denied.
        session = await kernel.session(headless=True)

        read = await session.call("read", {"path": "notes.txt"})
        print(f"read: {read.type}, {len(read.data['text'].splitlines())} lines of notes")

        denied = await session.call("write", {"path": "plan.txt", "content": "rest\n"})
        print(f"write: {denied.error_kind}")

    async with open_kernel(workspace, state=folder / "state", rules=["allow fs.write plan.txt"]) as kernel:
        session = await kernel.session(headless=True)
        written = await session.call("write", {"path": "plan.txt", "content": "rest\n"})
        print(f"write with a rule: {written.type}")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
