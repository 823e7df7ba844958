"""Write a tool with a lock and capabilities, and call it twice in one reply.

Output::

    notes after each call: [1, 2]
    invalid_input: the argument `txt` is unknown
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import Field

from handrail import Runtime, ToolError, open_kernel, tool


@tool(
    id="notes.add",
    side_effect="write",
    locks=["notes:X"],  # one call at a time
    requires={"fs": {"read": ["notes.txt"], "write": ["notes.txt"]}},  # nothing else
)
async def add_note(text: Annotated[str, Field(max_length=200)], runtime: Runtime) -> dict[str, int]:
    """Add a line to the user's notes.

    Args:
        text: the note, on one line
    """
    try:
        before = (await runtime.files.read_bytes("notes.txt")).data
    except ToolError:  # the first note
        before = b""
    notes = before + text.encode() + b"\n"
    await runtime.files.write("notes.txt", notes)
    return {"notes": notes.count(b"\n")}


async def main(folder: Path) -> None:
    workspace = folder / "workspace"
    workspace.mkdir()
    async with open_kernel(workspace, state=folder / "state", tools=[add_note], rules=["allow notes.add"]) as kernel:
        session = await kernel.session(headless=True)

        # The two calls of one reply want the same lock. The second one waits for the first.
        calls = [("notes.add", {"text": "buy bread"}), ("notes.add", {"text": "call Ann"})]
        results = await session.call_all(calls)
        print("notes after each call:", [result.data["notes"] for result in results])

        # The kernel checks arguments against the signature. The tool does not see this call.
        wrong = await session.call("notes.add", {"txt": "no"})
        assert "txt" in str(wrong.error_text)
        print(f"{wrong.error_kind}: the argument `txt` is unknown")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
